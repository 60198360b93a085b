"""The experiments' trainings: what is cut over played workers computes what is whole, and seeds fix everything."""

from __future__ import annotations

import dataclasses
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from experiments import configuration, data, models
from experiments.configuration import Experiment, parse_arm
from experiments.training import Training, Worker, mean_error

pytestmark = pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")

BASE = Experiment(
    suite="test",
    name="small",
    title="Small",
    task="mlp",
    data="digits",
    mode="data",
    workers=1,
    seeds=(0,),
    arms=("none",),
    epochs=2,
    batch_size=128,
    optimizer="sgd",
    learning_rate=0.1,
    last_epochs=1,
    train_examples=256,
    options=(("dropout", (0.0, 0.0)), ("hidden", (32,))),
)


@pytest.fixture(scope="module")
def digits():
    return data.load("digits", None, BASE.train_examples)


def trained(digits, arm="none", seed=0, **changes) -> tuple[Training, list]:
    training = Training(dataclasses.replace(BASE, **changes), arm, seed, digits)
    return training, list(training.epochs())


def assert_same_training(one: tuple[Training, list], other: tuple[Training, list]) -> None:
    """Up to float32's rounding."""
    for a, b in zip(one[1], other[1]):
        assert a.loss == pytest.approx(b.loss, rel=1e-4)
        assert a.error_percent == pytest.approx(b.error_percent, abs=0.6)


def test_workers_with_a_part_of_the_batch_each_compute_the_whole_batchs_gradient(digits):
    whole, cut = trained(digits), trained(digits, workers=4)
    assert_same_training(whole, cut)
    for a, b in zip(whole[0].variables, cut[0].variables):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-5)
    assert whole[1][-1].loss < whole[1][0].loss < math.log(10) * 1.1


def test_a_model_cut_over_workers_computes_the_whole_one(digits):
    assert_same_training(trained(digits), trained(digits, workers=4, mode="model"))


def test_both_kinds_of_cut_together_compute_the_whole_one(digits):
    options = (("local", (6, 5)),)
    whole = trained(digits, task="cifar", options=options, learning_rate=0.02)
    cut = trained(digits, task="cifar", options=options, learning_rate=0.02, workers=2, mode="hybrid")
    assert_same_training(whole, cut)


@pytest.mark.parametrize("mode", ["data", "model"])
def test_rounding_changes_a_training_a_little(digits, mode):
    exact = trained(digits, workers=4, mode=mode)
    for arm in ("fp16", "dynamic_tree/64", "linear/tensor"):
        rounded = trained(digits, arm, workers=4, mode=mode)
        assert rounded[0].digest() != exact[0].digest()
        assert rounded[1][-1].loss == pytest.approx(exact[1][-1].loss, rel=0.1)


def test_a_seed_fixes_everything_and_another_changes_everything(digits):
    options = (("dropout", (0.2, 0.2)), ("hidden", (32,)))
    first, again = (trained(digits, "linear/64", workers=2, options=options) for _ in range(2))
    assert first[0].digest() == again[0].digest()
    other = trained(digits, "linear/64", seed=1, workers=2, options=options)
    assert other[0].digest() != first[0].digest()


@pytest.mark.parametrize("task", ["mlp", "transformer", "lstm", "cifar"])
def test_every_task_learns(digits, task):
    options = {
        "mlp": (("batch_norm", True), ("dropout", (0.0, 0.0)), ("hidden", (32,))),
        "transformer": (("blocks", 1), ("width", 16)),
    }
    few = dataclasses.replace(
        BASE, task=task, optimizer="adam", learning_rate=0.003, workers=2, batch_size=32, epochs=4
    )
    training = Training(dataclasses.replace(few, options=options.get(task, ())), "dynamic_tree/1024", 0, digits)
    epochs = list(training.epochs())
    assert epochs[-1].loss < epochs[0].loss
    assert epochs[-1].error_percent < 75


def test_all_arms_of_an_experiment_start_alike(digits):
    for mode in ("data", "model"):
        starts = {
            Training(dataclasses.replace(BASE, mode=mode, workers=2), arm, 0, digits).digest()
            for arm in ("none", "linear/64")
        }
        assert len(starts) == 1


# Dropout.


def masks(clock: models.Clock, place: int = 0) -> np.ndarray:
    return models.Dropout(0.25, clock, place)(tf.ones((50, 40)), training=True).numpy()


def test_dropout_keeps_its_share_and_the_mean():
    mask = masks(models.Clock(0))
    assert set(np.unique(mask)) == {0.0, np.float32(1 / 0.75)}
    assert np.mean(mask > 0) == pytest.approx(0.75, abs=0.04)
    clock = models.Clock(0)
    assert (models.Dropout(0.25, clock, 0)(tf.ones((5, 4))).numpy() == 1).all()


def test_masks_differ_between_steps_workers_layers_and_seeds_and_come_again():
    seen = []
    for seed, step, worker, place in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
        clock = models.Clock(seed)
        clock.set(step, worker, workers=2)
        seen.append(masks(clock, place))
        assert (masks(clock, place) == seen[-1]).all()
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert np.mean(one != other) > 0.2


# What is refused.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 512}, "batch_size must be at most the 256 examples, got 512"),
        ({"task": "resnet"}, "task must be one of mlp, transformer, lstm, cifar, got 'resnet'"),
        ({"task": "lstm", "mode": "model"}, "task lstm has mode data alone, got model"),
        ({"task": "cifar", "mode": "model"}, "task cifar has modes data and hybrid, got model"),
        ({"exchange": "real"}, "exchange real does not go with no worker"),
    ],
)
def test_what_does_not_fit_is_refused(digits, changes, message):
    with pytest.raises(ValueError, match=message):
        Training(dataclasses.replace(BASE, **changes), "none", 0, digits)
    with pytest.raises(ValueError, match="exchange rounding does not go with"):
        Training(BASE, "none", 0, digits, Worker(0, 1))


def test_a_runs_error_is_the_mean_over_its_last_epochs():
    assert mean_error([9.0, 1.0, 2.0, 3.0], 3) == 2.0
    assert math.isnan(mean_error([1.0], 3))


def test_every_arm_of_every_suite_can_be_built():
    for suite in configuration.suites():
        for experiment in configuration.load(suite):
            assert experiment.task in models.TASKS
            assert all(parse_arm(arm).title for arm in experiment.arms)
