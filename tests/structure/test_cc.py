"""Builds the codec without TensorFlow, under sanitizers, and runs tests/cc; the CUDA kernels as emulated there."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TF_OPS = ROOT / "tf_ops"
KERNELS = TF_OPS / "codec" / "cuda" / "kernels.cu"
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREADS = ("-fsanitize=thread",)
# The codec keeps its tables for good; a leak checker would need ptrace besides.
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
}
needs_emulation = pytest.mark.skipif(platform.machine() != "x86_64", reason="cuda_emulation is written for x86-64")


def run(*command: str | pathlib.Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, **ENVIRONMENT, **environment},
    )


def succeed(*command: str | pathlib.Path, **environment: str) -> str:
    done = run(*command, **environment)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr[-5000:]}"
    return done.stdout


def source_lists() -> dict:
    lists: dict = {}
    exec((TF_OPS / "sources.bzl").read_text(encoding="utf-8"), {"__builtins__": {}}, lists)
    return lists


class Builder:
    """Compiles into a folder, each source once, with the library's flags and a sanitizer's."""

    def __init__(self, work: pathlib.Path, sanitize: tuple[str, ...]):
        if shutil.which("g++") is None:
            pytest.skip("no g++ here")
        self.work, self.sanitize, self.objects = work, sanitize, {}
        lists = source_lists()
        succeed(sys.executable, TF_OPS / "codec" / "generate_codebooks.py", work / lists["GENERATED_HEADER"])
        # The library's own flags, but for the optimisation: it is the sanitizers that take the time here.
        self.flags = [*(flag for flag in lists["COPTS"] if flag != "-O3"), "-std=c++17", "-O1", "-g", "-pthread"]
        codec = [TF_OPS / name for name in lists["SOURCES"] if name.startswith("codec/")]
        self.cpu = [path for path in codec if path.name != "c_api.cc"]
        self.cuda = [TF_OPS / name for name in lists["CUDA_SOURCES"] if name.startswith("codec/")]

    def program(self, *sources: pathlib.Path) -> pathlib.Path:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(self._compiled, sources))
        out = self.work / sources[-1].stem
        succeed("g++", *self.sanitize, "-pthread", *objects, "-o", out)
        return out

    def _compiled(self, source: pathlib.Path) -> pathlib.Path:
        if source not in self.objects:
            out = self.work / (source.name + ".o")
            emulation = [f"-I{ROOT}/tests/cc/cuda_emulation", "-Wno-unknown-pragmas", "-x", "c++"]
            emulated = emulation if source.suffix == ".cu" else []
            includes = [f"-I{ROOT}", f"-I{self.work}"]
            succeed("g++", *self.flags, *self.sanitize, *includes, *emulated, "-c", source, "-o", out)
            self.objects[source] = out
        return self.objects[source]


@pytest.fixture(scope="module")
def memory_checked(tmp_path_factory) -> Builder:
    """Builds with the address and the undefined behaviour sanitizer."""
    return Builder(tmp_path_factory.mktemp("memory"), MEMORY)


@pytest.fixture(scope="module")
def thread_checked(tmp_path_factory) -> pathlib.Path:
    """tests/cc/cuda_test.cc with the thread sanitizer."""
    builder = Builder(tmp_path_factory.mktemp("threads"), THREADS)
    return builder.program(*builder.cpu, *builder.cuda, ROOT / "tests" / "cc" / "cuda_test.cc")


def test_codec_without_tensorflow(memory_checked):
    said = succeed(memory_checked.program(*memory_checked.cpu, ROOT / "tests" / "cc" / "codec_test.cc"))
    assert said.startswith("passed with ")
    assert "scalar" in said


@needs_emulation
def test_cuda_kernels_keep_to_their_memory(memory_checked):
    sources = [*memory_checked.cpu, *memory_checked.cuda, ROOT / "tests" / "cc" / "cuda_test.cc"]
    assert succeed(memory_checked.program(*sources)) == "passed\n"


@needs_emulation
def test_cuda_kernels_have_no_races(thread_checked):
    assert succeed(thread_checked) == "passed\n"


BARRIERS = [
    number
    for number, line in enumerate(KERNELS.read_text(encoding="utf-8").splitlines(), 1)
    if re.search(r"\b__syncthreads(_or)?\(", line)
]


def test_the_kernels_have_barriers():
    assert len(BARRIERS) >= 4


@needs_emulation
@pytest.mark.parametrize("line", [*BARRIERS, "all"])
def test_every_barrier_is_needed(thread_checked, line):
    """Without it there is a race, or a wrong byte: what shows that the test above would see one."""
    done = run(thread_checked, HVD8BIT_SKIP_BARRIER=str(line))
    assert done.returncode in (1, 66), f"status {done.returncode} without the barrier of line {line}\n{done.stderr}"
    assert "not true" in done.stderr or "data race" in done.stderr or "the scalar back end has" in done.stderr
