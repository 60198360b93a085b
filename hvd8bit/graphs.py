"""How what is built into a graph runs."""

from __future__ import annotations

import contextlib
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
    manager = getattr(graph, "experimental_acd_manager", None)
    before = 0 if graph is None or manager is None else graph.num_operations()
    yield
    if graph is not None and manager is not None:
        for op in graph.get_operations()[before:]:
            if op._is_stateful and op.type not in ("ReadVariableOp", "ResourceGather"):
                manager.run_independently(op)
