import launch
import pytest


@pytest.mark.parametrize(
    "workers",
    [
        1,
        2,
        pytest.param(3, marks=pytest.mark.soak),
        pytest.param(4, marks=pytest.mark.soak),
    ],
)
def test_primitives(workers):
    launch.run_cases(["cases_primitives.py"], workers=workers, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
