"""Settings of the unit tests: one process, no Horovod job, the same examples every time."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
import pytest

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
