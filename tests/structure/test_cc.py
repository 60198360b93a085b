"""Builds the codec without TensorFlow, under sanitizers, and runs tests/cc and tests/gpu over emulated CUDA."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import pytest

from hvd8bit import native

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
RUNNABLE = native.runnable_backends()
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
        copts = [flag for flag in lists["COPTS"] if flag != "-O3"]
        self.flags = [*copts, "-std=c++17", "-O1", "-g", "-pthread", "-DHVD8BIT_CUDA"]
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


@pytest.fixture(scope="module")
def fuzzer(memory_checked) -> pathlib.Path:
    """tests/cc/fuzz.cc with the address and the undefined behaviour sanitizer."""
    emulated = memory_checked.cuda if platform.machine() == "x86_64" else []
    return memory_checked.program(*memory_checked.cpu, *emulated, ROOT / "tests" / "cc" / "fuzz.cc")


def test_any_payload_is_refused_or_used(fuzzer):
    said = json.loads(succeed(fuzzer, "100000", "1"))
    assert said["payloads"] == said["refused"] + said["accepted"] == 100_000
    assert min(said["refused"], said["accepted"]) > 20_000
    assert said["on_emulated_cuda"] > 0 or platform.machine() != "x86_64"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_ten_million_payloads(fuzzer, seed, record_soak):
    """A million for each seed."""
    said = json.loads(succeed(fuzzer, "1000000", str(seed)))
    assert said["refused"] + said["accepted"] == 1_000_000
    record_soak("fuzz", said)


@needs_emulation
def test_every_back_end_keeps_to_its_memory(tmp_path):
    """The table of all back ends, which runs through the C ABI, with a library that sanitizers watch."""
    library = tmp_path / "libhvd8bit_codec.so"
    flags = [f"--flag={flag}" for flag in (*MEMORY, "-O1", "-g")]
    succeed(sys.executable, ROOT / "tests" / "gpu" / "build.py", library, "--emulate", *flags)
    # Python itself is built without: the sanitizer's library has to be there before it.
    libasan = succeed("g++", "-print-file-name=libasan.so").strip()
    check = [sys.executable, ROOT / "tests" / "gpu" / "check.py", "--library", library, "--memory", "host"]
    for backend in RUNNABLE:
        less = ["--against", backend, "--random", "300000", "--mantissa-step", "101", "--elements", "0"]
        assert succeed(*check, *less, LD_PRELOAD=libasan).endswith("passed\n")


def test_micro_benchmarks_run(tmp_path):
    """They compare the back ends' bytes first, and end if those differ."""
    if run("g++", "-x", "c++", "-E", "-include", "benchmark/benchmark.h", "/dev/null").returncode != 0:
        pytest.skip("no Google Benchmark on this machine (Debian and Ubuntu: apt-get install libbenchmark-dev)")
    short = ["--benchmark_filter=/dynamic_tree/in_cache", "--benchmark_min_time=0.001", "--benchmark_format=json"]
    script = ROOT / "tests" / "cc" / "benchmark.sh"
    said = json.loads(succeed(script, *short, PYTHON=sys.executable, OUT=str(tmp_path), CXXFLAGS="-O1"))
    names = {result["name"] for result in said["benchmarks"]}
    assert names == {
        f"{kernel}/{backend}/dynamic_tree/in_cache"
        for kernel in ("encode", "encode_stochastic", "decode", "sum_of_4")
        for backend in RUNNABLE
    }


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
