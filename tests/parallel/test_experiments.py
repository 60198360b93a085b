"""The experiments with real workers; and their command line under horovodrun."""

from __future__ import annotations

import keras
import launch
import pytest

from experiments import configuration
from experiments.configuration import Run
from experiments.results import Results

pytestmark = pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_real_workers_and_played_ones(workers):
    launch.run_cases(["cases_experiments.py"], workers=workers)


def test_the_command_line_runs_real_workers_and_goes_on_where_it_was(tmp_path):
    script = f"""
import sys
sys.path.insert(0, {str(launch.ROOT)!r})
from experiments.__main__ import main
arguments = ["--results", {str(tmp_path)!r}, "--seeds", "0"]
assert main(["run", "digits/data_2_real", "--arms", "dynamic_tree/1024", *arguments]) == 0
assert main(["run", "digits/data_2_real", "--arms", "linear/tensor,dynamic_tree/1024", *arguments]) == 0
assert main(["run", "digits/data_4_real", *arguments]) == 2
"""
    result = launch.run_python(script, workers=2)
    [experiment] = [e for e in configuration.load("digits") if e.name == "data_2_real"]
    rows = Results("digits", tmp_path).rows_of(experiment)
    assert {row["arm"] for row in rows} == {"dynamic_tree/1024", "linear/tensor"}
    assert {row["exchange"] for row in rows} == {"real"}
    assert "1 of 2 runs have been made already" in result.stdout(0)
    assert result.stdout(1) == ""
    assert Run(experiment, "linear/tensor", 0).key in Results("digits", tmp_path).finished()
    assert "digits/data_4_real needs horovodrun -np 4, got 2" in result.stderr(0)
