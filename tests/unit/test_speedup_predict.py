"""Predicted steps against steps worked out by hand, and against the paper's node."""

from __future__ import annotations

import dataclasses

import pytest

from hvd8bit import speedup
from hvd8bit.speedup import (
    Cluster,
    Coding,
    DataParallel,
    Hybrid,
    Layer,
    Link,
    Pipeline,
    Workload,
    paper,
    predict,
)
from hvd8bit.speedup.predict import _cut, pipelined_s

TWO = Workload([Layer("a", 10_000_000, 10, 1), Layer("b", 10_000_000, 10, 1)], step_s=0.6)
GIGABYTE = Cluster(2, between=Link(1e9), coding=Coding())


# ------------------------------------------------------------------------------------------ data parallelism


def test_exchange_hides_under_the_backward_pass():
    # Forward 0.2; b's gradient is there at 0.4 and takes 0.04 s, hidden; a's at 0.6, to 0.64.
    found = predict(TWO, GIGABYTE, "data", 32)
    assert found.step_s == pytest.approx(0.64)
    assert found.speedup == pytest.approx(2 * 0.6 / 0.64)
    assert found.compute_s == pytest.approx(0.6)
    assert found.exchange_s == pytest.approx(0.08)
    assert found.exposed_s == pytest.approx(0.04)
    assert found.coding_s == 0
    assert found.dominated_by == "compute"


def test_without_overlap_all_of_it_sticks_out():
    assert predict(TWO, GIGABYTE, DataParallel(overlap=False), 32).step_s == pytest.approx(0.68)


def test_a_bucket_waits_for_the_one_before_it():
    slow = dataclasses.replace(GIGABYTE, between=Link(1e8))
    # b's exchange lasts from 0.4 to 0.8, a's from there to 1.2.
    found = predict(TWO, slow, "data", 32)
    assert found.step_s == pytest.approx(1.2)
    assert found.dominated_by == "compute"
    assert predict(TWO, dataclasses.replace(GIGABYTE, between=Link(1e7)), "data", 32).dominated_by == "bandwidth"


def test_layers_travel_together_up_to_a_bucket():
    one = predict(TWO, GIGABYTE, DataParallel(bucket_elements=20_000_000), 32)
    assert one.step_s == pytest.approx(0.68), "one bucket is full only when both gradients are there"
    late = dataclasses.replace(GIGABYTE, between=Link(1e12, 0.01))
    assert predict(TWO, late, DataParallel(bucket_elements=20_000_000), 32).exchange_s == pytest.approx(0.02, rel=0.01)
    assert predict(TWO, late, DataParallel(bucket_elements=1), 32).exchange_s == pytest.approx(0.04, rel=0.01)


def test_coding_counts_and_takes_the_device():
    coding = Coding(20e-9, 0, 10e-9, block_size=None)
    cluster = dataclasses.replace(GIGABYTE, between=Link(1e12), coding=coding)
    found = predict(TWO, cluster, "data", 8)
    assert found.coding_s == pytest.approx(20_000_000 * (20e-9 * 1.5 + 10e-9))
    # Its exchange would be done at 1.0, but the device needs 0.6 s for the step and 0.8 s for coding.
    assert found.step_s == pytest.approx(1.4, rel=1e-4)


def test_latency_dominates_where_messages_are_many():
    cluster = Cluster(1024, between=Link(1e12, 1e-3), coding=Coding())
    assert predict(TWO, cluster, "data", 32).dominated_by == "latency"
    coded = Cluster(4, between=Link(1e12), coding=Coding(1e-6))
    assert predict(TWO, coded, "data", 8).dominated_by == "coding"


@pytest.mark.parametrize("scheme", ["data", "hybrid", "pipeline"])
def test_one_worker_is_one_workers_step(scheme):
    found = predict(TWO, Cluster(1), scheme, 8)
    assert found.speedup == 1
    assert found.step_s == pytest.approx(0.6)


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("scheme", ["data", "hybrid", "pipeline"])
def test_a_perfect_network_gives_n(scheme, bits):
    workload = speedup.load("vgg16").timed(0.3)
    cluster = Cluster(4, between=Link(1e18), coding=Coding())
    if scheme == "pipeline":
        # Stages differ and the pipeline fills and drains; four equal ones and many micro-batches give N.
        workload = Workload([Layer(str(k), 1000, 10, 1) for k in range(4)], step_s=0.3)
        assert predict(workload, cluster, Pipeline(micro_batches=10_000), bits).speedup == pytest.approx(4, rel=1e-3)
    else:
        assert predict(workload, cluster, scheme, bits).speedup == pytest.approx(4, rel=1e-6)


