"""How nvcc is found, what of it counts, and what is said where it is missing. Toolkits here are scripts."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import cuda_toolkit
from cuda_toolkit import CudaError, find

DEFAULT = ["75", "80", "90", "120"]


@pytest.fixture
def toolkit(tmp_path):
    """A folder that looks like a toolkit of CUDA 12.4, which knows neither 75 nor 120."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcudart_static.a").touch()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "--version) echo 'Cuda compilation tools, release 12.4, V12.4.131';;\n"
        "--list-gpu-arch) echo compute_80; echo compute_90; echo compute_100;;\n"
        f"--dryrun) echo '#$ TOP={tmp_path}/bin/..' >&2;;\n"
        "esac\n"
    )
    nvcc.chmod(0o755)
    return tmp_path


@pytest.fixture(autouse=True)
def no_other_nvcc(monkeypatch):
    """As on a machine without one."""
    which = cuda_toolkit.shutil.which
    monkeypatch.setattr(
        cuda_toolkit.shutil, "which", lambda name: None if name in ("nvcc", "/usr/local/cuda/bin/nvcc") else which(name)
    )


@pytest.mark.parametrize("variable", ["NVCC", "CUDA_HOME"])
def test_the_default_is_what_nvcc_knows(toolkit, variable):
    where = {"NVCC": str(toolkit / "bin" / "nvcc"), "CUDA_HOME": str(toolkit)}[variable]
    found = find(DEFAULT, {variable: where})
    assert found.version == "12.4"
    assert found.architectures == ("sm_80", "sm_90", "compute_90")
    assert found.flags == (
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    )
    assert found.static_runtime == str((toolkit / "lib64" / "libcudart_static.a").resolve())


@pytest.mark.parametrize("asked", ["100,80", "10.0, 8.0"])
def test_architectures_by_name(toolkit, asked):
    found = find(DEFAULT, {"CUDA_HOME": str(toolkit), "HVD8BIT_CUDA_ARCHS": asked})
    assert found.architectures == ("sm_100", "sm_80", "compute_100")


@pytest.mark.parametrize("asked", ["75", "80,sm_90", ","])
def test_architectures_that_nvcc_does_not_know(toolkit, asked):
    with pytest.raises(CudaError, match=r"HVD8BIT_CUDA_ARCHS must name .* knows \(80, 90, 100\).*got '"):
        find(DEFAULT, {"CUDA_HOME": str(toolkit), "HVD8BIT_CUDA_ARCHS": asked})


def test_switched_off(toolkit):
    assert find(DEFAULT, {"CUDA_HOME": str(toolkit), "HVD8BIT_CUDA": "0"}) is None


def test_without_nvcc_nothing_is_built():
    assert find(DEFAULT, {}) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "there is no nvcc on PATH"),
        ({"NVCC": "/no/such/nvcc"}, "NVCC names /no/such/nvcc, which is not there"),
        ({"NVCC": "false"}, "false --version failed with status 1"),
    ],
)
def test_asked_for_and_missing(environment, message):
    with pytest.raises(CudaError, match="HVD8BIT_CUDA=1, but .*" + message):
        find(DEFAULT, {**environment, "HVD8BIT_CUDA": "1"})


def test_a_toolkit_without_the_static_runtime(toolkit):
    (toolkit / "lib64" / "libcudart_static.a").unlink()
    assert find(DEFAULT, {"CUDA_HOME": str(toolkit)}) is None
    with pytest.raises(CudaError, match=r"lacks libcudart_static\.a"):
        find(DEFAULT, {"CUDA_HOME": str(toolkit), "HVD8BIT_CUDA": "1"})


def test_a_variable_that_is_neither():
    with pytest.raises(CudaError, match="HVD8BIT_CUDA must be 0, 1 or unset, got 'yes'"):
        find(DEFAULT, {"HVD8BIT_CUDA": "yes"})
