"""Counts the bytes that go to Horovod, in eager mode and each time a traced step runs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import tensorflow as tf

from hvd8bit.graphs import unordered


def sent_bytes() -> int:
    """Bytes that this process handed to Horovod for other workers: codes, scales, headers, and what passed through.

    A ring passes on what it receives, so what an allgather brings counts as sent. Control traffic is not counted.
    """
    return int(tf.raw_ops.ReadVariableOp(resource=_counter(), dtype=tf.int64))


def reset_sent_bytes() -> None:
    """Starts the count of `sent_bytes` anew."""
    tf.raw_ops.AssignVariableOp(resource=_counter(), value=tf.constant(0, tf.int64))


@contextlib.contextmanager
def counting(counter: tf.Variable) -> Iterator[None]:
    """Adds to `counter`, an int64 variable, what the collectives inside send; traced ones each time they run."""
    _also.counters = (*_also.counters, counter)
    try:
        yield
    finally:
        _also.counters = _also.counters[:-1]


class _Also(threading.local):
    """Counters beside the one of all bytes, of this thread."""

    counters: tuple[tf.Variable, ...] = ()


_also = _Also()
_counter_lock = threading.Lock()
_counter_made = False


def _counter() -> tf.Tensor:
    """The handle of a variable that counts, so that a traced step counts each time it runs.

    Known by its name instead of being captured: a function that counts can then be exported.
    """
    global _counter_made
    with tf.device("CPU:0"):
        with _counter_lock:
            if not _counter_made:
                with tf.init_scope():
                    tf.raw_ops.AssignVariableOp(resource=_counter_handle(), value=tf.constant(0, tf.int64))
                _counter_made = True
        return _counter_handle()


def _counter_handle() -> tf.Tensor:
    return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name="hvd8bit_sent_bytes")


def count(sent: tf.Tensor) -> None:
    """Adds an integer scalar to all counters: now, or each time the graph that is being built runs."""
    with tf.device("CPU:0"), unordered():
        sent = tf.cast(sent, tf.int64)
        for counter in _also.counters:
            counter.assign_add(sent)
        if tf.executing_eagerly():
            tf.raw_ops.AssignAddVariableOp(resource=_counter(), value=sent)
        elif tf.compat.v1.get_default_graph().building_function:  # a graph of TensorFlow 1 has variables of its own
            _counting_function()(sent)


@functools.lru_cache(maxsize=1)
def _counting_function():
    """Counts in a graph. Traced once: a step may count for hundreds of small gradients."""
    with tf.init_scope():  # leaves nothing in the graph that happens to count first
        _counter()

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
    def add(sent):
        with tf.device("CPU:0"):
            handle = _counter_handle()
            # In a process that loads an exported function nobody has made the variable.
            tf.cond(
                tf.raw_ops.VarIsInitializedOp(resource=handle),
                lambda: tf.group(tf.raw_ops.AssignAddVariableOp(resource=handle, value=sent)),
                tf.no_op,
            )

    return add
