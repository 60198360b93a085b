"""The command line: what it parses, prints and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import hvd8bit
from hvd8bit import cli, doctor, errors, native
from hvd8bit.commands import common, predict

FACTS = {"host": {"name": "a"}, "library": {"path": "/lib.so", "info": {"tensorflow_version": "2.18.1"}}}


@pytest.fixture
def doctor_finds(monkeypatch):
    """Lets the doctor find what a test says, at once."""

    def find(*findings: doctor.Finding) -> None:
        monkeypatch.setattr(doctor, "gather", lambda: FACTS)
        monkeypatch.setattr(doctor, "judge", lambda facts, multi_host: list(findings))

    return find


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_usage_errors_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: hvd8bit" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"hvd8bit {hvd8bit.__version__}\n"


@pytest.mark.parametrize(("status", "code"), [(doctor.OK, 0), (doctor.NOTE, 0), (doctor.WARNING, 0), (doctor.FAULT, 1)])
def test_doctor_exit_status(status, code, doctor_finds, capsys):
    doctor_finds(doctor.Finding("Thing", status, "found [this]", "do [bold]that[/bold]"))
    assert cli.main(["doctor"]) == code
    out = capsys.readouterr().out
    assert "found [this]" in out
    assert "-> do [bold]that[/bold]" in out, "brackets are text, not markup"


def test_doctor_json_on_standard_output_is_json_alone(doctor_finds, capsys):
    doctor_finds(doctor.Finding("Thing", doctor.OK, "found this"))
    assert cli.main(["doctor", "--json", "-"]) == 0
    captured = capsys.readouterr()
    content = json.loads(captured.out)
    assert set(content) == {"machine", "versions", "results", "op_library"}
    assert content["results"] == [{"subject": "Thing", "status": "ok", "found": "found this", "remedy": ""}]
    assert content["op_library"] == {"path": "/lib.so", "tensorflow_version": "2.18.1"}
    assert "found this" in captured.err


COMMANDS = {
    "doctor": ["doctor"],
    "errors": ["errors", "--samples", "1000"],
    "predict": ["predict", "--model", "vgg16", "--step-time", "1s", "--bandwidth", "1Gbit/s"],
    "paper": ["predict", "--paper"],
    "codec": ["bench", "codec", "--elements", "64"],
    "netlab": ["bench", "netlab", "--", "true"],
    "report": ["bench", "report", "."],
}


@pytest.fixture
def no_work(monkeypatch):
    """Makes the commands fail the test if they begin with their work."""
    from hvd8bit.bench import codec, netlab, report

    def fail(*args, **kwargs):
        pytest.fail("the work began before the outputs were checked")

    for module, name in ((codec, "run"), (netlab, "NetLab"), (report, "read"), (errors, "paper_table")):
        monkeypatch.setattr(module, name, fail)
    for name in ("gather", "judge"):
        monkeypatch.setattr(doctor, name, fail)
    monkeypatch.setattr(predict, "_cluster_of_workers", fail)
    monkeypatch.setattr(predict, "_paper", fail)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("output", ["json", "plot", "output", "markdown"])
def test_what_cannot_be_written_is_found_before_the_work(command, output, no_work, tmp_path, capsys):
    has = {"plot": ("errors", "predict", "codec"), "output": ("report",), "markdown": ("report",)}
    if command not in has.get(output, COMMANDS):
        return
    argv = COMMANDS[command]
    missing = str(tmp_path / "missing" / "out")
    for path, why in ((missing, f"there is no folder {os.path.dirname(missing)!r}"), (str(tmp_path), "not a folder")):
        given = [f"--{output}", path]
        argv_ = [*argv[:-2], *given, *argv[-2:]] if command == "netlab" else [*argv, *given]
        assert cli.main(argv_) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"hvd8bit: --{output} must be a path that can be written, got {path!r}: ")
        assert why in line


def test_workers_that_do_not_write_are_not_asked_for_the_path(monkeypatch, tmp_path, capsys):
    import horovod.tensorflow as hvd

    from hvd8bit.bench import timing
    from hvd8bit.commands import bench

    monkeypatch.setattr(timing, "start", lambda: None)
    monkeypatch.setattr(hvd, "size", lambda: 2)
    args = cli._parser().parse_args(["bench", "exchange", "--json", str(tmp_path / "missing" / "out")])
    assert args.on_workers
    monkeypatch.setattr(hvd, "rank", lambda: 1)
    with bench._worker("exchange", args) as (rank, _):
        assert rank == 1
    monkeypatch.setattr(hvd, "rank", lambda: 0)
    with pytest.raises(common.UsageError, match="--json must be a path"), bench._worker("exchange", args):
        pytest.fail("unreachable")


@pytest.mark.parametrize(
    ("command", "more", "package", "said"),
    [
        ("predict", ["--plot", "p.png"], "matplotlib", "--plot needs matplotlib: pip install matplotlib"),
        ("errors", ["--plot", "p.png"], "matplotlib", "--plot needs matplotlib: pip install matplotlib"),
        ("keras", [], "keras", "python -m hvd8bit doctor says what to install"),
        ("exchange", [], "horovod", "python -m hvd8bit doctor says what to install"),
    ],
)
def test_a_missing_package_is_a_line(command, more, package, said, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Without(package), *sys.meta_path])
    commands = {**COMMANDS, "exchange": ["bench", "exchange"], "keras": ["predict", "--model", "keras:VGG16"]}
    assert cli.main([*commands[command], *more]) == 2
    out, err = capsys.readouterr()
    assert not out, "no work before it is said"
    (line,) = err.splitlines()
    assert said in line
    assert package in line


class _Without:
    """Finds all modules but those of one package."""

    def __init__(self, package: str):
        self._package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_missing_op_library_is_a_line(monkeypatch, tmp_path, capsys):
    native.load.cache_clear()
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "missing.so")
    assert cli.main(["bench", "codec", "--elements", "64"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "op library is missing" in line


def test_multi_host_reaches_the_judge(monkeypatch):
    seen = {}
    monkeypatch.setattr(doctor, "gather", lambda: FACTS)
    monkeypatch.setattr(doctor, "judge", lambda facts, multi_host: seen.update(multi_host=multi_host) or [])
    cli.main(["doctor", "--multi-host"])
    assert seen == {"multi_host": True}


def test_the_command_line_loads_neither_tensorflow_nor_horovod():
    code = "import sys, hvd8bit.cli, hvd8bit.doctor; print({'tensorflow', 'horovod'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
