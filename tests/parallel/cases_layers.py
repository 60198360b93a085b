"""Parallel layers against the whole model in one process: for Keras 3, and for Keras 2 where tf.keras is that."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from split_models import (
    ALL,
    MODELS,
    assert_same_on_all_ranks,
    difference,
    keras,
    made,
    own_parts,
    sequential,
    step,
    train,
)

from hvd8bit import parallel
from hvd8bit.parallel.layers_base import ParallelLayer


@pytest.fixture(autouse=True)
def fresh_names(hvd):
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)


@pytest.fixture(params=["exact", "eightbit"])
def compression(request):
    return None if request.param == "exact" else ALL


# ---- equal to one process ----


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_exact_mode_equals_one_process(hvd, name, dtype):
    """FIELD-CASES M1, exact: outputs, every gradient, 20 losses, weights afterwards."""
    bound = 1e-5 if dtype == "float32" else 1e-10
    model, plain, x, y = made(name, None, dtype)
    loss, output, by_input, by_weights = step(model, x, y)
    plain_loss, plain_output, plain_by_input, plain_by_weights = step(plain, x, y)
    assert difference(loss, plain_loss) <= bound
    assert difference(output, plain_output) <= bound
    if by_input is not None:
        assert difference(by_input, plain_by_input) <= bound
    for got, want in zip(by_weights, own_parts(model, plain_by_weights)):
        assert difference(got, want) <= bound
    losses, plain_losses = train(model, x, y), train(plain, x, y)
    assert losses[-1] < losses[0]
    assert difference(losses, plain_losses) <= bound
    final = [np.asarray(w) for w in plain.trainable_variables]
    for got, want in zip(model.trainable_variables, own_parts(model, final)):
        assert difference(got, want) <= bound


@pytest.mark.parametrize("name", MODELS)
def test_eight_bits_are_near_one_process(hvd, name):
    """FIELD-CASES M1, 8 bits: 2 % RMS forward, 4 % backward a layer, 20 losses within 2 %; replicas the same bits."""
    model, plain, x, y = made(name, ALL, "float32", batch=33)
    layers = sum(isinstance(layer, ParallelLayer) for layer in model.layers)
    _, output, by_input, by_weights = step(model, x, y)
    _, plain_output, plain_by_input, plain_by_weights = step(plain, x, y)
    assert difference(output, plain_output) <= 0.02 * layers
    if by_input is not None:
        assert difference(by_input, plain_by_input) <= 0.04 * layers
    for got, want in zip(by_weights, own_parts(model, plain_by_weights)):
        assert difference(got, want) <= 0.04 * layers
    if name != "chained" or hvd.size() == 1:
        assert_same_on_all_ranks(hvd, output)
    rounded = difference(output, plain_output) > 1e-6
    assert rounded == (hvd.size() > 1)
    losses, plain_losses = train(model, x, y), train(plain, x, y)
    np.testing.assert_allclose(losses, plain_losses, rtol=0.02)
    for layer in model.layers:
        parts = getattr(layer, "_parts", dict.fromkeys(range(len(layer.weights)), ((), None)))
        for weight, (_, axis) in zip(layer.weights, parts.values()):
            if axis is None:
                assert_same_on_all_ranks(hvd, np.asarray(weight))


@pytest.mark.parametrize("name", ["column", "row", "conv valid", "embedding"])
def test_the_same_seed_gives_the_weights_of_plain_layers(hvd, name):
    plain = {
        "column": lambda: [keras.layers.Dense(10)],
        "row": lambda: [keras.layers.Dense(6, bias_initializer="ones")],
        "conv valid": lambda: [keras.layers.Conv2D(6, 3, strides=2), keras.layers.Flatten(), keras.layers.Dense(5)],
        "embedding": lambda: [keras.layers.Embedding(20, 5), keras.layers.Dense(8)],
    }[name]
    shape, layers = MODELS[name]
    keras.utils.set_random_seed(11)
    want = sequential(*plain(), shape=shape, dtype="float32").get_weights()
    keras.utils.set_random_seed(11)
    model = sequential(*layers({"compression": None, "dtype": "float32"}), shape=shape, dtype="float32")
    for got, weight in zip(parallel.merge(model).get_weights(), want):
        np.testing.assert_array_equal(got, weight)
    for got, weight in zip(model.get_weights(), own_parts(model, want)):
        np.testing.assert_array_equal(got, weight)


def test_locally_connected_is_the_layer_of_keras_2(hvd):
    tf_keras = pytest.importorskip("tf_keras")
    layer = parallel.LocallyConnected2D(5, (2, 3), strides=(1, 2), compression=None)
    whole = tf_keras.layers.LocallyConnected2D(5, (2, 3), strides=(1, 2))
    x = np.random.default_rng(0).standard_normal((4, 6, 8, 3)).astype("float32")
    want = whole(x)
    layer.build(x.shape)
    random = np.random.default_rng(1)
    weights = [random.standard_normal(w.shape).astype("float32") for w in whole.get_weights()]
    whole.set_weights(weights)
    layer.set_whole_weights(weights)
    want = whole(x)
    assert tuple(layer.compute_output_shape(x.shape)) == tuple(want.shape)
    np.testing.assert_allclose(layer(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_channels_first(hvd, padding):
    x = np.random.default_rng(0).standard_normal((4, 6, 8, 3)).astype("float32")
    for cls in (parallel.ColumnParallelConv2D, parallel.LocallyConnected2D):
        last = cls(5, 3, padding=padding, compression=None, data_format="channels_last")
        first = cls(5, 3, padding=padding, compression=None, data_format="channels_first")
        want = last(x)
        turned = np.transpose(x, [0, 3, 1, 2])
        first.build(turned.shape)
        first.set_weights(last.get_weights())
        got = first(turned)
        assert tuple(first.compute_output_shape(turned.shape)) == tuple(got.shape)
        np.testing.assert_allclose(np.transpose(got, [0, 2, 3, 1]), want, rtol=1e-5, atol=1e-6)


def test_process_sets(hvd, compression):
    """Two pairs of workers, each with a layer of its own."""
    if hvd.size() < 4:
        return
    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    try:
        mine = pairs[hvd.rank() // 2]
        layer = parallel.ColumnParallelDense(10, compression=compression, process_set=mine)
        model = sequential(layer, shape=(12,), dtype="float32")
        assert layer.weights[0].shape == (12, 5)
        x = np.random.default_rng(hvd.rank() // 2).standard_normal((30, 12)).astype("float32")
        plain = parallel.merge(model)
        assert difference(model(x), plain(x)) <= 0.02
        again = type(layer).from_config(layer.get_config())
        assert again._process_set.process_set_id == mine.process_set_id
        assert parallel.split(plain, process_set=mine).layers[-1].weights[0].shape == (12, 5)
    finally:
        for pair in pairs:
            hvd.remove_process_set(pair)


@pytest.mark.parametrize("where", ["both", "input", "output"])
def test_process_sets_of_compressions(hvd, where):
    """Each worker has a layer for itself: its clone, too, with both boundaries, and what is split by it."""
    if hvd.size() == 1:
        return
    alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    try:
        mine = alone[hvd.rank()]
        own = ALL(process_set=mine)
        compression = own if where == "both" else {"input": None, "output": None, where: own}
        model = sequential(parallel.ColumnParallelDense(7, compression=compression), shape=(12,), dtype="float32")
        for one in (model, keras.models.clone_model(model)):
            assert one.layers[-1].get_config()["process_set"] == [hvd.rank()]
            assert one.layers[-1].weights[0].shape == (12, 7)
            assert one(tf.ones([2 + hvd.rank(), 12])).shape == (2 + hvd.rank(), 7)
        plain = sequential(keras.layers.Dense(1), shape=(12,), dtype="float32")
        assert isinstance(parallel.split(plain, compression=compression).layers[-1], ParallelLayer)
        other = alone[hvd.rank() - 1]
        for wrong in (
            {"compression": compression, "process_set": other},
            {"compression": {"input": own, "output": ALL(process_set=other)}},
        ):
            with pytest.raises(ValueError, match=r"process_set differs.*give it once"):
                parallel.ColumnParallelDense(7, **wrong)(tf.ones([2, 12]))
    finally:
        for one in alone:
            hvd.remove_process_set(one)


@pytest.mark.parametrize("name", ["column", "row", "conv valid", "local", "embedding"])
def test_different_batches_are_an_error_on_every_worker(hvd, compression, name):
    if hvd.size() == 1:
        return
    model, _, x, _ = made(name, compression, "float32")
    with pytest.raises(tf.errors.OpError):
        model(x[: 5 if hvd.rank() else 4])
