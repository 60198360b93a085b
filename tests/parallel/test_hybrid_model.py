import launch
import pytest


@pytest.mark.parametrize("workers", [2])
def test_hybrid_model(workers):
    launch.run_cases(["cases_hybrid_model.py"], workers=workers, timeout=580)
