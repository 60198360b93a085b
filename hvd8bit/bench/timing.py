"""Times what several workers do together: cases take turns, and the slowest worker's time counts.

A case is a function that all workers call. In each round every case runs once, between barriers, so that a
disturbance of the machine hits all cases alike and their ratios stay.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Callable

import numpy as np
import tensorflow as tf

from hvd8bit.bench import netlab

MIN_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Samples:
    """What was seen of one case.

    Attributes:
      seconds: of the slowest worker, by round.
      bytes_sent: at this worker's network interface from barrier to barrier, mean of the rounds and workers;
        None where it cannot be read.
    """

    seconds: tuple[float, ...]
    bytes_sent: float | None

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(90th - 10th percentile) / median."""
        low, high = np.percentile(self.seconds, [10, 90])
        return float(high - low) / self.median_s


def start() -> None:
    """Starts Horovod; each worker of a host takes a GPU of its own, where there are any."""
    import horovod.tensorflow as hvd

    hvd.init()
    # A benchmark traces the same step for each compression; TensorFlow takes it for an oversight.
    tf.get_logger().setLevel("ERROR")
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")


def interleaved(
    cases: Mapping[str, Callable[[], object]],
    rounds: int,
    budget_s: float,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Samples]:
    """Times the cases in turn, after one round to warm up. All workers must call it with the same cases.

    Args:
      cases: name -> what to time.
      rounds: how often at the most.
      budget_s: fewer rounds where these would take longer, but not fewer than `MIN_ROUNDS`.
      progress: called with a line of text now and then.
    """
    import horovod.tensorflow as hvd

    seconds: dict[str, list[float]] = {name: [] for name in cases}
    sent: dict[str, list[int]] = {name: [] for name in cases}
    readable = _interface_is_ours()

    def one_round(order: Sequence[str]) -> float:
        begin = time.perf_counter()
        for name in order:
            barrier()
            before = netlab.own_traffic().sent_bytes if readable else 0
            started = time.perf_counter()
            result = cases[name]()
            _finish()
            seconds[name].append(time.perf_counter() - started)
            del result  # the next case finds the memory free
            barrier()
            sent[name].append(netlab.own_traffic().sent_bytes - before if readable else 0)
        return time.perf_counter() - begin

    names = list(cases)
    one_round(names)  # traces
    for name in names:
        seconds[name].clear()
        sent[name].clear()
    took = one_round(names)
    affordable = int(budget_s / took)
    rounds = hvd.broadcast_object(max(MIN_ROUNDS, min(rounds, affordable)), root_rank=0)
    progress(f"{rounds} rounds of {took:.3g} s")
    for number in range(1, rounds):
        # Forth and back: no case always follows the same other one.
        one_round(names if number % 2 == 0 else names[::-1])
    everyone = hvd.allgather_object((seconds, sent, readable))
    return {
        name: Samples(
            tuple(max(worker[0][name][k] for worker in everyone) for k in range(rounds)),
            float(np.mean([worker[1][name] for worker in everyone])) if all(worker[2] for worker in everyone) else None,
        )
        for name in names
    }


def barrier() -> None:
    """Returns when all workers have come here."""
    import horovod.tensorflow as hvd

    hvd.allreduce(tf.zeros(1), name="hvd8bit_bench_barrier")


def rate_bit_per_s(given: float | None) -> float | None:
    """The rate of this worker's host's link: what was given, else what the netlab set, else None."""
    told = os.environ.get(netlab.RATE_VARIABLE)
    return given if given is not None else (float(told) if told else None)


def workers_per_host() -> int:
    """How many share a host's link, the largest number of them. All workers must call it."""
    import horovod.tensorflow as hvd

    return max(hvd.allgather_object(hvd.local_size(), name="hvd8bit_bench_workers_per_host"))


def _interface_is_ours() -> bool:
    """Whether the counters at the interface tell what this worker sends: it has the host to itself."""
    import horovod.tensorflow as hvd

    # Workers of one host reach each other past the interface.
    if hvd.local_size() > 1 or os.environ.get("HOROVOD_GLOO_IFACE", netlab.INTERFACE) != netlab.INTERFACE:
        return False
    try:
        netlab.own_traffic()
    except (OSError, ValueError):
        return False
    return True


def _finish() -> None:
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()
