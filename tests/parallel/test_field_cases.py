"""Cases of FIELD-CASES.md that take a job of their own: restarts, large tensors, XLA."""

from __future__ import annotations

import json

import launch
import pytest

RESIZED = """
import json, os, sys
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import hvd8bit, hvd8bit.keras

hvd.init()
rank = hvd.rank()
optimizer = hvd8bit.keras.DistributedOptimizer(
    tf.keras.optimizers.SGD(1.0), compression=hvd8bit.EightBit(min_elements=0)
)
layer = tf.keras.layers.Dense(3000, use_bias=False, kernel_initializer="zeros")
layer.build([None, 1])
(weight,) = layer.trainable_variables
seen = []

def step():
    before = np.array(weight)[0]
    optimizer.apply_gradients([(tf.fill([1, 3000], rank + 1.0), weight)])
    tape_mean = hvd.allreduce(tf.fill([3000], rank + 1.0), compression=hvd8bit.EightBit(min_elements=0))
    seen.append([float((before - np.array(weight)[0])[0]), float(tape_mean[0])])

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


XLA = """
import horovod.tensorflow as hvd
import tensorflow as tf
import hvd8bit

hvd.init()
w = tf.Variable(tf.zeros([2000]))
compression = hvd8bit.EightBit(min_elements=0)
wrappers = {"ours": hvd8bit.DistributedGradientTape, "horovods": hvd.DistributedGradientTape}

def step(x, wrapper):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.exp(tf.tanh(w) * 0.5) * x)
    (gradient,) = wrappers[wrapper](tape, compression=compression).gradient(loss, [w])
    w.assign_sub(gradient)
    return gradient

x = tf.fill([2000], hvd.rank() + 1.0)
for wrapper in wrappers:
    w.assign(tf.zeros([2000]))
    assert abs(float(tf.function(step)(x, wrapper)[0]) - 0.75) < 1e-6
    assert abs(float(w[0]) + 0.75) < 1e-6
    try:
        tf.function(step, jit_compile=True)(x, wrapper)
    except tf.errors.InvalidArgumentError as error:
        assert "unsupported operations" in str(error), error
        print(wrapper, "refused")
"""


def test_xla_where_tensorflow_chooses_what_to_compile():
    """FIELD-CASES G4: with automatic clustering a step trains; told to compile all of it, TensorFlow refuses."""
    clusters = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_min_cluster_size=1"
    result = launch.run_python(XLA, workers=2, timeout=120, env={"TF_XLA_FLAGS": clusters})
    for rank in range(2):
        assert result.stdout(rank).split("\n")[:2] == ["ours refused", "horovods refused"]


LARGE = """
import json, resource, sys, time
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import hvd8bit
from hvd8bit import layout

hvd.init()
elements, steps = int(sys.argv[1]), int(sys.argv[2])
compression = hvd8bit.EightBit(exchange="scatter_reduce")

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

x = tf.random.stateless_normal([elements], [hvd.rank(), 7])

@tf.function
def reduce(x, compression):
    return hvd.allreduce(x, op=hvd.Sum, compression=compression, name="large")

plain = reduce(x, hvd.Compression.none)
del plain
peak_plain = peak()
whole = reduce(x, compression).numpy()
peaks = [peak()]
for _ in range(steps - 1):
    reduce(x, compression)
    peaks.append(peak())

# The same data in 16 parts on borders of blocks, each cut in two where the whole is.
equal = True
if "parts" in sys.argv:
    n = hvd.size()
    cut = elements // n
    pieces = [whole[k * cut : (k + 1) * cut] for k in range(n)]
    for k in range(n):
        size = cut // 8
        for part in range(8):
            start = k * cut + part * size
            got = hvd8bit.allreduce(x[start : start + size], op=hvd.Sum, compression=compression, name="part").numpy()
            equal = equal and np.array_equal(got, whole[start : start + size])
print(json.dumps({"equal": equal, "plain": peak_plain, "first": peaks[0], "last": peaks[-1]}))
"""


def large(elements, steps, *more, workers=2, timeout=300.0):
    result = launch.run_python(LARGE, str(elements), str(steps), *more, workers=workers, timeout=timeout)
    return [json.loads(result.stdout(rank).strip().splitlines()[-1]) for rank in range(workers)]


@pytest.mark.parametrize("elements", [8 * 2**20, pytest.param(64 * 2**20, marks=pytest.mark.soak)])
def test_large_tensors_equal_their_parts(elements):
    """FIELD-CASES D8: bit for bit."""
    for seen in large(elements, 1, "parts"):
        assert seen["equal"]
