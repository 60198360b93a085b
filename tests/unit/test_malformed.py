"""Malformed payloads. The cases run in their own process: a crash is a failure, not the end of all tests."""

from __future__ import annotations

import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def test_malformed_payloads_end_in_errors():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(HERE / "cases_malformed.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    # The end of the output: before it every error was logged.
    text = done.stdout[-6000:] + done.stderr[-1500:]
    assert done.returncode == 0, f"exit status {done.returncode} (negative: a signal)\n{text}"
    assert " passed" in done.stdout
