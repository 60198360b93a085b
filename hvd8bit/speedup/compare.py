"""32, 16 and 8 bit side by side: which is best, from where on compression does not pay, and why."""

from __future__ import annotations

import dataclasses

from hvd8bit.speedup import units
from hvd8bit.speedup.cluster import BITS, Cluster, Link
from hvd8bit.speedup.predict import Prediction, Scheme, predict
from hvd8bit.speedup.workload import Workload

WORTH_IT = 0.01
"""Fewer bits must make a step this share shorter to be called better: no prediction is closer."""
_SLOWEST, _FASTEST = 1e4, 1e13  # bytes per second, between which the break-even is looked for
_STEP = 2.0  # from one bandwidth to the next one that is tried


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the model advises for a number of workers.

    Attributes:
      workers: N.
      predictions: by bits, those that the cluster knows.
      best_bits: with the shortest step; more bits where fewer gain less than `WORTH_IT`.
      eight_bit_gain: how much shorter 8 bit makes the step than the better of 32 and 16, as a share; below 0,
        longer.
      pays_below_bytes_per_s: up to which bandwidth 8 bit is the best, seen from the cluster's own: where it is the
        best there, the next bandwidth above at which it is not, infinite if there is none; else the next one below
        at which it is, 0 if there is none.
      reason: why the best is the best, in words.
    """

    workers: int
    predictions: dict[int, Prediction]
    best_bits: int
    eight_bit_gain: float
    pays_below_bytes_per_s: float
    reason: str


def compare(workload: Workload, cluster: Cluster, scheme: Scheme = "data") -> Verdict:
    """Predicts for all bits that the cluster knows and weighs them.

    Arguments and errors as `predict`; ValueError also where the cluster does not know both 32 and 8 bit.
    """
    if not {32, 8} <= set(cluster.bits):
        raise ValueError(
            f"bits must have 32 and 8, which are compared, got {', '.join(map(str, cluster.bits))}: a profile needs "
            "exchanges in both, of two rounds in 8 bit (exchange: scatter_reduce); hvd8bit bench exchange measures them"
        )
    predictions = _predictions(workload, cluster, scheme)
    best = _best(predictions)
    return Verdict(
        workers=cluster.workers,
        predictions=predictions,
        best_bits=best,
        eight_bit_gain=_gain(predictions),
        pays_below_bytes_per_s=_break_even(workload, cluster, scheme),
        reason=_reason(predictions, best),
    )


def _predictions(workload: Workload, cluster: Cluster, scheme: Scheme) -> dict[int, Prediction]:
    return {bits: predict(workload, cluster, scheme, bits) for bits in BITS if bits in cluster.bits}


def _best(predictions: dict[int, Prediction]) -> int:
    best = 32
    for bits, prediction in predictions.items():
        if prediction.step_s < (1 - WORTH_IT) * predictions[best].step_s:
            best = bits
    return best


def _gain(predictions: dict[int, Prediction]) -> float:
    return 1 - predictions[8].step_s / min(prediction.step_s for bits, prediction in predictions.items() if bits > 8)


def _break_even(workload: Workload, cluster: Cluster, scheme: Scheme) -> float:
    """`Verdict.pays_below_bytes_per_s`: what 8 bit gains may rise and fall with the bandwidth, and is followed."""
    link = cluster.between if cluster.nodes > 1 else cluster.within
    if cluster.workers == 1 or link is None:
        return 0.0

    def pays(bandwidth: float) -> bool:
        return _best(_predictions(workload, _with_bandwidth(cluster, bandwidth), scheme)) == 8

    low = high = link.bandwidth_bytes_per_s
    if pays(low):
        while pays(high):
            if high >= _FASTEST:
                return float("inf")
            low, high = high, high * _STEP
    else:
        while not pays(low):
            if low <= _SLOWEST:
                return 0.0
            low, high = low / _STEP, low
    while high / low > 1.005:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _with_bandwidth(cluster: Cluster, bytes_per_s: float) -> Cluster:
    """Another bandwidth for the link that limits: between the nodes, or inside the only one."""
    if cluster.nodes == 1 and cluster.within is not None:
        return dataclasses.replace(cluster, within=Link(bytes_per_s, cluster.within.latency_s))
    latency_s = cluster.between.latency_s if cluster.between is not None else 0.0
    return dataclasses.replace(cluster, between=Link(bytes_per_s, latency_s))


def _reason(predictions: dict[int, Prediction], best: int) -> str:
    show = units.show_seconds
    wide, narrow = predictions[32], predictions[8]
    if not wide.cost.total_s:
        return "one worker exchanges nothing"
    if wide.exposed_s < WORTH_IT * wide.step_s:
        return f"32 bit's exchange, {show(wide.exchange_s)}, hides under the computing: nothing to gain"
    if best == 8:
        left = narrow.exposed_s
        return f"exchange adds {show(wide.exposed_s)} to the step with 32 bit, {show(left)} with 8" + (
            "" if left < WORTH_IT * narrow.step_s else f", by now mostly {_largest(narrow)}"
        )
    rival = predictions[best]
    if narrow.step_s < rival.step_s * (1 + WORTH_IT):
        return f"8 bit gains nothing over {best}: what is left is {_largest(narrow)}"
    more = {
        "coding": narrow.cost.coding_s - rival.cost.coding_s,
        "latency of more messages": narrow.cost.latency_s - rival.cost.latency_s,
        "transport": narrow.cost.transport_s - rival.cost.transport_s,
        "bytes on a shared link": narrow.cost.bandwidth_s - rival.cost.bandwidth_s,
    }
    name = max(more, key=lambda part: more[part])
    saved = rival.cost.bandwidth_s - narrow.cost.bandwidth_s
    less = f"while its bytes save {show(saved)}" if saved > 0 else "and its bytes save nothing"
    slower = narrow.step_s / rival.step_s - 1
    if more[name] <= 0:
        # Bytes and calls are fewer: it is the device, which codes instead of computing.
        return f"8 bit is {slower:.0%} slower than {best}: coding takes {show(narrow.coding_s)} of the device"
    if name == "bytes on a shared link":
        return (
            f"8 bit is {slower:.0%} slower than {best}: a node's workers share its link, and alltoall brings "
            f"{show(more[name])} more of bytes onto it"
        )
    return f"8 bit is {slower:.0%} slower than {best}: {name} costs {show(more[name])} more, {less}"


def _largest(prediction: Prediction) -> str:
    """What most of an exchange consists of."""
    cost = prediction.cost
    parts = {
        "latency": cost.latency_s,
        "bandwidth": cost.bandwidth_s,
        "transport": cost.transport_s,
        "coding": max(cost.coding_s, prediction.coding_s),
    }
    return max(parts, key=lambda name: parts[name])
