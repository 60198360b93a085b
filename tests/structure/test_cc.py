"""Builds the codec without TensorFlow, under the address and undefined sanitizers, and runs tests/cc."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TF_OPS = ROOT / "tf_ops"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def run(*command: str | pathlib.Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr[-5000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> pathlib.Path:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    work = tmp_path_factory.mktemp("cc")
    lists: dict = {}
    exec((TF_OPS / "sources.bzl").read_text(encoding="utf-8"), {"__builtins__": {}}, lists)
    run(sys.executable, TF_OPS / "codec" / "generate_codebooks.py", work / lists["GENERATED_HEADER"])
    sources = [TF_OPS / name for name in lists["SOURCES"] if name.startswith("codec/") and name.endswith(".cc")]
    sources.append(ROOT / "tests" / "cc" / "codec_test.cc")
    # The library's own flags, but for the optimisation: it is the sanitizers that take the time here.
    flags = [
        "-std=c++17",
        *(flag for flag in lists["COPTS"] if flag != "-O3"),
        "-O1",
        "-g",
        "-pthread",
        *SANITIZE,
    ]

    def compiled(source: pathlib.Path) -> pathlib.Path:
        out = work / (source.stem + ".o")
        run("g++", *flags, f"-I{ROOT}", f"-I{work}", "-c", source, "-o", out)
        return out

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    run("g++", *SANITIZE, "-pthread", *objects, "-o", work / "codec_test")
    return work / "codec_test"


def test_codec_without_tensorflow(program):
    # The codec keeps its tables for good; a leak checker would need ptrace besides.
    said = run(program, ASAN_OPTIONS="detect_leaks=0", UBSAN_OPTIONS="print_stacktrace=1")
    assert said.startswith("passed with ")
    assert "scalar" in said
