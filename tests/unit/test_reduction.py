"""The parts of the gradient list's reduction that need no Horovod: buckets, scales, differences, names."""

from __future__ import annotations

import re

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf

from hvd8bit import planning, reduction, variables


def gradient(position: int, shape) -> planning.Gradient:
    return planning.Gradient(position, f"v{position}", tf.TensorSpec(shape), "encode")


def positions(buckets):
    return [[g.position for g in bucket] for bucket in buckets]


def test_buckets_hold_consecutive_gradients_up_to_their_size(monkeypatch):
    monkeypatch.setattr(planning, "BUCKET_ELEMENTS", 100)
    sizes = [60, 40, 1, 200, 50, 50, 1]
    buckets = planning.buckets([gradient(i, [size]) for i, size in enumerate(sizes)])
    assert positions(buckets) == [[0, 1], [2], [3], [4, 5], [6]]
    assert planning.buckets([]) == []


def test_a_gradient_of_unknown_size_goes_alone():
    buckets = planning.buckets([gradient(0, [3]), gradient(1, [None]), gradient(2, [3]), gradient(3, [0])])
    assert positions(buckets) == [[0], [1], [2, 3]]


@pytest.mark.parametrize("op", [hvd.Adasum, hvd.Min, hvd.Max, hvd.Product])
def test_other_reductions_are_refused_by_name(op):
    with pytest.raises(ValueError, match=r"op must be Average or Sum, got (Adasum|Min|Max|Product)"):
        reduction._scale(op, 1.0)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_predivide_factor_must_be_positive(factor):
    with pytest.raises(ValueError, match="gradient_predivide_factor must be positive, got"):
        reduction._scale(hvd.Average, factor)


def test_predivide_factor_only_with_average():
    assert reduction._scale(None, 4.0) == (True, 1.0)
    assert reduction._scale(hvd.Sum, 1.0) == (False, 1.0)
    with pytest.raises(ValueError, match="gradient_predivide_factor must be 1 with op=Sum, got 2"):
        reduction._scale(hvd.Sum, 2.0)


PLAN = ["compression=EightBit", "a: float32 (3,), encode", "b: float32 (4,), encode"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            [PLAN[0].replace("Eight", "Nine"), *PLAN[1:]],
            r"differ in the settings: rank 0 has 'compression=EightBit' .*rank 5 has",
        ),
        (
            [*PLAN[:2], "b: float32 (5,), encode"],
            r"gradient 1: rank 0 has 'b: float32 \(4,\), .*' \(2 gradients\), rank 5 has 'b: float32 \(5,\)",
        ),
        (PLAN[:2], r"differ in gradient 1: .*rank 5 has 'no such gradient' \(1 gradients\)"),
        (
            [*PLAN, "c"],
            r"differ in gradient 2: rank 0 has 'no such gradient' \(2 gradients\), rank 5 has 'c'",
        ),
    ],
    ids=str,
)
def test_a_difference_names_the_first_line_that_differs(other, message):
    texts = ["\n".join(PLAN), "\n".join(PLAN), "\n".join(other)]
    assert re.search(message, reduction._difference(texts, [0, 2, 5]))


def test_a_plans_line():
    dense = planning.Gradient(0, "dense_3/kernel:0", tf.TensorSpec([3, 4], tf.float16), "encode")
    # Keras numbers layers as a process builds them: no difference between workers.
    assert dense.describe() == "dense/kernel:0: float16 (3, 4), encode"
    assert planning.Gradient(1, "bias", None, "none").describe() == "bias: no gradient"


def test_names_that_repeat_are_numbered():
    assert variables.unique(["a", "b", "a", "a"]) == ["a", "b", "a#2", "a#3"]


def test_keras_and_tensorflow_variables():
    keras = pytest.importorskip("keras")
    plain = tf.Variable([1.0], name="plain")
    assert variables.tf_variable(plain) is plain
    assert variables.name_of(plain) == "plain:0"
    tensor = tf.ones([2, 3])
    assert variables.tf_variable(tensor) is tensor
    assert variables.name_of(tensor) == "tensor_2x3"
    layer = keras.layers.Dense(2, name="dense")
    layer.build((None, 3))
    if hasattr(layer.kernel, "path"):
        assert variables.name_of(layer.kernel) == "dense/kernel"
    assert isinstance(variables.tf_variable(layer.kernel), tf.Variable)
