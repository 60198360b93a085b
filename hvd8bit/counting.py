"""Counts the bytes that go to Horovod, in eager mode and each time a traced step runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf

from hvd8bit import native
from hvd8bit.graphs import unordered


def sent_bytes() -> int:
    """Bytes that this process handed to Horovod for other workers: codes, scales, headers, and what passed through.

    A ring passes on what it receives, so what an allgather brings counts as sent. Control traffic is not counted.
    """
    return native.sent_bytes()


def reset_sent_bytes() -> None:
    """Starts the count of `sent_bytes` anew."""
    native.reset_sent_bytes()


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


def count(sent) -> None:
    """Adds an integer scalar to all counters: now, or each time the graph that is being built runs."""
    with tf.device("CPU:0"), unordered():
        sent = tf.cast(sent, tf.int64)
        for counter in _also.counters:
            counter.assign_add(sent)
        # In a graph of TensorFlow 1 nothing would run it.
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
            native.load().hvd8bit_count_sent(sent)
