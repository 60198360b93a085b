"""Keras 2 through hvd8bit.keras: the same calls as for Keras 3, and in the same process where that is there."""

from __future__ import annotations

import copy
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit import reduction
from hvd8bit.keras import DistributedOptimizer, ElasticState, callbacks
from hvd8bit.variables import optimizer_variables

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


def optimizers_of(kind):
    return tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy


def values_of(optimizer):
    return [variable.numpy() for variable in optimizer_variables(optimizer)]


def assert_equal_lists(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


# Where tf_keras is installed beside TensorFlow's own Keras 2, loading a folder mixes the two, whatever the optimizer.
FORMATS = ["model.keras", "model.h5", *(["model"] if keras.__version__ >= "3" else [])]

OPTIMIZERS = {
    "Adam": lambda: tf_keras.optimizers.Adam(0.01),
    "SGD": lambda: tf_keras.optimizers.SGD(0.01),
    "Adafactor": lambda: tf_keras.optimizers.Adafactor(0.01),
    "moving average": lambda: tf_keras.optimizers.RMSprop(0.01, use_ema=True, momentum=0.5),
    "schedule": lambda: tf_keras.optimizers.Adam(tf_keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5)),
    "legacy SGD": lambda: tf_keras.optimizers.legacy.SGD(0.01, momentum=0.9),
    "legacy Nadam": lambda: tf_keras.optimizers.legacy.Nadam(0.01),
    "legacy schedule": lambda: tf_keras.optimizers.legacy.Adam(
        tf_keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5)
    ),
    "legacy function": lambda: tf_keras.optimizers.legacy.SGD(lambda: 0.01, momentum=0.9),
}


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss scale"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_built_optimizer_goes_on_where_it_was(hvd, name, scaled):
    plain = OPTIMIZERS[name]()
    plain = tf_keras.mixed_precision.LossScaleOptimizer(plain, initial_scale=4.0) if scaled else plain
    model = small_model()
    model.compile(plain, loss="mse")
    x, y = np.random.default_rng(5).normal(size=(32, 6)), np.ones((32, 4))
    model.fit(x, y, batch_size=8, verbose=0)
    if scaled:
        plain._loss_scale.current_loss_scale.assign(2.0)
    wrapped = DistributedOptimizer(plain, compression=hvd.Compression.none)
    weights, kept = model.get_weights(), values_of(plain)
    assert int(wrapped.iterations) == 4
    assert_equal_lists(values_of(wrapped), kept)
    model.fit(x, y, batch_size=8, verbose=0)
    assert_equal_lists(values_of(wrapped), kept)

    expected = model.get_weights()
    model.set_weights(weights)
    model.compile(wrapped, loss="mse")
    model.fit(x, y, batch_size=8, verbose=0)
    assert_equal_lists(model.get_weights(), expected)
    assert_equal_lists(values_of(wrapped), values_of(plain))


def test_an_optimizer_that_awaits_a_checkpoint_is_an_error(hvd, tmp_path):
    model = small_model()
    model.compile(tf_keras.optimizers.Adam(0.01), loss="mse")
    model.fit(*own_data(hvd), batch_size=8, verbose=0)
    path = tf.train.Checkpoint(optimizer=model.optimizer).save(tmp_path / "checkpoint")
    plain, first = tf_keras.optimizers.Adam(0.01), DistributedOptimizer(tf_keras.optimizers.Adam(0.01))
    tf.train.Checkpoint(optimizer=plain).restore(path)
    with pytest.raises(ValueError, match="restore the checkpoint into what is returned"):
        DistributedOptimizer(plain)
    tf.train.Checkpoint(optimizer=first).restore(path)
    first.build(model.trainable_variables)
    assert_equal_lists(values_of(first), values_of(model.optimizer))
    plain.build(model.trainable_variables)
    assert_equal_lists(values_of(DistributedOptimizer(plain)), values_of(model.optimizer))