def test_more_bandwidth_is_never_slower():
    workload = speedup.load("resnet50").timed(0.18)
    for bits in (32, 16, 8):
        steps = [predict(workload, Cluster(16, between=Link(10.0**k, 3e-5)), "data", bits).step_s for k in range(7, 12)]
        assert steps == sorted(steps, reverse=True)


# ------------------------------------------------------------------------------------------ hybrid


def test_two_stage_flow_shop():
    assert pipelined_s(3, 5, 1) == 8
    assert pipelined_s(3, 5, 4) == 3 + 4 * 5
    assert pipelined_s(5, 3, 4) == 4 * 5 + 3


def test_hybrid_by_hand():
    layers = [
        Layer("conv", 1_000_000, 100, 2),
        Layer("fc1", 50, 40, 1, "model"),
        Layer("fc2", 50, 10, 1, "model"),
    ]
    workload = Workload(layers, step_s=1.2, samples=64)
    cluster = Cluster(2, between=Link(1e5), coding=Coding())
    # Forward and backward: conv 0.2 and 0.4, fc1 and fc2 0.1 and 0.2 each. 4 sub-batches of 32 samples.
    exchange = (2 * (100 + 40) + 10) * 32 * 4 / 2 / 1e5  # gather and scatter what goes into fc1 and fc2; gather the end
    fc = pipelined_s(exchange, 0.6 / 4, 4)
    conv = 4_000_000 / 1e5
    found = predict(workload, cluster, Hybrid(sub_batches=4), 32)
    assert found.step_s == pytest.approx(0.2 + fc + 0.4 + conv)
    assert found.exchange_s == pytest.approx(4 * exchange + conv)
    slower = predict(workload, cluster, Hybrid(sub_batches=4, efficiency=0.5), 32)
    assert slower.step_s == pytest.approx(0.2 + pipelined_s(exchange, 0.3, 4) + 0.4 + conv)


def test_split_layers_exchange_no_gradients():
    few = Workload([Layer("conv", 10, 100, 1), Layer("fc", 10**9, 10, 1, "model")], step_s=0.1)
    cluster = Cluster(4, between=Link(1e9), coding=Coding())
    assert predict(few, cluster, "data", 32).exchange_s > 5
    assert predict(few, cluster, "hybrid", 32).exchange_s < 0.01


def test_data_parallel_layers_after_a_split_one_exchange_gradients():
    layers = [
        Layer("conv", 1_000_000, 100, 2),
        Layer("fc", 50, 40, 1, "model"),
        Layer("head", 2_000_000, 10, 1),
    ]
    cluster = Cluster(2, between=Link(1e6), coding=Coding())
    # Forward and backward: conv 0.2 and 0.4, fc and head 0.1 and 0.2. One exchange, after the backward pass.
    exchange = (2 * 100 + 40) * 64 * 4 / 2 / 1e6
    found = predict(Workload(layers, step_s=1.2, samples=64), cluster, Hybrid(sub_batches=2), 32)
    assert found.step_s == pytest.approx(0.3 + pipelined_s(exchange, 0.3 / 2, 2) + 0.6 + 12_000_000 / 1e6)
    assert found.compute_s == pytest.approx(1.2)


@pytest.mark.parametrize("sub_batches", [1, 16, 64])
@pytest.mark.parametrize("step_s", [0.01, 0.04])
def test_the_device_that_computes_split_layers_also_codes(sub_batches, step_s):
    layers = [Layer("conv", 1000, 9216, 1), Layer("fc", 10**7, 4096, 1000, "model")]
    found = predict(Workload(layers, step_s, 512), Cluster(8, between=Link(1e14)), Hybrid(sub_batches), 8)
    assert found.coding_s > 0.03
    assert found.step_s >= (found.compute_s + found.coding_s) * (1 - 1e-9)


