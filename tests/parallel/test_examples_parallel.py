"""The examples of model parallelism as a user runs them, in small configurations."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from test_examples import EXAMPLES, alone, records_of, run

pytestmark = pytest.mark.skipif(
    importlib.metadata.version("keras") < "3", reason="SplitModel and HybridModel need Keras 3"
)

KEYS = {
    "compression",
    "dataset",
    "seed",
    "workers",
    "batch_size",
    "steps",
    "test_accuracy",
    "seconds_per_step",
    "activation_bytes_per_step",
    "gradient_bytes_per_step",
    "boundaries",
    "weight_digest",
    "loss_of_epochs",
}
BOTH = ["--compression=none", "--compression=eightbit"]
# As the example's own first lines say: AlexNet at a quarter of its width, on images of 64 pixels.
ALEXNET = ["--dataset=stand_in", "--width=0.25", "--image_size=64", "--optimizer=adam", "--learning_rate=0.001"]
HALF_WITHIN = 100
"""Steps on two workers within which its loss falls to half of what guessing gives; 32 images each."""


def check(record):
    assert set(record) >= KEYS
    assert len(record["weight_digest"]) == 64
    assert 0 < record["seconds_per_step"] < 60
    for row in record["boundaries"]:
        assert set(row) == {"boundary", "direction", "sent_bytes", "relative_error"}


def by_boundary(record):
    return {(row["boundary"].split("/")[-1], row["direction"]): row for row in record["boundaries"]}


def test_split_model_on_two_workers(tmp_path):
    result, (none, eight) = run("split_model.py", *BOTH, "--epochs=4", workers=2, json_path=tmp_path / "results.json")
    for record in (none, eight):
        check(record)
        assert record["stages"] == 2
        assert record["test_accuracy"] > 0.85
        assert record["loss_of_epochs"][-1] < record["loss_of_epochs"][0]
        assert set(by_boundary(record)) == {("boundary_0", "forward"), ("boundary_0", "backward")}
    for key, row in by_boundary(none).items():
        assert row["relative_error"] == 0
        assert by_boundary(eight)[key]["sent_bytes"] <= 0.27 * row["sent_bytes"]
        assert 0 < by_boundary(eight)[key]["relative_error"] < 0.03
    assert abs(none["test_accuracy"] - eight["test_accuracy"]) < 0.1
    assert "what crosses the boundaries in a step" in result.stdout(0)
    assert result.stdout(1) == ""


@pytest.mark.soak
def test_split_model_with_replicas_on_four_workers(tmp_path):
    flags = ["--compression=eightbit", "--replicas=2", "--epochs=1"]
    _, [record] = run("split_model.py", *flags, workers=4, json_path=tmp_path / "results.json")
    check(record)
    assert (record["stages"], record["replicas"], record["workers"]) == (2, 2, 4)
    assert record["gradient_bytes_per_step"] > 0


def test_cifar10_network_on_two_workers(tmp_path):
    flags = ["--dataset=digits", "--epochs=1", *BOTH]
    _, (none, eight) = run("keras_cifar10.py", *flags, workers=2, json_path=tmp_path / "results.json")
    for record in (none, eight):
        check(record)
        assert record["test_accuracy"] > 0.6
    assert {("switch", "forward"), ("switch", "backward")} <= set(by_boundary(none))
    for key, row in by_boundary(none).items():
        if row["sent_bytes"] > 100_000:
            assert by_boundary(eight)[key]["sent_bytes"] <= 0.27 * row["sent_bytes"], key


def check_alexnet(record):
    check(record)
    assert record["steps_until_loss_was_half_of_guessing"] is not None, record["loss_of_epochs"]
    assert record["steps_until_loss_was_half_of_guessing"] <= HALF_WITHIN
    assert record["test_top_5_accuracy"] > 0.5  # guessing gives 0.25
    assert record["test_accuracy"] <= record["test_top_5_accuracy"] <= 1


LOSS_OF_AN_EPOCH = """
import types
import alexnet_imagenet
import numpy as np
from common import keras

rng = np.random.default_rng(0)
x, y = rng.normal(size=(12, 3)), rng.normal(size=(12, 1))
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.0), loss="mse")
losses = []
run = types.SimpleNamespace(begin_step=lambda: None, end_step=lambda: None, end_epoch=losses.append)
progress = alexnet_imagenet.Progress(run)
model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[progress])
of_batches = [model.evaluate(x[i : i + 4], y[i : i + 4], verbose=0) for i in (0, 4, 8)]
np.testing.assert_allclose(progress.losses, 2 * of_batches, rtol=1e-5)
np.testing.assert_allclose(losses, 2 * [np.mean(of_batches)], rtol=1e-5)
assert progress.steps_until(min(of_batches) * 1.001) == 1 + of_batches.index(min(of_batches))
assert progress.steps_until(0.0) is None
"""


def test_alexnets_loss_of_an_epoch_is_the_mean_of_its_batches():
    done = subprocess.run([sys.executable, "-c", LOSS_OF_AN_EPOCH], cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_alexnets_loss_falls_by_half_on_two_workers(tmp_path):
    flags = [*ALEXNET, "--steps=20", f"--epochs={HALF_WITHIN // 20}", "--compression=eightbit"]
    _, [record] = run("alexnet_imagenet.py", *flags, workers=2, json_path=tmp_path / "r.json")
    check_alexnet(record)
    assert record["steps"] == HALF_WITHIN


@pytest.mark.soak
@pytest.mark.parametrize("update", ["step", "sub_batch"])
def test_alexnets_loss_falls_by_half_in_32_and_8_bits(update, tmp_path):
    flags = [*ALEXNET, "--steps=20", f"--epochs={HALF_WITHIN // 20}", f"--update={update}", *BOTH]
    _, records = run("alexnet_imagenet.py", *flags, workers=2, json_path=tmp_path / "r.json", timeout=600)
    for record in records:
        check_alexnet(record)
        assert record["update"] == update


@pytest.mark.soak
@pytest.mark.parametrize(
    ("example", "flags"),
    [
        ("split_model.py", ["--epochs=1"]),
        ("keras_cifar10.py", ["--dataset=digits", "--epochs=1"]),
        ("alexnet_imagenet.py", [*ALEXNET, "--steps=4"]),
    ],
)
def test_alone(example, flags, tmp_path):
    process = alone(EXAMPLES / example, *flags, "--compression=eightbit", f"--json={tmp_path / 'results.json'}")
    assert process.returncode == 0, process.stderr
    [record] = records_of(tmp_path / "results.json")
    check(record)
    assert record["workers"] == 1
    assert record["activation_bytes_per_step"] == 0


@pytest.mark.parametrize(
    ("example", "title", "name"),
    [("keras_cifar10.py", "CIFAR-10", "cifar10"), ("alexnet_imagenet.py", "ImageNet", "imagenet2012")],
)
def test_a_missing_data_set_is_looked_for_and_not_downloaded(example, title, name, tmp_path):
    process = alone(EXAMPLES / example, f"--data_dir={tmp_path}", timeout=120)
    assert process.returncode == 1
    assert f"No {title} found: looked for {tmp_path}/{name}/*/dataset_info.json" in process.stderr
    assert "Traceback" not in process.stderr
    assert list(tmp_path.iterdir()) == []
