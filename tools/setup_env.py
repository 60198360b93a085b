"""Makes the virtual environment that everything here runs in: `make setup`.

In order: Python packages with TensorFlow, tf_keras, Horovod (built from source against that TensorFlow once,
then kept in the user's cache), the op library, this package as an editable install. Standard library alone.

Versions come from requirements/: the lists name what is wanted, lock-<TensorFlow version>.txt pins all of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
HOROVOD = "0.28.1"
DEFAULT_TENSORFLOW = "2.18.1"
# What is tested, by the short name that TF= takes, too.
TENSORFLOWS = {"2.15": "2.15.1", "2.18": DEFAULT_TENSORFLOW, "2.21": "2.21.0"}
# From here on TensorFlow's wheel lacks headers that Horovod's XLA ops need. They are optional, and nothing here uses
# them: Horovod is built without this file.
NO_XLA_FROM = (2, 19)
XLA_OPS = "xla_mpi_ops.cc"
DEFAULT_PACKAGE = "tensorflow-cpu"
PYTHONS = ((3, 9), (3, 12))
# There is no TensorFlow for others.
PYTHONS_OF = {"2.15": ((3, 9), (3, 11)), "2.21": ((3, 10), (3, 12))}

# What Horovod's own build reads. Its run-time variables (HOROVOD_STALL_...) must not start a new build.
HOROVOD_BUILD_PREFIXES = (
    "HOROVOD_WITH",
    "HOROVOD_GPU",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_NCCL_",
    "HOROVOD_CUDA_HOME",
    "HOROVOD_ROCM_HOME",
    "HOROVOD_NVTX_",
    "HOROVOD_BUILD_",
    "HOROVOD_ALLOW_MIXED_GPU_IMPL",
    "HOROVOD_DEBUG",
)
PROGRESS_EVERY_S = 15.0


class SetupError(Exception):
    """What is wrong and what mends it, in one line."""


# ------------------------------------------------------------------------------------------------ progress


def say(text: str) -> None:
    print(text, flush=True)


def run(title: str, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
    """Runs a long command, its output in `log`; every few seconds says the elapsed time and the last line."""
    say(f"==> {title}")
    start = time.monotonic()
    shown = start
    with log.open("ab") as out:
        begin = out.tell()
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, cwd=ROOT
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=1.0)
                    break
                except subprocess.TimeoutExpired:
                    now = time.monotonic()
                    if now - shown >= PROGRESS_EVERY_S:
                        shown = now
                        say(f"    {now - start:4.0f} s  {last_line(log, begin)}")
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code != 0:
        tail = log.read_bytes()[begin:].decode(errors="replace").splitlines()[-25:]
        say("\n".join("    " + line for line in tail))
        raise SetupError(f"{title}: failed with status {code}; the whole output is in {log}")
    say(f"    done in {time.monotonic() - start:.0f} s")


def last_line(log: Path, begin: int) -> str:
    """What the command said last: make's line with the percentage where there is one, since it tells most."""
    with log.open("rb") as stream:
        stream.seek(max(begin, log.stat().st_size - 2**20))
        lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
    percentages = [line for line in lines if re.match(r"\[ *\d+%\]", line)]
    return (percentages or lines or [""])[-1][:100]


# ------------------------------------------------------------------------------------------------ the machine


