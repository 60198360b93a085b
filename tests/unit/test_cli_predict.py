"""`hvd8bit predict`: what it parses, prints, writes and returns."""

from __future__ import annotations

import json
import math
import os
import pathlib
import resource
import subprocess
import sys

import pytest

from hvd8bit import cli
from hvd8bit.speedup import Cluster, Link, bundled, paper

RESNET = [
    "predict",
    "--model",
    "resnet50",
    "--bandwidth",
    "10Gbit/s",
    "--latency",
    "30us",
    "--step-time",
    "180ms",
]
WORKERS = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def records(argv: list[str], tmp_path, capsys) -> list[dict]:
    """The records that the command writes."""
    out = tmp_path / "out.json"
    assert cli.main([*argv, "--json", str(out)]) == 0
    capsys.readouterr()
    return json.loads(out.read_text())["results"]


def refused(argv: list[str], capsys) -> str:
    """What the command says when it refuses, whoever does: argparse or the command."""
    try:
        status = cli.main(argv)
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    return capsys.readouterr().err


# ------------------------------------------------------------------------------------------ the paper


def test_paper(capsys, tmp_path):
    out = tmp_path / "paper.json"
    assert cli.main(["predict", "--paper", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "measured: 3.66 (Krizhevsky 2014" in text
    for part in ("104.1, recomputed 94.5", "6.81, recomputed 7.01", "7750, recomputed 7709.7"):
        assert part in text
    document = json.loads(out.read_text())
    assert {"machine", "versions"} <= set(document)
    assert len(document["results"]) == 28
    for record in document["results"]:
        assert {"kernels", "sub_batch", "bits", "speedup", "printed"} <= set(record)


def test_paper_off_by_more_is_exit_status_1(monkeypatch, capsys):
    monkeypatch.setattr(paper, "full_ms", lambda size, bits: 1000.0)
    assert cli.main(["predict", "--paper"]) == 1
    assert "MISSED" in capsys.readouterr().out


def test_paper_has_no_picture(capsys):
    assert "--plot goes with --model" in refused(["predict", "--paper", "--plot", "x.png"], capsys)


# ------------------------------------------------------------------------------------------ a cluster


def test_table(capsys):
    assert cli.main([*RESNET, "--workers", ",".join(map(str, WORKERS))]) == 0
    text = capsys.readouterr().out
    assert "ResNet-50: 25,557,032 parameters = 102 MB of float32 gradients" in text
    assert "between nodes 10 Gbit/s = 1.25 GB/s, 30 us" in text
    assert "G, M, k are 10^9, 10^6, 10^3" in text
    for workers in WORKERS:
        assert f"\n{workers:7} " in text or f" {workers} │" in text
    assert "Without --profile the transport is taken to use all of the bandwidth" in text


def test_records(capsys, tmp_path):
    found = records([*RESNET, "--workers", "2,1024"], tmp_path, capsys)
    assert [(r["workers"], r["bits"]) for r in found] == [(n, bits) for n in (2, 1024) for bits in (32, 16, 8)]
    keys = {"step_s", "speedup", "compute_s", "exchange_s", "coding_s", "dominated_by", "best_bits", "reason"}
    assert all(keys <= set(record) for record in found)
    # 25.6M float32 between 2: 4 bytes of each go over a link of 1.25 GB/s.
    assert found[0]["exchange_s"] == pytest.approx(25_557_032 * 4 / 1.25e9, rel=0.01)
    assert found[0]["bandwidth_bytes_per_s"] == 1.25e9
    assert found[5]["dominated_by"] == "latency"


def test_json_on_standard_output_is_alone_there(capsys):
    assert cli.main([*RESNET, "--json", "-"]) == 0
    out = capsys.readouterr()
    assert len(json.loads(out.out)["results"]) == 6 * 3
    assert "Speedup over one worker" in out.err


def test_honest_when_compression_is_slower(capsys, tmp_path):
    fast = [
        "predict",
        "--model",
        "alexnet",
        "--bandwidth",
        "100Gbit/s",
        "--step-time",
        "200ms",
        "--workers",
        "4",
    ]
    assert cli.main(fast) == 0
    text = capsys.readouterr().out
    assert "8 bit is the best setting nowhere here. It is slower than another setting with 4." in text
    assert "coding" in text
    found = records(fast, tmp_path, capsys)
    assert found[0]["best_bits"] != 8
    assert found[2]["step_s"] > found[0]["step_s"]


def test_pays_where_the_link_is_slow(capsys, tmp_path):
    slow = [
        "predict",
        "--model",
        "vgg16",
        "--bandwidth",
        "1Gbit/s",
        "--step-time",
        "300ms",
        "--workers",
        "1,2,8",
    ]
    assert cli.main(slow) == 0
    text = capsys.readouterr().out
    assert "8 bit is the best setting with 2, 8 workers." in text
    assert "One worker alone is faster than any setting with 2." in text
    assert {r["best_bits"] for r in records(slow, tmp_path, capsys) if r["workers"] > 1} == {8}


def test_break_even_is_where_8_bit_stops_paying(capsys, tmp_path):
    argv = ["predict", "--model", "bert-base", "--step-time", "200ms", "--workers", "8"]
    at = records([*argv, "--bandwidth", "1Gbit/s"], tmp_path, capsys)[0]["eight_bit_pays_below_bytes_per_s"]
    below = records([*argv, "--bandwidth", f"{0.97 * at} B/s"], tmp_path, capsys)
    above = records([*argv, "--bandwidth", f"{1.03 * at} B/s"], tmp_path, capsys)
    assert (below[0]["best_bits"], above[0]["best_bits"]) == (8, 16)


@pytest.mark.parametrize("bandwidth", ["1Gbit/s", "50Gbit/s", "400Gbit/s"])
@pytest.mark.parametrize("step", ["50ms", "1s"])
def test_where_8_bit_pays_agrees_with_the_best(bandwidth, step, capsys, tmp_path):
    """Flat between nodes of 8 the gain rises with the bandwidth: what limits in the end is the link inside."""
    argv = ["predict", "--model", "vgg16", "--step-time", step, "--workers", "16", "--workers-per-node", "8"]
    argv += ["--within", "5GB/s", "--coding", "none", "--bandwidth", bandwidth]
    first = records(argv, tmp_path, capsys)[0]
    below = first["eight_bit_pays_below_bytes_per_s"]
    assert (below is None or below >= first["bandwidth_bytes_per_s"]) == (first["best_bits"] == 8)
    if (bandwidth, step) == ("400Gbit/s", "50ms"):
        assert first["best_bits"] == 8


def test_hidden_exchange_is_named(capsys, tmp_path):
    argv = [
        "predict",
        "--model",
        "resnet50",
        "--bandwidth",
        "100Gbit/s",
        "--step-time",
        "60s",
        "--workers",
        "4",
    ]
    (first, *_) = records(argv, tmp_path, capsys)
    assert first["best_bits"] == 32
    assert "hides under the computing" in first["reason"]


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_scheme_options_reach_the_model(bits, capsys, tmp_path):
    base = [
        "predict",
        "--model",
        "alexnet",
        "--bandwidth",
        "10Gbit/s",
        "--step-time",
        "100ms",
        "--workers",
        "4",
    ]

    def step(*more: str) -> float:
        return next(r["step_s"] for r in records([*base, *more], tmp_path, capsys) if r["bits"] == bits)

    data = step()
    assert step("--no-overlap") > data
    assert step("--scheme", "hybrid") != data
    assert step("--scheme", "hybrid", "--sub-batches", "1") != step("--scheme", "hybrid")
    assert step("--scheme", "pipeline", "--micro-batches", "2") > step("--scheme", "pipeline", "--micro-batches", "8")
    assert step("--scheme", "pipeline", "--stages", "2") != step("--scheme", "pipeline")
    flat = step("--workers-per-node", "2", "--within", "10GB/s")
    assert step("--workers-per-node", "2", "--within", "10GB/s", "--hierarchical") < flat
    if bits == 8:
        assert step("--coding", "none") < step("--coding", "paper")
        assert step("--block-size", "none", "--coding", "none") < step("--block-size", "64", "--coding", "none")
        assert step("--coding", "0ns,0ns,0ns") == step("--coding", "none")
        assert step("--block-size", "64", "--coding", "none") > step("--block-size", "4096", "--coding", "none")


def test_plot(tmp_path, capsys):
    picture = tmp_path / "p.png"
    assert cli.main([*RESNET, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_own_yaml(tmp_path, capsys):
    path = tmp_path / "net.yaml"
    path.write_text("name: mine\nlayers: [{name: a, parameters: 1000000, activations: 5, flops: 20}]\n")
    argv = ["predict", "--model", str(path), "--bandwidth", "1Gbit/s", "--step-time", "1ms", "--workers", "2"]
    assert records(argv, tmp_path, capsys)[0]["model"] == "mine"


def test_keras_model(tmp_path, capsys):
    pytest.importorskip("keras")
    argv = [
        "predict",
        "--model",
        "keras:MobileNetV2",
        "--bandwidth",
        "1Gbit/s",
        "--step-time",
        "100ms",
        "--workers",
        "2",
    ]
    first = records(argv, tmp_path, capsys)[0]
    assert first["exchange_s"] == pytest.approx(3_504_872 * 4 / 1.25e8, rel=0.01)


def test_1024_workers_in_under_2_seconds():
    """Processor time, so that a busy machine does not count; on an idle one it is the time on the clock."""
    argv = [*RESNET, "--workers", ",".join(map(str, WORKERS))]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "hvd8bit", *argv], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


# ------------------------------------------------------------------------------------------ with a profile


@pytest.fixture
def profile(tmp_path) -> str:
    """A profile of a transport that reaches half of a perfect one's bandwidth."""
    results = []
    for n in (2, 4):
        for rate in (2e8, 1e9):
            for elements in (1000, 1_000_000, 25_000_000):
                for name, bits in (("none", 32), ("fp16", 16), ("dynamic_tree", 8)):
                    seconds = Cluster(n, between=Link(rate / 8 / 2, 1e-4)).exchange(elements, bits).total_s
                    result = {"workers": n, "elements": elements, "compression": name, "rate_bit_per_s": rate}
                    if bits == 8:
                        result |= {"encode_s": 0.5e-9 * elements, "decode_s": 0.25e-9 * elements}
                        result["reduce_s"] = 0.2e-9 * elements + 0.5e-9 * elements / n
                    results.append({**result, "median_s": seconds})
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"results": results, "machine": {}, "versions": {}}))
    return str(path)


