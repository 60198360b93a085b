import keras
import launch
import pytest

for_keras3 = pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")


@for_keras3
@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3, 4))])
def test_hybrid_model(workers):
    launch.run_cases(["cases_hybrid_model.py"], workers=workers)
