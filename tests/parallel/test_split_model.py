import keras
import launch
import pytest

for_keras3 = pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")

DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


@pytest.mark.parametrize("workers", [2])
def test_send_recv(workers):
    launch.run_cases(["cases_send_recv.py"], workers=workers)


@for_keras3
@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (3, 4))])
def test_split_model(workers):
    launch.run_cases(["cases_split_model.py"], workers=workers)


@for_keras3
def test_replicas():
    launch.run_cases(["cases_pipelines.py"], workers=4, env=DYNAMIC)
