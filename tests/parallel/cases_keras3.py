"""Keras 3: DistributedOptimizer reduces exactly once, everywhere, and keeps the replicas equal."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit import reduction
from hvd8bit.keras import DistributedOptimizer

pytestmark = pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")


@pytest.fixture(params=["none", "eightbit"])
def compression(request, hvd):
    """Small tensors pass EightBit by, so it is told to encode them all."""
    return hvd.Compression.none if request.param == "none" else hvd8bit.EightBit(min_elements=0)


# How a step runs and what carries it; the two do not depend on each other, so not every pair is run.
both_ways = pytest.mark.parametrize(
    ("traced", "compression"),
    [(False, "none"), (True, "eightbit")],
    indirect=["compression"],
    ids=["eager", "traced"],
)


@pytest.fixture(autouse=True)
def fresh_names():
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)


@pytest.fixture
def calls(monkeypatch):
    """The names of the gradients of each call of reduce_gradients."""
    real, seen = reduction.reduce_gradients, []

    def reduce_gradients(gradients, names, **arguments):
        seen.append(list(names))
        return real(gradients, names, **arguments)

    monkeypatch.setattr(reduction, "reduce_gradients", reduce_gradients)
    return seen


def digest(arrays) -> int:
    return zlib.crc32(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays))


def assert_replicas_equal(hvd, *variable_lists):
    mine = digest([np.asarray(variable) for variables in variable_lists for variable in variables])
    everyone = hvd.allgather(tf.constant([mine], tf.int64)).numpy()
    assert set(everyone) == {mine}


def mean_over_workers(hvd, value) -> float:
    """The mean of value(rank) over all ranks."""
    return float(np.mean([value(rank) for rank in range(hvd.size())]))


# ---- once, whatever calls the optimizer ----


def one_weight_model():
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="only")]
    )
    return model, model.weights[0]


def the_output(y_true, y_pred):
    return tf.reduce_mean(y_pred)


def run_fit(optimizer, gradient, **compile_arguments):
    model, weight = one_weight_model()
    model.compile(optimizer, loss=the_output, **compile_arguments)
    x = np.full((1, 1), gradient, "float32")
    model.fit(x, np.zeros((1, 1)), batch_size=1, verbose=0)
    return weight


def run_train_on_batch(optimizer, gradient):
    model, weight = one_weight_model()
    model.compile(optimizer, loss=the_output)
    model.train_on_batch(np.full((1, 1), gradient, "float32"), np.zeros((1, 1)))
    return weight


def run_apply(optimizer, gradient):
    weight = keras.Variable(0.0, name="only")
    optimizer.build([weight])
    optimizer.apply([tf.constant(gradient)])
    return weight


def run_apply_gradients(optimizer, gradient):
    weight = keras.Variable(0.0, name="only")
    optimizer.apply_gradients([(tf.constant(gradient), weight)])
    return weight


def run_tf_variable(optimizer, gradient):
    weight = tf.Variable(0.0, name="only")
    optimizer.apply_gradients([(tf.constant(gradient), weight)])
    return weight


def run_custom_loop(optimizer, gradient):
    model, weight = one_weight_model()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = the_output(None, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    step(tf.fill((1, 1), gradient))
    return weight


WAYS = [
    run_fit,
    lambda optimizer, gradient: run_fit(optimizer, gradient, run_eagerly=True),
    lambda optimizer, gradient: run_fit(optimizer, gradient, steps_per_execution=2),
    run_train_on_batch,
    run_apply,
    run_apply_gradients,
    run_tf_variable,
    run_custom_loop,
]
WAY_IDS = [
    "fit",
    "fit-eager",
    "fit-steps",
    "train_on_batch",
    "apply",
    "apply_gradients",
    "tf-variable",
    "custom-loop",
]


@pytest.mark.parametrize("way", WAYS, ids=WAY_IDS)
@pytest.mark.parametrize(
    ("op_name", "compression"), [("Average", "eightbit"), ("Sum", "none")], indirect=["compression"]
)
def test_reduces_exactly_once(hvd, way, op_name, compression):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression, op=getattr(hvd, op_name))
    weight = way(optimizer, hvd.rank() + 1.0)
    mean = mean_over_workers(hvd, lambda rank: rank + 1.0)
    # A mean of means would not show; a sum of sums does.
    expected = -mean if op_name == "Average" else -mean * hvd.size()
    np.testing.assert_allclose(np.ravel(weight), [expected], rtol=1e-6)
    assert_replicas_equal(hvd, [weight])


def test_one_call_per_step_with_every_gradient(hvd, compression, calls):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
    variables = [keras.Variable(0.0, name="a"), keras.Variable(0.0, name="b"), tf.Variable(0.0, name="b")]
    for _ in range(3):
        optimizer.apply([tf.constant(1.0), None, tf.constant(1.0)], variables)
    assert len(calls) == 3
    assert all(len(set(names)) == 3 for names in calls)
    assert float(variables[1].value) == 0.0


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_predivide_factor_changes_nothing(hvd, compression, factor):
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(1.0), compression=compression, gradient_predivide_factor=factor
    )
    weight = run_apply(optimizer, hvd.rank() + 1.0)
    np.testing.assert_allclose(float(weight.value), -mean_over_workers(hvd, lambda rank: rank + 1.0), rtol=1e-6)


def test_two_optimizers_in_one_step(hvd, compression):
    first = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
    second = DistributedOptimizer(keras.optimizers.SGD(2.0), name="The Second é", compression=compression)
    a, b = keras.Variable(0.0, name="w"), keras.Variable(0.0, name="w")
    first.build([a])
    second.build([b])

    @tf.function
    def step(gradient):
        second.apply([gradient * 10.0])
        first.apply([gradient])

    step(tf.constant(hvd.rank() + 1.0))
    mean = mean_over_workers(hvd, lambda rank: rank + 1.0)
    np.testing.assert_allclose([float(a.value), float(b.value)], [-mean, -20 * mean], rtol=1e-6)


def test_one_worker_retraces_alone(hvd, compression):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
    weight = keras.Variable(np.zeros(100, "float32"), name="w")
    optimizer.build([weight])

    @tf.function
    def step(x):
        optimizer.apply([tf.fill([100], tf.reduce_mean(x))])

    for number in range(4):
        rows = number + 1 if hvd.rank() == 0 else 1
        step(tf.fill([rows], hvd.rank() + 1.0))
    np.testing.assert_allclose(weight.numpy(), -4 * mean_over_workers(hvd, lambda rank: rank + 1.0), rtol=1e-6)


# ---- everything else in the optimizer sees reduced gradients ----

SETTINGS = [
    ("SGD", {"learning_rate": 0.5, "momentum": 0.9, "nesterov": True}),
    ("Adam", {}),
    ("AdamW", {"weight_decay": 0.1}),
    ("RMSprop", {}),
    ("Lion", {}),
    ("SGD", {"clipnorm": 0.5}),
    ("SGD", {"global_clipnorm": 0.5}),
    ("SGD", {"clipvalue": 1.25}),
    ("SGD", {"weight_decay": 0.25, "loss_scale_factor": 4.0}),
    ("Adam", {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}),
    ("SGD", {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)}),
    ("SGD", {"gradient_accumulation_steps": 2}),
    ("Adam", {"gradient_accumulation_steps": 2, "clipnorm": 0.5}),
    ("SGD", {"gradient_accumulation_steps": 3, "use_ema": True, "weight_decay": 0.1}),
]


def gradients_of(rank: int, step: int) -> list[np.ndarray]:
    # Constant tensors: EightBit carries them exactly, so that the results can be compared exactly.
    return [np.full((40, 3), (rank + 1) * (step + 1) / 2, "float32"), np.full(5, rank - step, "float32")]


@both_ways
@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=[f"{k}-{'-'.join(s)}" for k, s in SETTINGS])
def test_equals_one_process_on_the_mean(hvd, compression, kind, settings, traced):
    def train(optimizer, gradients_at):
        variables = [keras.Variable(np.ones((40, 3), "float32")), keras.Variable(np.ones(5, "float32"))]
        optimizer.build(variables)
        step = tf.function(optimizer.apply) if traced else optimizer.apply
        for number in range(6):
            step([tf.constant(gradient) for gradient in gradients_at(number)])
        optimizer.finalize_variable_values(variables)
        return variables

    def mean_gradients(number):
        everyone = [gradients_of(rank, number) for rank in range(hvd.size())]
        return [np.mean(same, axis=0, dtype="float64").astype("float32") for same in zip(*everyone)]

    make = getattr(keras.optimizers, kind)
    expected = train(make(**settings), mean_gradients)
    optimizer = DistributedOptimizer(make(**settings), compression=compression)
    result = train(optimizer, lambda number: gradients_of(hvd.rank(), number))
    for ours, plain in zip(result, expected):
        np.testing.assert_allclose(ours.numpy(), plain.numpy(), rtol=2e-5, atol=1e-6)
    assert_replicas_equal(hvd, result, optimizer_state(optimizer))


def optimizer_state(optimizer) -> list:
    # Accumulated gradients are each worker's own until they travel.
    return [variable for variable in optimizer.variables if "accumulator" not in variable.path]


def test_accumulation_exchanges_at_its_boundary_only(hvd, compression, calls):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=3), compression=compression)
    weight = keras.Variable(0.0)
    for _ in range(7):
        optimizer.apply([tf.constant(1.0)], [weight])
    assert len(calls) == 2


@both_ways
@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
def test_backward_passes_per_step(hvd, compression, average, traced):
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        compression=compression,
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    weight = keras.Variable(0.0)
    optimizer.build([weight])
    step = tf.function(optimizer.apply) if traced else optimizer.apply
    for number in range(4):
        step([tf.constant((hvd.rank() + 1.0) * (number + 1))])
    total = mean_over_workers(hvd, lambda rank: (rank + 1.0) * (1 + 2 + 3 + 4))
    np.testing.assert_allclose(float(weight.value), -total / 2 if average else -total, rtol=1e-6)
    assert_replicas_equal(hvd, [weight])


@pytest.mark.parametrize("scaled", [False, True], ids=["", "loss-scaling"])
def test_multi_optimizer(hvd, compression, scaled):
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")

    def choose(variable):
        return slow if variable.path.endswith("slow") else fast

    slow, fast = keras.optimizers.SGD(0.5), keras.optimizers.SGD(2.0)
    optimizer = keras.optimizers.MultiOptimizer(choose)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
    optimizer = DistributedOptimizer(optimizer, compression=compression)
    variables = [keras.Variable(0.0, name="slow"), keras.Variable(0.0, name="fast")]
    gradient = tf.constant(hvd.rank() + 1.0)
    optimizer.apply([gradient, gradient], variables)
    mean = mean_over_workers(hvd, lambda rank: rank + 1.0)
    np.testing.assert_allclose([float(v.value) for v in variables], [-0.5 * mean, -2 * mean], rtol=1e-6)


# ---- models ----


class WithUnusedLayer(keras.Model):
    def __init__(self):
        super().__init__()
        self.frozen = keras.layers.Dense(16, trainable=False)
        self.used = keras.layers.Dense(4)
        self.unused = keras.layers.Dense(8)
        self.unused.build((None, 8))

    def call(self, inputs):
        return self.used(tf.nn.relu(self.frozen(inputs)))


def own_data(hvd, rows=32, columns=6, outputs=4, scale=1.0):
    random = np.random.default_rng(100 + hvd.rank())
    x, y = random.normal(size=(rows, columns)) * scale, random.normal(size=(rows, outputs)) * scale
    return x.astype("float32"), y.astype("float32")


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("kind", "compression"),
    [("SGD", "none"), ("Adam", "eightbit"), ("AdamW", "eightbit")],
    indirect=["compression"],
)
def test_unused_and_frozen_layers(hvd, compression, kind):
    model = WithUnusedLayer()
    x, y = own_data(hvd)
    model(x[:1])
    before = [np.array(weight) for weight in [*model.frozen.weights, *model.unused.weights]]
    used_before = np.array(model.used.kernel)
    model.compile(DistributedOptimizer(getattr(keras.optimizers, kind)(0.01), compression=compression), loss="mse")
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    for old, new in zip(before, [*model.frozen.weights, *model.unused.weights]):
        np.testing.assert_array_equal(old, new)
    assert np.abs(used_before - np.array(model.used.kernel)).max() > 0
    assert_replicas_equal(hvd, model.weights, model.optimizer.variables)


@pytest.mark.parametrize("sparse_as_dense", [False, True], ids=["sparse", "as-dense"])
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_embedding(hvd, kind, sparse_as_dense):
    """Workers touch different rows and some the same, one of them twice; a dense layer stands beside."""

    def train(optimizer, rows_of, dense=False):
        # Keras takes a row that is touched twice differently in sparse and in dense gradients.
        table = keras.Variable(np.ones((8, 4), "float32"), name="table")
        bias = keras.Variable(np.zeros(4, "float32"), name="bias")
        for number in range(3):
            with tf.GradientTape() as tape:
                losses = []
                for rank in rows_of:
                    rows = tf.gather(table.value, [rank % 8, 5, 5, (rank + number) % 8])
                    losses.append(tf.reduce_sum((rows + bias.value) * (rank + 1.0)))
                loss = tf.add_n(losses) / len(losses)
            gradients = tape.gradient(loss, [table.value, bias.value])
            assert isinstance(gradients[0], tf.IndexedSlices)
            if dense:
                gradients[0] = tf.convert_to_tensor(gradients[0])
            optimizer.apply(gradients, [table, bias])
        return [table, bias]

    make = getattr(keras.optimizers, kind)
    expected = train(make(0.1), range(hvd.size()), dense=sparse_as_dense and hvd.size() > 1)
    optimizer = DistributedOptimizer(make(0.1), compression=hvd.Compression.none, sparse_as_dense=sparse_as_dense)
    result = train(optimizer, [hvd.rank()])
    assert_replicas_equal(hvd, result, optimizer.variables)
    for ours, plain in zip(result, expected):
        np.testing.assert_allclose(ours.numpy(), plain.numpy(), rtol=1e-5)


# ---- loss scaling ----


def scaled_in_order(order, optimizer, **arguments):
    """The optimizer for compile, distributed and under loss scaling in the given order."""
    scaled = keras.optimizers.LossScaleOptimizer
    return {
        "compile": lambda: DistributedOptimizer(optimizer, **arguments),  # compile adds the loss scaling
        "outside": lambda: scaled(DistributedOptimizer(optimizer, **arguments)),
        "inside": lambda: DistributedOptimizer(scaled(optimizer), **arguments),
    }[order]()


@both_ways
@pytest.mark.parametrize("accumulation", [None, 2], ids=["", "accumulation"])
@pytest.mark.parametrize("order", ["compile", "outside", "inside"])
def test_overflow_on_one_worker(hvd, compression, order, accumulation, traced):
    """One sample of the last worker overflows in each of two epochs of four batches: all skip both steps."""
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulation)
    optimizer = scaled_in_order(order, optimizer, compression=compression)
    policy = keras.DTypePolicy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu", dtype=policy),
            keras.layers.Dense(4, dtype="float32"),
        ]
    )
    model.dtype_policy = policy
    model.compile(optimizer, loss="mse", run_eagerly=not traced)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = own_data(hvd, scale=0.1)
    if hvd.rank() == hvd.size() - 1:
        x[11] = 1e5
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert float(model.optimizer.dynamic_scale.value) == 8192
    assert int(model.optimizer.inner_optimizer._iterations.value) == 6
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert_replicas_equal(hvd, model.weights, optimizer_state(model.optimizer))


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_loss_scaling_reduces_once(hvd, compression, order):
    optimizer = scaled_in_order(order, keras.optimizers.SGD(1.0), compression=compression, op=hvd.Sum)
    weight = keras.Variable(0.0)
    optimizer.build([weight])
    optimizer.apply([optimizer.scale_loss(tf.constant(hvd.rank() + 1.0))])
    np.testing.assert_allclose(float(weight.value), -sum(range(1, hvd.size() + 1)), rtol=1e-6)
    assert float(optimizer.dynamic_scale.value) == 2.0**15


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_number_that_is_none_reaches_all(hvd, compression, value):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
    weight = keras.Variable(np.zeros(1000, "float32"))
    gradient = np.ones(1000, "float32")
    if hvd.rank() == hvd.size() - 1:
        gradient[700] = value
    optimizer.apply([tf.constant(gradient)], [weight])
    assert not np.isfinite(weight.numpy()[700])
    assert_replicas_equal(hvd, [weight])


# ---- XLA ----


def pretend_gpu(monkeypatch):
    class Device:
        device_type = "GPU"

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [Device()])


def test_auto_jit_compile_is_off(hvd, monkeypatch):
    pretend_gpu(monkeypatch)
    plain, _ = one_weight_model()
    plain.compile(keras.optimizers.SGD(1.0), loss="mse")
    assert plain.jit_compile is True
    for order in ("compile", "outside", "inside"):
        model, _ = one_weight_model()
        model.compile(scaled_in_order(order, keras.optimizers.SGD(1.0)), loss="mse")
        assert model.jit_compile is False


def test_jit_compile_is_refused(hvd):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
    if hvd.size() == 1:  # nothing is exchanged
        assert float(run_fit(optimizer, 1.0, jit_compile=True)[0, 0]) == -1.0
        return
    with pytest.raises(ValueError, match=r"jit_compile must be False .*compile\(\.\.\., jit_compile=False\)"):
        run_fit(optimizer, 1.0, jit_compile=True)


# ---- saving and going on ----

LOAD_WITHOUT_HVD8BIT = """
import sys
sys.modules["hvd8bit"] = None
sys.modules["horovod"] = None
import keras
for path in sys.argv[1:]:
    optimizer = keras.models.load_model(path).optimizer
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    cls = type(optimizer)
    print(cls.__module__, cls.__name__, int(optimizer.iterations), float(optimizer.learning_rate))
