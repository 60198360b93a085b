"""Finds nvcc and what it can build: for setup.py, Bazel and tests/gpu/check.sh.

    python tools/cuda_toolkit.py    # prints what was found as JSON; null where CUDA is switched off or not there

Variables:
  HVD8BIT_CUDA        0 builds no CUDA kernels; 1 fails where they cannot be built; unset builds them if nvcc is found.
  HVD8BIT_CUDA_ARCHS  compute capabilities, e.g. "80,90"; default: those of tf_ops/sources.bzl that nvcc knows. For the
                      newest one PTX goes along, which a driver compiles for GPUs that came later.
  NVCC                the compiler; default: nvcc on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "tf_ops" / "sources.bzl"


class CudaError(Exception):
    """CUDA was asked for and cannot be had; the message says why and what mends it."""


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit.

    Attributes:
      nvcc: its path.
      version: of the toolkit, e.g. "13.0".
      static_runtime: path of libcudart_static.a. Linked in, it needs neither a driver nor CUDA where the library loads.
      architectures: what is built, e.g. ("sm_80", "sm_90", "compute_90"); the last one is PTX.
      flags: of nvcc, for them.
    """

    nvcc: str
    version: str
    static_runtime: str
    architectures: tuple[str, ...]
    flags: tuple[str, ...]


def find(default_capabilities: list[str], environment: Mapping[str, str] = os.environ) -> Toolkit | None:
    """The toolkit to build with, or None: switched off, or not there.

    Raises:
      CudaError: HVD8BIT_CUDA or HVD8BIT_CUDA_ARCHS asks for what cannot be had.
    """
    wanted = environment.get("HVD8BIT_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise CudaError(f"HVD8BIT_CUDA must be 0, 1 or unset, got {wanted!r}")
    if wanted == "0":
        return None
    try:
        return _find(default_capabilities, environment)
    except _Absent as absent:
        if wanted == "1":
            raise CudaError(f"HVD8BIT_CUDA=1, but {absent}") from None
        return None


class _Absent(Exception):
    pass


def _find(default_capabilities: list[str], environment: Mapping[str, str]) -> Toolkit:
    nvcc = _nvcc(environment)
    release = re.search(r"release (\d+\.\d+)", _say(nvcc, "--version"))
    if release is None:
        raise _Absent(f"{nvcc} does not say its version")
    known = set(re.findall(r"compute_(\d+)", _say(nvcc, "--list-gpu-arch")))
    asked = environment.get("HVD8BIT_CUDA_ARCHS", "")
    if asked:
        capabilities = [name.strip().replace(".", "") for name in asked.split(",") if name.strip()]
        unknown = [name for name in capabilities if name not in known]
        if unknown or not capabilities:
            raise CudaError(
                f"HVD8BIT_CUDA_ARCHS must name compute capabilities that {nvcc} knows "
                f"({', '.join(sorted(known, key=int))}), separated by commas, got {asked!r}"
            )
    else:
        capabilities = [name for name in default_capabilities if name in known]
        if not capabilities:
            raise _Absent(f"{nvcc} knows none of the compute capabilities {', '.join(default_capabilities)}")
    newest = max(capabilities, key=int)
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in capabilities]
    flags.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    return Toolkit(
        nvcc=nvcc,
        version=release.group(1),
        static_runtime=_static_runtime(nvcc),
        architectures=(*(f"sm_{name}" for name in capabilities), f"compute_{newest}"),
        flags=tuple(flags),
    )


def _nvcc(environment: Mapping[str, str]) -> str:
    named = environment.get("NVCC")
    if named:
        found = shutil.which(named)
        if found is None:
            raise _Absent(f"NVCC names {named}, which is not there")
        return found
    places = [environment.get("CUDA_HOME", "") + "/bin/nvcc", "/usr/local/cuda/bin/nvcc"]
    found = next((path for path in map(shutil.which, ["nvcc", *places]) if path), None)
    if found is None:
        raise _Absent("there is no nvcc on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin: set NVCC")
    return found


def _say(nvcc: str, *arguments: str) -> str:
    try:
        done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Absent(f"{nvcc} does not run: {error}") from None
    if done.returncode != 0:
        raise _Absent(f"{nvcc} {' '.join(arguments)} failed with status {done.returncode}")
    return done.stdout + done.stderr


def _static_runtime(nvcc: str) -> str:
    # The one on PATH may be a script that calls the real one; a dry run tells where that is.
    top = re.search(r"^#\$ TOP=(.*)$", _say(nvcc, "--dryrun", "-c", "none.cu"), re.M)
    if top is not None:
        folder = Path(top.group(1).strip())
        for place in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            library = folder / place / "libcudart_static.a"
            if library.exists():
                return str(library.resolve())
    raise _Absent(f"the toolkit of {nvcc} lacks libcudart_static.a")


if __name__ == "__main__":
    lists: dict = {}
    exec(compile(SOURCES.read_text(encoding="utf-8"), str(SOURCES), "exec"), {"__builtins__": {}}, lists)
    try:
        toolkit = find(lists["CUDA_CAPABILITIES"])
    except CudaError as error:
        raise SystemExit(f"hvd8bit: {error}") from None
    print(json.dumps(toolkit and dataclasses.asdict(toolkit)))
