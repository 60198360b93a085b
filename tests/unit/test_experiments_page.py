"""docs/results.md: its numbers are the CSVs', and the tables say what has not been run."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest

from experiments import configuration, data, quick, statistics, tables
from experiments.configuration import Run
from experiments.results import FOLDER, Results, row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results.md"


@pytest.fixture(scope="module")
def make_results():
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "docs" / "make_results.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_results"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def experiment():
    [found] = [e for e in configuration.load("mnist") if e.name == "data"]
    return dataclasses.replace(found, arms=("none", "fp16", "linear/tensor", "dynamic_tree/tensor"), seeds=(0, 1, 2))


def a_row(experiment, arm: str, seed: int, error: float, loss: float = 0.1, weights: str = "a") -> dict:
    place = {"cpu": "p", "cores": 1, "threads": 1, "versions": "v", "commit": "c"}
    made = row(
        Run(experiment, arm, seed),
        errors_percent=[error + 1] * 5 + [error] * 5,
        losses=[loss] * 10,
        training_seconds=[1.0] * 10,
        error_percent=error,
        weights=weights,
        place=place,
    )
    return {key: str(value) for key, value in made.items()}


def line_of(table: str, start: str) -> list[str]:
    [line] = [line for line in table.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_made_from_the_committed_rows(make_results):
    text = PAGE.read_text(encoding="utf-8")
    assert make_results.filled(text) == text, "run: python docs/make_results.py"
    assert len(re.findall("<!-- table ", text)) == len(re.findall("<!-- end of table -->", text)) > 10


def test_the_page_shows_every_suite(make_results):
    """What was not run must not be left out."""
    text = PAGE.read_text(encoding="utf-8")
    for suite in configuration.suites():
        for experiment in configuration.load(suite):
            assert f"`{experiment.id}`" in text
            if suite not in make_results.CASES and experiment.exchange == "rounding":
                assert f"<!-- table {experiment.id.replace('/', '-')} -->" in text


def test_a_changed_row_changes_the_page(make_results, tmp_path):
    for path in FOLDER.glob("*.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    [experiment] = [e for e in configuration.load("mnist") if e.name == "data"]
    Results("mnist", tmp_path).add(a_row(experiment, "none", 0, error=77.125))
    text = PAGE.read_text(encoding="utf-8")
    assert make_results.filled(text, tmp_path) != text


def test_a_table_that_is_not_made_is_refused(make_results):
    with pytest.raises(ValueError, match="no table 'nonsense'; there are "):
        make_results.filled("<!-- table nonsense -->\n<!-- end of table -->")


def test_test_sets_have_the_sizes_that_steps_of_errors_are_taken_from():
    digits = data.load("digits", None)
    assert len(digits.test_labels) == data.TEST_EXAMPLES["digits"]
    assert set(data.TEST_EXAMPLES) == set(data.DATA)


def test_committed_rows_are_what_they_say():
    """A row's error is the mean over the last epochs of its own errors; all epochs are there."""
    for suite in configuration.suites():
        for experiment in configuration.load(suite):
            for made in Results(suite).rows_of(experiment):
                errors = [float(text) for text in made["errors_percent"].split()]
                last = errors[-experiment.last_epochs :]
                assert len(errors) == int(made["epochs"]) == experiment.epochs
                assert float(made["error_percent"]) == pytest.approx(sum(last) / len(last), rel=1e-5)
                assert len(made["weights"]) == 16
                assert (made["exchange"], int(made["workers"])) == (experiment.exchange, experiment.workers)


def test_comparison_by_hand(experiment):
    rows = [a_row(experiment, "none", seed, error) for seed, error in enumerate((2.0, 2.1, 2.2))]
    rows += [a_row(experiment, "linear/tensor", seed, error) for seed, error in enumerate((2.02, 2.08, 2.26))]
    rows += [a_row(experiment, "fp16", 2, 2.5)]
    table = tables.comparison(experiment, rows, margin=0.15)
    result = statistics.paired([0.02, -0.02, 0.06], 0.15)
    assert line_of(table, "32 bit") == ["32 bit", "3 of 3", "2.100", "0.100", "", "", "", "", "1.0"]
    assert line_of(table, "linear, one scale per tensor") == [
        "linear, one scale per tensor",
        "3 of 3",
        "2.120",
        "0.125",
        f"+0.020 [{result.low:+.3f}, {result.high:+.3f}]",
        f"passes, p = {result.tost_p:.2g}",
        f"{result.power:.2f}",
        "+1.0 %",
        "1.0",
    ]
    assert line_of(table, "fp16")[:5] == ["fp16", "1 of 3", "2.500", "", "+0.300"]
    assert line_of(table, "dynamic_tree, one scale per tensor")[1:3] == ["0 of 3", "not run"]
    rows += [a_row(experiment, "dynamic_tree/tensor", seed, error) for seed, error in enumerate((2.5, 2.3, 2.8))]
    assert "**fails**" in line_of(tables.comparison(experiment, rows, 0.15), "dynamic_tree, one scale per tensor")[5]