def test_profile_calibrates_and_shows_residuals(profile, capsys, tmp_path):
    argv = ["predict", "--model", "vgg16", "--bandwidth", "1Gbit/s", "--step-time", "300ms", "--workers", "4"]
    assert cli.main([*argv, "--profile", profile]) == 0
    text = capsys.readouterr().out
    assert "Calibration: measured and modelled exchanges" in text
    assert "error of 36 exchanges: median 0.0 %" in text
    assert "efficiency 0.50 with 2 workers, 0.50 with 4 workers" in text
    assert "Without --profile" not in text
    assert "extrapolated" not in text
    with_profile = records([*argv, "--profile", profile], tmp_path, capsys)
    without = records([*argv, "--latency", "100us"], tmp_path, capsys)
    for slow, ideal in zip(with_profile, without):
        assert slow["cost"]["bandwidth_s"] == pytest.approx(2 * ideal["cost"]["bandwidth_s"], rel=1e-3)


def test_extrapolation_is_said(profile, capsys, tmp_path):
    argv = [
        "predict",
        "--model",
        "vgg16",
        "--bandwidth",
        "1Gbit/s",
        "--step-time",
        "300ms",
        "--workers",
        "4,8",
    ]
    argv += ["--profile", profile]
    assert cli.main(argv) == 0
    assert "The profile has 2, 4 workers; for other numbers" in capsys.readouterr().out
    assert [r["extrapolated"] for r in records(argv, tmp_path, capsys)] == [False] * 3 + [True] * 3


