"""Keras 3 callbacks: the initial state, metrics and learning rate of all workers. Any number of workers."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit.keras import DistributedOptimizer, callbacks

pytestmark = pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")


@pytest.fixture(autouse=True)
def fresh_names():
    keras.backend.clear_session()


def of_all_workers(hvd, array) -> np.ndarray:
    """The array of every worker, along a new first axis."""
    array = tf.constant(np.asarray(array))
    return np.stack(np.split(hvd.allgather(tf.reshape(array, [-1])).numpy(), hvd.size()))


def assert_equal_to_rank(hvd, root, variables, values_before):
    for variable, before in zip(variables, values_before):
        np.testing.assert_array_equal(np.ravel(np.asarray(variable)), of_all_workers(hvd, before)[root])


def seeded_model(hvd):
    keras.utils.set_random_seed(hvd.rank())
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(64),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(4),
        ]
    )


class Spy(keras.callbacks.Callback):
    """Notes the values of variables after the callbacks before it and before the first step."""

    def __init__(self, variables):
        super().__init__()
        self._variables = variables

    def on_train_begin(self, logs=None):
        self.values = [np.array(variable) for variable in self._variables()]


def own_data(hvd, rows=16):
    random = np.random.default_rng(hvd.rank())
    return random.normal(size=(rows, 6)).astype("float32"), random.normal(size=(rows, 4)).astype("float32")


@pytest.mark.parametrize("root", [0, -1], ids=["first", "last"])
def test_broadcast_before_the_first_step(hvd, root):
    root %= hvd.size()
    model = seeded_model(hvd)
    optimizer = DistributedOptimizer(
        keras.optimizers.Adam(0.01 * (hvd.rank() + 1)), compression=hvd8bit.EightBit(min_elements=0)
    )
    optimizer.build(model.trainable_variables)
    for variable in optimizer.variables[2:]:
        variable.assign(np.random.default_rng(hvd.rank()).uniform(size=variable.shape))
    model.compile(optimizer, loss="mse")
    variables = [*model.weights, *optimizer.variables]
    before = [np.array(variable) for variable in variables]
    broadcast, spy = callbacks.BroadcastGlobalVariablesCallback(root), Spy(lambda: variables)
    model.fit(*own_data(hvd), callbacks=[broadcast, spy], verbose=0)
    assert_equal_to_rank(hvd, root, spy.values, before)
    # The moving averages of BatchNormalization go on with each worker's own data.
    shared = [*model.trainable_weights, *optimizer.variables]
    assert_equal_to_rank(hvd, 0, shared, [np.array(variable) for variable in shared])


def test_broadcast_under_loss_scaling(hvd):
    model = seeded_model(hvd)
    model.compile(keras.optimizers.LossScaleOptimizer(DistributedOptimizer(keras.optimizers.Adam(0.01))), loss="mse")
    broadcast = callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(*own_data(hvd), callbacks=[broadcast], verbose=0)
    variables = [*model.trainable_weights, *model.optimizer.variables]
    assert len(variables) > len(model.optimizer.inner_optimizer.variables) + len(model.trainable_weights)
    assert_equal_to_rank(hvd, 0, variables, [np.array(variable) for variable in variables])


def test_local_variables_and_generators_stay(hvd):
    model = seeded_model(hvd)
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    kernel = model.layers[0].kernel
    seeds = [variable for variable in model.variables if "seed" in variable.path]
    before = [np.array(variable) for variable in [kernel, *seeds]]
    broadcast = callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[kernel.value])
    spy = Spy(lambda: [kernel, *seeds])
    model.fit(*own_data(hvd), callbacks=[broadcast, spy], verbose=0)
    assert len(seeds) == 1
    for value, old in zip(spy.values, before):
        np.testing.assert_array_equal(value, old)


def test_broadcast_happens_once(hvd):
    model = seeded_model(hvd)
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    broadcast = callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(*own_data(hvd), callbacks=[broadcast], verbose=0)
    model.layers[0].kernel.assign(np.full((6, 64), hvd.rank()))
    model.fit(*own_data(hvd), callbacks=[broadcast], verbose=0)
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), np.full((6, 64), hvd.rank()))


def test_a_second_model_with_the_same_callback(hvd):
    callback = hvd8bit.keras.callbacks.BroadcastGlobalVariablesCallback(0)
    for number in range(2):
        model = seeded_model(hvd)
        before = [np.array(variable) for variable in model.weights]
        model.compile("sgd", "mse")
        spy = Spy(lambda model=model: model.weights)
        model.fit(*own_data(hvd), batch_size=8, epochs=1, verbose=0, callbacks=[callback, spy])
        assert_equal_to_rank(hvd, 0, spy.values, before)
        assert callback.broadcast_done, number


def test_a_worker_outside_keeps_its_metrics(hvd, monkeypatch):
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    if hvd.size() < 3:
        return
    some = hvd.add_process_set([0, 1])
    try:
        callback = hvd8bit.keras.callbacks.MetricAverageCallback(process_set=some)
        logs = {"loss": hvd.rank() + 1.0}
        callback.on_epoch_end(0, logs)
        assert logs == {"loss": 1.5 if hvd.rank() < 2 else hvd.rank() + 1.0}
    finally:
        hvd.remove_process_set(some)


def test_metrics_are_averaged_exactly(hvd):
    value = 0.1 + hvd.rank() / 3
    logs = {
        "loss": value,
        "accuracy": np.float32(value),
        "per_class": np.array([hvd.rank(), 1.0], "float32"),
        "steps": hvd.rank(),
        "best": "model.keras",
    }
    callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    ranks = range(hvd.size())
    assert logs["loss"] == sum(0.1 + rank / 3 for rank in ranks) / hvd.size()
    assert logs["accuracy"] == sum(float(np.float32(0.1 + rank / 3)) for rank in ranks) / hvd.size()
    np.testing.assert_array_equal(logs["per_class"], [np.mean(ranks), 1.0])
    assert logs["steps"] == np.mean(ranks)
    assert logs["best"] == "model.keras"


def test_metrics_of_fit_are_averaged_for_later_callbacks(hvd):
    model = seeded_model(hvd)
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse", metrics=["mae"])
    seen, x_y = {}, own_data(hvd)
    first = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.update(logs))
    history = model.fit(
        *x_y, callbacks=[first, callbacks.MetricAverageCallback()], validation_data=x_y, verbose=0
    ).history
    assert {"loss", "mae", "val_loss", "val_mae"} <= set(seen)
    for name, own in seen.items():
        assert history[name] == [pytest.approx(np.mean(of_all_workers(hvd, np.float64(own))), rel=1e-12)]


@pytest.mark.parametrize("others", [{"loss": 1.0, "validated": 2.0}, {"loss": 1.0}, {}], ids=["other", "fewer", "none"])
def test_other_metrics_on_one_worker_is_an_error_on_all(hvd, others):
    given = {"loss": 1.0, "val_loss": 2.0} if hvd.rank() == 0 else others
    logs, alone = dict(given), hvd.size() == 1
    with contextlib.nullcontext() if alone else pytest.raises(ValueError, match=r"workers differ in gradient .*loss"):
        callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == given


@pytest.mark.parametrize("scaled", [False, True], ids=["", "loss-scaling"])
def test_warmup(hvd, scaled, capsys):
    optimizer = DistributedOptimizer(keras.optimizers.SGD(7.0, momentum=0.9))
    model = seeded_model(hvd)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, loss="mse")
    rates = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    warmup = callbacks.LearningRateWarmupCallback(initial_lr=0.8, warmup_epochs=2, verbose=1)
    history = model.fit(*own_data(hvd), batch_size=4, epochs=3, callbacks=[warmup, note], verbose=0).history
    n = hvd.size()
    expected = [0.8 / n * (1 + (n - 1) * (step + 1) / 8) for step in range(8)] + [0.8] * 4
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    np.testing.assert_allclose(history["learning_rate"], [expected[3], expected[7], 0.8], rtol=1e-6)
    assert ("warm-up has ended at 0.8" in capsys.readouterr().out) == (hvd.rank() == 0)


@pytest.mark.parametrize("several", [2, 3, 4])
def test_warmup_by_executions_of_several_steps(hvd, several):
    model = seeded_model(hvd)
    model.compile(DistributedOptimizer(keras.optimizers.SGD(7.0)), loss="mse", steps_per_execution=several)
    warmup = callbacks.LearningRateWarmupCallback(initial_lr=0.8, warmup_epochs=2)
    history = model.fit(*own_data(hvd), batch_size=4, epochs=3, callbacks=[warmup], verbose=0).history
    n = hvd.size()
    np.testing.assert_allclose(history["learning_rate"], [0.4 / n * (n + 1), 0.8, 0.8], rtol=1e-6)


def test_warmup_with_other_data(hvd):
    model = seeded_model(hvd)
    model.compile(DistributedOptimizer(keras.optimizers.SGD(7.0)), loss="mse")
    warmup = callbacks.LearningRateWarmupCallback(initial_lr=0.8, warmup_epochs=1)
    for batch_size in (8, 4):
        history = model.fit(*own_data(hvd), batch_size=batch_size, callbacks=[warmup], verbose=0).history
        np.testing.assert_allclose(history["learning_rate"], [0.8], rtol=1e-6)


def test_warmup_refuses_what_it_cannot_do(hvd):
    model = seeded_model(hvd)
    x, y = own_data(hvd)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    model.compile(DistributedOptimizer(keras.optimizers.SGD(schedule)), loss="mse")
    with pytest.raises(ValueError, match=r"learning_rate is a number.*put the warm-up into the schedule"):
        model.fit(x, y, callbacks=[callbacks.LearningRateWarmupCallback(0.1)], verbose=0)
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    with pytest.raises(ValueError, match="momentum_correction must be False or None for SGD, got True"):
        model.fit(x, y, callbacks=[callbacks.LearningRateWarmupCallback(0.1, momentum_correction=True)], verbose=0)

    def endless():
        while True:
            yield x, y

    with pytest.raises(
        ValueError, match=r"steps_per_epoch must be a number, got None.*give it to LearningRateWarmupCallback"
    ):
        model.fit(endless(), callbacks=[callbacks.LearningRateWarmupCallback(0.1)], verbose=0)


def test_ranks_differ_without_the_broadcast(hvd):
    """Shows that the model of these cases tells the ranks apart."""
    kernels = of_all_workers(hvd, seeded_model(hvd).layers[0].kernel)
    assert len(np.unique(kernels, axis=0)) == hvd.size()
