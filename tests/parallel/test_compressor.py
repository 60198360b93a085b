import launch
import pytest


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_horovods_calls_and_our_wrappers(workers):
    files = ["cases_allreduce.py", "cases_wrappers.py", "cases_choices.py", "cases_feedback.py"]
    launch.run_cases(files, workers=workers, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
