"""Cases of FIELD-CASES.md that take a job of their own."""

from __future__ import annotations

import json

import launch

RESIZED = """
import json, os, sys
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
import hvd8bit, hvd8bit.keras

hvd.init()
rank = hvd.rank()
optimizer = hvd8bit.keras.DistributedOptimizer(
    keras.optimizers.SGD(1.0), compression=hvd8bit.EightBit(min_elements=0)
)
weight = keras.Variable(np.zeros(3000, "float32"), name="w")
optimizer.build([weight])
seen = []

def step():
    before = np.array(weight)
    optimizer.apply([tf.fill([3000], rank + 1.0)])
    tape_mean = hvd.allreduce(tf.fill([3000], rank + 1.0), compression=hvd8bit.EightBit(min_elements=0))
    seen.append([float((before - np.array(weight))[0]), float(tape_mean[0])])

step()
hvd.shutdown()
os.environ["HOROVOD_HOSTNAME"] += "-again"
if rank < 2:
    # The job of three becomes one of two, in the same processes, with the same optimizer.
    for name in ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"):
        os.environ[name] = "2"
    hvd.init()
    assert hvd.size() == 2
    step()
    hvd.shutdown()
print(json.dumps(seen))
"""


def test_nothing_of_the_old_world_is_left_after_a_restart():
    """FIELD-CASES D6."""
    result = launch.run_python(RESIZED, workers=3, timeout=120)
    for rank in range(3):
        expected = [[2.0, 2.0], [1.5, 1.5]]
        assert json.loads(result.stdout(rank).strip().splitlines()[-1]) == expected[: 1 if rank == 2 else 2]
