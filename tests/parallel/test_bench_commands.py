"""`hvd8bit bench` on several workers and hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import keras
import launch
import pytest

from hvd8bit.bench import namespaces, netlab

MISSING = netlab.available(shaping=True)
needs_lab = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

ELEMENTS = 20_000
SCRIPT = """
import json, sys
import horovod.tensorflow as hvd
from hvd8bit import cli, ops
from hvd8bit.bench import exchange

folder = sys.argv[1]
small = ["--rounds", "3", "--budget", "100ms"]
several = ["--elements", "20000", "--gradients-of", "MobileNet", "--slices", "2"]
several += ["--exchanges", "scatter_reduce,allgather"]
several += ["--rate", "1Gbit/s", "--compressions", "none,fp16,dynamic_tree,linear"]
written = ["--json", folder + "/exchange.json", "--plot", folder + "/e.png"]
codes = [cli.main(["bench", "exchange", *several, *small, *written])]
tiny = ["--model", "MobileNet", "--image-size", "32", "--batch-size", "2"]
written = ["--json", folder + "/train.json", "--plot", folder + "/t.png"]
codes += [cli.main(["bench", "train", *tiny, *small, *written])]

right = ops.decode_list
if hvd.rank() == 1:
    ops.decode_list = lambda *args, **options: [2.0 * x for x in right(*args, **options)]
try:
    exchange.run([(20000,)], exchange.Settings(rounds=3, budget_s=0.1))
    raised = ""
except RuntimeError as error:
    raised = str(error)
print(json.dumps({"codes": codes, "raised": raised}))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What was written, and what each worker printed."""
    folder = tmp_path_factory.mktemp("bench")
    result = launch.run_python(SCRIPT, folder, workers=2, timeout=300)
    return folder, result


def test_exchange_writes_what_the_model_reads(measured):
    folder, _ = measured
    content = json.loads((folder / "exchange.json").read_text())
    assert {"machine", "versions", "results", "slices"} <= set(content)
    one = [r for r in content["results"] if r["gradients_of"] is None]
    names = ["none", "fp16", "dynamic_tree", "linear"]
    assert [r["compression"] for r in one] == [*names, "bare", "no_communication"]
    for r in one:
        assert (r["workers"], r["elements"], r["rate_bit_per_s"]) == (2, ELEMENTS, 1e9)
        assert r["workers_per_host"] == 2
        assert r["median_s"] > 0
        parts = [r[f"{part}_s"] for part in ("encode", "alltoall", "reduce", "allgather", "decode")]
        assert all(part > 0 for part in parts) if r["compression"] in names[2:] else parts == [None] * 5
    by_name = {r["compression"]: r for r in one}
    # 20,000 codes, 20 scales and a header, in one round to the other worker.
    sent = (ELEMENTS + 4 * 20 + 64) / ELEMENTS
    assert by_name["dynamic_tree"]["bytes_per_element"] == pytest.approx(sent, rel=0.0001)
    assert by_name["none"]["bytes_per_element"] == 4
    assert by_name["fp16"]["bytes_per_element"] == 2
    assert [r["slices"] for r in content["slices"]] == [2, 2]
    assert [r["exchange"] for r in content["exchanges"]] == ["scatter_reduce", "allgather"] * 2
    assert all(r["median_s"] > 0 for r in content["exchanges"])
    assert content["rule"]["workers"] == 2
    assert content["rule"]["largest_elements"] in (0, ELEMENTS, 4_231_976)

    from hvd8bit.speedup import calibrate

    on_two_hosts = [{**r, "workers_per_host": 1} for r in content["results"]]
    assert calibrate({**content, "results": on_two_hosts}).workers == (2,)


def test_exchange_sums_the_gradients_of_a_model(measured):
    folder, _ = measured
    content = json.loads((folder / "exchange.json").read_text())
    (ours,) = [r for r in content["results"] if r["gradients_of"] and r["compression"] == "dynamic_tree"]
    assert ours["elements"] == 4_231_976
    assert ours["tensors"] == 83
    assert 0.9 * ours["elements"] < ours["encoded_elements"] < ours["elements"], "small ones pass"


def test_train_measures_each_compression_beside_none(measured):
    folder, _ = measured
    content = json.loads((folder / "train.json").read_text())
    by_name = {r["compression"]: r for r in content["results"]}
    assert list(by_name) == ["none", "fp16", "eightbit", "alone"]
    sent = {name: r["gradient_bytes_per_step"] for name, r in by_name.items()}
    assert sent["none"] == 2 * sent["fp16"] == pytest.approx(4 * by_name["none"]["parameters"], rel=0.001)
    assert 0.25 < sent["eightbit"] / sent["none"] < 0.27
    assert sent["alone"] == 0
    for r in by_name.values():
        assert r["images_per_s"] == pytest.approx(4 / r["step_s"])
        assert r["step_compute_s"] == by_name["alone"]["step_s"]


HOROVODS = """
import sys
from hvd8bit import cli

