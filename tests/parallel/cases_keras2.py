"""Keras 2 (tf_keras): Horovod's own optimizer with `compression=EightBit` and nothing else changed.

Launched with TF_USE_LEGACY_KERAS=1.
"""

import numpy as np
import pytest
import tensorflow as tf
from oracle import rank_values

import hvd8bit


@pytest.fixture
def hvd_keras(hvd):
    import horovod.tensorflow.keras as hvd_keras

    assert not hasattr(tf.keras, "ops"), "TF_USE_LEGACY_KERAS=1 is missing"
    return hvd_keras


def model_and_data(hvd, seed=0):
    tf.keras.utils.set_random_seed(seed)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input([40]),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    x = rank_values(hvd.rank(), [256, 40])
    y = np.argmax(x[:, :10], 1)
    return model, x, y


def assert_same_weights(hvd, model):
    bits = np.concatenate([w.numpy().ravel().view(np.uint8) for w in model.weights])
    everyone = hvd.allgather(tf.constant(bits[None]), name="weights").numpy()
    assert np.all(everyone == everyone[0])
    assert np.all(np.isfinite(np.concatenate([w.numpy().ravel() for w in model.weights])))


def fit(hvd, hvd_keras, optimizer, epochs=2, run_eagerly=False, **settings):
    model, x, y = model_and_data(hvd)
    model.compile(
        hvd_keras.DistributedOptimizer(optimizer, **settings),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=run_eagerly,
    )
    history = model.fit(x, y, batch_size=32, epochs=epochs, verbose=0)
    assert_same_weights(hvd, model)
    return model, history.history["loss"]


@pytest.mark.parametrize("groups", [None, 1, 2], ids=["bare", "one group", "two groups"])
@pytest.mark.parametrize("compression", [hvd8bit.EightBit, hvd8bit.EightBit(min_elements=0)], ids=["default", "all"])
def test_fit(hvd, hvd_keras, groups, compression):
    _, losses = fit(hvd, hvd_keras, tf.keras.optimizers.Adam(0.01), compression=compression, groups=groups)
    _, plain = fit(hvd, hvd_keras, tf.keras.optimizers.Adam(0.01), groups=groups)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, plain, rtol=0.05)


def test_fit_eagerly(hvd, hvd_keras):
    _, losses = fit(
        hvd, hvd_keras, tf.keras.optimizers.SGD(0.1), compression=hvd8bit.EightBit, epochs=1, run_eagerly=True
    )
    assert np.isfinite(losses[-1])


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0])
def test_predivide_factor(hvd, hvd_keras, factor):
    """FIELD-CASES A1: a power of two only moves the scale; 3 stays within the rounding."""

    def weights(factor):
        model, _ = fit(
            hvd,
            hvd_keras,
            tf.keras.optimizers.Adam(0.01),
            epochs=3,
            compression=hvd8bit.EightBit(min_elements=0),
            gradient_predivide_factor=factor,
        )
        return model.get_weights()

    for ours, right in zip(weights(factor), weights(1.0)):
        if factor == 3.0:
            np.testing.assert_allclose(ours, right, atol=1e-2)
        else:
            np.testing.assert_array_equal(ours, right)


def test_two_optimizers_in_one_process(hvd, hvd_keras):
    """FIELD-CASES B7: each keeps its own settings."""
    first, _ = fit(hvd, hvd_keras, tf.keras.optimizers.SGD(0.1), compression=hvd8bit.EightBit(min_elements=0))
    second, _ = fit(
        hvd,
        hvd_keras,
        tf.keras.optimizers.SGD(0.1),
        compression=hvd8bit.EightBit(data_type="linear", min_elements=0),
    )
    again, _ = fit(hvd, hvd_keras, tf.keras.optimizers.SGD(0.1), compression=hvd8bit.EightBit(min_elements=0))
    for a, b in zip(first.get_weights(), again.get_weights()):
        np.testing.assert_array_equal(a, b)
    if hvd.size() > 1:
        assert any(np.any(a != b) for a, b in zip(first.get_weights(), second.get_weights()))


def test_accumulation(hvd, hvd_keras):
    """FIELD-CASES B5: exchanges happen in every second step only."""
    from hvd8bit import collectives

    model, x, y = model_and_data(hvd)
    settings = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    model.compile(
        hvd_keras.DistributedOptimizer(tf.keras.optimizers.Adam(0.01), compression=hvd8bit.EightBit, **settings),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    loss = model.fit(x, y, batch_size=32, epochs=1, verbose=0).history["loss"][-1]
    collectives.reset_sent_bytes()
    model.fit(x, y, batch_size=32, epochs=1, verbose=0)
    accumulated = collectives.sent_bytes()
    assert_same_weights(hvd, model)
    plain, _, _ = model_and_data(hvd)
    plain.compile(
        hvd_keras.DistributedOptimizer(tf.keras.optimizers.Adam(0.01), **settings),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    plain_loss = plain.fit(x, y, batch_size=32, epochs=1, verbose=0).history["loss"][-1]
    assert abs(loss - plain_loss) <= 0.01 * plain_loss
    every, _, _ = model_and_data(hvd)
    every.compile(
        hvd_keras.DistributedOptimizer(tf.keras.optimizers.Adam(0.01), compression=hvd8bit.EightBit),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    every.fit(x, y, batch_size=32, epochs=1, verbose=0)
    collectives.reset_sent_bytes()
    every.fit(x, y, batch_size=32, epochs=1, verbose=0)
    assert collectives.sent_bytes() == 2 * accumulated


def test_mixed_precision(hvd, hvd_keras):
    """FIELD-CASES C4: an overflow on one worker halves the loss scale on all, twice here."""
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input([20]),
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(1, dtype="float32"),
            ]
        )
        hvd8bit.broadcast_variables(model.variables)
        compression = hvd8bit.EightBit(min_elements=0)
        optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=compression)
        model.compile(optimizer, "mse")
        x = rank_values(hvd.rank(), [32, 20])
        if hvd.rank() == hvd.size() - 1:
            x[0] = 1e5
        model.fit(x, np.zeros([32, 1], np.float32), batch_size=8, epochs=2, shuffle=False, verbose=0)
        assert float(model.optimizer.loss_scale) == 8192.0
        assert_same_weights(hvd, model)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def test_scalar_weight_and_dead_layer(hvd, hvd_keras):
    """FIELD-CASES F2, K1: gradients of shape (), all zeros, and none."""

    class Scaled(tf.keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(name="scale", shape=(), initializer="ones")
            self.unused = self.add_weight(name="unused", shape=(3,), initializer="ones")

        def call(self, x):
            return self.scale * x

    tf.keras.utils.set_random_seed(0)
    dead = tf.keras.layers.Dense(64, activation="relu", bias_initializer=tf.keras.initializers.Constant(-100.0))
    model = tf.keras.Sequential([tf.keras.layers.Input([40]), dead, Scaled(), tf.keras.layers.Dense(1)])
    compression = hvd8bit.EightBit(min_elements=0)
    model.compile(hvd_keras.DistributedOptimizer(tf.keras.optimizers.Adam(), compression=compression), "mse")
    before = dead.kernel.numpy()
    x = rank_values(hvd.rank(), [40, 40])
    model.fit(x, np.ones([40, 1]), batch_size=8, epochs=1, verbose=0)
    assert_same_weights(hvd, model)
    np.testing.assert_array_equal(dead.kernel.numpy(), before)