def test_the_papers_node_in_the_general_model():
    """Tables 3 and 4 of the appendix: 4 GPUs, 3.53 with 32 bit and 3.67 with 8 bit, PCIe at 5 GB/s.

    The layers' times and widths are the paper's; the latency of 50 us is ours. The paper counts no coding.
    """
    node = paper.data()["single_node"]
    sizes = {  # parameters and outputs of the paper's AlexNet
        "conv11 s4 3-64": (23296, 0),
        "conv5 64-192": (307392, 0),
        "conv3 192-384": (663936, 0),
        "conv3 384-256": (884992, 0),
        "conv3 256-256": (590080, 9216),
        "fc 9216-3072": (9216 * 3072, 3072),
        "fc 3072-3072": (3072**2, 3072),
        "fc 3072-1000": (3072 * 1000, 1000),
    }
    layers = [
        Layer(
            layer["name"],
            *sizes[layer["name"]],
            sum(layer["one_gpu"]),
            "model" if "fc" in layer["name"] else "data",
        )
        for layer in node["layers"]
    ]
    workload = Workload(layers, step_s=sum(layer.flops for layer in layers) / 1e3, samples=128)
    cluster = Cluster(4, between=Link(5e9, 50e-6), coding=Coding())
    scheme = Hybrid(node["sub_batches"], efficiency=node["fc"] / node["sub_batches"] / node["parallel_fc"])
    assert predict(workload, cluster, scheme, 32).speedup == pytest.approx(3.53, rel=0.02)
    assert predict(workload, cluster, scheme, 8).speedup == pytest.approx(3.67, rel=0.02)


# ------------------------------------------------------------------------------------------ pipelines


def test_pipeline_by_hand():
    workload = Workload([Layer("a", 10, 1000, 1), Layer("b", 10, 10, 3)], step_s=1.2, samples=10)
    cluster = Cluster(2, between=Link(1e5), coding=Coding())
    # Two stages, 4 micro-batches of 5 samples. Forward 0.1 and 0.3 for 10 samples, 0.05 and 0.15 for 5; the
    # backward pass twice that; 5000 floats in between, 0.2 s each way, the slowest but for b's backward pass.
    forward = 0.05 + 0.2 + 0.15 + 3 * 0.2
    backward = 0.1 + 0.2 + 0.3 + 3 * 0.3
    found = predict(workload, cluster, Pipeline(micro_batches=4), 32)
    assert found.step_s == pytest.approx(forward + backward)
    ideal = 0.05 + 0.15 + 3 * 0.15 + 0.1 + 0.3 + 3 * 0.3
    assert found.idle_s == pytest.approx(ideal - 1.2)
    assert found.speedup == pytest.approx(2 * 1.2 / (forward + backward))


def test_a_pipeline_of_few_micro_batches_idles():
    workload = Workload([Layer(str(k), 10, 1, 1) for k in range(8)], step_s=0.8)
    cluster = Cluster(8, between=Link(1e12), coding=Coding())
    found = predict(workload, cluster, Pipeline(micro_batches=1), 32)
    assert found.dominated_by == "idle"
    assert found.speedup == pytest.approx(1, rel=1e-3), "one micro-batch: a stage works at a time"


def test_replicas_of_a_pipeline_exchange_gradients():
    workload = Workload([Layer("a", 1_000_000, 1, 1), Layer("b", 1_000_000, 1, 1)], step_s=0.6)
    cluster = Cluster(4, between=Link(1e9), coding=Coding())
    alone = predict(workload, dataclasses.replace(cluster, workers=2), Pipeline(stages=2), 32)
    both = predict(workload, cluster, Pipeline(stages=2), 32)
    assert both.step_s - alone.step_s == pytest.approx(2 * 1 / 2 * 4e6 / 1e9)


@pytest.mark.parametrize(
    ("stages", "sharing", "replicas"),
    [(8, 8, (2, 1)), (16, None, None), (2, 2, (8, 4))],
)
def test_exchanges_of_several_stages_share_a_nodes_link(stages, sharing, replicas):
    """On nodes of 8. Two pipelines of 8 stages: one per node; eight of 2: four per node; one of 16: over two nodes."""
    workload = Workload([Layer(str(k), 10_000_000, 1, 1) for k in range(16)], step_s=0.1)
    inside = Link(1e15)
    cluster = Cluster(16, 8, between=Link(1e9), within=inside, coding=Coding())
    found = predict(workload, cluster, Pipeline(stages), 32)
    gradients = 10_000_000 * 16 // stages
    sends = 2 * 8 * stages * 32 / 8 * 4 / 1e9 if stages > 8 else 0
    averaging = 0.0
    if sharing:
        peers = Cluster(*replicas, between=Link(1e9 / sharing), within=inside, coding=Coding())
        averaging = peers.exchange(gradients, 32).bandwidth_s
    assert found.cost.bandwidth_s == pytest.approx(averaging + sends, rel=1e-4)


