"""Writes requirements/lock-<TensorFlow>.txt: one pin for every package, for every declared Python.

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

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
MINORS = ("3.9", "3.10", "3.11", "3.12")


def resolve(python: str, tensorflow: str) -> dict[str, str]:
    """Package -> version that pip of `python` would install on an empty environment."""
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
            subprocess.run([*dry, *extra], check=True)
            for item in json.loads(report.read_text())["install"]:
                found[item["metadata"]["name"].lower().replace("_", "-")] = item["metadata"]["version"]
    # TF_PACKAGE chooses the distribution, TF its version: neither is a pin of this file.
    del found["tensorflow-cpu"]
    return found


def merge(per_python: dict[str, dict[str, str]]) -> list[str]:
    """Constraint lines; a marker only where the Pythons differ."""
    lines = []
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
            low = "" if minors[0] == MINORS[0] else f'python_version >= "{minors[0]}"'
            high = "" if minors[-1] == MINORS[-1] else f'python_version <= "{minors[-1]}"'
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
    tensorflow = args.tensorflow or "2.18.1"
    named = dict(item.split("=", 1) for item in args.python)

    per_python = {}
    for minor in MINORS:
        python = named.get(minor) or shutil.which(f"python{minor}")
        if python is None:
            print(f"no python{minor} on this machine: name one with --python {minor}=PATH", file=sys.stderr)
            return 2
        per_python[minor] = resolve(python, tensorflow)
        print(f"Python {minor}: {len(per_python[minor])} packages", flush=True)
    path = REQUIREMENTS / f"lock-{tensorflow}.txt"
    head = [
        f"# Constraints for TensorFlow {tensorflow} on Python {MINORS[0]} to {MINORS[-1]}.",
        f"# Written by: make lock TF={tensorflow}",
    ]
    path.write_text("\n".join([*head, *merge(per_python)]) + "\n")
    print(f"wrote {path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