def rewritten(profile: str, change) -> str:
    """The profile with `change` of each record, and without those that it makes None."""
    document = json.loads(pathlib.Path(profile).read_text())
    document["results"] = [new for record in document["results"] if (new := change(record)) is not None]
    pathlib.Path(profile).write_text(json.dumps(document))
    return profile


VGG = ["predict", "--model", "vgg16", "--bandwidth", "1Gbit/s", "--workers", "4"]


def test_what_a_profile_lacks_is_not_predicted(profile, capsys, tmp_path):
    rewritten(profile, lambda record: None if record["compression"] == "fp16" else record)
    argv = [*VGG, "--step-time", "300ms", "--profile", profile]
    assert cli.main([*argv, "--plot", str(tmp_path / "p.png")]) == 0
    text = capsys.readouterr().out
    assert "The profile has no exchange in 16 bit, so 16 bit is neither predicted nor compared." in text
    assert [r["bits"] for r in records(argv, tmp_path, capsys)] == [32, 8]
    assert {r["best_bits"] for r in records(argv, tmp_path, capsys)} == {8}


@pytest.mark.parametrize("missing", ["none", "dynamic_tree"])
def test_a_profile_without_what_is_compared_is_refused(missing, profile, capsys):
    rewritten(profile, lambda record: None if record["compression"] == missing else record)
    text = refused([*VGG, "--step-time", "300ms", "--profile", profile], capsys)
    assert "bits must have 32 and 8, which are compared, got " in text


