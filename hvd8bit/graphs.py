"""How what is built into a graph runs."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import weakref
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def unordered() -> Iterator[None]:
    """What is built inside runs as soon as its inputs are there, not in the order in which it is written.

    In a `tf.function` TensorFlow runs ops that have a state one after another, in the order of the program: those that
    read rank and size, assertions, and branches with one of these in them. So an exchange would wait for what an
    earlier one brings, though it needs nothing of it: exchanges would not overlap, and workers that send each other
    something in different orders would wait for ever. For code without side effects but assertions and counters.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    manager = _manager(graph)
    before = 0 if graph is None or manager is None else graph.num_operations()
    yield
    if graph is not None and manager is not None:
        for op in graph.get_operations()[before:]:
            if op._is_stateful and op.type not in ("ReadVariableOp", "ResourceGather"):
                manager.run_independently(op)


def take_turns(results) -> None:
    """To be called with what collectives of a graph bring: of a function called twice, one call follows the other.

    Both calls' collectives have the same names, and TensorFlow lets them run at the same time, for they read variables
    at most: one worker's first call could meet another's second.
    """
    if tf.executing_eagerly() or not tf.compat.v1.get_default_graph().building_function or not results:
        return
    with tf.device("CPU:0"), tf.control_dependencies(tf.nest.flatten(results, expand_composites=True)):
        _turns().assign_add(1)


@functools.lru_cache(maxsize=1)
def _turns() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="hvd8bit_turns")


def node_name(name: str) -> str:
    """`name` with an underscore for each character that a graph does not take in names, "My Adam" say."""
    return re.sub(r"^(?![A-Za-z0-9.])", "x", re.sub(r"[^A-Za-z0-9_./-]", "_", name))


class _Last(threading.local):
    """The branch that this thread was last seen to build."""

    branch: weakref.ref | None = None
    operations_before = 0


_last = _Last()


def let_branches_overlap() -> None:
    """To be called in each of several branches (`tf.cond`) that need not run one after another.

    Horovod puts each gradient's allreduce in a branch of its own. One that holds ops with a state, as an exchange does,
    is an op with a state, and TensorFlow would start the next gradient's exchange when this one's has ended. That op
    comes to be when its branch is complete: so a branch is freed by the call in the next one, and the last one stays as
    it is, by itself. So does one that reads or writes variables: there the order counts.
    """
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    last = None if _last.branch is None else _last.branch()
    if last is graph:
        return
    manager = None if last is None else _manager(last.outer_graph)  # none where that graph is complete, too
    if last is not None and manager is not None:
        for op in last.outer_graph.get_operations()[_last.operations_before :]:
            if op.type != "If" or any(x.dtype == tf.resource for x in op.inputs):
                continue
            if last.name in (op.get_attr("then_branch").name, op.get_attr("else_branch").name):
                manager.run_independently(op)
    _last.branch = None
    outer = getattr(graph, "outer_graph", None)
    if outer is not None and _manager(outer) is not None:
        _last.branch, _last.operations_before = weakref.ref(graph), outer.num_operations()


def keeps_order() -> bool:
    """Whether what assigns variables here runs without being asked for: eagerly, or in a function of TensorFlow 2."""
    return tf.executing_eagerly() or _manager(tf.compat.v1.get_default_graph()) is not None


def _manager(graph):
    """What puts a function's ops with a state in order; None where nothing does."""
    return getattr(graph, "experimental_acd_manager", None)
