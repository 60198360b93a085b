"""The command line: what it parses, prints and returns."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import hvd8bit
from hvd8bit import cli, doctor

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


def test_json_that_cannot_be_written(doctor_finds, tmp_path, capsys):
    doctor_finds(doctor.Finding("Thing", doctor.OK, "found this"))
    path = tmp_path / "missing" / "doctor.json"
    assert cli.main(["doctor", "--json", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


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
