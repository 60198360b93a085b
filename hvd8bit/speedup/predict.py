"""How long a step takes on a cluster, and how much faster the cluster is than one worker.

Three schemes: data parallelism, the paper's hybrid scheme, pipelines (Dettmers 2016, sec. 2). N workers
always process N times the samples of one, so

    speedup = N * (one worker's step) / (the cluster's step)        (appendix, single node)

and N is the ceiling. `t_fwd` and `t_bwd` are a layer's seconds on one worker for its own samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Union

from hvd8bit.speedup.cluster import Cluster, Cost, Link
from hvd8bit.speedup.workload import Workload

BUCKET_ELEMENTS = 8 * 2**20
"""Gradients that are exchanged together. `hvd8bit.reduction` owns the number; a unit test compares them."""


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """Every worker has the whole model; gradients are exchanged (Dettmers 2016, sec. 2.1).

    Attributes:
      overlap: exchange a bucket while the backward pass goes on; else all after it.
      bucket_elements: gradients of consecutive layers travel together up to this many elements.
    """

    overlap: bool = True
    bucket_elements: int = BUCKET_ELEMENTS


@dataclasses.dataclass(frozen=True)
class Hybrid:
    """Layers with split: model are split over the workers, others data-parallel (Dettmers 2016, sec. 2.4).

    Attributes:
      sub_batches: K, into which all workers' samples are cut for the split layers; None for N.
      efficiency: one worker's time for a layer over N times its time for an N-th of it; 1 if splitting costs
        nothing.
      overlap, bucket_elements: of the data-parallel layers, as in `DataParallel`.
    """

    sub_batches: int | None = None
    efficiency: float = 1.0
    overlap: bool = True
    bucket_elements: int = BUCKET_ELEMENTS


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The model is cut into stages of consecutive layers; micro-batches flow through them.

    Attributes:
      stages: None for N. N / stages replicas of the pipeline exchange gradients after the backward pass.
      micro_batches: into which a replica's samples are cut.
    """

    stages: int | None = None
    micro_batches: int = 8


