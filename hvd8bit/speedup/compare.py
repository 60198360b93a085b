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


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the model advises for a number of workers.

    Attributes:
      workers: N.
      predictions: by bits.
      best_bits: with the shortest step; more bits where fewer gain less than `WORTH_IT`.
      eight_bit_gain: how much shorter 8 bit makes the step than the better of 32 and 16, as a share; below 0,
        longer.
      pays_below_bytes_per_s: the bandwidth from which on 8 bit gains less than `WORTH_IT`; 0 if it never
        does, infinite if always.
      reason: why the best is the best, in words.
    """

    workers: int
    predictions: dict[int, Prediction]
    best_bits: int
    eight_bit_gain: float
    pays_below_bytes_per_s: float
    reason: str


def compare(workload: Workload, cluster: Cluster, scheme: Scheme = "data") -> Verdict:
    """Predicts for 32, 16 and 8 bit and weighs them. Arguments and errors as `predict`."""
    predictions = {bits: predict(workload, cluster, scheme, bits) for bits in BITS}
    best = BITS[0]
    for bits in BITS[1:]:
        if predictions[bits].step_s < (1 - WORTH_IT) * predictions[best].step_s:
            best = bits
    return Verdict(
        workers=cluster.workers,
        predictions=predictions,
        best_bits=best,
        eight_bit_gain=_gain(predictions),
        pays_below_bytes_per_s=_break_even(workload, cluster, scheme),
        reason=_reason(predictions, best),
    )


def _gain(predictions: dict[int, Prediction]) -> float:
    return 1 - predictions[8].step_s / min(predictions[32].step_s, predictions[16].step_s)


def _break_even(workload: Workload, cluster: Cluster, scheme: Scheme) -> float:
    if cluster.workers == 1:
        return 0.0

    def pays(bandwidth: float) -> bool:
        faster = _with_bandwidth(cluster, bandwidth)
        return _gain({bits: predict(workload, faster, scheme, bits) for bits in BITS}) > WORTH_IT

    low, high = _SLOWEST, _FASTEST
    if not pays(low):
        return 0.0
    if pays(high):
        return float("inf")
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