def test_coding_goes_with_a_profile_that_has_none(profile, capsys, tmp_path):
    argv = [*VGG, "--step-time", "300ms", "--profile", profile]
    assert "--coding and --profile exclude each other" in refused([*argv, "--coding", "none"], capsys)
    rewritten(profile, lambda record: {k: v for k, v in record.items() if k not in ("encode_s", "decode_s")})
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "The profile has no coding rates; those of --coding cpu stand for them." in out
    assert "encode 0.5, reduce 0.2, decode 0.25" in out
    assert cli.main([*argv, "--coding", "paper"]) == 0
    assert "encode 1, reduce 0.5, decode 0.5" in capsys.readouterr().out


def test_latencies_of_a_profile_are_those_between_nodes(profile, capsys, tmp_path):
    argv = [
        *VGG[:-1],
        "8",
        "--step-time",
        "300ms",
        "--profile",
        profile,
        "--workers-per-node",
        "8",
        "--within",
        "1GB/s",
    ]

    def latency_s(*more: str) -> float:
        return records([*argv, *more], tmp_path, capsys)[0]["cost"]["latency_s"]

    base = latency_s()
    assert latency_s("--within-latency", "50us") == pytest.approx(10 * base)
    assert latency_s("--latency", "1s") == base


def test_a_latency_that_the_profile_does_not_tell_is_the_default(profile, capsys, tmp_path):
    argv = [*VGG, "--step-time", "300ms", "--profile", profile]
    fitted = {r["bits"]: r["cost"]["latency_s"] for r in records(argv, tmp_path, capsys)}
    rewritten(profile, lambda r: None if r["compression"] == "dynamic_tree" and r["elements"] < 25_000_000 else r)
    found = {r["bits"]: r["cost"]["latency_s"] for r in records(argv, tmp_path, capsys)}
    assert found[32] == pytest.approx(fitted[32])
    assert found[8] == pytest.approx(fitted[8] * 30e-6 / 1e-4, rel=1e-3)