def test_merged_models_have_errors_of_their_own(experiment):
    short = dataclasses.replace(experiment, last_epochs=3)
    rows = [a_row(short, "none", seed, error=5.0) for seed in range(2)]
    rows[0]["merged_errors_percent"] = "9 9 1 2 3"
    assert tables.errors_of(tables.of_merged(short, rows), "none") == {0: 2.0}
    assert tables.errors_of(rows, "none") == {0: 5.0, 1: 5.0}


def test_f_tests_take_the_paper_s_arms_and_whole_seeds(experiment):
    assert tables.paper_arms(experiment) == ["none", "linear/tensor", "dynamic_tree/tensor"]
    rows = [a_row(experiment, arm, seed, 2 + 0.1 * seed) for arm in experiment.arms for seed in (0, 1)]
    rows += [a_row(experiment, "none", 2, 9.0)]
    [(what, value), _] = tables.f_tests(experiment, rows)
    assert what == "F-test, 3 arms, 2 seeds"
    assert value.startswith("F(2,3) = 0.00, p = 1")
    assert "not enough runs" in tables.f_tests(experiment, rows[:1])[0][1]
    assert "F(4,4) = 0.71, p = 0.59" in tables.f_table([experiment], [rows])


def test_convergence_is_the_last_epochs_less_those_before(experiment):
    table = tables.converged(experiment, [a_row(experiment, "none", seed, 2.0) for seed in range(3)])
    assert line_of(table, "32 bit") == ["32 bit", "3", "-1.000 [-1.000, -1.000]"]
    assert tables.converged(experiment, []) == "not run\n"


def test_stress_marks_what_is_not_chance(experiment):
    rows = [a_row(experiment, "none", seed, 2.0 + 0.1 * seed, loss=0.1) for seed in range(3)]
    rows += [a_row(experiment, "linear/tensor", seed, 3.0 + 0.11 * seed, loss=0.2) for seed in range(3)]
    rows += [a_row(experiment, "fp16", seed, 2.0 + 0.1 * seed + (-1) ** seed, loss=0.1) for seed in range(3)]
    rows += [a_row(experiment, "dynamic_tree/tensor", seed, math.nan, loss=math.nan) for seed in range(3)]
    error = line_of(tables.stress([experiment], [rows], "error"), experiment.title)
    assert error == [experiment.title, "3", "2.10 %", "+0.33", "**+1.01**", "**no number**"]
    loss = line_of(tables.stress([experiment], [rows], "loss"), experiment.title)
    assert loss == [experiment.title, "3", "0.1", "+0 %", "**+100 %**", "**no number**"]
    assert line_of(tables.stress([experiment], [[]], "error"), experiment.title)[1] == "not run"
    rows = [row_ for row_ in rows if (row_["arm"], row_["seed"]) != ("fp16", "2")]
    assert line_of(tables.stress([experiment], [rows], "loss"), experiment.title)[3] == "+0 % (2)"
    # Two seeds are too few, and differences of one test image in one epoch are no certainty.
    assert tables.not_chance({"a": [1.0, 1.01]}, 0.0) == set()
    assert tables.not_chance({"a": [0.002, 0.002, 0.002]}, 0.0) == {"a"}
    assert tables.not_chance({"a": [0.002, 0.002, 0.002]}, 0.002) == set()


def test_real_runs_are_shown_beside_played_ones(experiment):
    real = dataclasses.replace(experiment, exchange="real", arms=("none", "fp16"))
    played = [a_row(experiment, "none", seed, 2.0, weights=str(seed)) for seed in range(3)]
    rows = [a_row(real, "none", 0, 2.0, weights="0"), a_row(real, "none", 1, 2.5, weights="x")]
    table = tables.real_beside_played([(experiment, played, real, rows)])
    assert "| 32 bit | 2 of 3 | 2.000 | 2.250 | 0.500 | 1 of 2 runs |" in table
    assert "| fp16 | 0 of 3 | not run |" in table


def test_the_quick_runs_are_compared_with_the_rows(tmp_path):
    [experiment] = [e for e in configuration.load("mnist") if e.name == "data"]
    old, new = Results("mnist", tmp_path / "old"), Results("mnist", tmp_path / "new")
    lines, good = quick.compare(new, old)
    assert not good
    assert "nothing to compare: 0 runs in the table, 0 made here" in lines[1]
    for arm in quick.ARMS:
        for seed in range(5):
            old.add(a_row(experiment, arm, seed, 2.0 + 0.05 * seed))
        for seed in range(3):
            new.add(a_row(experiment, arm, seed, 2.05 + 0.05 * seed, weights="ab"[seed == 0]))
    lines, good = quick.compare(new, old)
    assert good
    assert "agree: +0.000" in lines[1]
    assert "bit for bit in 2 of 3 runs" in lines[1]
    for seed in range(3):
        new.add(a_row(experiment, "none", seed, 3.0 + 0.05 * seed))
    lines, good = quick.compare(new, old)
    assert not good
    assert "DO NOT AGREE: +0.950" in lines[1]
