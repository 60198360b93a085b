"""Trains small models for many steps on every worker and compares the workers' digests on the way.

Mixed precision with overflows planted on one worker or another, gradient accumulation, an embedding, buckets of several
gradients (hvd8bit's optimizer), and groups behind Horovod's own tape. Prints one JSON line: digests, memory, scale.
"""

from __future__ import annotations

import gc
import hashlib
import json
import resource
import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvd8bit
import hvd8bit.keras

STEPS, EVERY = int(sys.argv[1]), int(sys.argv[2])

hvd.init()
keras.utils.set_random_seed(1)
policy = keras.DTypePolicy("mixed_float16")
model = keras.Sequential(
    [
        keras.Input((8,), dtype="int32"),
        keras.layers.Embedding(100, 16, dtype=policy),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="tanh", dtype=policy),
        keras.layers.Dense(4, dtype="float32"),
    ]
)
select = hvd8bit.Selection(min_elements=0, sparse="compress", exclude="*dense_1/bias", start_step=100)
optimizer = keras.optimizers.LossScaleOptimizer(
    hvd8bit.keras.DistributedOptimizer(
        keras.optimizers.Adam(0.003, gradient_accumulation_steps=2), compression=hvd8bit.EightBit(select=select)
    ),
    dynamic_growth_steps=20,
)
optimizer.build(model.trainable_variables)
weights = [tf.Variable(tf.random.stateless_normal([40, 30], [i, i]), name=f"w{i}") for i in range(5)]
momenta = [tf.Variable(tf.zeros([40, 30]), name=f"m{i}") for i in range(5)]


@tf.function(
    input_signature=[
        tf.TensorSpec([16, 8], tf.int32),
        tf.TensorSpec([16, 4]),
        tf.TensorSpec([16, 40]),
        tf.TensorSpec([]),
    ]
)
def step(tokens, labels, x, overflow):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(tokens) - labels)) * overflow
        scaled = optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, [v.value for v in model.trainable_variables])
    optimizer.apply(gradients, model.trainable_variables)
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_mean(tf.square(x @ w)) for w in weights])
    tape = hvd.DistributedGradientTape(tape, compression=hvd8bit.EightBit(min_elements=0), groups=2)
    for w, m, gradient in zip(weights, momenta, tape.gradient(loss, weights)):
        m.assign(0.9 * m + gradient)
        w.assign_sub(0.01 * m)


def digest() -> str:
    # Accumulated gradients are each worker's own until they travel.
    state = [
        v for v in [*model.variables, *optimizer.variables] if "accumulator" not in v.path and "seed" not in v.path
    ]
    arrays = [np.asarray(v) for v in state] + [v.numpy() for v in [*weights, *momenta]]
    assert all(np.isfinite(array).all() for array in arrays)
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()[:16]


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


random = np.random.default_rng(hvd.rank())
planted = np.random.default_rng(5)  # the same on all workers: who overflows, and when
digests, memory, scales = [], [], []
for number in range(1, STEPS + 1):
    victim = int(planted.integers(0, hvd.size())) if planted.random() < 0.02 else -1
    tokens = random.integers(0, 100, (16, 8)).astype(np.int32)
    labels = np.repeat(tokens.mean(1, keepdims=True) / 50 - 1, 4, 1).astype(np.float32)
    x = random.standard_normal((16, 40)).astype(np.float32)
    step(tokens, labels, x, np.float32(np.inf if victim == hvd.rank() else 1.0))
    if number % EVERY == 0:
        digests.append(digest())
        memory.append(resident())
        scales.append(float(optimizer.dynamic_scale.value))
iterations = int(optimizer.inner_optimizer._iterations.value)
print(json.dumps({"digests": digests, "memory": memory, "scales": scales, "iterations": iterations}))
