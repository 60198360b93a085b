import launch
import pytest

CASES = ["cases_allreduce.py"]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_horovods_own_calls(workers):
    launch.run_cases(CASES, workers=workers)
