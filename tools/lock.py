"""Writes requirements/lock-<TensorFlow>.txt: one pin for every package, for every declared Python that it runs on.

For each Python it asks that Python's own pip what it would install, and merges the answers; nothing is
installed. Where Pythons need different versions of a package, environment markers tell them apart.
Interpreters are found as python3.9 to python3.12 on PATH, or named with --python. pip's --python-version
cannot stand in for one: pip evaluates the markers of dependencies for the Python that it runs in.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from setup_env import DEFAULT_TENSORFLOW, SetupError, full_version

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
MINORS = ("3.9", "3.10", "3.11", "3.12")


def resolve(python: str, tensorflow: str) -> dict[str, str] | None:
    """Package -> version that pip of `python` would install on an empty environment; None: no such TensorFlow there."""
    minor = ".".join(tensorflow.split(".")[:2])
    lists = [part for name in ("build", "run", "dev") for part in ("-r", str(REQUIREMENTS / f"{name}.txt"))]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        # A venv of its own: pip from the system's packages may be too old to report.
        subprocess.run([python, "-m", "venv", scratch + "/venv"], check=True)
        pip = [scratch + "/venv/bin/python", "-m", "pip"]
        subprocess.run([*pip, "install", "-q", "-U", "pip"], check=True)
        dry = [*pip, "install", "-q", "--dry-run", "--ignore-installed", "--report", str(report)]
        found = {}
        for extra in ([f"tensorflow-cpu=={tensorflow}", *lists], ["--no-deps", f"tf_keras=={minor}.*"]):
            asked = subprocess.run([*dry, *extra], stderr=subprocess.PIPE, text=True)
            if f"No matching distribution found for tensorflow-cpu=={tensorflow}" in asked.stderr:
                return None
            sys.stderr.write(asked.stderr)
            asked.check_returncode()
            for item in json.loads(report.read_text())["install"]:
                found[item["metadata"]["name"].lower().replace("_", "-")] = item["metadata"]["version"]
    # TF_PACKAGE chooses the distribution, TF its version: neither is a pin of this file.
    del found["tensorflow-cpu"]
    return found


def merge(per_python: dict[str, dict[str, str]]) -> list[str]:
    """Constraint lines; a marker only where the Pythons differ."""
    lines = []
    pythons = list(per_python)
    for name in sorted({name for found in per_python.values() for name in found}):
        runs: list[tuple[str, list[str]]] = []  # (version, the neighbouring Pythons that take it)
        for minor, found in per_python.items():
            version = found.get(name)
            if version is None:
                continue
            if runs and runs[-1][0] == version:
                runs[-1][1].append(minor)
            else:
                runs.append((version, [minor]))
        for version, minors in runs:
            if len(runs) == 1:
                lines.append(f"{name}=={version}")
                continue
            low = "" if minors[0] == pythons[0] else f'python_version >= "{minors[0]}"'
            high = "" if minors[-1] == pythons[-1] else f'python_version <= "{minors[-1]}"'
            marker = " and ".join(part for part in (low, high) if part)
            if len(minors) == 1:
                marker = f'python_version == "{minors[0]}"'
            lines.append(f"{name}=={version} ; {marker}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow", default="")
    parser.add_argument("--python", action="append", default=[], metavar="3.9=/path/to/python3.9")
    args = parser.parse_args()
    try:
        tensorflow = full_version(args.tensorflow or DEFAULT_TENSORFLOW)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    named = dict(item.split("=", 1) for item in args.python)

    per_python: dict[str, dict[str, str]] = {}
    for minor in MINORS:
        python = named.get(minor) or shutil.which(f"python{minor}")
        if python is None:
            print(f"no python{minor} on this machine: name one with --python {minor}=PATH", file=sys.stderr)
            return 2
        found = resolve(python, tensorflow)
        if found is None:
            print(f"Python {minor}: no TensorFlow {tensorflow}", flush=True)
            continue
        per_python[minor] = found
        print(f"Python {minor}: {len(found)} packages", flush=True)
    if not per_python:
        print(f"no TensorFlow {tensorflow} for any Python", file=sys.stderr)
        return 1
    path = REQUIREMENTS / f"lock-{tensorflow}.txt"
    pythons = list(per_python)
    head = [
        f"# Constraints for TensorFlow {tensorflow} on Python {pythons[0]} to {pythons[-1]}.",
        f"# Written by: make lock TF={tensorflow}",
    ]
    path.write_text("\n".join([*head, *merge(per_python)]) + "\n")
    print(f"wrote {path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
