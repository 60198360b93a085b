"""Which ops of a graph wait for which."""

from __future__ import annotations

import pytest
import tensorflow as tf

from hvd8bit.graphs import let_branches_overlap


def branches_of(count, overlap, calls_in_each=1):
    """The `If` ops of a function with so many branches that hold an op with a state."""

    def branch(x):
        for _ in range(calls_in_each):
            if overlap:
                let_branches_overlap()
        return x + tf.random.uniform([])

    @tf.function(autograph=False)
    def run(x, on):
        return [tf.cond(on, lambda: branch(x), lambda: x) for _ in range(count)]

    concrete = run.get_concrete_function(tf.TensorSpec([]), tf.TensorSpec([], tf.bool))
    return [op for op in concrete.graph.get_operations() if op.type == "If"], concrete


def waits(ops):
    """How many of the ops wait for another one of them."""
    return sum(any(other in ops for other in op.control_inputs) for op in ops)


def test_branches_run_in_order_by_themselves():
    ops, _ = branches_of(4, overlap=False)
    assert len(ops) == 4
    assert waits(ops) == 3


@pytest.mark.parametrize("calls_in_each", [1, 3])
def test_branches_overlap_where_they_say_so(calls_in_each):
    ops, concrete = branches_of(4, overlap=True, calls_in_each=calls_in_each)
    assert len(ops) == 4
    assert waits(ops) == 0
    # And all of them run.
    assert all(float(y) > 1 for y in concrete(tf.constant(1.0), tf.constant(True)))


def test_other_functions_are_left_alone():
    branches_of(2, overlap=True)

    @tf.function(autograph=False)
    def run(x):
        let_branches_overlap()
        return tf.random.uniform([]) + x

    assert run(tf.constant(1.0)) > 1
    let_branches_overlap()  # eager
    ops, _ = branches_of(3, overlap=False)
    assert waits(ops) == 2


def test_branches_with_variables_keep_their_order():
    v = tf.Variable(1.0)

    def add(x):
        let_branches_overlap()
        return v.assign_add(x) + tf.random.uniform([])

    @tf.function(autograph=False)
    def run(x, on):
        return [tf.cond(on, lambda: add(x), lambda: x) for _ in range(3)]

    graph = run.get_concrete_function(tf.TensorSpec([]), tf.TensorSpec([], tf.bool)).graph
    assert waits([op for op in graph.get_operations() if op.type == "If"]) == 2
