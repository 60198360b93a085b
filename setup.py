"""Builds the op library `hvd8bit/_hvd8bit_ops.so` with g++ against the TensorFlow of the running Python, and with
nvcc, where that is found, its CUDA kernels; tools/cuda_toolkit.py says which variables count.

`pip install --no-build-isolation .` puts the library into the wheel. `python setup.py build_ops`, which
`make setup` calls, builds it beside the package's own files, compiles only what changed, and does not even
import TensorFlow when nothing did.

Sources and flags come from tf_ops/sources.bzl alone, which is Python and Starlark at once; Bazel reads it.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import cuda_toolkit  # noqa: E402

TF_OPS = ROOT / "tf_ops"
LIBRARY = "_hvd8bit_ops.so"
BUILD_INFO = "_build_info.json"


class BuildError(SystemExit):
    """One line that says what is missing and what mends it; exits with status 1."""

    def __init__(self, message: str):
        super().__init__(f"hvd8bit: {message}")


def read_sources() -> dict:
    """The assignments of tf_ops/sources.bzl."""
    path = TF_OPS / "sources.bzl"
    values: dict = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__builtins__": {}}, values)
    return values


# ------------------------------------------------------------------------------------------------ TensorFlow

_ASK_TENSORFLOW = """
import json, tensorflow as tf
print("\\n" + json.dumps({"version": tf.__version__, "compile": tf.sysconfig.get_compile_flags(),
                          "link": tf.sysconfig.get_link_flags(), "cxx_abi": tf.sysconfig.CXX11_ABI_FLAG}))
"""


def tensorflow_facts(cache_dir: Path) -> dict:
    """TensorFlow's version, compile and link flags; kept between builds, since importing it takes seconds."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        raise BuildError(
            f"{sys.executable} sees no TensorFlow, and the op library is built against the one it will run "
            "with: install TensorFlow, then run pip install --no-build-isolation . (without that option pip "
            "hides what is installed)"
        )
    framework = Path(spec.origin).with_name("libtensorflow_framework.so.2")
    seen = [str(framework), framework.stat().st_mtime_ns if framework.exists() else 0]
    cache = cache_dir / f"tensorflow-{hashlib.sha256(str(framework).encode()).hexdigest()[:12]}.json"
    if cache.exists():
        facts = json.loads(cache.read_text())
        if facts["seen"] == seen:
            return facts
    asked = subprocess.run(
        [sys.executable, "-c", _ASK_TENSORFLOW],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    if asked.returncode != 0:
        reason = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(
            f"the TensorFlow of {sys.executable} does not import ({reason}): "
            "mend or reinstall TensorFlow, then build again"
        )
    facts = {"seen": seen, **json.loads(asked.stdout.strip().splitlines()[-1])}
    cache_dir.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps(facts))
    return facts


# ------------------------------------------------------------------------------------------------ the build


def run(command: list[str], what: str) -> None:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.stdout:
        print(done.stdout, end="", file=sys.stderr, flush=True)
    if done.returncode != 0:
        raise BuildError(f"{what} failed with status {done.returncode}: {shlex.join(command)}")


def outdated(target: Path, inputs: list[Path]) -> bool:
    """True if `target` is missing or older than one of `inputs`, or if an input is gone."""
    if not target.exists():
        return True
    made = target.stat().st_mtime_ns
    return any(not path.exists() or path.stat().st_mtime_ns > made for path in inputs)


def read_depfile(path: Path) -> list[Path]:
    """The prerequisites that g++ or nvcc wrote with -MMD, relative to the repository."""
    if not path.exists():
        return []
    text = path.read_text().replace("\\\n", " ")
    prerequisites = "".join(re.split(r":\s", text, maxsplit=1)[1:])
    return [ROOT / _without_escapes(name) for name in re.findall(r"(?:\\.|\S)+", prerequisites)]


def _without_escapes(name: str) -> str:
    """A file's name from its name in a makefile, where backslashes count before blanks and signs alone."""
    name = re.sub(r"(\\*)\\([\s#:])", lambda escaped: escaped[1][::2] + escaped[2], name)
    return name.replace("$$", "$")


def remember(path: Path, text: str) -> bool:
    """Writes `text` to `path` if it is not there already; True if it was not."""
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return True


def generate_codebooks(sources: dict, out_dir: Path) -> None:
    """The codebook header, from hvd8bit/datatypes.py; not touched when its text stays: nothing rebuilds."""
    generator = TF_OPS / "codec" / "generate_codebooks.py"
    header = out_dir / sources["GENERATED_HEADER"]
    stamp = header.with_name(header.name + ".stamp")
    if header.exists() and not outdated(stamp, [generator, ROOT / "hvd8bit" / "datatypes.py"]):
        return
    header.parent.mkdir(parents=True, exist_ok=True)
    fresh = header.with_name(header.name + ".new")
    run([sys.executable, str(generator), str(fresh)], "generating the codebook header")
    remember(header, fresh.read_text())
    fresh.unlink()
    stamp.touch()