def test_the_step_of_a_profile_is_its_models(profile, capsys, tmp_path):
    train = tmp_path / "train.json"

    def step_of(**records: object) -> None:
        alone = {"step_compute_s": 0.25, "batch_size": 4, **records}
        train.write_text(json.dumps({"results": [alone]}))

    argv = [*VGG, "--profile", profile, str(train)]
    step_of(model="VGG16")
    assert {(r["step_time_s"], r["samples"]) for r in records(argv, tmp_path, capsys)} == {(0.25, 4)}
    assert cli.main(argv) == 0
    assert "250 ms per step of 4 samples" in (out := capsys.readouterr().out)
    assert "The profile's step" not in out
    assert "--samples must be those of the profile's step, 4, got 8" in refused([*argv, "--samples", "8"], capsys)
    assert {r["samples"] for r in records([*argv, "--samples", "4"], tmp_path, capsys)} == {4}

    step_of(model="MobileNetV2")
    assert {r["step_of"] for r in records(argv, tmp_path, capsys)} == {"MobileNetV2"}
    assert cli.main(argv) == 0
    assert "The profile's step, 250 ms, is MobileNetV2's and not VGG-16's; give its own" in capsys.readouterr().out
    assert cli.main([*argv, "--step-time", "1s"]) == 0
    assert "1 s per step of 32 samples" in (out := capsys.readouterr().out)
    assert "The profile's step" not in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"no", "Expecting value"),
        (b"\xff{}", "'utf-8' codec can't decode"),
        (b"{}", "profile must have a list of records under results"),
        (b'{"results": [1, 2]}', "profile must have a list of records under results"),
        (
            b'{"results": [{"step_compute_s": "a"}]}',
            "step_compute_s of record 0 of the profile must be above 0, got 'a'",
        ),
        (b'{"results": [{"workers": 2}]}', "record 0 of the profile lacks elements"),
        (b'{"results": []}', "got none; run hvd8bit bench exchange"),
    ],
)
def test_bad_profile_is_a_usage_error(content, message, profile, tmp_path, capsys):
    path = tmp_path / "p.json"
    path.write_bytes(content)
    (line,) = refused([*RESNET, "--profile", str(path)], capsys).splitlines()
    assert message in line
    assert line.startswith("hvd8bit: --profile ")
    assert str(path) in line
    if b"results" not in content:
        assert str(path) in refused([*RESNET, "--profile", profile, str(path)], capsys)


def test_a_profile_needs_a_bandwidth(profile, capsys):
    argv = ["predict", "--model", "vgg16", "--step-time", "300ms", "--profile", profile]
    assert "--bandwidth is needed, of a node's link: --bandwidth 10Gbit/s, say" in refused(argv, capsys)