"""


def fitted_model(hvd, optimizer):
    x, y = own_data(hvd, rows=40, scale=0.1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16), keras.layers.Dense(4)])
    model.compile(optimizer, loss=keras.losses.MeanSquaredError())
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    return model


def test_saved_model_loads_without_hvd8bit(hvd, tmp_path):
    optimizer = DistributedOptimizer(keras.optimizers.Adam(0.25))
    plain = fitted_model(hvd, optimizer)
    scaled = fitted_model(hvd, scaled_in_order("inside", keras.optimizers.Adam(0.25)))
    paths = [str(tmp_path / name) for name in ("plain.keras", "plain.h5", "scaled.keras")]
    for model, path in zip([plain, plain, scaled], paths):
        model.save(path)
    if hvd.rank() == 0:
        script = [sys.executable, "-c", LOAD_WITHOUT_HVD8BIT, *paths]
        loaded = subprocess.run(script, capture_output=True, text=True, timeout=120)
        assert loaded.stdout.splitlines() == ["keras.src.optimizers.adam Adam 5 0.25"] * 3, loaded.stderr


@pytest.mark.parametrize("suffix", ["keras", "h5"])
def test_loaded_model_resumes_when_wrapped_again(hvd, compression, tmp_path, suffix):
    model = fitted_model(hvd, DistributedOptimizer(keras.optimizers.Adam(0.25), compression=compression))
    path = str(tmp_path / f"model.{suffix}")
    model.save(path)
    resumed = keras.models.load_model(path)
    assert type(resumed.optimizer) is keras.optimizers.Adam
    optimizer = DistributedOptimizer(resumed.optimizer, compression=compression)
    for ours, saved in zip(optimizer.variables, model.optimizer.variables):
        np.testing.assert_array_equal(ours.numpy(), saved.numpy())
    resumed.compile(optimizer, loss="mse")
    resumed.fit(*own_data(hvd), batch_size=8, epochs=1, verbose=0)
    assert int(optimizer.iterations.value) == 9
    assert_replicas_equal(hvd, resumed.weights, optimizer.variables)


def test_loss_scaling_and_accumulation_resume(hvd, compression, tmp_path):
    path = str(tmp_path / "model.keras")
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model = fitted_model(hvd, scaled_in_order("outside", optimizer, compression=compression))
    model.save(path)
    resumed = keras.models.load_model(path)
    optimizer = DistributedOptimizer(resumed.optimizer, compression=compression)
    for ours, saved in zip(optimizer.variables, model.optimizer.variables):
        np.testing.assert_array_equal(ours.numpy(), saved.numpy())
    resumed.compile(optimizer, loss="mse")
    resumed.fit(*own_data(hvd, scale=0.1), batch_size=8, epochs=1, verbose=0)
    assert_replicas_equal(hvd, resumed.weights, optimizer_state(optimizer))


# ---- mistakes ----


def test_other_variables_on_one_worker_is_an_error_on_all(hvd, compression):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
    rows = 3 if hvd.rank() == 0 else 4
    weight = keras.Variable(np.zeros((rows, 2), "float32"), name="kernel")
    alone = hvd.size() == 1
    with contextlib.nullcontext() if alone else pytest.raises(ValueError, match="kernel"):
        optimizer.apply([tf.ones((rows, 2))], [weight])
    np.testing.assert_array_equal(weight.numpy(), np.full((rows, 2), -1.0 if alone else 0.0))
