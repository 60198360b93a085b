"""Activations and error signals at a real network interface: at most 0.27 of the exact mode's bytes, each of them.

The file is both the test and, as a program, the worker that runs on each host. tests/parallel/test_wire_bytes.py does
the same for gradients.
"""

from __future__ import annotations

import functools
import json
import sys

import keras
import pytest

from hvd8bit.bench import netlab

WORKERS = 2
MEGABYTES = (1, 4)
STEPS = 8
BOUND = 0.27
# What headers, acknowledgements, negotiation, and a model's labels and logs add to what the exact mode has to send.
OVERHEAD = 0.06

# Boundary and direction -> what each worker sends of an activation, in exact mode. Senders that differ are by rank.
SENT = {
    ("all_gather", "forward"): (0.5, 0.5),
    ("all_gather, sum", "backward"): (0.5, 0.5),
    ("all_reduce", "forward"): (1, 1),
    ("copy", "backward"): (1, 1),
    ("reduce_scatter", "forward"): (0.5, 0.5),
    ("reduce_scatter", "backward"): (0.5, 0.5),
    ("scatter", "backward"): (0.5, 0.5),
    ("send_recv", "forward"): (1, 0),
    ("send_recv", "backward"): (0, 1),
    # One step: activations are all that the first stage sends, but for labels, and error signals all of the second's.
    ("SplitModel", "step"): (1, 1),
}
if keras.__version__ < "3":
    del SENT["SplitModel", "step"]

MISSING = netlab.available()


@pytest.fixture(scope="module")
def measured():
    """By worker, what each printed."""
    if MISSING:
        pytest.skip(MISSING)
    with netlab.NetLab(WORKERS) as lab:
        job = lab.run([sys.executable, __file__], env={"TF_CPP_MIN_LOG_LEVEL": "2"}, timeout=300)
    assert job.returncode == 0, job.describe()
    return [json.loads(text.splitlines()[-1]) for text in job.stdout]


@pytest.mark.parametrize("megabytes", MEGABYTES)
@pytest.mark.parametrize(("boundary", "direction"), SENT)
def test_a_quarter_of_the_bytes_cross_the_wire(measured, boundary, direction, megabytes):
    for worker, share in zip(measured, SENT[boundary, direction]):
        if share:
            exact, coded = (worker[f"{boundary} {direction} {megabytes} {mode}"] for mode in ("exact", "eightbit"))
            assert share <= exact / (megabytes * 2**20) <= (1 + OVERHEAD) * share
            assert 0.25 < coded / exact <= BOUND


def work() -> None:
    """On each host: measures, and prints one line of JSON."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import hvd8bit

    hvd.init()
    assert hvd.size() == WORKERS

    def least_sent(step) -> int:
        """Bytes at the interface from barrier to barrier. Retransmissions, and negotiation while the machine is busy,
        add to a step: the one that sent least counts."""
        sent = []
        for _ in range(STEPS):
            hvd.allreduce(tf.ones(1), name="barrier")
            before = netlab.own_traffic().sent_bytes
            step()
            hvd.allreduce(tf.ones(1), name="barrier")  # the others have received everything
            sent.append(netlab.own_traffic().sent_bytes - before)
        return min(sent)

    found = {}
    for megabytes in MEGABYTES:
        for mode, compression in (("exact", None), ("eightbit", hvd8bit.EightBit)):
            for boundary, direction in SENT:
                if boundary == "SplitModel":
                    step = split_model_step(megabytes, compression)
                else:
                    step = exchange_of(boundary, megabytes, compression)[direction]
                found[f"{boundary} {direction} {megabytes} {mode}"] = least_sent(step)
    print(json.dumps(found), flush=True)


def exchange_of(boundary: str, megabytes: int, compression) -> dict:
    """Direction -> a function that runs a primitive, or its gradient, for an activation of so many MB."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd8bit import parallel

    rows, columns = 128 * megabytes, 2048
    part = tf.random.stateless_normal([rows, columns // WORKERS], [1, hvd.rank()])
    whole = tf.random.stateless_normal([rows, columns], [2, 2])
    sizes = {"axis": 1, "sizes": [columns // WORKERS] * WORKERS}
    name, x, settings = {
        "all_gather": ("all_gather", part, sizes),
        "all_gather, sum": ("all_gather", part, {**sizes, "gradient": "sum"}),
        "all_reduce": ("all_reduce", whole, {}),
        "copy": ("copy", whole, {}),
        "reduce_scatter": ("reduce_scatter", whole, sizes),
        "scatter": ("scatter", whole, sizes),
        "send_recv": ("send_recv", whole, {"source": 0, "destination": 1}),
    }[boundary]
    forward = functools.partial(getattr(parallel, name), x, compression=compression, name=name, **settings)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = forward()
    return {"forward": forward, "backward": lambda: tape.gradient(y, x, output_gradients=y)}


def split_model_step(megabytes: int, compression):
    """A training step of two stages with so many MB between them."""
    import numpy as np

    from hvd8bit.parallel import SplitModel

    rows, columns = 128 * megabytes, 2048
    stages = [[keras.layers.Dense(columns)], [keras.layers.Dense(10)]]
    model = SplitModel(stages, micro_batches=2, compression=compression)
    model.compile(keras.optimizers.SGD(0.001), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    images = np.random.default_rng(0).standard_normal((rows, 16), dtype=np.float32)
    labels = np.arange(rows) % 10
    return lambda: model.train_on_batch(images, labels)


if __name__ == "__main__":
    work()
