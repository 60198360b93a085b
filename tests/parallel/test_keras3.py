import importlib.util

import launch
import pytest

FILES = ["cases_keras3.py", "cases_keras_callbacks.py", "cases_keras_choices.py"]
if importlib.util.find_spec("tf_keras") is not None:
    FILES.append("cases_keras_tf_keras.py")


@pytest.mark.parametrize(("workers", "files"), [(1, FILES), (2, FILES), (3, [FILES[0], FILES[2]])], ids=["1", "2", "3"])
def test_keras(workers, files):
    launch.run_cases(files, workers=workers, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
