"""Workers that go their own way: the others end within a minute, with a cause in their output."""

from __future__ import annotations

import json

import launch
import pytest

ALONE = """
import json, sys, time
import horovod.tensorflow as hvd
import tensorflow as tf
import hvd8bit
from hvd8bit import reduction

hvd.init()
elements = int(sys.argv[1])

def reduce(names):
    gradients = [tf.ones([elements])] * len(names)
    return reduction.reduce_gradients(gradients, names, compression=hvd8bit.EightBit, scope="alone")

for _ in range(3):
    reduce(["a", "b"])
began, raised = time.monotonic(), ""
try:
    # The last worker has a new list; the others go on with the old one.
    reduce(["a", "b", "c"] if hvd.rank() == hvd.size() - 1 else ["a", "b"])
except Exception as error:
    raised = f"{type(error).__name__}: {error}"
print(json.dumps({"raised": raised, "seconds": time.monotonic() - began}))
"""


def test_a_worker_alone_with_a_new_plan_is_noticed_at_once():
    """The others wait in an exchange whose name it knows."""
    result = launch.run_python(ALONE, "2000", workers=3, timeout=120)
    seen = [json.loads(result.stdout(rank).strip().splitlines()[-1]) for rank in range(3)]
    assert all(worker["seconds"] < 20 for worker in seen), seen
    assert seen[2]["raised"].startswith("RuntimeError: rank 2 has a new list of gradients"), seen[2]
    assert "others go on with an older one instead of comparing it" in seen[2]["raised"]
    assert "others go on with an older one" in result.stderr(2)
    assert all("Mismatched" in worker["raised"] or "shut down" in worker["raised"] for worker in seen[:2]), seen


def test_a_worker_alone_with_a_new_plan_ends_the_job_in_time():
    """Nothing is encoded, so that nothing is noticed at once."""
    result = launch.run_python(ALONE, "20", workers=3, timeout=120, env={"HVD8BIT_STALL_TIMEOUT_SECONDS": "15"})
    seen = [json.loads(result.stdout(rank).strip().splitlines()[-1]) for rank in range(3)]
    assert all(14 < worker["seconds"] < 60 for worker in seen), seen
    assert seen[2]["raised"].startswith("RuntimeError: rank 2 has a new list of gradients"), seen[2]
    assert "HVD8BIT_STALL_TIMEOUT_SECONDS" in seen[2]["raised"]
    assert all("shut down" in worker["raised"] for worker in seen[:2]), seen
    assert "waits 8 s for the others to compare it" in result.stderr(2)
    assert "waits" not in result.stderr(0)


DIFFERENT = """
import json, sys, time
import horovod.tensorflow as hvd
import tensorflow as tf
import hvd8bit

hvd.init()
other = hvd.rank() == 1
case = sys.argv[1]
shape = [2001] if other and case == "shape" else [2000]
dtype = "float16" if other and case == "dtype" else "float32"
count = 2 if other and case == "number" else 1
compression = hvd8bit.EightBit(block_size=512) if other and case == "settings" else hvd8bit.EightBit
variables = [tf.Variable(tf.zeros(shape, dtype), name=f"weight{i}") for i in range(count)]

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in variables])
    return hvd8bit.DistributedGradientTape(tape, compression=compression).gradient(loss, variables)

step()
"""


@pytest.mark.parametrize(
    ("case", "named"),
    [("shape", "2001"), ("dtype", "float16"), ("number", "no such gradient"), ("settings", "block_size=512")],
)
def test_workers_that_differ_end_with_the_cause(case, named):
    """FIELD-CASES D7, as a job of its own: every worker's error names it, and nobody is left waiting."""
    result = launch.run_python(DIFFERENT, case, workers=2, timeout=60, check=False)
    assert result.problem is None, result.describe()
    assert result.returncode != 0
    told = [rank for rank in range(2) if "workers differ in" in result.stderr(rank) and named in result.stderr(rank)]
    # The launcher ends the others as soon as one has ended.
    assert told, result.describe()