def check_machine(tensorflow: str = DEFAULT_TENSORFLOW) -> None:
    """Stops with one line where the Python is none for this TensorFlow or a program of the machine is missing."""
    minor = ".".join(tensorflow.split(".")[:2])
    low, high = PYTHONS_OF.get(minor, PYTHONS)
    if not low <= sys.version_info[:2] <= high:
        raise SetupError(
            f"Python must be {low[0]}.{low[1]} to {high[0]}.{high[1]} for TensorFlow {minor}, {sys.executable} is "
            f"{platform.python_version()}: name another one with make setup PYTHON=python3.11"
        )
    missing = [name for name in ("g++", "make", "cmake") if shutil.which(name) is None]
    if os.environ.get("CXX") and "g++" in missing:
        missing.remove("g++")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        missing.append(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")
    if missing:
        raise SetupError(
            f"missing on this machine: {', '.join(missing)}. Install with: sudo apt-get install -y {' '.join(missing)}"
        )


# ------------------------------------------------------------------------------------------------ choices


def horovod_options(environ: dict[str, str]) -> dict[str, str]:
    """The user's own variables of Horovod's build, and Gloo without MPI where they say nothing."""
    options = {k: v for k, v in environ.items() if k.startswith(HOROVOD_BUILD_PREFIXES)}
    defaults = {
        "TENSORFLOW": "WITH", "GLOO": "WITH", "MPI": "WITHOUT", "PYTORCH": "WITHOUT", "MXNET": "WITHOUT"
    }  # fmt: skip
    for name, default in defaults.items():
        if f"HOROVOD_WITH_{name}" not in options and f"HOROVOD_WITHOUT_{name}" not in options:
            options[f"HOROVOD_{default}_{name}"] = "1"
    return dict(sorted(options.items()))


def full_version(text: str) -> str:
    """TensorFlow's version in three numbers, of what TF= says."""
    if text in TENSORFLOWS:
        return TENSORFLOWS[text]
    if not re.fullmatch(r"2\.\d+\.\d+", text):
        raise SetupError(f"TF must be a version such as 2.17.1, or one of {', '.join(TENSORFLOWS)}, got {text!r}")
    return text


def without_xla_ops(choices: dict) -> bool:
    """Whether Horovod has to be built without its XLA ops."""
    return tuple(map(int, choices["tensorflow"].split(".")[:2])) >= NO_XLA_FROM


def choose(args: argparse.Namespace, stamp: dict) -> dict:
    """What the venv shall hold: what is asked for now, else what it was made with, else the defaults."""
    kept = stamp.get("choices", {})
    asked_horovod = any(name.startswith(HOROVOD_BUILD_PREFIXES) for name in os.environ)
    return {
        "python": platform.python_version(),
        "tensorflow": full_version(args.tensorflow or kept.get("tensorflow") or DEFAULT_TENSORFLOW),
        "package": args.tensorflow_package or kept.get("package") or DEFAULT_PACKAGE,
        "horovod": HOROVOD,
        "horovod_options": horovod_options(dict(os.environ))
        if asked_horovod or "horovod_options" not in kept
        else kept["horovod_options"],
    }


def digest(choices: dict) -> str:
    """Changes with all that the venv's contents depend on; not the op library, which looks after itself."""
    hasher = hashlib.sha256(json.dumps(choices, sort_keys=True).encode())
    for path in [ROOT / "pyproject.toml", Path(__file__), *sorted(REQUIREMENTS.glob("*.txt"))]:
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def wheel_dir(choices: dict) -> Path:
    """Where the Horovod wheel for just these choices is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    package = choices["package"].partition("[")[0]
    options = json.dumps([choices["horovod_options"], platform.machine()], sort_keys=True)
    name = "-".join(
        [
            f"horovod{choices['horovod']}",
            f"{package}{choices['tensorflow']}",
            f"cp{sys.version_info[0]}{sys.version_info[1]}",
            hashlib.sha256(options.encode()).hexdigest()[:10],
        ]
    )
    return cache / "hvd8bit" / "wheels" / name


# ------------------------------------------------------------------------------------------------ the steps


class Venv:
    def __init__(self, path: Path):
        self.path = path
        self.python = str(path / "bin" / "python")
        self.stamp_path = path / "hvd8bit-setup.json"
        self.log = path / "hvd8bit-setup.log"

    def read_stamp(self) -> dict:
        try:
            return json.loads(self.stamp_path.read_text())
        except (OSError, ValueError):
            return {}

    def create(self) -> None:
        """Makes the venv, or makes it anew where it belongs to another Python."""
        seen = None
        if Path(self.python).exists():
            asked = subprocess.run(
                [self.python, "-c", "import platform; print(platform.python_version())"],
                capture_output=True,
                text=True,
            )
            seen = asked.stdout.strip()
        if seen == platform.python_version():
            return
        say(f"==> {self.path.name} with Python {platform.python_version()}")
        # This interpreter may be that of the venv to be made anew: take the one that stands behind it.
        base = getattr(sys, "_base_executable", sys.executable)
        made = subprocess.run([base, "-m", "venv", "--clear", str(self.path)], capture_output=True, text=True)
        if made.returncode != 0:
            raise SetupError(f"python -m venv failed: {(made.stderr or made.stdout).strip()}")

    def pip(self, title: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        run(
            title,
            [self.python, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"],
            self.log,
            env,
        )

    def installed(self) -> dict[str, str]:
        """Distribution names, in lower case and with hyphens, and their versions."""
        code = (
            "import importlib.metadata as m, json\n"
            "found = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}\n"
            "print(json.dumps(found))"
        )
        return json.loads(subprocess.check_output([self.python, "-c", code], text=True))


def install_packages(venv: Venv, choices: dict) -> None:
    lock = REQUIREMENTS / f"lock-{choices['tensorflow']}.txt"
    pins = ["-c", str(lock)] if lock.exists() else []
    if not pins:
        say(f"    no {lock.name} here: pip chooses the versions that fit TensorFlow {choices['tensorflow']}")
    package = choices["package"].partition("[")[0]
    others = [n for n in venv.installed() if n in ("tensorflow", "tensorflow-cpu") and n != package]
    if others:
        # Both distributions write the same files: the one that stays has to be installed anew.
        venv.pip("taking out the other TensorFlow", "uninstall", "-y", *others, package)
    venv.pip(
        "pip, setuptools and what Horovod's build needs",
        "install",
        *pins,
        "-r",
        str(REQUIREMENTS / "build.txt"),
    )
    venv.pip(
        f"{choices['package']} {choices['tensorflow']} and the packages of the examples, tests and linters",
        "install",
        *pins,
        f"{choices['package']}=={choices['tensorflow']}",
        *[part for name in ("build", "run", "dev") for part in ("-r", str(REQUIREMENTS / f"{name}.txt"))],
    )
    # tf_keras requires the distribution `tensorflow`, and would bring a second one over tensorflow-cpu.
    minor = ".".join(choices["tensorflow"].split(".")[:2])
    venv.pip(f"tf_keras {minor}", "install", *pins, "--no-deps", f"tf_keras=={minor}.*")


def build_horovod(venv: Venv, choices: dict) -> Path:
    """The Horovod wheel for these choices, from the user's cache or built now."""
    kept = wheel_dir(choices)
    wheels = sorted(kept.glob("*.whl"))
    if wheels:
        say(f"==> Horovod {choices['horovod']}: {wheels[0]}, built earlier for this TensorFlow and Python")
        return wheels[0]
    options = choices["horovod_options"]
    # Horovod passes -j to make only where MAKEFLAGS is unset, and under `make setup` it is set, without a -j.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    env.update(options, MAKEFLAGS=f"-j{min(os.cpu_count() or 1, 8)}")
    with tempfile.TemporaryDirectory(prefix="hvd8bit-") as scratch:
        source = f"horovod=={choices['horovod']}"
        said = " ".join(options)
        if without_xla_ops(choices):
            source = str(source_without_xla_ops(venv, choices, Path(scratch)))
            said += "; without its XLA ops, which do not compile with this TensorFlow and which nothing here uses"
        # --no-cache-dir: pip's cache knows the wheel by its name, which is the same for every TensorFlow.
        venv.pip(
            f"building Horovod {choices['horovod']} ({said}): a few minutes, once",
            "wheel", "-v", "--no-build-isolation", "--no-cache-dir", "--no-deps", "--no-binary", "horovod",
            "-w", scratch, source,
            env=env,
        )  # fmt: skip
        (wheel,) = Path(scratch).glob("*.whl")
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "options.json").write_text(json.dumps(options, indent=2) + "\n")
        # Copied under another name first: a wheel cut short by a full disk must not be taken for a whole one.
        shutil.copyfile(wheel, kept / (wheel.name + ".part"))
        os.replace(kept / (wheel.name + ".part"), kept / wheel.name)
    return kept / wheel.name