tiny = ["--model", "MobileNet", "--image-size", "32", "--batch-size", "2", "--rounds", "3", "--budget", "100ms"]
for optimizer, compression in (("horovod", "none"), ("horovod_group", "eightbit")):
    ours = ["--optimizer", optimizer, "--compressions", compression, "--json", f"{sys.argv[1]}/{compression}.json"]
    assert cli.main(["bench", "train", *tiny, *ours]) == 0
"""


@needs_lab
def test_train_with_horovods_own_optimizer_shows_what_has_passed_the_interface(tmp_path):
    (tmp_path / "train.py").write_text(HOROVODS)
    env = {"TF_USE_LEGACY_KERAS": "1"}
    done = _netlab("-n", "2", "--", sys.executable, str(tmp_path / "train.py"), str(tmp_path), env=env)
    assert done.returncode == 0, done.stderr
    none, alone = json.loads((tmp_path / "none.json").read_text())["results"]
    eightbit, alone_too = json.loads((tmp_path / "eightbit.json").read_text())["results"]
    assert [r["compression"] for r in (none, alone, eightbit, alone_too)] == ["none", "alone", "eightbit", "alone"]
    assert [r["optimizer"] for r in (none, alone, eightbit)] == ["horovod", "horovod", "horovod_group"]
    assert (none["gradient_bytes_per_step"], alone["gradient_bytes_per_step"]) == (None, 0)
    # What two workers' ring sends, and what Horovod's workers tell each other every millisecond.
    exact, talk = 4 * none["parameters"], 300_000
    assert exact < none["interface_bytes_per_step"] < 1.05 * exact + talk
    sent = eightbit["gradient_bytes_per_step"]
    assert 0.25 < sent / exact < 0.27
    assert sent < eightbit["interface_bytes_per_step"] < 1.05 * sent + talk
    assert alone["interface_bytes_per_step"] < talk


def test_rank_0_alone_prints(measured):
    _, result = measured
    assert "20,000 elements, 2 workers, link 1 Gbit/s" in result.stdout(0)
    assert "MobileNet, 4,231,976 parameters, 2 workers" in result.stdout(0)
    assert len(result.stdout(1).splitlines()) == 1
    assert (measured[0] / "e.png").exists()
    assert (measured[0] / "t.png").exists()


def test_a_wrong_sum_on_one_worker_is_an_error_on_all(measured):
    _, result = measured
    for rank in range(2):
        found = result.json(rank)
        assert found["codes"] == [0, 0]
        assert "a sum with dynamic_tree is wrong by" in found["raised"]


HYBRID = """
import sys
import tensorflow as tf
from hvd8bit import cli
from hvd8bit.bench import hybrid

folder = sys.argv[1]
tiny = ["--units", "256,10", "--batch-size", "32", "--sub-batches", "2", "--rounds", "3", "--budget", "100ms"]
assert cli.main(["bench", "hybrid", *tiny, "--json", folder + "/h.json", "--plot", folder + "/h.png"]) == 0
assert cli.main(["bench", "hybrid", "--batch-size", "3"]) == 2

right = hybrid._model
def broken(settings, sub_batches, name):
    model = right(settings, sub_batches, name)
    if name == "eightbit":
        compute_loss = model._objective
        model._objective = lambda *arguments: 2.0 * compute_loss(*arguments)
    return model
hybrid._model = broken
try:
    hybrid.run(hybrid.Settings(batch_size=2, units=(10,), sub_batches=(1,)))
except RuntimeError as error:
    print(error)
