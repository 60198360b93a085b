import importlib.util

import launch
import pytest


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_horovods_keras_optimizer(workers):
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("tf_keras is not installed")
    launch.run_cases(["cases_keras2.py"], workers=workers, env={"TF_USE_LEGACY_KERAS": "1"})