def test_what_get_config_leaves_out_is_kept(hvd):
    decaying = tf_keras.optimizers.AdamW(0.1, weight_decay=0.5)
    decaying.exclude_from_weight_decay(var_names=["bias"])
    bias, kernel = tf.Variable([1.0], name="bias"), tf.Variable([1.0], name="kernel")
    DistributedOptimizer(decaying).apply_gradients([(tf.constant([0.0]), bias), (tf.constant([0.0]), kernel)])
    np.testing.assert_allclose([bias[0], kernel[0]], [1.0, 0.95])

    twice = tf_keras.optimizers.legacy.SGD(1.0, gradient_transformers=[lambda pairs: [(2 * g, v) for g, v in pairs]])
    DistributedOptimizer(twice).apply_gradients([(tf.constant([1.0]), bias)])
    np.testing.assert_allclose(bias, [-1.0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_has_what_one_of_the_plain_optimizer_has(hvd, tmp_path, name):
    model, plain = small_model(), OPTIMIZERS[name]()
    model.compile(plain, loss="mse")
    model.fit(*own_data(hvd), verbose=0)

    def saved(optimizer):
        model.compile(optimizer, loss="mse")
        return tf.train.list_variables(tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint"))

    assert saved(DistributedOptimizer(plain)) == saved(plain)


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_a_class_registered_by_the_user_is_saved_under_its_name(hvd, kind):
    cls = type("Registered", (optimizers_of(kind).SGD,), {"__module__": __name__})
    cls = tf_keras.utils.register_keras_serializable(f"ours_{kind}")(cls)
    config = tf_keras.optimizers.serialize(DistributedOptimizer(cls(0.5)))
    assert config["registered_name"] == f"ours_{kind}>Registered"
    assert type(tf_keras.optimizers.deserialize(config)) is cls


@pytest.mark.parametrize("kind", ["new", "legacy"])
@pytest.mark.parametrize("order", ["outside", "inside"])
def test_loss_scaling_in_fit(hvd, kind, order):
    sgd, scale = optimizers_of(kind).SGD(1.0), tf_keras.mixed_precision.LossScaleOptimizer
    if order == "outside":
        optimizer = scale(DistributedOptimizer(sgd, op=hvd.Sum), initial_scale=4.0)
    else:
        optimizer = DistributedOptimizer(scale(sgd, initial_scale=4.0, dynamic_growth_steps=7), op=hvd.Sum)
        assert optimizer.dynamic_growth_steps == 7
        with pytest.raises(ValueError, match="distributed already"):
            DistributedOptimizer(optimizer)
    model = tf_keras.Sequential(
        [tf_keras.layers.Input((1,)), tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(optimizer, loss=lambda y, output: tf.reduce_mean(output))
    model.fit(np.full((2, 1), hvd.rank() + 1.0), np.zeros((2, 1)), batch_size=1, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], [[-hvd.size() * (hvd.size() + 1)]], rtol=1e-6)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_an_overflow_in_a_loop_of_ones_own(hvd, compression, kind, traced):
    """With Sum, a second reduction would show."""
    inner = DistributedOptimizer(optimizers_of(kind).SGD(1.0), compression=compression, op=hvd.Sum)
    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=4.0)
    variable = tf.Variable(tf.zeros([4]))

    def step(gradient):
        [unscaled] = optimizer.get_unscaled_gradients([gradient])
        optimizer.apply_gradients([(unscaled, variable)])

    step = tf.function(step) if traced else step
    scale, total = 4.0, 0.0
    for number in range(4):
        overflow = number in (1, 2)
        step(tf.fill([4], np.inf if overflow and hvd.rank() == hvd.size() - 1 else scale * (hvd.rank() + 1.0)))
        scale, total = (scale / 2, total) if overflow else (scale, total - hvd.size() * (hvd.size() + 1) / 2)
        np.testing.assert_allclose(variable, [total] * 4, rtol=1e-6)
        assert float(optimizer.loss_scale) == scale
    assert int(optimizer.iterations) == 4

    skips = {"skip_gradients_aggregation": True} if kind == "new" else {"experimental_aggregate_gradients": False}
    with pytest.raises(ValueError, match="would look for overflows in its own gradients"):
        optimizer.apply_gradients([(tf.ones([4]), variable)], **skips)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss scale"])
@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_the_learning_rate_and_the_loss_scale_are_shared(hvd, kind, scaled):
    def compiled():
        optimizer = DistributedOptimizer(optimizers_of(kind).Adam(0.01), compression=hvd.Compression.none)
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer) if scaled else optimizer
        model = small_model()
        model.compile(optimizer, loss="mse")
        return model, optimizer

    def change_at_root(optimizer):
        if hvd.rank() == 0:
            optimizer.learning_rate = 0.001
            if scaled:
                optimizer._loss_scale.current_loss_scale.assign(512.0)

    model, optimizer = compiled()
    change_at_root(optimizer)
    model.fit(
        *own_data(hvd), batch_size=8, epochs=2, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)], verbose=0
    )
    assert float(optimizer.learning_rate) == pytest.approx(0.001)
    assert_replicas_equal(hvd, [*model.get_weights(), *values_of(optimizer)])

    model, optimizer = compiled()
    state = ElasticState(model, epoch=0)
    change_at_root(optimizer)
    state.sync()
    assert float(optimizer.learning_rate) == pytest.approx(0.001)
    assert not scaled or float(optimizer.loss_scale) == 512.0
    optimizer.learning_rate = 7.0
    state.restore()
    assert float(optimizer.learning_rate) == pytest.approx(0.001)
    model.fit(*own_data(hvd), batch_size=8, verbose=0)
    assert_replicas_equal(hvd, [*model.get_weights(), *values_of(optimizer)])


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_a_worker_that_joins_an_elastic_job(hvd, kind):
    def state_of_a_worker():
        model = small_model()
        optimizer = DistributedOptimizer(optimizers_of(kind).Adam(0.01), compression=hvd.Compression.none, name="joins")
        model.compile(optimizer, loss="mse")
        return ElasticState(model, epoch=0)

    state = state_of_a_worker()
    before = state.model.get_weights(), values_of(state.optimizer)
    state.model.fit(*own_data(hvd), batch_size=8, verbose=0)
    state.restore()
    assert_equal_lists([*state.model.get_weights(), *values_of(state.optimizer)], [*before[0], *before[1]])
    state.model.fit(*own_data(hvd), batch_size=8, verbose=0)
    state.commit()
    if hvd.rank() == hvd.size() - 1 > 0:
        state = state_of_a_worker()
    state.sync()
    assert int(state.optimizer.iterations) == 4
    assert_replicas_equal(hvd, [*state.model.get_weights(), *values_of(state.optimizer)])


