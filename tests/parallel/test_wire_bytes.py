"""What really crosses the wire: bytes counted at the network interfaces of four hosts.

The file is both the test and, as a program, the worker that runs on each host.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import pytest

from hvd8bit.bench import netlab

WORKERS = 4
# The ring of an allreduce sends 2(N-1)/N elements per element and worker, so does the exchange of EightBit.
RING = 2 * (WORKERS - 1) / WORKERS
ELEMENTS = 25_000_000
STEPS = 3
# EightBit sends a byte per element and a float32 for each 1,024 of them: 1.506 bytes per element. The rest,
# up to this bound, is for headers, acknowledgements and Horovod's own negotiation (0.1 to 0.2 MB per second).
EIGHT_BIT_BOUND = 1.53
# What headers, acknowledgements and negotiation may add to the payload; 0.1 to 0.6 % seen. A burst of retransmissions
# or of small acknowledgements on a busy machine adds to one step: of several steps, the one that sent least counts.
OVERHEAD = 0.02
COUNTED_ELEMENTS = 6_000_000

MISSING = netlab.available()


@pytest.fixture(scope="module")
def measured():
    """By worker, what each printed."""
    if MISSING:
        pytest.skip(MISSING)
    with netlab.NetLab(WORKERS) as lab:
        job = lab.run([sys.executable, __file__], env={"TF_CPP_MIN_LOG_LEVEL": "2"}, timeout=400)
    assert job.returncode == 0, job.describe()
    workers = [json.loads(text.splitlines()[-1]) for text in job.stdout]
    for rank, worker in enumerate(workers):
        print(f"rank {rank}:", json.dumps(worker))
    return workers


@pytest.mark.parametrize(("compression", "payload"), [("none", 4 * RING), ("fp16", 2 * RING)])
def test_horovods_own_compressions_send_what_they_always_did(measured, compression, payload):
    for worker in measured:
        assert payload <= worker["allreduce"][compression]["sent_bytes_per_element"] < (1 + OVERHEAD) * payload


def test_eight_bit_sends_a_quarter(measured):
    for worker in measured:
        sent = worker["allreduce"]["eightbit"]["sent_bytes_per_element"]
        assert RING < sent <= EIGHT_BIT_BOUND


def test_the_exchange_measured_gave_the_sum(measured):
    for worker in measured:
        assert worker["allreduce"]["eightbit"]["mean_relative_error"] < 0.05
    assert len({worker["allreduce"]["eightbit"]["digest"] for worker in measured}) == 1


def test_allreduce_counts_what_it_sends(measured):
    for worker in measured:
        found = worker["allreduce"]["eightbit"]
        counted, sent = found["counted_bytes_per_element"], found["sent_bytes_per_element"]
        assert counted <= sent < (1 + OVERHEAD) * counted


@pytest.mark.parametrize("compression", ["none", "fp16", "eightbit"])
def test_reduce_gradients_counts_what_it_sends(measured, compression):
    for worker in measured:
        found = worker["reduce_gradients"][compression]
        counted, sent = found["counted_bytes_per_element"], found["sent_bytes_per_element"]
        assert counted <= sent < (1 + OVERHEAD) * counted


def work() -> None:
    """On each host: measures, and prints one line of JSON."""
    import horovod.tensorflow as hvd
    import numpy as np
    import tensorflow as tf

    import hvd8bit
    from hvd8bit.collectives import reset_sent_bytes, sent_bytes
    from hvd8bit.reduction import reduce_gradients

    hvd.init()
    assert hvd.size() == WORKERS
    compressions = {
        "none": hvd.Compression.none,
        "fp16": hvd.Compression.fp16,
        "eightbit": hvd8bit.EightBit,
    }

    def barrier() -> None:
        hvd.allreduce(tf.ones(1), name="barrier")

    def measure(step, elements: int, steps: int) -> dict:
        """The step that sent the fewest bytes, each counted from one barrier to the next."""
        measured = []
        for _ in range(steps):
            barrier()
            reset_sent_bytes()
            before, started = netlab.own_traffic(), time.monotonic()
            result = step()
            seconds = time.monotonic() - started
            barrier()  # the others have received everything
            sent = netlab.own_traffic() - before
            measured.append(
                {
                    "sent_bytes_per_element": sent.sent_bytes / elements,
                    "counted_bytes_per_element": sent_bytes() / elements,
                    "seconds_per_step": round(seconds, 3),
                    "digest": hashlib.sha256(result.numpy().tobytes()).hexdigest()[:16],
                    "result": result,
                }
            )
        assert len({one["counted_bytes_per_element"] for one in measured}) == 1
        assert len({one["digest"] for one in measured}) == 1
        return min(measured, key=lambda one: one["sent_bytes_per_element"])

    def tensor(elements: int) -> tf.Tensor:
        return tf.constant(np.random.default_rng(hvd.rank()).standard_normal(elements, dtype=np.float32))

    found: dict = {"allreduce": {}, "reduce_gradients": {}}
    x = tensor(ELEMENTS)
    for name, compression in compressions.items():

        def allreduce(name=name, compression=compression):
            return hvd.allreduce(x, op=hvd.Sum, compression=compression, name=f"allreduce.{name}")

        # Gloo adds halves one by one on the CPU: one step of fp16 takes as long as ten of float32.
        found["allreduce"][name] = measure(allreduce, ELEMENTS, steps=1 if name == "fp16" else STEPS)

    exact = found["allreduce"]["none"]["result"].numpy()
    error = np.abs(found["allreduce"]["eightbit"]["result"].numpy() - exact)
    found["allreduce"]["eightbit"]["mean_relative_error"] = float(error.mean() / np.abs(exact).mean())

    x = tensor(COUNTED_ELEMENTS)
    for name, compression in compressions.items():

        def reduce(name=name, compression=compression):
            return reduce_gradients([x], ["x"], compression=compression, op=hvd.Sum, scope=name)[0]

        reduce()  # the agreement on the plan is no part of a step
        found["reduce_gradients"][name] = measure(reduce, COUNTED_ELEMENTS, STEPS)

    for kind in found.values():
        for values in kind.values():
            del values["result"]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    work()
