"""Keras 2 through hvd8bit.keras: the same calls as for Keras 3, and in the same process where that is there."""

from __future__ import annotations

import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit import reduction
from hvd8bit.keras import DistributedOptimizer, callbacks

# Up to TensorFlow 2.15 its own Keras is Keras 2.
tf_keras = tf.keras if keras.__version__ < "3" else pytest.importorskip("tf_keras")


@pytest.fixture(params=["none", "eightbit"])
def compression(request, hvd):
    return hvd.Compression.none if request.param == "none" else hvd8bit.EightBit(min_elements=0)


def assert_replicas_equal(hvd, variables):
    mine = zlib.crc32(b"".join(np.ascontiguousarray(variable).tobytes() for variable in variables))
    assert set(hvd.allgather(tf.constant([mine], tf.int64)).numpy()) == {mine}


def own_data(hvd, rows=32, scale=1.0):
    random = np.random.default_rng(hvd.rank())
    x, y = random.normal(size=(rows, 6)) * scale, random.normal(size=(rows, 4)) * scale
    return x.astype("float32"), y.astype("float32")


def small_model(seed=3):
    tf_keras.utils.set_random_seed(seed)
    return tf_keras.Sequential([tf_keras.layers.Input((6,)), tf_keras.layers.Dense(8), tf_keras.layers.Dense(4)])


@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("op_name", ["Average", "Sum"])
def test_fit_reduces_exactly_once(hvd, compression, op_name, groups):
    model = tf_keras.Sequential(
        [tf_keras.layers.Input((1,)), tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    optimizer = DistributedOptimizer(
        tf_keras.optimizers.SGD(1.0), compression=compression, op=getattr(hvd, op_name), groups=groups
    )
    model.compile(optimizer, loss=lambda y, output: tf.reduce_mean(output))
    model.fit(np.full((1, 1), hvd.rank() + 1.0), np.zeros((1, 1)), verbose=0)
    total = hvd.size() * (hvd.size() + 1) / 2
    expected = total / hvd.size() if op_name == "Average" else total
    np.testing.assert_allclose(model.get_weights()[0], [[-expected]], rtol=1e-6)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("kind", ["new", "legacy"])
@pytest.mark.parametrize("call", ["apply_gradients", "minimize"])
def test_a_loop_of_ones_own_reduces_exactly_once(hvd, compression, call, kind, traced):
    """FIELD-CASES K1: with Sum, a second reduction would show."""
    sgd = (tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy).SGD(1.0)
    optimizer = DistributedOptimizer(sgd, compression=compression, op=hvd.Sum)
    used, unused = tf.Variable(0.0), tf.Variable(1.0)

    def step(factor):
        if call == "minimize":
            optimizer.minimize(lambda: factor * used, [used])
            return
        with tf.GradientTape() as tape:
            loss = factor * used
        optimizer.apply_gradients(zip(tape.gradient(loss, [used, unused]), [used, unused]))

    step = tf.function(step) if traced else step
    for _ in range(3):
        step(tf.constant(hvd.rank() + 1.0))
    assert (float(used), float(unused)) == (-3 * hvd.size() * (hvd.size() + 1) / 2, 1.0)


def test_accumulation_needs_gradients_of_its_own(hvd):
    optimizer = DistributedOptimizer(tf_keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="accumulated itself; use fit or minimize"):
        optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(0.0))])


def test_legacy_optimizer(hvd, compression):
    model = small_model()
    model.compile(DistributedOptimizer(tf_keras.optimizers.legacy.Adam(0.01), compression=compression), loss="mse")
    model.fit(*own_data(hvd), batch_size=8, verbose=0)
    assert_replicas_equal(hvd, model.get_weights())


def test_embedding_beside_dense_layers(hvd, compression):
    """Horovod's own groups fail where sparse and dense gradients meet."""
    tf_keras.utils.set_random_seed(3)
    model = tf_keras.Sequential(
        [tf_keras.layers.Embedding(20, 8), tf_keras.layers.GlobalAveragePooling1D(), tf_keras.layers.Dense(4)]
    )
    model.compile(DistributedOptimizer(tf_keras.optimizers.SGD(0.1), compression=compression), loss="mse")
    tokens = np.random.default_rng(hvd.rank()).integers(0, 20, (32, 5))
    model.fit(tokens, own_data(hvd)[1], batch_size=8, verbose=0)
    assert_replicas_equal(hvd, model.get_weights())


