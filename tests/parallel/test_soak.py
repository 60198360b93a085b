from __future__ import annotations

import keras
import launch
import pytest

pytestmark = pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")


@pytest.mark.timeout(3700)
@pytest.mark.parametrize(
    ("steps", "every"), [(1000, 250), pytest.param(10_000, 1000, marks=pytest.mark.soak)], ids=["short", "long"]
)
def test_replicas_stay_equal_and_memory_flat(steps, every, record_soak):
    result = launch.run_python("tests/parallel/training_soak.py", str(steps), str(every), workers=3, timeout=3600)
    seen = [result.json(rank) for rank in range(3)]
    digests = [worker["digests"] for worker in seen]
    assert digests[0] == digests[1] == digests[2]
    assert len(digests[0]) == steps // every
    assert len(set(digests[0])) == len(digests[0]), "weights move"
    # Planted overflows were skipped by all, and others were not.
    assert all(0.5 * steps < worker["iterations"] < steps for worker in seen)
    assert len({tuple(worker["scales"]) for worker in seen}) == 1
    grown = [worker["memory"][-1] - worker["memory"][0] for worker in seen]
    record_soak(
        "training", {"steps": steps, "workers": 3, "every": every, "digests": digests[0], "memory_grown": grown}
    )
    assert max(grown) < 20e6, [worker["memory"] for worker in seen]