def source_without_xla_ops(venv: Venv, choices: dict, scratch: Path) -> Path:
    """Horovod's source release, unpacked, with one line of its list of sources taken out."""
    venv.pip(
        f"fetching the source of Horovod {choices['horovod']}",
        "download", "--no-build-isolation", "--no-cache-dir", "--no-deps", "--no-binary", "horovod",
        "-d", str(scratch), f"horovod=={choices['horovod']}",
    )  # fmt: skip
    (archive,) = scratch.glob("horovod-*.tar.gz")
    shutil.unpack_archive(archive, scratch)
    folder = scratch / archive.name[: -len(".tar.gz")]
    listing = folder / "horovod" / "tensorflow" / "CMakeLists.txt"
    lines = listing.read_text().splitlines(keepends=True)
    kept = [line for line in lines if XLA_OPS not in line]
    if len(kept) != len(lines) - 1:
        raise SetupError(f"{listing.relative_to(scratch)} does not name {XLA_OPS} once: this is no Horovod {HOROVOD}")
    listing.write_text("".join(kept))
    return folder


def install_horovod(venv: Venv, choices: dict, stamp: dict) -> None:
    key = wheel_dir(choices).name
    if stamp.get("horovod_key") == key and venv.installed().get("horovod") == choices["horovod"]:
        return
    wheel = build_horovod(venv, choices)
    venv.pip("installing Horovod", "install", "--no-deps", "--force-reinstall", "--no-cache-dir", str(wheel))
    check = subprocess.run(
        [venv.python, "-c", "import horovod.tensorflow"],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    if check.returncode != 0:
        reason = (check.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetupError(f"Horovod does not import ({reason}): delete its wheel {wheel} and run make setup again")


def build_ops(venv: Venv) -> None:
    built = subprocess.run([venv.python, "setup.py", "-q", "build_ops"], cwd=ROOT, stdin=subprocess.DEVNULL)
    if built.returncode != 0:
        raise SetupError("the op library was not built, see above")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument(
        "--tensorflow",
        default="",
        metavar="2.x[.y]",
        help=f"default: what the venv has, else {DEFAULT_TENSORFLOW}",
    )
    parser.add_argument("--tensorflow-package", default="", help=f"default: what the venv has, else {DEFAULT_PACKAGE}")
    args = parser.parse_args()

    venv = Venv(args.venv.absolute())
    try:
        stamp = venv.read_stamp()
        choices = choose(args, stamp)
        wanted = digest(choices)
        if stamp.get("digest") != wanted:
            check_machine(choices["tensorflow"])
            start = time.monotonic()
            venv.create()
            stamp = venv.read_stamp()
            venv.stamp_path.unlink(missing_ok=True)
            install_packages(venv, choices)
            install_horovod(venv, choices, stamp)
            say("==> the op library and this package")
            build_ops(venv)
            editable = ["--no-build-isolation", "--no-deps", "-e", str(ROOT)]
            venv.pip("installing this package from the source tree", "install", *editable)
            stamp = {"digest": wanted, "choices": choices, "horovod_key": wheel_dir(choices).name}
            venv.stamp_path.write_text(json.dumps(stamp, indent=2) + "\n")
            made = f"TensorFlow {choices['tensorflow']}, Horovod {choices['horovod']}"
            say(f"==> {args.venv} is ready after {time.monotonic() - start:.0f} s: {made}")
        else:
            build_ops(venv)
    except SetupError as error:
        print(f"hvd8bit setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hvd8bit setup: interrupted; run make setup again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
