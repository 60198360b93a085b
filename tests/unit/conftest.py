"""Settings of the unit tests: one process, no Horovod job, the same examples every time."""

import os
import pathlib
import platform
import shutil
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))

import hypothesis
import pytest

if "HVD8BIT_TEST_LIBRARY" in os.environ:  # test_cuda_ops.py has these tests run with another op library
    from hvd8bit import native

    native.LIBRARY = pathlib.Path(os.environ["HVD8BIT_TEST_LIBRARY"])

# A shared machine is slow at times, and a failure should come back when the test is run again.
hypothesis.settings.register_profile(
    "hvd8bit",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("hvd8bit")


@pytest.fixture
def rng():
    """Random numbers that are the same in every run."""
    import numpy as np

    return np.random.default_rng(20161)


@pytest.fixture(scope="session")
def emulated_cuda(tmp_path_factory):
    """The codec's C library with the CUDA kernels compiled for the host (tests/cc/cuda_emulation)."""
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("CUDA is emulated with g++ on x86-64 alone")
    from build import build
    from hvd8bit import native

    path = tmp_path_factory.mktemp("emulated") / "libhvd8bit_codec.so"
    build(path, emulate=True)
    return native.open_c_library(path)
