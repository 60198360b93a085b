"""The one-process arm of the experiments: bit for bit what workers get that do exchange."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from experiments import models, rounding
from experiments.configuration import parse_arm
from hvd8bit import reference
from hvd8bit.collectives import LoopbackComm
from hvd8bit.exchange import exchange, exchange_with_errors

pytestmark = pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")

ARMS = ("dynamic_tree/tensor", "linear/64", "mantissa/1e0", "static_tree/1024")
SHAPES = ((70, 31), (33,), (5,), (3, 3, 2, 64))


def gradients(rng, workers: int) -> list[list[np.ndarray]]:
    """For each worker tensors of very different sizes of numbers."""
    return [
        [(rng.normal(size=shape) * 10.0 ** rng.integers(-4, 2)).astype(np.float32) for shape in SHAPES]
        for _ in range(workers)
    ]


def tensors_of(of_workers) -> list[list[tf.Tensor]]:
    return [[tf.constant(tensor) for tensor in tensors] for tensors in of_workers]


def bits(tensors) -> list[bytes]:
    return [np.asarray(tensor).tobytes() for tensor in tensors]


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("workers", [2, 3, 16])
def test_exchange_is_the_one_between_workers(rng, arm, workers):
    encoding = parse_arm(arm).encoding
    of_workers = gradients(rng, workers)

    @tf.function
    def played(tensors):
        return rounding.exchange(tensors, encoding)

    def work(comm):
        mine = [tf.constant(tensor) for tensor in of_workers[comm.rank_tensor().numpy()]]
        return exchange(mine, encoding, comm, factor=1.0, name="test")

    expected = LoopbackComm.run(workers, work)
    assert bits(played(of_workers)) == bits(expected[0]) == bits(expected[-1])


@pytest.mark.parametrize("arm", ARMS)
def test_errors_are_those_of_the_exchange_between_workers(rng, arm):
    encoding = parse_arm(arm).encoding
    of_workers = gradients(rng, 3)

    def work(comm):
        mine = [tf.constant(tensor) for tensor in of_workers[comm.rank()]]
        return exchange_with_errors(mine, encoding, comm, factor=1.0, name="test")

    expected = LoopbackComm.run(3, work)
    mean, errors = rounding.mean_with_errors(tensors_of(of_workers), encoding)
    assert bits(mean) == bits(expected[0][0])
    assert [bits(of_worker) for of_worker in errors] == [bits(of_worker) for _, of_worker in expected]


@pytest.mark.parametrize("arm", ARMS)
def test_exchange_is_the_references_arithmetic(rng, arm):
    encoding = parse_arm(arm).encoding
    of_workers = gradients(rng, 3)
    like = of_workers[0]
    sent = [reference.encode_list(tensors, 3, encoding) for tensors in of_workers]
    sums = [reference.reduce_shards([chunks[k] for chunks in sent], like, k, encoding) for k in range(3)]
    expected = reference.decode_list([sums], like, encoding, factor=3.0)
    assert bits(rounding.exchange(of_workers, encoding, factor=3.0)) == bits(expected)


def test_gradients_are_packed_as_the_wrappers_pack_them(rng):
    """The last one first, small ones as they are: blocks end elsewhere in another order."""
    arm = parse_arm("linear/tensor")
    of_workers = gradients(rng, 2)
    reduced = rounding.reduce_gradients(tensors_of(of_workers), arm, min_elements=1000)
    in_order = rounding.exchange([[tensors[3], tensors[0]] for tensors in of_workers], arm.encoding)
    assert bits([reduced[3], reduced[0]]) == bits(in_order)
    other = rounding.exchange([[tensors[0], tensors[3]] for tensors in of_workers], arm.encoding)
    assert bits([reduced[0], reduced[3]]) != bits(other)
    for small in (1, 2):
        mean = (of_workers[0][small] + of_workers[1][small]) * np.float32(0.5)
        assert bits([reduced[small]]) == bits([mean])


def test_min_elements_0_rounds_every_tensor(rng):
    of_workers = gradients(rng, 2)
    reduced = rounding.reduce_gradients(tensors_of(of_workers), parse_arm("linear/tensor"), min_elements=0)
    for position in range(len(SHAPES)):
        exact = (of_workers[0][position] + of_workers[1][position]) * np.float32(0.5)
        assert not np.array_equal(reduced[position], exact)


@pytest.mark.parametrize(("arm", "dtype"), [("none", np.float32), ("fp16", np.float16)])
def test_arms_without_codes_are_plain_means(rng, arm, dtype):
    of_workers = gradients(rng, 4)
    reduced = rounding.reduce_gradients(tensors_of(of_workers), parse_arm(arm), min_elements=0)
    for position in range(len(SHAPES)):
        total = of_workers[0][position].astype(dtype)
        for tensors in of_workers[1:]:
            total = total + tensors[position].astype(dtype)
        expected = (total * dtype(0.25)).astype(np.float32)
        assert bits([reduced[position]]) == bits([expected])


def test_gradients_of_several_buckets_are_refused(rng, monkeypatch):
    monkeypatch.setattr(rounding, "BUCKET_ELEMENTS", 1000)
    with pytest.raises(ValueError, match="must fit into one bucket of 1000 elements"):
        rounding.reduce_gradients(tensors_of(gradients(rng, 2)), parse_arm("linear/64"), min_elements=0)


# Boundaries of a split model.


def test_what_is_gathered_is_rounded_part_by_part_and_its_gradient_is_not(rng):
    arm = parse_arm("linear/tensor")
    parts = [tf.constant(rng.normal(size=(6, 5)) * scale, tf.float32) for scale in (1, 100)]
    with tf.GradientTape() as tape:
        tape.watch(parts)
        gathered = rounding.gather(parts, arm)
    signal = tf.constant(rng.normal(size=(6, 10)), tf.float32)
    assert bits(tape.gradient(gathered, parts, signal)) == bits(tf.split(signal, 2, axis=1))
    expected = []
    for part in parts:
        codes, scale = reference.encode_block(part.numpy().reshape(-1), arm.encoding)
        expected.append(reference.decode_block(codes, scale, "linear").reshape(6, 5))
    assert bits([gathered]) == bits([np.concatenate(expected, 1)])


def test_error_signals_are_exchanged_as_a_sum(rng):
    arm = parse_arm("dynamic_tree/64")
    x = tf.constant(rng.normal(size=(6, 50)), tf.float32)
    signals = [tf.constant(rng.normal(size=(6, 50)), tf.float32) for _ in range(3)]
    with tf.GradientTape() as tape:
        tape.watch(x)
        copies = rounding.fan_out(x, 3, arm)
    assert bits(copies) == bits([x, x, x])
    [expected] = rounding.exchange([[signal] for signal in signals], arm.encoding, factor=3.0)
    assert bits([tape.gradient(copies, x, signals)]) == bits([expected])
    total = sum(signal.numpy() for signal in signals)
    assert 0 < np.abs(expected - total).max() < 0.2


@pytest.mark.parametrize("arm", ["none", "dynamic_tree/64"])
def test_a_split_layer_computes_what_a_whole_one_does(rng, arm):
    """Up to the roundings of what is exchanged: none for 32 bit."""
    x = tf.constant(rng.normal(size=(8, 20)), tf.float32)
    split = models.SplitDense(10, 4, parse_arm(arm), "relu")
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = split(x)
    kernel, bias = tf.concat(split.kernels, 1), tf.concat(split.biases, 0)
    assert kernel.shape == (20, 10)
    whole = tf.nn.relu(x @ kernel + bias)
    signal = tf.constant(rng.normal(size=(8, 10)), tf.float32)
    error = tape.gradient(y, x, signal)
    expected = (signal * tf.cast(whole > 0, tf.float32)) @ tf.transpose(kernel)
    tolerance = {"none": 1e-6, "dynamic_tree/64": 0.05}[arm]
    np.testing.assert_allclose(y, whole, atol=tolerance * float(tf.reduce_max(whole)))
    np.testing.assert_allclose(error, expected, atol=3 * tolerance * float(tf.reduce_max(tf.abs(expected))))
    assert (arm == "none") == bool(np.allclose(y, whole, atol=1e-6))


def test_a_local_layer_is_a_convolution_whose_weights_differ_from_place_to_place(rng):
    x = tf.constant(rng.normal(size=(2, 4, 5, 3)), tf.float32)
    layer = models.Local(6, 2, parse_arm("none"))
    y = layer(x)
    assert y.shape == (2, 4, 5, 6)
    kernel = tf.concat(layer.kernels, 2)
    for row, column in ((0, 0), (2, 3)):
        own = tf.reshape(kernel[row * 5 + column], (3, 3, 3, 6))
        expected = tf.nn.relu(tf.nn.conv2d(x, own, 1, "SAME"))[:, row, column]
        np.testing.assert_allclose(y[:, row, column], expected, atol=1e-5)


def test_stochastic_rounding_is_unbiased_and_follows_the_seed():
    arm = parse_arm("linear/tensor/stochastic")
    assert arm.title == "linear, one scale per tensor, stochastic"
    numbers = tf.constant([1.0, *[0.002] * 2000, 1.0])  # a 1 in either chunk; half a step is 0.004

    def mean(of):
        return float(tf.reduce_mean(rounding.exchange([[numbers]] * 2, of.encoding)[0][1:-1]))

    tf.random.set_seed(1)
    first, second = mean(arm), mean(arm)
    tf.random.set_seed(1)
    assert (first, second) == (mean(arm), mean(arm))
    assert first != second
    assert abs(first - 0.002) < 0.0005
    assert mean(parse_arm("linear/tensor")) == 0.0
