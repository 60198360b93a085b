"""The experiments' configurations, results and runner: a run is made once, and a killed one leaves nothing."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest
from rich.console import Console

from experiments import configuration, data, runner
from experiments.__main__ import main
from experiments.configuration import Run, parse, parse_arm, parse_numbers, select
from experiments.results import COLUMNS, Results, commit, environment, numbers, row
from experiments.training import Worker
from hvd8bit.encoding import Encoding

pytestmark = pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")

ROOT = Path(__file__).resolve().parents[2]

SUITE = """
defaults:
  task: mlp
  data: digits
  mode: data
  workers: 2
  seeds: 0..1
  epochs: 2
  batch_size: 256
  last_epochs: 1
  optimizer: adam
  learning_rate: 1e-3
  options: {hidden: [16], dropout: [0.1, 0.1]}
  arms: [none, linear/64]
experiments:
  tiny: {title: Tiny}
  split: {title: Split, mode: model, seeds: [7]}
"""


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """The suite above, as `tiny`, in a folder of its own."""
    (tmp_path / "tiny.yaml").write_text(SUITE)
    monkeypatch.setattr(configuration, "FOLDER", tmp_path)
    return parse("tiny", SUITE)


def a_row(run: Run, error: float = 1.0) -> dict:
    place = {"cpu": "test, one", "cores": 1, "threads": 1, "versions": "none", "commit": "0"}
    return row(
        run,
        errors_percent=[2.0, error],
        losses=[1.0, 0.5],
        training_seconds=[3.0, 1.0],
        error_percent=error,
        weights="0123456789abcdef0123",
        place=place,
    )


# ---- configurations ----


def test_a_suite_is_defaults_and_what_differs(tiny):
    whole, split = tiny
    assert (whole.id, whole.mode, whole.seeds, whole.learning_rate) == ("tiny/tiny", "data", (0, 1), 0.001)
    assert (split.id, split.mode, split.seeds) == ("tiny/split", "model", (7,))
    assert dict(whole.options) == {"hidden": (16,), "dropout": (0.1, 0.1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("workers: 2", "workers: 3"), "batch_size must be a multiple of workers=3, got 256"),
        (("epochs: 2", "epochs: 0"), "epochs must be an integer of at least 1, got 0"),
        (("last_epochs: 1", "last_epochs: 3"), "last_epochs must be at most epochs=2, got 3"),
        (("mode: data", "mode: both"), "mode must be one of data, model, hybrid, got 'both'"),
        (("  task: mlp\n", ""), "tiny/tiny: task missing"),
        (("epochs: 2", "epochs: 2\n  epoch: 3"), "tiny/tiny: unknown epoch"),
        (("none, linear/64", "none, none"), "arms must be different"),
        (("none, linear/64", "none, linear"), "an arm must be none, fp16, or TYPE/BLOCK"),
        (("none, linear/64", "none, linear/100"), "block_size must be a multiple of 64"),
        (("0..1", "first"), "seeds must be like 0..4 or 0,2,5, got 'first'"),
        (("experiments:", "experiment:"), "must hold `experiments`"),
    ],
)
def test_a_wrong_suite_is_refused_by_name(change, message):
    assert change[0] in SUITE
    with pytest.raises(ValueError, match=message):
        parse("tiny", SUITE.replace(*change))


@pytest.mark.parametrize("suite", configuration.suites())
def test_every_suite_can_be_read_and_has_32_bit_to_compare_with(suite):
    for experiment in configuration.load(suite):
        assert experiment.arms[0] == "none"
        assert len(experiment.seeds) >= 3


def test_real_experiments_are_played_ones_but_for_the_exchange():
    for suite in configuration.suites():
        by_name = {experiment.name: experiment for experiment in configuration.load(suite)}
        for name, real in by_name.items():
            assert (real.exchange == "real") == name.endswith("_real")
            if real.exchange == "real":
                played = by_name[name[: -len("_real")]]
                same = dataclasses.replace(real, exchange="rounding")
                assert same.fingerprint == played.fingerprint
                assert set(real.arms) <= set(played.arms)
                assert set(real.seeds) <= set(played.seeds)


@pytest.mark.parametrize(
    ("text", "encoding", "title"),
    [
        ("none", None, "32 bit"),
        ("fp16", None, "fp16"),
        ("dynamic_tree/1024", Encoding("dynamic_tree", 1024), "dynamic_tree, blocks of 1024"),
        ("linear/tensor", Encoding("linear", None), "linear, one scale per tensor"),
        ("mantissa/1e-2", Encoding("mantissa", scaling=0.01), "mantissa, exponent offset -2"),
    ],
)
def test_arms(text, encoding, title):
    assert (parse_arm(text).encoding, parse_arm(text).title) == (encoding, title)


def test_numbers():
    assert parse_numbers("0..2,7") == (0, 1, 2, 7)
    assert parse_numbers([3, 1]) == (3, 1)
    assert parse_numbers(5) == (5,)


def test_runs_are_selected_seed_by_seed(tiny):
    assert [(r.experiment.name, r.seed, r.arm) for r in select("tiny", arms="none")] == [
        ("tiny", 0, "none"),
        ("tiny", 1, "none"),
        ("split", 7, "none"),
    ]
    assert [(r.seed, r.arm) for r in select("tiny/tiny", seeds="1")] == [(1, "none"), (1, "linear/64")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny/none",), "no experiment 'tiny/none'; there are tiny/tiny, tiny/split"),
        (("huge",), "no suite 'huge'; there are tiny"),
        (("tiny", "fp16"), "tiny has no fp16"),
        (("tiny", None, "0..2"), "tiny has no 2"),
    ],
)
def test_what_is_not_there_is_refused(tiny, arguments, message):
    with pytest.raises(ValueError, match=message):
        select(*arguments)


def test_the_fingerprint_is_of_what_makes_the_result(tiny):
    whole = tiny[0]
    for change in ({"title": "x"}, {"seeds": (5,)}, {"arms": ("none",)}, {"name": "x"}):
        assert dataclasses.replace(whole, **change).fingerprint == whole.fingerprint
    for change in ({"epochs": 3}, {"workers": 4}, {"exchange": "real"}, {"options": ()}, {"min_elements": 1}):
        assert dataclasses.replace(whole, **change).fingerprint != whole.fingerprint


# ---- results ----


def test_a_row_comes_back(tiny, tmp_path):
    store = Results("tiny", tmp_path)
    run = Run(tiny[0], "linear/64", 1)
    assert store.rows() == []
    store.add(a_row(run))
    [back] = store.rows_of(tiny[0])
    assert tuple(back) == COLUMNS
    assert (back["error_percent"], back["cpu"], back["weights"]) == ("1", "test, one", "0123456789abcdef")
    assert numbers(back["errors_percent"]) == [2.0, 1.0]
    assert store.finished() == {run.key}


def test_a_run_has_one_row(tiny, tmp_path):
    store = Results("tiny", tmp_path)
    for error in (1.0, 3.0):
        store.add(a_row(Run(tiny[0], "none", 0), error))
    assert [r["error_percent"] for r in store.rows()] == ["3"]


def test_rows_of_other_settings_do_not_count(tiny, tmp_path):
    store = Results("tiny", tmp_path)
    store.add(a_row(Run(tiny[0], "none", 0)))
    longer = dataclasses.replace(tiny[0], epochs=5)
    assert store.rows_of(longer) == []
    assert runner.left([Run(longer, "none", 0)], store)
    fewer = dataclasses.replace(tiny[0], seeds=(1,))
    assert store.rows_of(fewer) == []


def test_a_line_that_was_cut_off_is_no_row(tiny, tmp_path):
    store = Results("tiny", tmp_path)
    runs = [Run(tiny[0], "none", seed) for seed in (0, 1)]
    for run in runs:
        store.add(a_row(run))
    text = store.path.read_text()
    store.path.write_text(text[:-20])
    assert store.finished() == {runs[0].key}
    store.add(a_row(runs[1]))
    assert store.path.read_text() == text


def test_a_file_from_before_there_were_merged_models_is_read_and_gone_on_with(tiny, tmp_path):
    store, runs = Results("tiny", tmp_path), [Run(tiny[0], "none", seed) for seed in (0, 1)]
    store.add(a_row(runs[0]))
    now = store.path.read_text()
    place = COLUMNS.index("merged_errors_percent")
    old = "".join(
        ",".join(cells[:place] + cells[place + 1 :]) + "\n"
        for cells in (line.replace("test, one", "test").replace('"', "").split(",") for line in now.splitlines())
    )
    store.path.write_text(old)
    assert "merged_errors_percent" not in old
    assert [row["merged_errors_percent"] for row in store.rows()] == [""]
    store.add({**a_row(runs[1]), "merged_errors_percent": "3 2"})
    assert [row["merged_errors_percent"] for row in store.rows()] == ["", "3 2"]
    assert store.finished() == {run.key for run in runs}


def test_a_file_with_other_columns_is_refused(tiny, tmp_path):
    store = Results("tiny", tmp_path)
    store.path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"tiny\.csv: columns must be experiment, arm"):
        store.add(a_row(Run(tiny[0], "none", 0)))
    assert store.path.read_text() == "a,b\n1,2\n"


def _add(folder, suite, seeds):
    experiment = dataclasses.replace(parse("tiny", suite)[0], seeds=tuple(seeds))
    for seed in seeds:
        Results("tiny", Path(folder)).add(a_row(Run(experiment, "none", seed)))


def test_several_processes_share_a_file(tmp_path):
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=_add, args=(tmp_path, SUITE, range(k, 60, 3))) for k in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert sorted(int(r["seed"]) for r in Results("tiny", tmp_path).rows()) == list(range(60))
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["tiny.csv"]


def test_the_environment_names_what_a_result_depends_on():
    place = environment()
    assert place["cores"] >= 1
    assert "tensorflow" in place["versions"]
    assert "python" in place["versions"]
    assert place["commit"] == commit() != ""


# ---- runner ----


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_what_has_a_row_is_not_run_again(tiny, tmp_path, monkeypatch):
    store = Results("tiny", tmp_path)
    runs = select("tiny", seeds="0,7", arms="linear/64")
    console = quiet()
    assert runner.run_all(runs, store, None, console=console) == 0
    assert store.finished() == {run.key for run in runs}
    first = store.path.read_text()
    assert "tiny/tiny linear/64 seed 0: error " in console.file.getvalue()
    assert "2 of 2 runs done, 0 s left" in console.file.getvalue()

    def no_more(*_):
        raise AssertionError("was run again")

    monkeypatch.setattr(runner, "Training", no_more)
    runner.run_all(runs, store, None, console=quiet())
    assert store.path.read_text() == first


def test_a_run_that_is_run_again_comes_to_the_same(tiny, tmp_path):
    [run] = select("tiny/tiny", seeds="1", arms="linear/64")
    made = []
    for name in ("one", "two"):
        runner.run_all([run], Results("tiny", tmp_path / name), None, console=quiet())
        [row_] = Results("tiny", tmp_path / name).rows()
        made.append((row_["errors_percent"], row_["losses"], row_["weights"]))
    assert made[0] == made[1]


def test_no_run_is_started_after_the_time_is_up(tiny, tmp_path):
    runs = select("tiny")
    assert runner.run_all(runs, Results("tiny", tmp_path), None, console=quiet(), limit_s=0.0) == len(runs)
    assert Results("tiny", tmp_path).rows() == []


def test_workers_take_no_limit_of_time(tiny, tmp_path):
    runs = select("tiny")
    with pytest.raises(ValueError, match=r"--minutes must be left out under horovodrun, .* got 2: select runs"):
        runner.run_all(runs, Results("tiny", tmp_path), None, worker=Worker(0, 2), console=quiet(), limit_s=120.0)


def test_a_killed_run_leaves_no_row_and_is_made_anew(tmp_path):
    """The real command line, killed by the system while it trains."""
    command = [sys.executable, "-m", "experiments", "run", "digits/data_2", "--results", str(tmp_path)]
    command += ["--seeds", "0", "--arms", "none,dynamic_tree/1024"]
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "none seed 0: error" in line:
            time.sleep(0.2)
            process.send_signal(signal.SIGKILL)
            break
    process.wait(60)
    [experiment] = [e for e in configuration.load("digits") if e.name == "data_2"]
    store = Results("digits", tmp_path)
    assert store.finished() == {Run(experiment, "none", 0).key}, lines
    again = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert "1 of 2 runs have been made already" in again.stdout
    assert store.finished() == {Run(experiment, arm, 0).key for arm in ("none", "dynamic_tree/1024")}


def test_remaining_time_is_that_of_the_epochs_so_far(tiny):
    runs = select("tiny")
    with runner.Show(runs, 0, quiet()) as show:
        assert show.remaining() == "?"
        for _ in range(2):
            show.epoch(runs[0], 2, 1.0, seconds=30.0)
        show.finished(runs[0], a_row(runs[0]))
        # Five runs of two epochs are left; of the other experiment nothing is known yet.
        assert show.remaining() == "5 min"
        show.epoch(runs[4], 1, 1.0, seconds=90.0)
        assert show.remaining() == f"{(3 * 2 * 30 + 1 * 90 + 2 * 90) / 60:.0f} min"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (89, "89 s"), (90, "2 min"), (600, "10 min"), (12000, "3 h 20 min")]
)
def test_durations_in_words(seconds, words):
    assert runner.in_words(seconds) == words


def test_on_a_terminal_there_is_a_bar_and_in_a_pipe_are_lines(tiny):
    run = select("tiny")[0]
    shown = {}
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=150, force_terminal=terminal)
        with runner.Show([run], 3, console) as show:
            show.epoch(run, 1, 4.2, seconds=1.0)
            show.finished(run, a_row(run))
        shown[terminal] = console.file.getvalue()
    assert "━" in shown[True]
    assert "\x1b" not in shown[False]
    assert shown[False].splitlines()[:2] == [
        "3 of 4 runs have been made already",
        "tiny/tiny none seed 0: epoch 1/2, test error 4.20 %; 3 of 4 runs done, 1 s left",
    ]


# ---- command line and data ----


def test_status_counts(tiny, tmp_path, capsys):
    assert main(["status", "tiny", "--results", str(tmp_path)]) == 1
    assert "tiny/tiny: 0 of 4 runs done" in capsys.readouterr().out
    for run in select("tiny"):
        Results("tiny", tmp_path).add(a_row(run))
    assert main(["status", "tiny", "--results", str(tmp_path)]) == 0
    assert "tiny/split: 2 of 2 runs done" in capsys.readouterr().out


def test_list_names_everything(tiny, capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "tiny/split: Split; 2 epochs, seeds 7..7" in out
    assert "none, linear/64" in out


def test_usage_errors_are_one_line(tiny, capsys):
    assert main(["run", "tiny/huge"]) == 2
    assert capsys.readouterr().err.startswith("experiments: there is no experiment 'tiny/huge'")


def test_real_experiments_want_horovodrun(capsys):
    assert main(["run", "digits/data_2_real"]) == 2
    printed = capsys.readouterr()
    assert "horovodrun -np 2 python -m experiments run digits/data_2_real" in printed.out
    assert "nothing that one process can run" in printed.err


def test_missing_data_names_the_path(tmp_path):
    with pytest.raises(data.MissingDataError, match=f"looked for {tmp_path}/mnist"):
        data.load("mnist", tmp_path)
    with pytest.raises(data.MissingDataError, match="cifar10 needs --data_dir"):
        data.load("cifar10", None)
    with pytest.raises(ValueError, match="data must be one of digits, mnist, cifar10, got 'imagenet'"):
        data.load("imagenet", tmp_path)


def test_digits_are_the_same_every_time():
    one, two = data.load("digits", None), data.load("digits", None, train_examples=100)
    assert one.train_images.shape == (1437, 8, 8, 1)
    assert (one.train_images[:100] == two.train_images).all()
    assert len(two.train_labels) == 100
    assert one.train_images.max() == one.brightest == 16