def test_restore_needs_the_variables_of_the_last_commit(hvd):
    model = small_model()
    optimizer = tf_keras.optimizers.legacy.Adam(0.01)
    state = ElasticState(model, optimizer)
    optimizer.apply_gradients([(tf.constant(1.0), tf.Variable(0.0))])
    with pytest.raises(ValueError, match="must have the variables of the last commit, got 19 where it kept 17"):
        state.restore()
    state.save()
    state.restore()


@pytest.mark.parametrize("kind", ["new", "legacy"])
@pytest.mark.parametrize("file", FORMATS)
@pytest.mark.parametrize("built", [False, True], ids=["new", "built"])
def test_a_saved_model_holds_the_plain_optimizer(hvd, tmp_path, kind, file, built):
    model, plain = small_model(), optimizers_of(kind).Adam(0.25)
    if built:
        model.compile(plain, loss="mse")
        model.fit(*own_data(hvd), verbose=0)
    distributed = DistributedOptimizer(plain)
    model.compile(distributed, loss="mse")
    model.fit(*own_data(hvd), verbose=0)
    model.save(tmp_path / file)
    for loaded in (tf_keras.models.load_model(tmp_path / file), copy.deepcopy(model)):
        assert type(loaded.optimizer) is type(plain)
        assert not hasattr(loaded.optimizer, "_allreduce_grads")
        assert float(loaded.optimizer.learning_rate) == 0.25
