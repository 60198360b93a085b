"""hvd8bit.keras.DistributedOptimizer in one process: what it carries over and refuses; it reduces once."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit import collectives, reduction
from hvd8bit.keras import DistributedOptimizer, teaching

pytestmark = pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")


class Workers:
    """Plays the other workers: notes each reduction and hands back `factor` times the gradients."""

    def __init__(self):
        self.calls = []
        self.factor = None

    def reduce_gradients(self, gradients, names, **arguments):
        self.calls.append((list(names), arguments))
        if self.factor is None:
            return list(gradients)
        return [gradient if gradient is None else gradient * self.factor for gradient in gradients]


@pytest.fixture(autouse=True)
def workers(monkeypatch):
    played = Workers()
    monkeypatch.setattr(reduction, "reduce_gradients", played.reduce_gradients)
    monkeypatch.setattr(collectives.HorovodComm, "size", lambda self: 2)
    return played


def variables_of(values=(1.0, 2.0)):
    return [keras.Variable(np.full(3, value, "float32"), name=f"v{i}") for i, value in enumerate(values)]


def steps(optimizer, variables, count=3):
    for number in range(count):
        optimizer.apply([tf.fill([3], number + 1.0) for _ in variables], variables)
    return [variable.numpy() for variable in variables]


# ---- the class ----


@keras.saving.register_keras_serializable("unit")
class Registered(keras.optimizers.SGD):
    pass


class WithOwnSetting(keras.optimizers.SGD):
    """Its get_config leaves `strength` out."""

    def __init__(self, strength=1.0, **settings):
        super().__init__(**settings)
        self.strength = strength

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.strength, variable, learning_rate)


def test_is_a_subclass_of_the_same_name():
    optimizer = DistributedOptimizer(keras.optimizers.Adam(0.5))
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert type(optimizer) is not keras.optimizers.Adam
    assert (type(optimizer).__name__, type(optimizer).__module__) == ("Adam", "keras.optimizers")
    assert type(DistributedOptimizer(WithOwnSetting(learning_rate=0.5))).__module__ == __name__


@pytest.mark.parametrize("make", [keras.optimizers.Adam, Registered])
def test_its_config_gives_the_plain_optimizer(make):
    optimizer = DistributedOptimizer(make(0.5))
    config = keras.saving.serialize_keras_object(optimizer)
    plain = keras.saving.deserialize_keras_object(config)
    assert type(plain) is make
    assert plain.get_config() == optimizer.get_config()
    assert config["class_name"] == keras.saving.serialize_keras_object(make(0.5))["class_name"]
    assert type(keras.optimizers.get(keras.optimizers.serialize(optimizer))) is make


def test_made_from_config_of_its_class_reduces_too(workers):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
    again = type(optimizer).from_config(optimizer.get_config())
    steps(again, variables_of(), 1)
    assert len(workers.calls) == 1


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies_reduce_too(workers, duplicate):
    optimizer, variables = DistributedOptimizer(keras.optimizers.Adam(0.5)), variables_of()
    steps(optimizer, variables, 2)
    copied = duplicate(optimizer)
    for ours, theirs in zip(copied.variables, optimizer.variables):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    steps(copied, variables, 1)
    assert len(workers.calls) == 3
    assert int(optimizer.iterations.value) == 2


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies_with_loss_scaling_reduce_too(workers, duplicate):
    plain = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.5), initial_scale=8.0, dynamic_growth_steps=7, name="mine"
    )
    optimizer, variables = DistributedOptimizer(plain), variables_of()
    steps(duplicate(optimizer), variables, 1)  # not built
    steps(optimizer, variables, 2)
    copied = duplicate(optimizer)
    assert (copied.initial_scale, copied.dynamic_growth_steps, copied.name) == (8.0, 7, "mine")
    for ours, theirs in zip(copied.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    steps(copied, variables, 1)
    assert len(workers.calls) == 4
    assert int(optimizer.iterations.value) == 2
    # Others are copied and pickled by Keras, as ever.
    assert duplicate(plain).name == pickle.loads(pickle.dumps(plain)).name == "mine"


@pytest.mark.parametrize("scaled", [False, True], ids=["", "loss-scaling"])
def test_pickling_would_lose_the_reduction(scaled):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(TypeError, match="cannot be pickled; pickle the plain optimizer, and wrap it on each worker"):
        pickle.dumps(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer)


# ---- what is carried over ----

SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)


def a_function():
    return 0.25


MADE = {
    "SGD": lambda: keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True, clipnorm=1.0, name="mine"),
    "Adam": lambda: keras.optimizers.Adam(0.5, beta_1=0.8, use_ema=True, ema_momentum=0.5),
    "AdamW": lambda: keras.optimizers.AdamW(0.5, weight_decay=0.1),
    "schedule": lambda: keras.optimizers.SGD(SCHEDULE),
    "function": lambda: keras.optimizers.SGD(a_function),
    "lambda": lambda: keras.optimizers.SGD(lambda: 0.125),
    "accumulation": lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2),
    "own setting": lambda: WithOwnSetting(strength=3.0, learning_rate=0.5),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5), initial_scale=8.0),
}


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_behaves_as_the_given_one(made, steps_before):
    """One worker: the same bits as without DistributedOptimizer, wrapped at the start and in between."""
    plain, given = MADE[made](), MADE[made]()
    expected, result = variables_of(), variables_of()
    steps(plain, expected, steps_before)
    steps(given, result, steps_before)
    before = [variable.numpy().copy() for variable in given.variables]
    optimizer = DistributedOptimizer(given)
    assert optimizer.name == given.name
    assert bool(optimizer.built) == bool(steps_before)
    for ours, theirs in zip(steps(optimizer, result), steps(plain, expected)):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(optimizer.variables, plain.variables):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    for variable, old in zip(given.variables, before):
        np.testing.assert_array_equal(variable.numpy(), old)


def test_exclusions_from_weight_decay_are_carried_over():
    given = keras.optimizers.SGD(1.0, weight_decay=0.5)
    variables = variables_of()
    given.exclude_from_weight_decay(var_list=[variables[0]], var_names=["v1"])
    optimizer = DistributedOptimizer(given)
    optimizer.apply([tf.zeros(3), tf.zeros(3)], variables)
    np.testing.assert_array_equal(variables[0].numpy(), np.full(3, 1.0))
    np.testing.assert_array_equal(variables[1].numpy(), np.full(3, 2.0))


def test_arguments_reach_the_reduction(workers):
    fp16 = hvd.Compression.fp16
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        compression=fp16,
        op=hvd.Sum,
        gradient_predivide_factor=2.0,
        sparse_as_dense=True,
        process_set="a set",
        name="mine",
    )
    variables = [*variables_of(), tf.Variable(tf.zeros(3), name="t")]
    optimizer.apply([tf.ones(3), None, tf.ones(3)], variables)
    names, arguments = workers.calls[0]
    assert names == ["v0", "v1", "t:0"]
    assert all(ours is given for ours, given in zip(arguments.pop("variables"), variables))
    assert arguments.pop("step") is optimizer.iterations
    assert arguments == {
        "observer": None,
        "passes": 1,
        "compression": fp16,
        "op": hvd.Sum,
        "gradient_predivide_factor": 2.0,
        "sparse_as_dense": True,
        "process_set": "a set",
        "scope": "mine",
    }


def test_names_and_scopes_are_unique(workers):
    variables = [
        keras.Variable(0.0, name="same"),
        keras.Variable(0.0, name="same"),
        tf.Variable(0.0, name="same"),
    ]
    for _ in range(2):
        DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([tf.constant(1.0)] * 3, variables)
    (names, first), (_, second) = workers.calls
    assert len(set(names)) == 3
    assert first["scope"] != second["scope"]


def test_scopes_that_all_workers_know(workers, monkeypatch):
    """One that joins an elastic job has not wrapped the optimizers that others have wrapped before."""
    weight = keras.Variable(0.0, name="w")
    for _ in range(2):
        DistributedOptimizer(keras.optimizers.SGD(1.0), name="mine").apply([tf.constant(1.0)], [weight])
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    for _ in range(2):
        DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([tf.constant(1.0)], [weight])
    assert [arguments["scope"] for _, arguments in workers.calls] == ["mine", "mine", *["DistributedSGD"] * 2]


# ---- once ----


def one_weight_model():
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((1,)), layer])


@pytest.mark.parametrize("accumulation", [None, 2])
@pytest.mark.parametrize("scaling", ["", "outside", "inside", "static"])
@pytest.mark.parametrize("eager", [False, True], ids=["traced", "eager"])
def test_fit_reduces_once(workers, scaling, accumulation, eager):
    workers.factor = 3.0
    factor = 16.0 if scaling == "static" else None
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=accumulation, loss_scale_factor=factor)
    if scaling == "inside":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer = DistributedOptimizer(optimizer)
    if scaling == "outside":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model = one_weight_model()
    model.compile(optimizer, loss=lambda y, output: tf.reduce_mean(output), run_eagerly=eager)
    model.fit(np.ones((4, 1)), np.zeros((4, 1)), batch_size=1, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], [[-3.0 * (4 / (accumulation or 1))]])


@pytest.mark.parametrize("accumulation", [None, 2])
@pytest.mark.parametrize("eager", [False, True], ids=["traced", "eager"])
def test_clipping_comes_after_the_reduction(workers, accumulation, eager):
    workers.factor = 3.0
    optimizer = keras.optimizers.SGD(1.0, clipvalue=2.0, gradient_accumulation_steps=accumulation)
    optimizer = DistributedOptimizer(optimizer)
    variables = variables_of([0.0])
    optimizer.build(variables)
    step = optimizer.apply if eager else tf.function(optimizer.apply)
    for _ in range(2):
        step([tf.ones(3)])
    np.testing.assert_array_equal(variables[0].numpy(), np.full(3, -2.0 * 2 / (accumulation or 1)))


@pytest.mark.parametrize("accumulation", [None, 2])
@pytest.mark.parametrize("order", ["outside", "inside"])
@pytest.mark.parametrize("eager", [False, True], ids=["traced", "eager"])
def test_loss_scaling_judges_what_all_workers_have(workers, order, accumulation, eager):
    """This worker's gradients are finite, another's are not: this one skips the step as well."""
    workers.factor = np.nan
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=accumulation)
    if order == "outside":
        optimizer = keras.optimizers.LossScaleOptimizer(DistributedOptimizer(optimizer))
    else:
        optimizer = DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))
    variables = variables_of([1.0])
    optimizer.build(variables)
    step = optimizer.apply if eager else tf.function(optimizer.apply)
    for _ in range(2):
        step([tf.ones(3)])
    np.testing.assert_array_equal(variables[0].numpy(), np.ones(3))
    assert float(optimizer.dynamic_scale.value) == 2.0**13
    assert int(optimizer.inner_optimizer._iterations.value) == 0


def test_accumulation_that_bypasses_the_exchange_is_an_error():
    class Bypass(keras.optimizers.SGD):
        def _clip_gradients(self, grads):
            return grads

        def _backend_apply_gradients(self, grads, trainable_variables):
            self._backend_update_step(grads, trainable_variables, self.learning_rate)

    optimizer = DistributedOptimizer(Bypass(1.0, gradient_accumulation_steps=2))
    variables = variables_of()
    optimizer.apply([tf.ones(3)] * 2, variables)
    with pytest.raises(RuntimeError, match="leave out gradient_accumulation_steps"):
        optimizer.apply([tf.ones(3)] * 2, variables)
    with pytest.raises(RuntimeError, match="leave out gradient_accumulation_steps"):
        tf.function(optimizer.apply)([tf.ones(3)] * 2)


def test_a_loss_scale_optimizer_without_ours_is_as_ever(workers):
    DistributedOptimizer(keras.optimizers.SGD(1.0))
    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    variables = variables_of([0.0])
    plain.apply([tf.fill([3], 4.0)], variables)
    plain.apply([tf.fill([3], np.inf)], variables)
    np.testing.assert_array_equal(variables[0].numpy(), np.full(3, -1.0))
    assert float(plain.dynamic_scale.value) == 2.0
    assert not workers.calls


def test_jit_compile_auto_of_other_models_is_as_ever(monkeypatch):
    class Device:
        device_type = "GPU"

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [Device()])
    DistributedOptimizer(keras.optimizers.SGD(1.0))
    for optimizer, jit_compile in [
        (keras.optimizers.SGD(1.0), True),
        (DistributedOptimizer(keras.optimizers.SGD(1.0)), False),
        (keras.optimizers.LossScaleOptimizer(DistributedOptimizer(keras.optimizers.SGD(1.0))), False),
    ]:
        model = one_weight_model()
        model.compile(optimizer, loss="mse")
        assert model.jit_compile is jit_compile


# ---- what is refused ----


@pytest.mark.parametrize("given", ["sgd", None, keras.optimizers.SGD, 0.1])
def test_what_is_no_optimizer(given):
    with pytest.raises(TypeError, match=r"optimizer must be a Keras optimizer object, got .*keras.optimizers.get"):
        DistributedOptimizer(given)


def distributed():
    return DistributedOptimizer(keras.optimizers.SGD(1.0))


TWICE = {
    "itself": distributed,
    "in loss scaling": lambda: keras.optimizers.LossScaleOptimizer(distributed()),
    "in several": lambda: keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(distributed())),
}


@pytest.mark.parametrize("case", TWICE)
def test_wrapping_twice(case):
    with pytest.raises(ValueError, match=r"optimizer .* is distributed already.*wrap the plain optimizer, once"):
        DistributedOptimizer(TWICE[case]())


def test_several_optimizers():
    optimizers = keras.optimizers
    inner = distributed()
    with pytest.raises(ValueError, match="would be reduced twice; wrap the outer optimizer only"):
        DistributedOptimizer(optimizers.MultiOptimizer(lambda variable: inner)).build(variables_of())
    accumulating = optimizers.SGD(1.0, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2 of .* is not supported"):
        DistributedOptimizer(optimizers.MultiOptimizer(lambda variable: accumulating)).build(variables_of())
    hidden = optimizers.LossScaleOptimizer(optimizers.MultiOptimizer(optimizers.OptimizerMap(distributed())))
    variables = variables_of()
    hidden.build(variables)
    with pytest.raises(ValueError, match="wrap the MultiOptimizer itself"):
        hidden.apply([tf.ones(3)] * 2, variables)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 1}, "groups must be None for a Keras 3 optimizer, got 1"),
        ({"groups": []}, "groups must be None for a Keras 3 optimizer, got []"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be an integer of at least 1, got 0"),
        (
            {"backward_passes_per_step": 1.5},
            "backward_passes_per_step must be an integer of at least 1, got 1.5",
        ),
        (
            {"backward_passes_per_step": True},
            "backward_passes_per_step must be an integer of at least 1, got True",
        ),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DistributedOptimizer(keras.optimizers.SGD(1.0), **arguments)


def test_backward_passes_per_step_with_accumulation_of_keras():
    accumulating = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"backward_passes_per_step=3 and .*gradient_accumulation_steps=2"):
        DistributedOptimizer(accumulating, backward_passes_per_step=3)
    assert DistributedOptimizer(accumulating, backward_passes_per_step=2).gradient_accumulation_steps == 2
    built = keras.optimizers.SGD(1.0)
    built.build(variables_of())
    with pytest.raises(
        ValueError, match="is built already, got 2; make the optimizer with gradient_accumulation_steps=2"
    ):
        DistributedOptimizer(built, backward_passes_per_step=2)


def test_variables_that_are_overwritten():
    variable = keras.Variable(1.0, name="scale")
    variable.overwrite_with_gradient = True
    with pytest.raises(ValueError, match=r"'scale' is overwritten with its gradient \(float8 training\)"):
        distributed().apply([tf.constant(1.0)], [variable])


def test_gradients_and_variables_that_do_not_match():
    with pytest.raises(ValueError, match="must be pairs, got 1 and 2"):
        distributed().apply([tf.ones(3)], variables_of())


def test_replicas(monkeypatch):
    class Strategy:
        num_replicas_in_sync = 2

    optimizer, variables = distributed(), variables_of()
    monkeypatch.setattr(tf.distribute, "get_strategy", Strategy)
    with pytest.raises(ValueError, match="strategy with 2 replicas cannot be combined with Horovod"):
        optimizer.apply([tf.ones(3)] * 2, variables)


def test_other_backends(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(
        RuntimeError, match="needs Keras on TensorFlow, got backend 'jax'; set KERAS_BACKEND=tensorflow"
    ):
        distributed()


def test_jit_compile(monkeypatch):
    monkeypatch.setattr(hvd, "global_process_set", object())
    optimizer, variables = distributed(), variables_of()
    optimizer.build(variables)
    with pytest.raises(ValueError, match=r"jit_compile must be False .*jit_compile=False\)"):
        tf.function(optimizer.apply, jit_compile=True)([tf.ones(3)] * 2)


def test_no_gradient_at_all():
    with pytest.raises(ValueError, match="No gradients provided"):
        distributed().apply([None, None], variables_of())


def test_hooks_are_set_once():
    before = keras.optimizers.LossScaleOptimizer.apply, keras.Model._resolve_auto_jit_compile
    teaching.teach_loss_scale_optimizer()
    teaching.teach_auto_jit_compile()
    assert (keras.optimizers.LossScaleOptimizer.apply, keras.Model._resolve_auto_jit_compile) == before


# ---- telemetry ----


def test_telemetry_without_tensorboard_is_refused_on_every_worker(monkeypatch, tmp_path):
    from hvd8bit.keras import telemetry

    telemetry.TelemetryCallback(str(tmp_path))
    monkeypatch.setattr(telemetry.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="not installed: pip install tensorboard"):
        telemetry.TelemetryCallback(str(tmp_path))


def test_telemetry_is_refused_in_an_elastic_job(monkeypatch, tmp_path):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ValueError, match=r"TelemetryCallback cannot look on in an elastic job.*leave it out there"):
        hvd8bit.keras.callbacks.TelemetryCallback(str(tmp_path))


def test_a_tape_refuses_a_local_layer_without_weights_yet():
    layer = keras.layers.Dense(4, name="mine")
    with pytest.raises(ValueError, match="local_layers must be built, got 'mine' of type Dense"):
        hvd8bit.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layer)
    layer.build((None, 4))
    hvd8bit.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[layer])


def test_an_optimizer_of_keras_2_refuses_a_local_layer_without_weights_yet():
    code = (
        "import horovod.tensorflow as hvd, tensorflow as tf\n"
        "from hvd8bit.keras import DistributedOptimizer\n"
        "hvd.init()\n"
        "layer = tf.keras.layers.Dense(4, name='mine')\n"
        "DistributedOptimizer(tf.keras.optimizers.SGD(), local_layers=layer)\n"
    )
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert "ValueError: local_layers must be built, got 'mine' of type Dense" in done.stderr
