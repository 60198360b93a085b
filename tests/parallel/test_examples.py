"""The examples as a user runs them: alone and on 2 or 3 workers, without a network where that can be had."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import launch
import pytest

EXAMPLES = launch.ROOT / "examples"
SHARED_DATA = launch.ROOT.parent / "shared" / "data"
LIMIT = 2000  # MNIST images of each split
PARAMETERS = 64 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
BIASES = 512 + 512 + 10
TRAINING_KEYS = {"compression", "dataset", "seed", "workers", "batch_size", "parameters", "steps"}
TRAINING_KEYS |= {
    "test_accuracy",
    "seconds_per_step",
    "gradient_bytes_per_step",
    "weight_digest",
    "loss_of_epochs",
}


def _without_network() -> list[str]:
    """A command that runs another one where there is only a loopback interface; as root only."""
    wrapper = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    tools = shutil.which("unshare") and shutil.which("ip")
    usable = os.geteuid() == 0 and tools and subprocess.run([*wrapper, "true"], capture_output=True).returncode == 0
    return wrapper if usable else []


WITHOUT_NETWORK = _without_network()


def run(example: str, *flags: str, workers: int, json_path: Path, **options) -> tuple[launch.Result, list[dict]]:
    """A launch of an example, and its records."""
    arguments = [*flags, f"--json={json_path}"]
    result = launch.run_python(EXAMPLES / example, *arguments, workers=workers, wrapper=WITHOUT_NETWORK, **options)
    return result, records_of(json_path)


def alone(*command: str | Path, timeout: float = 240) -> subprocess.CompletedProcess:
    """A command in one process, without horovodrun."""
    return subprocess.run(
        [*WITHOUT_NETWORK, sys.executable, *command],
        cwd=launch.ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def records_of(json_path: Path) -> list[dict]:
    report = json.loads(json_path.read_text(encoding="utf-8"))
    assert set(report) == {"results", "machine", "versions"}
    assert {"system", "cpu", "cores"} <= set(report["machine"])
    assert {"python", "horovod", "hvd8bit"} <= set(report["versions"])
    return report["results"]


def check_training(record: dict) -> None:
    assert set(record) >= TRAINING_KEYS
    assert len(record["weight_digest"]) == 64
    assert 0 < record["seconds_per_step"] < 60
    assert len(record["loss_of_epochs"]) == 3
    assert record["loss_of_epochs"][-1] < record["loss_of_epochs"][0]


def ring_bytes(elements: int, width: int, workers: int) -> float:
    return 2 * (workers - 1) / workers * width * elements


@pytest.mark.parametrize("generation", [3, 2])
def test_keras_on_two_workers(generation, tmp_path):
    if keras.__version__ < "3" and generation == 3:
        pytest.skip("for Keras 3")
    compressions = [f"--compression={name}" for name in ("none", "fp16", "eightbit")]
    result, records = run(
        "keras_mnist.py",
        *compressions,
        workers=2,
        json_path=tmp_path / "results.json",
        env={"TF_USE_LEGACY_KERAS": "1"} if generation == 2 else {},
    )
    for record in records:
        check_training(record)
        assert record["parameters"] == PARAMETERS
        assert record["test_accuracy"] > 0.9
    none, fp16, eightbit = (record["gradient_bytes_per_step"] for record in records)
    # The same for both versions of Keras, though Horovod's own optimizer does the work for one.
    assert none == ring_bytes(PARAMETERS, 4, 2)
    assert fp16 == ring_bytes(PARAMETERS, 2, 2)
    codes_and_scales = ring_bytes(PARAMETERS - BIASES, 1, 2) * (1 + 4 / 1024)
    assert 0 <= eightbit - codes_and_scales - ring_bytes(BIASES, 4, 2) < 500  # headers
    assert eightbit <= 0.26 * none
    assert records[2]["data_type"] == "dynamic_tree"
    assert records[2]["block_size"] == 1024

    # Rank 0 tells each epoch and all results, the others say nothing.
    lines = result.stdout(0).splitlines()
    assert sum("epoch" in line for line in lines) == 9
    for record, line in zip(records, lines[-3:]):
        assert record["compression"] in line
        assert record["weight_digest"][:16] in line
    assert result.stdout(1) == ""


@pytest.fixture(scope="module")
def mnist(tmp_path_factory) -> Path:
    """Some of MNIST as tensorflow-datasets prepares it."""
    if not (SHARED_DATA / "make_tfds.py").exists():
        pytest.skip(f"there is no MNIST here: {SHARED_DATA}/make_tfds.py is missing")
    folder = tmp_path_factory.mktemp("tfds")
    made = alone(SHARED_DATA / "make_tfds.py", folder, "--only", "mnist", "--limit", str(LIMIT))
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("example", ["keras_mnist.py", "gradient_tape_mnist.py"])
def test_mnist_on_three_workers(example, mnist, tmp_path):
    flags = [
        "--dataset=mnist",
        f"--data_dir={mnist}",
        "--compression=eightbit",
        "--data_type=linear",
        "--block_size=0",
    ]
    _, [record] = run(example, *flags, workers=3, json_path=tmp_path / "results.json")
    check_training(record)
    assert record["workers"] == 3
    assert record["data_type"] == "linear"
    assert record["block_size"] is None
    assert record["test_accuracy"] > 0.7
    # Codes and headers, but a scale for each 1,024 elements would be 3,500 bytes more.
    codes = ring_bytes(record["parameters"] - BIASES, 1, 3)
    assert 0 <= record["gradient_bytes_per_step"] - codes - ring_bytes(BIASES, 4, 3) < 1500


@pytest.mark.parametrize("example", ["keras_mnist.py", "gradient_tape_mnist.py"])
def test_alone(example):
    process = alone(EXAMPLES / example, "--compression=eightbit", "--json=-")
    assert process.returncode == 0, process.stderr
    table, brace, report = process.stdout.partition("{")
    assert "eightbit, seed 1: epoch 3/3" in table
    [record] = json.loads(brace + report)["results"]
    check_training(record)
    assert record["workers"] == 1
    assert record["gradient_bytes_per_step"] == 0
    assert record["test_accuracy"] > 0.9


def test_a_missing_data_set_is_looked_for_and_not_downloaded(tmp_path):
    process = alone(EXAMPLES / "keras_mnist.py", "--dataset=mnist", f"--data_dir={tmp_path}", timeout=120)
    assert process.returncode == 1
    assert f"No MNIST found: looked for {tmp_path}/mnist/*/dataset_info.json" in process.stderr
    assert "Traceback" not in process.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("example", "flag", "message"),
    [
        ("split_model.py", "--replicas=2", "--replicas must divide the number of workers, 1, got 2"),
        ("synthetic_benchmark.py", "--model=NoSuch", "--model must be one of keras.applications, got 'NoSuch'"),
    ],
)
def test_a_flag_that_cannot_be_used_is_a_usage_error(example, flag, message):
    process = alone(EXAMPLES / example, flag, timeout=120)
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")
def test_workers_that_train_alone_are_found_out():
    """As they do with Horovod's own optimizer and Keras 3, the README's first warning."""
    script = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import horovod.tensorflow.keras
import hvd8bit
import keras_mnist
from absl import app

class Broadcast(keras_mnist.keras.callbacks.Callback):
    def __init__(self, root_rank):
        super().__init__()

    def on_train_begin(self, logs=None):
        hvd8bit.broadcast_variables(self.model.variables)

keras_mnist.DistributedOptimizer = horovod.tensorflow.keras.DistributedOptimizer
# hvd8bit's own callbacks would refuse that optimizer.
keras_mnist.callbacks.BroadcastGlobalVariablesCallback = Broadcast
keras_mnist.callbacks.MetricAverageCallback = keras_mnist.keras.callbacks.Callback
keras_mnist.common.define_training_flags()
app.run(keras_mnist.main)
"""
    result = launch.run_python(script, "--epochs=1", workers=2, check=False)
    assert result.returncode != 0
    assert result.problem is None
    assert "The workers' weights differ" in result.stderr(0) + result.stderr(1)
    assert "weight_digest" not in result.stdout(0)


