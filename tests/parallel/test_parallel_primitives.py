import launch
import pytest


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_primitives(workers):
    launch.run_cases(["cases_primitives.py"], workers=workers, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
