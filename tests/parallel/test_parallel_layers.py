import importlib.util

import launch
import pytest

DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


@pytest.mark.parametrize(
    "workers", [1, 2, pytest.param(3, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)]
)
def test_layers(workers):
    launch.run_cases(["cases_layers.py"], workers=workers, env=DYNAMIC)


@pytest.mark.soak
def test_layers_in_keras_hands():
    """Three workers: parts of different sizes."""
    launch.run_cases(["cases_layers_keras.py"], workers=3)


@pytest.mark.soak
def test_layers_of_keras_2():
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("tf_keras is not installed")
    files = ["cases_layers.py", "cases_layers_keras.py"]
    launch.run_cases(files, workers=2, env={**DYNAMIC, "TF_USE_LEGACY_KERAS": "1"}, label="Keras 2")