def test_synthetic_benchmark(tmp_path):
    flags = [
        "--model=MobileNet",
        "--image_size=32",
        "--batch_size=2",
        "--num_iters=3",
        "--compression=eightbit",
    ]
    result, records = run("synthetic_benchmark.py", *flags, workers=2, json_path=tmp_path / "results.json")
    eightbit, without = records
    assert [record["compression"] for record in records] == ["eightbit", "alone"]
    assert without["gradient_bytes_per_step"] == 0
    assert without["of_alone"] == 1
    assert len(eightbit["weight_digest"]) == 64
    assert 0.25 < eightbit["gradient_bytes_per_step"] / ring_bytes(eightbit["parameters"], 4, 2) < 0.3
    for record in records:
        low, high = record["quartiles"]
        assert 0 < low <= record["images_per_second"] <= high
    assert "images_per_second" in result.stdout(0)


def test_demo(tmp_path):
    process = alone(EXAMPLES / "demo.py", f"--out={tmp_path}", "--epochs=3", "--seed=1", timeout=400)
    assert process.returncode == 0, process.stdout + process.stderr
    assert [record["compression"] for record in records_of(tmp_path / "demo.json")] == ["none", "eightbit"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "ratio 0.25" in process.stdout
    assert "the same on all workers" in process.stdout


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, None),
        ({"test_accuracy": 0.93}, "accuracies must be at most 1.5 points apart, got 2.00"),
        ({"gradient_bytes_per_step": 265}, "bytes must be at most 0.26, got 0.2650"),
    ],
)
def test_demo_misses_its_bounds(changes, missed, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    none = {
        "parameters": 250_000,
        "workers": 2,
        "seed": 1,
        "test_accuracy": 0.95,
        "gradient_bytes_per_step": 1000,
        "seconds_per_step": 0.01,
        "weight_digest": "0" * 64,
    }
    eightbit = {**none, "gradient_bytes_per_step": 251, **changes}
    assert demo.compare([none], [eightbit]) is (missed is None)
    assert (missed or "0.00 points apart") in capsys.readouterr().out
