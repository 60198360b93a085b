"""`make setup`: what it chooses, under which name it keeps Horovod's wheel, what it says is missing."""

from __future__ import annotations

import argparse
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import setup_env

DEFAULT_OPTIONS = {
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITH_TENSORFLOW": "1",
}


@pytest.fixture(autouse=True)
def no_horovod_variables(monkeypatch):
    for name in [name for name in setup_env.os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)


def choose(stamp=None, tensorflow="", package=""):
    args = argparse.Namespace(tensorflow=tensorflow, tensorflow_package=package)
    return setup_env.choose(args, stamp or {})


def test_defaults():
    choices = choose()
    assert (choices["tensorflow"], choices["package"], choices["horovod"]) == (
        "2.18.1",
        "tensorflow-cpu",
        "0.28.1",
    )
    assert choices["horovod_options"] == DEFAULT_OPTIONS


@pytest.mark.parametrize(
    ("environment", "changed"),
    [
        ({"HOROVOD_WITH_MPI": "1"}, {"HOROVOD_WITH_MPI": "1", "HOROVOD_WITHOUT_MPI": None}),
        ({"HOROVOD_WITHOUT_GLOO": "1"}, {"HOROVOD_WITHOUT_GLOO": "1", "HOROVOD_WITH_GLOO": None}),
        ({"HOROVOD_GPU_OPERATIONS": "NCCL"}, {"HOROVOD_GPU_OPERATIONS": "NCCL"}),
        ({"HOROVOD_NCCL_HOME": "/opt/nccl"}, {"HOROVOD_NCCL_HOME": "/opt/nccl"}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "10"}, {}),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, {}),
    ],
)
def test_horovods_own_variables(environment, changed):
    expected = {k: v for k, v in {**DEFAULT_OPTIONS, **changed}.items() if v is not None}
    assert setup_env.horovod_options(environment) == expected


def test_a_venv_keeps_what_it_was_made_with(monkeypatch):
    monkeypatch.setenv("HOROVOD_WITH_MPI", "1")
    made = choose(tensorflow="2.15.1", package="tensorflow")
    monkeypatch.delenv("HOROVOD_WITH_MPI")
    assert choose({"choices": made}) == made
    assert choose({"choices": made}, tensorflow="2.17.1")["tensorflow"] == "2.17.1"


def test_the_kept_wheel_is_named_by_all_that_it_depends_on(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base = choose()
    others = [
        choose(tensorflow="2.17.1"),
        choose(package="tensorflow"),
        {**base, "horovod": "0.29.0"},
        {**base, "horovod_options": {**DEFAULT_OPTIONS, "HOROVOD_GPU_OPERATIONS": "NCCL"}},
    ]
    places = [setup_env.wheel_dir(choices) for choices in (base, *others)]
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    places.append(setup_env.wheel_dir(base))
    assert len(set(places)) == len(places)
    assert all(place.parent == tmp_path / "hvd8bit" / "wheels" for place in places)


@pytest.mark.parametrize(
    ("text", "version"), [("2.15", "2.15.1"), ("2.18", "2.18.1"), ("2.21", "2.21.0"), ("2.17.1",) * 2]
)
def test_short_names_of_tensorflows(text, version):
    assert choose(tensorflow=text)["tensorflow"] == version


@pytest.mark.parametrize("text", ["2.14", "3.0.0", "latest", "2.18.1rc0"])
def test_a_tensorflow_that_is_no_version(text):
    with pytest.raises(setup_env.SetupError, match=r"TF must be a version such as 2.17.1, or one of 2.15, 2.18, 2.21"):
        choose(tensorflow=text)


class _NoVenv:
    """pip download, from a folder."""

    def __init__(self, listing: str):
        self.listing = listing

    def pip(self, title, *arguments, env=None):
        scratch = pathlib.Path(arguments[arguments.index("-d") + 1])
        folder = scratch / "made" / "horovod-0.28.1" / "horovod" / "tensorflow"
        folder.mkdir(parents=True)
        (folder / "CMakeLists.txt").write_text(self.listing)
        setup_env.shutil.make_archive(str(scratch / "horovod-0.28.1"), "gztar", scratch / "made", "horovod-0.28.1")


def test_horovod_without_its_xla_ops(tmp_path):
    choices = choose(tensorflow="2.21")
    assert setup_env.without_xla_ops(choices)
    assert not setup_env.without_xla_ops(choose())
    source = setup_env.source_without_xla_ops(_NoVenv("a mpi_ops.cc\nb xla_mpi_ops.cc\nc\n"), choices, tmp_path)
    assert (source / "horovod" / "tensorflow" / "CMakeLists.txt").read_text() == "a mpi_ops.cc\nc\n"


def test_a_horovod_that_is_laid_out_otherwise(tmp_path):
    with pytest.raises(setup_env.SetupError, match=r"CMakeLists.txt does not name xla_mpi_ops.cc once"):
        setup_env.source_without_xla_ops(_NoVenv("a mpi_ops.cc\n"), choose(tensorflow="2.21"), tmp_path)


def test_extras_are_no_part_of_the_wheels_name():
    """tensorflow[and-cuda] is the same TensorFlow."""
    assert setup_env.wheel_dir(choose(package="tensorflow[and-cuda]")) == setup_env.wheel_dir(
        choose(package="tensorflow")
    )


def test_missing_programs_are_named_with_the_line_that_installs_them(monkeypatch):
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(setup_env.SetupError) as stopped:
        setup_env.check_machine()
    assert "sudo apt-get install -y g++ make cmake" in str(stopped.value)
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize(
    ("python", "tensorflow", "range"),
    [((3, 13), "2.18.1", "3.9 to 3.12"), ((3, 12), "2.15.1", "3.9 to 3.11"), ((3, 9), "2.21.0", "3.10 to 3.12")],
)
def test_python_out_of_range(monkeypatch, python, tensorflow, range):
    monkeypatch.setattr(sys, "version_info", (*python, 0))
    with pytest.raises(setup_env.SetupError, match=rf"Python must be {range} for TensorFlow .*make setup PYTHON="):
        setup_env.check_machine(tensorflow)


def test_the_newest_python_of_a_tensorflow(monkeypatch):
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: name)
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    setup_env.check_machine("2.18.1")
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    setup_env.check_machine("2.15.1")


def test_progress_shows_makes_percentage(tmp_path):
    log = tmp_path / "log"
    log.write_text("[ 10%] Building a.cc\n[ 37%] Building b.cc\ncc: some warning\n")
    assert setup_env.last_line(log, 0) == "[ 37%] Building b.cc"
    log.write_text("Collecting numpy\n\n")
    assert setup_env.last_line(log, 0) == "Collecting numpy"


def test_a_failing_step_shows_its_last_lines_and_stops(tmp_path, capsys):
    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with pytest.raises(setup_env.SetupError, match=r"a step: failed with status 3.*log"):
        setup_env.run("a step", command, tmp_path / "log")
    assert "the reason" in capsys.readouterr().out