# ------------------------------------------------------------------------------------------ usage


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["predict"], "one of the arguments --paper --model is required"),
        (["predict", "--paper", "--model", "vgg16"], "not allowed with argument --paper"),
        (["predict", "--model", "vgg16"], "--step-time is needed"),
        (["predict", "--model", "vgg16", "--step-time", "1s"], "--bandwidth is needed"),
        (
            ["predict", "--model", "lenet", "--step-time", "1s", "--bandwidth", "1Gbit/s"],
            "model must be one of alexnet",
        ),
        (["predict", "--model", "no.yaml", "--step-time", "1s", "--bandwidth", "1Gbit/s"], "no.yaml"),
        ([*RESNET, "--bandwidth", "10Gb/s"], "the unit 'Gb/s' is unknown"),
        ([*RESNET, "--bandwidth", "10"], "the unit is missing"),
        ([*RESNET, "--latency", "30"], "a time must be in ns, us, ms, s or min"),
        ([*RESNET, "--step-time", "0ms"], "a time must be above 0"),
        ([*RESNET, "--workers", "2,x"], "must be an integer of at least 1, got 'x'"),
        ([*RESNET, "--workers", "0"], "must be an integer of at least 1, got '0'"),
        ([*RESNET, "--workers", "2," + "9" * 400], "argument --workers: must be at most 1,000,000,000,000, got '999"),
        ([*RESNET, "--workers", "9" * 5000], "argument --workers: must be"),
        ([*RESNET, "--samples", "9" * 400], "argument --samples: must be at most"),
        ([*RESNET, "--bandwidth", "1e300Gbit/s"], "argument --bandwidth: a bandwidth must be at most 1 PB/s"),
        ([*RESNET, "--bandwidth", "1e-300bit/s"], "argument --bandwidth: a bandwidth must be at least 1e-15 B/s"),
        ([*RESNET, "--latency", "1e308s"], "argument --latency: a time must be at most 10^9 s"),
        ([*RESNET, "--step-time", "1e308s"], "argument --step-time: a time must be at most 10^9 s"),
        ([*RESNET, "--workers-per-node", "2"], "--within is needed, of a worker's link inside its node"),
        (
            [*RESNET, "--workers", "6", "--workers-per-node", "4", "--within", "1GB/s"],
            "workers must fill whole nodes",
        ),
        (
            [*RESNET, "--coding", "fast"],
            "must be cpu, paper, none or three times such as 0.5ns,0.2ns,0.25ns, got 'fast'",
        ),
        ([*RESNET, "--coding", "1ns,1ns,x"], "got '1ns,1ns,x' (a time must be a number and a unit"),
        ([*RESNET, "--bandwidth", "-1Gbit/s"], "argument --bandwidth: a bandwidth must be above 0, got '-1Gbit/s'"),
        ([*RESNET, "--step-time", "-5ms"], "argument --step-time: a time must be above 0, got '-5ms'"),
        ([*RESNET, "--latency", "-.5us"], "argument --latency: a time must be 0 or above 0, got '-.5us'"),
        (["predict", "--model", "MobileNetV2", *RESNET[3:]], "also takes keras:NAME"),
        (["predict", "--paper", "--workers", "3"], "--workers goes with --model"),
        (["predict", "--paper", "--bandwidth", "1Gbit/s"], "--bandwidth goes with --model"),
        (["predict", "--paper", "--latency", "0s"], "--latency goes with --model"),
        (["predict", "--paper", "--block-size", "none"], "--block-size goes with --model"),
        (["predict", "--paper", "--scheme", "data"], "--scheme goes with --model"),
        ([*RESNET, "--stages", "2"], "--stages goes with --scheme pipeline"),
        ([*RESNET, "--micro-batches", "8", "--scheme", "hybrid"], "--micro-batches goes with --scheme pipeline"),
        ([*RESNET, "--sub-batches", "2"], "--sub-batches goes with --scheme hybrid"),
        ([*RESNET, "--no-overlap", "--scheme", "pipeline"], "--no-overlap goes with --scheme data or hybrid"),
        ([*RESNET, "--within", "1GB/s"], "--within goes with --workers-per-node 2 or more"),
        ([*RESNET, "--within-latency", "0s"], "--within-latency goes with --workers-per-node 2 or more"),
        ([*RESNET, "--hierarchical"], "--hierarchical goes with --workers-per-node 2 or more"),
        ([*RESNET, "--coding", "1ns,1ns"], "three times such as 0.5ns,0.2ns,0.25ns, got '1ns,1ns'"),
        ([*RESNET, "--block-size", "100"], "must be a multiple of 64 in [64, 65536], or none, got '100'"),
        ([*RESNET, "--block-size", "None"], "must be a multiple of 64 in [64, 65536], or none, got 'None'"),
        ([*RESNET, "--scheme", "pipeline", "--stages", "3"], "stages must divide the 2 workers"),
        ([*RESNET, "--profile", "missing.json"], "missing.json"),
        (
            ["predict", "--model", "gpt2-small", *RESNET[3:], "--scheme", "hybrid"],
            "needs layers with split: model",
        ),
    ],
)
def test_usage_errors_exit_with_2_and_say_why(argv, message, capsys):
    assert message in refused(argv, capsys)


@pytest.mark.parametrize("scheme", ["data", "hybrid", "pipeline"])
@pytest.mark.parametrize("bandwidth", ["1e15B/s", "1e-15B/s"])
@pytest.mark.parametrize("time", ["1e9s", "1e-15s"])
def test_the_bounds_of_all_arguments_together_are_predicted(scheme, bandwidth, time, capsys, tmp_path):
    argv = ["predict", "--model", "vgg16", "--bandwidth", bandwidth, "--step-time", time, "--latency", time]
    argv += ["--workers", "1,1000000000000", "--samples", "1000000000000", "--scheme", scheme]
    if scheme == "pipeline":
        argv += ["--stages", "1", "--micro-batches", "1000000000000"]
    found = records(argv, tmp_path, capsys)
    assert all(math.isfinite(record[key]) for record in found for key in ("step_s", "speedup", "exchange_s"))


def test_help_names_units_and_models(capsys, monkeypatch):
    monkeypatch.setitem(os.environ, "COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["predict", "--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "bit/s or B/s (bytes)",
        "10^3",
        "2^40",
        "10Gbit/s is 1.25GB/s, and 1.25GiB/s is more",
        "180ms",
        *bundled(),
    ):
        assert part in text


def test_parsing_loads_nothing_heavy():
    code = (
        "import sys\nfrom hvd8bit import cli\ncli._parser()\n"
        "wrong = {'numpy', 'rich', 'yaml', 'tensorflow', 'matplotlib'} & set(sys.modules)\n"
        "assert not wrong, wrong"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