@pytest.mark.parametrize("passes", [1, 2])
def test_all_gradients_travel_together(hvd, monkeypatch, passes):
    real, seen = reduction.reduce_gradients, []

    def reduce_gradients(gradients, names, **arguments):
        seen.append(list(names))
        return real(gradients, names, **arguments)

    monkeypatch.setattr(reduction, "reduce_gradients", reduce_gradients)
    model = small_model()
    optimizer = DistributedOptimizer(tf_keras.optimizers.SGD(0.1), backward_passes_per_step=passes)
    model.compile(optimizer, loss="mse", run_eagerly=True)
    model.fit(*own_data(hvd), batch_size=8, verbose=0)
    assert seen == [[weight.name for weight in model.weights]] * (4 // passes)


@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
def test_backward_passes_per_step(hvd, compression, average):
    model = tf_keras.Sequential(
        [tf_keras.layers.Input((1,)), tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    optimizer = DistributedOptimizer(
        tf_keras.optimizers.SGD(1.0),
        compression=compression,
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    model.compile(optimizer, loss=lambda y, output: tf.reduce_mean(output))
    x = np.full((4, 1), hvd.rank() + 1.0)
    model.fit(x, np.zeros((4, 1)), batch_size=1, verbose=0)
    mean = np.mean(range(1, hvd.size() + 1))
    np.testing.assert_allclose(model.get_weights()[0], [[-mean * (2 if average else 4)]], rtol=1e-6)


def test_overflow_on_one_worker(hvd, compression):
    tf_keras.utils.set_random_seed(3)
    policy = "mixed_float16"
    model = tf_keras.Sequential(
        [
            tf_keras.layers.Input((6,)),
            tf_keras.layers.Dense(8, dtype=policy),
            tf_keras.layers.Dense(4, dtype="float32"),
        ]
    )
    scaled = tf_keras.mixed_precision.LossScaleOptimizer(
        DistributedOptimizer(tf_keras.optimizers.SGD(0.1), compression=compression)
    )
    model.compile(scaled, loss="mse")
    x, y = own_data(hvd, scale=0.1)
    if hvd.rank() == hvd.size() - 1:
        x[11] = 1e5
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert float(scaled.loss_scale) == 8192
    assert np.isfinite(np.concatenate([weight.ravel() for weight in model.get_weights()])).all()
    assert_replicas_equal(hvd, model.get_weights())


def test_callbacks(hvd):
    model = small_model(seed=hvd.rank())
    model.compile(DistributedOptimizer(tf_keras.optimizers.SGD(7.0)), loss="mse")
    own, rates = {}, []
    note = tf_keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: own.update(logs),
        on_batch_begin=lambda batch, logs: rates.append(float(model.optimizer.learning_rate)),
    )
    history = model.fit(
        *own_data(hvd),
        batch_size=8,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
            note,
            callbacks.MetricAverageCallback(),
        ],
        verbose=0,
    ).history
    assert_replicas_equal(hvd, model.get_weights())
    losses = hvd.allgather(tf.constant([own["loss"]], tf.float64)).numpy()
    assert history["loss"] == [pytest.approx(np.mean(losses), rel=1e-12)]
    n = hvd.size()
    np.testing.assert_allclose(rates, [0.1 / n * (1 + (n - 1) * (step + 1) / 8) for step in range(4)], rtol=1e-6)


def test_momentum_is_corrected_where_it_is_a_variable(hvd):
    model = small_model()
    model.compile(DistributedOptimizer(tf_keras.optimizers.legacy.SGD(0.2, momentum=0.5)), loss="mse")
    seen = []
    note = tf_keras.callbacks.LambdaCallback(
        on_batch_begin=lambda batch, logs: seen.append(float(model.optimizer.momentum)),
    )
    warmup = callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=1)
    model.fit(*own_data(hvd), batch_size=8, callbacks=[warmup, note], verbose=0)
    n = hvd.size()
    rates = [0.2, *(0.2 / n * (1 + (n - 1) * (step + 1) / 4) for step in range(4))]
    np.testing.assert_allclose(seen, [0.5 * new / old for old, new in zip(rates, rates[1:])], rtol=1e-5)
    assert float(model.optimizer.momentum) == 0.5


def test_wrapping_twice_is_an_error(hvd):
    optimizer = DistributedOptimizer(tf_keras.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match="distributed already"):
        DistributedOptimizer(optimizer)
