"""Activations and error signals at a real network interface: at most 0.27 of the exact mode's bytes.

The file is both the test and, as a program, the worker that runs on each host. tests/parallel/test_wire_bytes.py does
the same for gradients.
"""

from __future__ import annotations

import json
import sys

import pytest

from hvd8bit.bench import netlab

WORKERS = 2
BATCH, WIDTH = 512, 2048  # 4 MB of float32
STEPS = 3
# What 8 bits may send of what exact mode sends, and what headers and acknowledgements may add to what is counted.
BOUND, OVERHEAD = 0.27, 0.03
BOUNDARIES = [("all_gather", "forward"), ("all_reduce", "forward"), ("copy", "backward"), ("scatter", "backward")]

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


@pytest.mark.parametrize(("primitive", "direction"), BOUNDARIES)
def test_a_quarter_of_the_bytes_cross_the_wire(measured, primitive, direction):
    for worker in measured:
        exact, coded = (worker[f"{primitive} {mode}"] for mode in ("exact", "eightbit"))
        assert coded["sent_bytes"] <= BOUND * exact["sent_bytes"]
        for found in (exact, coded):
            assert found["counted_bytes"] <= found["sent_bytes"] <= (1 + OVERHEAD) * found["counted_bytes"]


def work() -> None:
    """On each host: measures, and prints one line of JSON."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    import hvd8bit
    from hvd8bit import parallel
    from hvd8bit.collectives import reset_sent_bytes, sent_bytes

    hvd.init()
    assert hvd.size() == WORKERS
    part = tf.random.stateless_normal([BATCH, WIDTH // WORKERS], [1, hvd.rank()])
    whole = tf.random.stateless_normal([BATCH, WIDTH], [2, 2])
    found = {}
    for mode, compression in (("exact", None), ("eightbit", hvd8bit.EightBit)):
        for primitive, direction in BOUNDARIES:
            x = part if primitive == "all_gather" else whole
            settings = {"compression": compression, "name": primitive}
            if primitive in ("all_gather", "scatter"):
                settings["axis"] = 1
            if primitive == "all_gather":
                settings["sizes"] = [WIDTH // WORKERS] * WORKERS
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = getattr(parallel, primitive)(x, **settings)
            steps = []
            for _ in range(STEPS):
                hvd.allreduce(tf.ones(1), name="barrier")
                reset_sent_bytes()
                before = netlab.own_traffic()
                if direction == "forward":
                    getattr(parallel, primitive)(x, **settings)
                else:
                    tape.gradient(y, x, output_gradients=tf.ones_like(y) * y)
                hvd.allreduce(tf.ones(1), name="barrier")  # the others have received everything
                sent = (netlab.own_traffic() - before).sent_bytes
                steps.append({"sent_bytes": sent, "counted_bytes": sent_bytes()})
            # A burst of retransmissions adds to one step: the one that sent least counts.
            found[f"{primitive} {mode}"] = min(steps, key=lambda step: step["sent_bytes"])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    work()