def test_the_device_of_a_stage_also_codes():
    workload = Workload([Layer(str(k), 0, 1000, 1) for k in range(3)], step_s=0.3, samples=10)
    cluster = Cluster(3, between=Link(1e15), coding=Coding(1e-6, 0, 3e-6))
    found = predict(workload, cluster, Pipeline(micro_batches=10), 8)
    # Micro-batches of 3 samples, 0.01 s forward and 0.02 s back. The stage in the middle codes what goes in and out.
    encode, decode = 3000 * 1e-6, 3000 * 3e-6
    first = 3 * 0.03 + 4 * (encode + decode)
    assert found.step_s == pytest.approx(first + 9 * (0.03 + 2 * (encode + decode)))
    ends = predict(workload, dataclasses.replace(cluster, workers=2), Pipeline(micro_batches=1000), 8)
    sample = 1000 * 20 / 1000
    # With two stages, of one layer and two, the larger one decodes forward and encodes backward.
    assert ends.step_s == pytest.approx(0.4 + 1000 * sample * 4e-6, rel=0.01)


def test_stages_send_inside_their_node():
    """Four stages on nodes of two: of the three cuts only the middle one crosses."""
    workload = Workload([Layer(str(k), 0, 1000, 1) for k in range(4)], step_s=0.4, samples=10)
    cluster = Cluster(4, 2, between=Link(1e6, 0.5), within=Link(1e6, 1e-3), coding=Coding())
    found = predict(workload, cluster, Pipeline(micro_batches=1), 32)
    a_send = 4 * 10 * 1000 * 4 / 1e6
    assert found.step_s == pytest.approx(0.4 * 4 + 2 * (0.5 + 2 * 1e-3 + 3 * a_send))


@pytest.mark.parametrize(
    ("seconds", "stages", "starts"),
    [
        ([1, 1, 1, 1], 2, [0, 2]),
        ([5, 1, 1, 1], 2, [0, 1]),
        ([1, 1, 1, 9], 3, [0, 1, 3]),
        ([3, 2, 1], 3, [0, 1, 2]),
    ],
)
def test_stages_are_as_even_as_they_can_be(seconds, stages, starts):
    found = _cut(seconds, stages)
    assert len(found) == stages
    longest = max(sum(seconds[a:b]) for a, b in zip(found, [*found[1:], len(seconds)]))
    best = max(sum(seconds[a:b]) for a, b in zip(starts, [*starts[1:], len(seconds)]))
    assert longest == best
    assert sorted(set(found)) == found, "no stage is empty"


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: predict(TWO, GIGABYTE, "magic"),
            "scheme must be one of data, hybrid, pipeline, got 'magic'",
        ),
        (lambda: predict(TWO, GIGABYTE, "data", 4), "bits must be one of 32, 16, 8, got 4"),
        (lambda: predict(TWO, GIGABYTE, "hybrid"), "needs layers with split: model"),
        (lambda: predict(TWO, GIGABYTE, Pipeline(stages=3)), "stages must divide the 2 workers"),
        (lambda: predict(TWO, Cluster(4, between=Link(1)), Pipeline()), "at most the 2 layers, got 4"),
        (
            lambda: predict(
                Workload([*TWO.layers, Layer("c", 1, 1, 1)], 0.1), Cluster(12, 4, Link(1), Link(1)), Pipeline(3)
            ),
            "stages must divide the 4 workers of a node or be a multiple of them, so that .* got 3",
        ),
        (lambda: predict(TWO, GIGABYTE, Pipeline(micro_batches=0)), "micro_batches must be at least 1"),
        (lambda: predict(Workload(TWO.layers), GIGABYTE), "step_s of the workload is needed"),
        (lambda: Workload([]), "layers must hold at least one Layer"),
        (lambda: Workload(TWO.layers, step_s=0), "step_s must be above 0"),
        (lambda: Workload(TWO.layers, samples=0), "samples must be an integer of at least 1"),
    ],
)
def test_errors_name_argument_rule_and_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("scheme", "message"), [(Hybrid(0), "sub_batches must be"), (Hybrid(efficiency=2), "efficiency must lie")]
)
def test_hybrid_settings_are_checked(scheme, message):
    workload = speedup.load("alexnet").timed(0.1)
    with pytest.raises(ValueError, match=message):
        predict(workload, GIGABYTE, scheme)