def build_library(build_root: Path, destination: Path, force: bool = False) -> bool:
    """Builds library and build-info file into `destination`; returns whether anything had to be done."""
    sources = read_sources()
    tensorflow = tensorflow_facts(build_root)
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"the compiler {compiler[0]} is missing: sudo apt-get install g++, or set CXX")

    try:
        cuda = cuda_toolkit.find(sources["CUDA_CAPABILITIES"])
    except cuda_toolkit.CudaError as error:
        raise BuildError(str(error)) from None

    # -isystem keeps TensorFlow's headers out of our warnings and out of the dependency files.
    includes = ["-isystem" + flag[2:] for flag in tensorflow["compile"] if flag.startswith("-I")]
    portable = [flag for flag in tensorflow["compile"] if not flag.startswith("-I")]
    flags = [*portable, *sources["COPTS"], *shlex.split(os.environ.get("CXXFLAGS", ""))]
    names = list(sources["SOURCES"])
    # CUDA's own runtime comes before TensorFlow's libraries: the GPU wheel's export the same names, the CPU wheel's do
    # not, and the library has to load with either.
    cuda_link: list[str] = []
    if cuda is not None:
        names = sources["CUDA_SOURCES"] + names  # nvcc takes longest, so it starts first
        flags.append("-DHVD8BIT_CUDA")
        cuda_link = [cuda.static_runtime, "-Wl,--exclude-libs,libcudart_static.a", "-ldl", "-lrt", "-lpthread"]
    link_flags = [
        *sources.get("LINKOPTS", []),
        *cuda_link,
        *tensorflow["link"],
        *shlex.split(os.environ.get("LDFLAGS", "")),
    ]

    # One folder per TensorFlow, compiler and set of flags: a build for one never spoils another's objects.
    cuda_flags = [] if cuda is None else [*sources["NVCC_OPTS"], *cuda.flags]
    cuda_key = [] if cuda is None else [cuda.nvcc, cuda.version, *cuda_flags]
    key = json.dumps([tensorflow["seen"], compiler, flags, includes, link_flags, *cuda_key])
    work = build_root / f"tf{tensorflow['version']}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if force:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    generate_codebooks(sources, work)

    units = [(TF_OPS / name, work / (name + ".o")) for name in names]
    commands = {".cc": [*compiler, *includes, *flags, f"-I{ROOT}", f"-I{work}", "-MMD"]}
    if cuda is not None:
        commands[".cu"] = [cuda.nvcc, *cuda_flags, f"-I{ROOT}", f"-I{work}", "-MMD"]
    todo = [(s, o) for s, o in units if outdated(o, [s, *read_depfile(o.with_suffix(".d"))])]
    compile_all(commands, todo)

    objects = [str(o) for _, o in units]
    linked = work / LIBRARY
    link_changed = remember(work / "objects.txt", "\n".join(objects))
    if todo or link_changed or outdated(linked, [o for _, o in units]):
        run([*compiler, "-shared", *objects, *link_flags, "-o", str(linked) + ".new"], "linking")
        os.replace(str(linked) + ".new", linked)

    info = {
        "tensorflow_version": tensorflow["version"],
        "cxx_abi": tensorflow["cxx_abi"],
        "compiler": compiler_version(compiler, work),
        "flags": flags,
        "backends": sources.get("BACKENDS", ["scalar"]),
        "cuda_architectures": [] if cuda is None else list(cuda.architectures),
        "cuda_version": "" if cuda is None else cuda.version,
    }
    return install(linked, info, destination) or bool(todo)


def compile_all(commands: dict[str, list[str]], todo: list[tuple[Path, Path]]) -> None:
    """Compiles sources into objects, each with the command for its suffix."""

    def compile_one(unit: tuple[Path, Path]) -> tuple[Path, float]:
        source, out = unit
        out.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        what = f"compiling {source.relative_to(ROOT)}"
        run([*commands[source.suffix], "-c", str(source), "-o", str(out)], what)
        return source, time.monotonic() - start

    jobs = int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
        pending = [pool.submit(compile_one, unit) for unit in todo]
        for count, finished in enumerate(concurrent.futures.as_completed(pending), 1):
            source, seconds = finished.result()
            print(f"[{count}/{len(todo)}] {source.relative_to(ROOT)} ({seconds:.1f} s)", flush=True)


def compiler_version(compiler: list[str], work: Path) -> str:
    kept = work / "compiler.txt"
    if not kept.exists():
        said = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
        kept.write_text(said.partition("\n")[0])
    return kept.read_text()


def install(library: Path, info: dict, destination: Path) -> bool:
    """Puts library and build info into the package folder; returns whether either changed."""
    target = destination / LIBRARY
    copied = not target.exists() or signature(target) != signature(library)
    if copied:
        # Renamed into place, never written over: a running process keeps the file that it has mapped.
        shutil.copy2(library, str(target) + ".new")
        os.replace(str(target) + ".new", target)
    return remember(destination / BUILD_INFO, json.dumps(info, indent=2, sort_keys=True) + "\n") or copied


def signature(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


# ------------------------------------------------------------------------------------------------ setuptools


class BuildOps(Command):
    """Builds the op library beside the package's Python files, for work in the source tree."""

    description = "build the op library into hvd8bit/"
    user_options: ClassVar = [("force", "f", "rebuild everything")]
    boolean_options: ClassVar = ["force"]

    def initialize_options(self) -> None:
        self.force = False

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        start = time.monotonic()
        if build_library(ROOT / "build" / "ops", ROOT / "hvd8bit", force=bool(self.force)):
            print(f"built hvd8bit/{LIBRARY} in {time.monotonic() - start:.1f} s", flush=True)


class BuildPyWithOps(build_py):
    """The package's Python files, and the op library beside them."""

    def run(self) -> None:
        super().run()
        package = ROOT / "hvd8bit" if self.editable_mode else Path(self.build_lib).resolve() / "hvd8bit"
        package.mkdir(parents=True, exist_ok=True)
        build_library(ROOT / "build" / "ops", package)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        extra = [str(Path(self.build_lib) / "hvd8bit" / name) for name in (LIBRARY, BUILD_INFO)]
        return super().get_outputs(include_bytecode) + extra


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """A wheel with the library inside fits one platform."""
        return True


if __name__ == "__main__":
    setup(
        license="Apache-2.0",
        cmdclass={"build_ops": BuildOps, "build_py": BuildPyWithOps},
        distclass=BinaryDistribution,
    )
