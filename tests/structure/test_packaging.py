"""What is packed, and that it builds and installs: sdist, wheel, and setup.py's own errors."""

from __future__ import annotations

import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import tarfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command: str, cwd: pathlib.Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)


def project_files() -> set[str]:
    """What git would have: tracked files, and new ones that it does not ignore."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard")
    assert listed.returncode == 0, listed.stderr
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> pathlib.Path:
    """The sdist, made as pip and build make it: through the back end that pyproject.toml names.

    From a copy of what git has: in the tree itself setuptools would add what an earlier egg-info lists.
    """
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    for name in project_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    for built in (
        "hvd8bit/_hvd8bit_ops.so",
        "hvd8bit/_build_info.json",
        "tools/__pycache__/old.pyc",
        "tf_ops/old.so",
    ):
        (tree / built).parent.mkdir(exist_ok=True)
        (tree / built).touch()
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    made = run(sys.executable, "-c", code, cwd=tree)
    assert made.returncode == 0, made.stderr
    (path,) = out.glob("hvd8bit-*.tar.gz")
    return path


@pytest.fixture(scope="module")
def sdist_files(sdist) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def test_sdist_holds_the_whole_project(sdist_files):
    missing = project_files() - sdist_files
    assert not missing, f"not in the sdist, add to MANIFEST.in: {sorted(missing)}"


def test_sdist_holds_nothing_that_was_built(sdist_files):
    made_by_setuptools = {"PKG-INFO", "setup.cfg"}
    extra = {name for name in sdist_files - project_files() - made_by_setuptools if ".egg-info/" not in name}
    assert not extra


def test_sdist_installs_and_works(sdist, tmp_path):
    """Installed from the sdist alone, with no network, into an empty folder; run from elsewhere."""
    arguments = ["--no-build-isolation", "--no-deps", "--no-index", "--target", str(tmp_path / "site")]
    # One architecture, where there is a CUDA compiler: that takes seconds.
    one = {"HVD8BIT_CUDA_ARCHS": os.environ.get("HVD8BIT_CUDA_ARCHS", "90")}
    installed = run(sys.executable, "-m", "pip", "install", *arguments, str(sdist), cwd=tmp_path, **one)
    assert installed.returncode == 0, (installed.stdout + installed.stderr)[-4000:]
    package = tmp_path / "site" / "hvd8bit"
    installed_files = {f"hvd8bit/{path.relative_to(package)}" for path in package.rglob("*") if path.is_file()}
    missing = {name for name in project_files() if name.startswith("hvd8bit/")} - installed_files
    assert not missing, f"not installed, add to package-data in pyproject.toml: {sorted(missing)}"

    code = "import hvd8bit.native as n; n.load(); print(n.__file__, n.build_info()['tensorflow_version'])"
    used = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert used.returncode == 0, used.stderr[-4000:]
    assert used.stdout.startswith(str(package))

    command = run(str(tmp_path / "site" / "bin" / "hvd8bit"), "--version", PYTHONPATH=str(tmp_path / "site"))
    assert command.returncode == 0, command.stderr


# ------------------------------------------------------------------------------------------------ setup.py


def test_building_again_does_nothing():
    library = ROOT / "hvd8bit" / "_hvd8bit_ops.so"
    first = run(sys.executable, "setup.py", "-q", "build_ops")
    assert first.returncode == 0, first.stderr
    made = library.stat().st_mtime_ns
    again = run(sys.executable, "setup.py", "-q", "build_ops")
    assert (again.returncode, again.stdout) == (0, "")
    assert library.stat().st_mtime_ns == made


@pytest.mark.parametrize("compiler", ["g++", "nvcc"])
def test_what_an_object_was_made_of_is_read_from_any_path(compiler, tmp_path):
    """Of a checkout in a folder with such a name all would be compiled each time."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    # nvcc has a shell that takes the dollar for a variable.
    folder = tmp_path / ("two words" if compiler == "nvcc" else r"two  words $x a#b c: d\e \ f")
    folder.mkdir()
    source = folder / ("source.cu" if compiler == "nvcc" else "source.cc")
    headers = [folder / f"{name}.h" for name in ("plain", "a b", " c")]
    for header in headers:
        header.touch()
    source.write_text("".join(f'#include "{header.name}"\n' for header in headers))
    out = folder / "source.o"
    compiled = run(compiler, "-MMD", "-c", str(source), "-o", str(out))
    assert compiled.returncode == 0, compiled.stderr

    setup = runpy.run_path(str(ROOT / "setup.py"))
    found = setup["read_depfile"](out.with_suffix(".d"))
    assert {source, *headers} <= set(found)
    assert not setup["outdated"](out, found)
    headers[1].unlink()
    assert setup["outdated"](out, found)


def test_building_without_tensorflow_says_so_in_one_line():
    code = (
        "import importlib.util as util, runpy, sys\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'tensorflow' else find(name, *rest)\n"
        "sys.argv = ['setup.py', '-q', 'build_ops']\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    built = run(sys.executable, "-W", "ignore", "-c", code)
    assert built.returncode == 1
    (line,) = built.stderr.strip().splitlines()
    assert "no TensorFlow" in line
    assert "pip install --no-build-isolation ." in line


def test_building_without_a_compiler_says_so_in_one_line():
    built = run(sys.executable, "-W", "ignore", "setup.py", "-q", "build_ops", CXX="no-such-compiler")
    assert built.returncode == 1
    (line,) = built.stderr.strip().splitlines()
    assert "no-such-compiler is missing" in line
    assert "apt-get install g++" in line
