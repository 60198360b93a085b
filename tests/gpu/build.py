"""Builds the codec as a library without TensorFlow, with CUDA: by nvcc, or emulated on the host.

python tests/gpu/build.py OUT.so [--emulate] [--flag=-fsanitize=address ...]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
TF_OPS = ROOT / "tf_ops"
sys.path.insert(0, str(ROOT / "tools"))

import cuda_toolkit  # noqa: E402


def build(out: pathlib.Path, *, emulate: bool, flags: Sequence[str] = ()) -> None:
    """Compiles everything anew.

    Args:
      out: the library; objects lie beside it.
      emulate: compile the kernels for the host, with tests/cc/cuda_emulation.
      flags: more of g++'s.

    Raises:
      cuda_toolkit.CudaError: there is no nvcc, or a command failed; the message holds its output.
    """
    lists: dict = {}
    exec((TF_OPS / "sources.bzl").read_text(encoding="utf-8"), {"__builtins__": {}}, lists)
    out.parent.mkdir(parents=True, exist_ok=True)
    generator = TF_OPS / "codec" / "generate_codebooks.py"
    _run([sys.executable, str(generator), str(out.parent / lists["GENERATED_HEADER"])])

    includes = [f"-I{ROOT}", f"-I{out.parent}"]
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    host = [*compiler, "-std=c++17", *lists["COPTS"], *flags, "-DHVD8BIT_CUDA", *includes]
    if emulate:
        device = [*host, f"-I{ROOT}/tests/cc/cuda_emulation", "-Wno-unknown-pragmas", "-x", "c++"]
        runtime = []
    else:
        toolkit = cuda_toolkit.find(lists["CUDA_CAPABILITIES"], {**os.environ, "HVD8BIT_CUDA": "1"})
        assert toolkit is not None
        device = [toolkit.nvcc, *lists["NVCC_OPTS"], *toolkit.flags, *includes]
        runtime = [toolkit.static_runtime, "-ldl", "-lrt", "-lpthread"]

    names = [name for name in lists["CUDA_SOURCES"] + lists["SOURCES"] if name.startswith("codec/")]
    objects = [out.parent / (name.replace("/", "_") + ".o") for name in names]

    def compile_one(name: str, target: pathlib.Path) -> None:
        _run([*(device if name.endswith(".cu") else host), "-c", str(TF_OPS / name), "-o", str(target)])

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, names, objects))
    _run([*compiler, "-shared", *flags, *map(str, objects), *runtime, "-o", str(out)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise cuda_toolkit.CudaError(f"{shlex.join(command)} failed:\n{done.stdout[-4000:]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--flag", action="append", default=[])
    options = parser.parse_args()
    try:
        build(options.out.resolve(), emulate=options.emulate, flags=options.flag)
    except cuda_toolkit.CudaError as failure:
        raise SystemExit(f"hvd8bit: {failure}") from None