Scheme = Union[str, DataParallel, Hybrid, Pipeline]
SCHEMES: dict[str, DataParallel | Hybrid | Pipeline] = {
    "data": DataParallel(),
    "hybrid": Hybrid(),
    "pipeline": Pipeline(),
}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Attributes:
      step_s: seconds of a step on the cluster.
      speedup: N times one worker's step over step_s.
      compute_s: one worker's computing in the step.
      exchange_s: its exchanges, coding not included, hidden or not.
      coding_s: its encoding and decoding, hidden or not.
      dominated_by: what takes the largest part of the step: "compute", "latency", "bandwidth", "transport"
        (the transport's processor time), "coding", or "idle" (a pipeline that fills and drains).
      exposed_s: what the exchange adds to the step, step_s - compute_s - idle_s.
      idle_s: waiting for other stages of a pipeline.
      cost: exchange and coding by what takes them.
    """

    step_s: float
    speedup: float
    compute_s: float
    exchange_s: float
    coding_s: float
    dominated_by: str
    exposed_s: float
    idle_s: float
    cost: Cost


def predict(workload: Workload, cluster: Cluster, scheme: Scheme = "data", bits: int = 32) -> Prediction:
    """Predicts a training step.

    Args:
      workload: with `step_s`, one worker's measured step.
      cluster: where it runs.
      scheme: "data", "hybrid" or "pipeline" with their defaults, or a `DataParallel`, `Hybrid` or `Pipeline`.
      bits: 32, 16 or 8, of everything that is exchanged.

    Raises:
      ValueError: an argument is out of range, or workload and scheme do not go together.
    """
    if isinstance(scheme, str):
        if scheme not in SCHEMES:
            raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
        return predict(workload, cluster, SCHEMES[scheme], bits)
    compute = workload.compute_s()
    cluster.transport(bits)  # raises for other bits
    if cluster.workers == 1:
        return _prediction(workload, cluster, step_s=sum(map(sum, compute)), cost=Cost(), coding_s=0.0)
    if isinstance(scheme, DataParallel):
        return _data_parallel(workload, cluster, scheme, bits)
    if isinstance(scheme, Hybrid):
        return _hybrid(workload, cluster, scheme, bits)
    return _pipeline(workload, cluster, scheme, bits)


def pipelined_s(first: float, second: float, jobs: int) -> float:
    """Seconds for `jobs` jobs that each go through two resources, one after the other: a two-stage flow shop.

    The paper's appendix has `jobs * second + max(first, (jobs - 1) (first - second))` for sub-batches,
    exchange first and then compute; that leaves out up to one `first`, since the exchange of the first
    sub-batch hides nowhere.
    """
    return first + (jobs - 1) * max(first, second) + second


# ------------------------------------------------------------------------------------------- data parallelism


def _data_parallel(workload: Workload, cluster: Cluster, scheme: DataParallel, bits: int) -> Prediction:
    compute = workload.compute_s()
    parameters = [layer.parameters for layer in workload.layers]
    forward_s = sum(forward for forward, _ in compute)
    end_s, cost, coding_s = _backward(
        [backward for _, backward in compute],
        parameters,
        cluster,
        bits,
        scheme.overlap,
        scheme.bucket_elements,
    )
    return _prediction(workload, cluster, step_s=forward_s + end_s, cost=cost, coding_s=coding_s)


def _backward(
    backward_s: Sequence[float],
    parameters: Sequence[int],
    cluster: Cluster,
    bits: int,
    overlap: bool,
    bucket_elements: int,
) -> tuple[float, Cost, float]:
    """Backward pass and exchange of its gradients: seconds, cost of the exchange, seconds of coding.

    A layer's gradient is ready when its backward pass is done, the last layer's first. Bucket k leaves when
    it is full and the exchange before it is over (Dettmers 2016, sec. 2.2 and appendix: all but the first
    layer's gradients hide under the backward pass). The device that computes also codes, so together they
    take at least the sum of both.
    """
    ready_s = free_s = coding_s = 0.0
    total_s = sum(backward_s)
    cost = Cost()
    full = 0
    for number in reversed(range(len(parameters))):
        ready_s += backward_s[number]
        full += parameters[number]
        following = parameters[number - 1] if number else 0
        if full and (number == 0 or full + following > bucket_elements):
            bucket = cluster.exchange(full, bits)
            free_s = max(free_s, ready_s if overlap else total_s) + bucket.total_s
            cost += bucket
            coding_s += cluster.coding_s(full) if bits == 8 else 0.0
            full = 0
    return max(total_s + coding_s, free_s), cost, coding_s


# --------------------------------------------------------------------------------------------- hybrid scheme


def _hybrid(workload: Workload, cluster: Cluster, scheme: Hybrid, bits: int) -> Prediction:
    """Convolutions data-parallel, dense layers split, K sub-batches (Dettmers 2016, sec. 2.4, appendix).

        step = sum t_fwd(data) + pipelined(x, c, K) + backward of the data-parallel layers with their exchange

    c = (t_fwd + t_bwd)(split) / K / efficiency is a sub-batch's computing: N times the samples, on N workers.
    x is its exchange: each split layer's inputs are gathered on the way up and their error signals
    scatter-reduced on the way down, and the last outputs are gathered. While one sub-batch is computed the next
    is exchanged; the device that computes also codes, so the split layers take at least the sum of both.
    """
    layers = workload.layers
    split = [number for number, layer in enumerate(layers) if layer.split == "model"]
    data = [number for number, layer in enumerate(layers) if layer.split != "model"]
    if not split:
        raise ValueError(
            f"the hybrid scheme needs layers with split: model, and {workload.name or 'the model'} has none"
        )
    count = cluster.workers if scheme.sub_batches is None else scheme.sub_batches
    if count < 1:
        raise ValueError(f"sub_batches must be at least 1, got {count}")
    if not 0 < scheme.efficiency <= 1:
        raise ValueError(f"efficiency must lie in (0, 1], got {scheme.efficiency}")
    compute = workload.compute_s()
    split_s = sum(sum(compute[number]) for number in split)
    samples = cluster.workers * workload.samples / count

    exchange = Cost()
    for number in split:
        inputs = layers[number - 1].activations if number else layers[number].activations
        exchange += cluster.allgather(samples * inputs, bits)
        exchange += cluster.reduce_scatter(samples * inputs, bits)
    exchange += cluster.allgather(samples * layers[split[-1]].activations, bits)

    sub_batch_s = split_s / count / scheme.efficiency
    middle_s = max(pipelined_s(exchange.total_s, sub_batch_s, count), count * (sub_batch_s + exchange.coding_s))
    end_s, cost, coding_s = _backward(
        [compute[number][1] for number in data],
        [layers[number].parameters for number in data],
        cluster,
        bits,
        scheme.overlap,
        scheme.bucket_elements,
    )
    return _prediction(
        workload,
        cluster,
        step_s=sum(compute[number][0] for number in data) + middle_s + end_s,
        cost=cost + exchange * count,
        coding_s=coding_s + exchange.coding_s * count,
        compute_s=sum(sum(compute[number]) for number in data) + split_s / scheme.efficiency,
    )


# --------------------------------------------------------------------------------------------- pipelines


def _pipeline(workload: Workload, cluster: Cluster, scheme: Pipeline, bits: int) -> Prediction:
    """S stages of consecutive layers, m micro-batches of S times a worker's samples (Dettmers 2016, sec. 2).

    Forward and backward pass are flow shops: the first micro-batch takes sum(stages + sends), each further one
    the longest of them; a stage's device also encodes what it sends and decodes what it gets. Then N / S
    replicas exchange the largest stage's gradients. Idle is what the flow shop with instant sends has over a
    worker's share of the computing.

    A pipeline's stages fill a node before the next one. Of w workers on a node min(w, S) are of different
    stages, whose exchanges share its link.
    """
    stages = cluster.workers if scheme.stages is None else scheme.stages
    layers = workload.layers
    if not 1 <= stages <= len(layers) or cluster.workers % stages:
        raise ValueError(
            f"stages must divide the {cluster.workers} workers and be at most the {len(layers)} layers, got {stages}"
        )
    if cluster.nodes > 1 and stages % cluster.local and cluster.local % stages:
        raise ValueError(
            f"stages must divide the {cluster.local} workers of a node or be a multiple of them, so that pipelines "
            f"fill whole nodes, got {stages}"
        )
    if scheme.micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, got {scheme.micro_batches}")
    compute = workload.compute_s()
    starts = _cut([sum(seconds) for seconds in compute], stages)
    bounds = list(zip(starts, [*starts[1:], len(layers)]))
    micro = scheme.micro_batches
    samples = stages * workload.samples / micro

    cuts = [samples * layers[stop - 1].activations for _, stop in bounds[:-1]]
    node = cluster.of(cluster.local)
    sends = [(node if stage % cluster.local else cluster).send(cut, bits) for stage, cut in enumerate(cuts, start=1)]
    hops = [send.total_s for send in sends]
    encode, decode = (cluster.coding.encode_s_per_element, cluster.coding.decode_s_per_element) if bits == 8 else (0, 0)
    step_s = ideal_s = 0.0
    for direction, (below, above) in enumerate([(decode, encode), (encode, decode)]):
        times = [stages / micro * sum(compute[k][direction] for k in range(*bound)) for bound in bounds]
        busy = [t + below * b + above * a for t, b, a in zip(times, [0, *cuts], [*cuts, 0])]
        step_s += sum(times) + sum(hops) + (micro - 1) * max(busy + hops)
        ideal_s += sum(times) + (micro - 1) * max(times)

    replicas = cluster.workers // stages
    gradients = max(sum(layer.parameters for layer in layers[start:stop]) for start, stop in bounds)
    peers = dataclasses.replace(cluster, workers=replicas, workers_per_node=max(1, cluster.local // stages))
    if cluster.nodes > 1 and cluster.between is not None:
        shared = cluster.between.bandwidth_bytes_per_s / min(cluster.local, stages)
        peers = dataclasses.replace(peers, between=Link(shared, cluster.between.latency_s))
    averaging = peers.exchange(gradients, bits)
    coding_s = peers.coding_s(gradients) if bits == 8 else 0.0
    step_s += averaging.total_s

    # A worker sends and receives each micro-batch in both directions; the widest cut stands for all.
    widest = max(sends, key=lambda send: send.total_s, default=Cost())
    compute_s = sum(map(sum, compute))
    return _prediction(
        workload,
        cluster,
        step_s=step_s,
        cost=averaging + widest * (2 * micro),
        coding_s=coding_s + widest.coding_s * 2 * micro,
        idle_s=max(0.0, ideal_s - compute_s),
    )


def _cut(seconds: Sequence[float], stages: int) -> list[int]:
    """First layer of each of `stages` runs of layers, none empty, the longest as short as it can be."""
    count = len(seconds)
    ends = [0.0]
    for value in seconds:
        ends.append(ends[-1] + value)
    # best[k]: the longest of the runs that the first k layers are cut into, and where the last one starts.
    best = [(ends[k], 0) for k in range(count + 1)]
    choices = []
    for stage in range(2, stages + 1):
        row = [(float("inf"), 0)] * (count + 1)
        for k in range(stage, count + 1):
            row[k] = min((max(best[j][0], ends[k] - ends[j]), j) for j in range(stage - 1, k))
        choices.append(row)
        best = row
    starts = []
    k = count
    for row in reversed(choices):
        k = row[k][1]
        starts.append(k)
    return [0, *reversed(starts)]


# --------------------------------------------------------------------------------------------- result


def _prediction(
    workload: Workload,
    cluster: Cluster,
    *,
    step_s: float,
    cost: Cost,
    coding_s: float,
    compute_s: float | None = None,
    idle_s: float = 0.0,
) -> Prediction:
    alone_s = sum(map(sum, workload.compute_s()))
    compute_s = alone_s if compute_s is None else compute_s
    exposed_s = max(0.0, step_s - compute_s - idle_s)
    # What sticks out is shared out over what the exchange consists of.
    sticks_out = exposed_s / cost.total_s if cost.total_s else 0.0
    parts = {
        "compute": compute_s,
        "latency": cost.latency_s * sticks_out,
        "bandwidth": cost.bandwidth_s * sticks_out,
        "transport": cost.transport_s * sticks_out,
        "coding": cost.coding_s * sticks_out,
        "idle": idle_s,
    }
    return Prediction(
        step_s=step_s,
        speedup=cluster.workers * alone_s / step_s,
        compute_s=compute_s,
        exchange_s=cost.wire_s,
        coding_s=coding_s,
        dominated_by=max(parts, key=lambda name: parts[name]),
        exposed_s=exposed_s,
        idle_s=idle_s,
        cost=cost,
    )