"""


@needs_lab
@pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")
def test_hybrid_tells_step_computation_and_exchange_apart(tmp_path):
    (tmp_path / "hybrid.py").write_text(HYBRID)
    done = _netlab("-n", "2", "--rate", "100mbit", "--", sys.executable, str(tmp_path / "hybrid.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "2 workers, 32 images, link 100 Mbit/s" in done.stdout
    assert "the first loss with 1 sub-batches, eightbit, is" in done.stdout
    assert "batch_size must be a multiple of the 2 workers, got 3" in done.stderr
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")
    records = json.loads((tmp_path / "h.json").read_text())["results"]
    assert [(r["sub_batches"], r["compression"]) for r in records] == [(2, "none"), (2, "eightbit")]
    for r in records:
        assert r["sum_s"] == r["computation_s"] + r["exchange_s"]
        assert r["of_sum"] == r["step_s"] / r["sum_s"]
        # The step sends what is counted, the exchange alone the same, the computation nothing but the barrier; and
        # Horovod's workers talk every millisecond, so that a busy machine sends more.
        sent, talk = r["sent_bytes_per_step"], 40_000
        assert sent < r["interface_bytes_of_step"] < 1.1 * sent + talk
        assert r["interface_bytes_of_exchange"] == pytest.approx(r["interface_bytes_of_step"], rel=0.1, abs=talk)
        assert r["interface_bytes_of_computation"] < 0.05 * sent + talk
        assert r["exchange_s"] > 0.7 * 8 * sent / 1e8 - 0.01
    # Switch, outputs and error signals of layers of 256 and 10 units, above 4,096 features.
    switch, outputs, errors = 2 * 16 * 4096, 32 * (128 + 5), 32 * 256
    lower = sum((27 * 32, 32, 288 * 64, 64))
    assert records[0]["sent_bytes_per_step"] == pytest.approx(4 * (switch + outputs + errors + lower), rel=0.02)
    assert records[1]["sent_bytes_per_step"] < 0.4 * records[0]["sent_bytes_per_step"]


def _netlab(*arguments: str, timeout: float = 200, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "hvd8bit", "bench", "netlab", *arguments]
    path = os.pathsep.join(filter(None, [str(launch.ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@needs_lab
def test_a_benchmark_on_hosts_with_links_of_a_given_rate(tmp_path):
    ours, told = tmp_path / "exchange.json", tmp_path / "netlab.json"
    bench = ["bench", "exchange", "--elements", "1M", "--compressions", "none,dynamic_tree", "--rounds", "3"]
    command = [sys.executable, "-m", "hvd8bit", *bench, "--budget", "1s", "--json", str(ours)]
    done = _netlab("-n", "2", "--rate", "1gbit", "--json", str(told), "--", *command)
    assert done.returncode == 0, done.stderr
    assert "1,000,000 elements, 2 workers, link 1 Gbit/s" in done.stdout
    by_name = {r["compression"]: r for r in json.loads(ours.read_text())["results"]}
    assert by_name["none"]["workers_per_host"] == 1
    assert by_name["none"]["bytes_from"] == "interface"
    assert by_name["none"]["bytes_per_element"] == pytest.approx(4, rel=0.03)
    # `bare` moves the same bytes, all of them.
    assert by_name["dynamic_tree"]["bytes_per_element"] == pytest.approx(1.004, rel=0.04)
    assert by_name["bare"]["bytes_per_element"] == pytest.approx(1.004, rel=0.04)
    # 4 MB cannot cross 1 Gbit/s in less, but for what the bucket of a limit lets pass at once.
    assert by_name["none"]["median_s"] > 0.9 * 8 * 4e6 / 1e9

    content = json.loads(told.read_text())
    assert [r["host"] for r in content["results"]] == ["h0", "h1"]
    assert all(r["sent_bytes"] > 20e6 for r in content["results"])
    assert content["returncode"] == 0


@needs_lab
def test_a_command_that_fails_on_a_host_is_told_of_and_nothing_is_left():
    program = "import os, sys; print('from', os.environ['HOROVOD_RANK']); sys.exit(int(os.environ['HOROVOD_RANK']))"
    done = _netlab("-n", "2", "--", sys.executable, "-c", program)
    assert done.returncode == 1
    assert done.stdout == "from 0\n"
    assert "exit status 1" in done.stderr
    assert "from 1" in done.stderr
    left = [path.name for path in Path("/run/netns").glob(f"{namespaces.PREFIX}.*")]
    living = [name for name in left if namespaces.owner_lives(name)]
    assert left == living, "labs of processes that have ended"
