"""What an exchange takes: bytes, messages, coding; flat, shared links and hierarchical (FIELD-CASES S3)."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from hvd8bit import layout
from hvd8bit.speedup import Cluster, Coding, Link, Transport, units
from hvd8bit.speedup import cluster as module
from hvd8bit.speedup import predict as predict_function

TEN_GBIT = units.bandwidth("10Gbit/s")
FREE = Coding()


def four_nodes(**changes) -> Cluster:
    return Cluster(**{"workers": 4, "between": Link(TEN_GBIT), "coding": FREE, **changes})


# ------------------------------------------------------------------------------------------ S3


def test_100_million_float32_on_4_nodes_at_10_gbit_take_480_ms():
    assert four_nodes().exchange(100_000_000, 32).total_s == pytest.approx(0.480, rel=1e-9)


def test_the_same_in_8_bit_takes_120_ms():
    cost = four_nodes(coding=Coding(block_size=None)).exchange(100_000_000, 8)
    assert cost.total_s == pytest.approx(0.120, abs=0.0001)


def test_the_same_with_a_scale_per_256_takes_122_ms():
    cost = four_nodes(coding=Coding(block_size=256)).exchange(100_000_000, 8)
    assert cost.total_s == pytest.approx(0.122, abs=0.0005)
    assert cost.total_s == pytest.approx(0.120 * (1 + 4 / 256), rel=1e-3)


def test_a_gibibyte_link_is_faster_than_10_gbit():
    binary = four_nodes(between=Link(units.bandwidth("1.25GiB/s")))
    assert binary.exchange(100_000_000, 32).total_s == pytest.approx(0.480 / 1.073741824, rel=1e-9)


# ----------------------------------------------------------------------------------------- bytes and messages


@pytest.mark.parametrize("workers", [2, 3, 4, 16, 1000])
@pytest.mark.parametrize(("bits", "element_bytes"), [(32, 4), (16, 2)])
def test_ring_moves_2_n_minus_1_over_n_of_the_bytes(workers, bits, element_bytes):
    cluster = Cluster(workers, between=Link(1e9, 1e-3), coding=FREE)
    cost = cluster.exchange(1e6, bits)
    assert cost.bandwidth_s * 1e9 == pytest.approx(layout.ring_bytes(1_000_000, workers, element_bytes))
    assert cost.latency_s == pytest.approx(2 * (workers - 1) * 1e-3)
    assert cost.coding_s == cost.transport_s == 0


@pytest.mark.parametrize("workers", [2, 4, 7])
@pytest.mark.parametrize("elements", [1_000, 3_000_000, 50_000_000])
@pytest.mark.parametrize("block_size", [64, 1024, None])
def test_8_bit_moves_what_the_wire_format_says(workers, elements, block_size):
    cluster = Cluster(workers, between=Link(1.0), coding=Coding(block_size=block_size))
    slices = module.slices(elements)
    expected = layout.Layout([elements], workers, block_size, slices).wire_bytes()
    # The layout cuts at multiples of 64 elements, the model anywhere.
    slack = 2 * slices * workers * (64 + 4)
    assert cluster.exchange(elements, 8).bandwidth_s == pytest.approx(expected, rel=1e-4, abs=slack)


def test_8_bit_sends_an_alltoall_and_an_allgather_per_slice():
    cluster = Cluster(5, between=Link(1e9, 1.0), coding=FREE)
    assert cluster.exchange(1e6, 8).latency_s == 2 * 4
    assert cluster.exchange(10 * 2**20, 8).latency_s == 2 * 4 * 5
    assert cluster.exchange(2**30, 8).latency_s == 2 * 4 * 16


def test_slices_and_buckets_are_those_of_the_exchange():
    pytest.importorskip("horovod")
    from hvd8bit import exchange, planning

    assert module.ELEMENTS_PER_SLICE == exchange.ELEMENTS_PER_SLICE
    assert module.MAX_SLICES == exchange.MAX_SLICES
    assert sys.modules["hvd8bit.speedup.predict"].BUCKET_ELEMENTS == planning.BUCKET_ELEMENTS


@pytest.mark.parametrize(("elements", "workers"), [(1_000, 8), (1_000, 64), (20_000, 256), (20_000, 1024)])
def test_where_8_bits_are_no_fewer_bytes_float32_is_sent(elements, workers):
    from hvd8bit.selection import pays

    cluster = Cluster(workers, between=Link(1e9, 1e-5))
    assert cluster.encodes(elements) == pays((elements,), workers, 1024) == (workers in (8, 256))
    same = cluster.exchange(elements, 8) == cluster.exchange(elements, 32)
    assert same == (not cluster.encodes(elements))
    assert (cluster.coding_s(elements) == 0) == same


def test_one_worker_exchanges_nothing():
    for bits in (32, 16, 8):
        assert Cluster(1).exchange(1e9, bits).total_s == 0
        assert Cluster(1).allgather(1e9, bits).total_s == 0
        assert Cluster(1).reduce_scatter(1e9, bits).total_s == 0


def test_coding_is_encode_n_reduce_n_encode_the_sum_decode_n():
    coding = Coding(1e-9, 10e-9, 100e-9)
    cluster = four_nodes(coding=coding)
    assert cluster.exchange(1e6, 8).coding_s == pytest.approx(1e-3 * (1 + 1 / 4) + 10e-3 + 100e-3)
    assert cluster.exchange(1e6, 32).coding_s == 0
    hidden = four_nodes(coding=Coding(1e-9, 10e-9, 100e-9, hidden_share=0.75))
    assert hidden.exchange(1e6, 8).coding_s == pytest.approx(cluster.exchange(1e6, 8).coding_s / 4)


def test_transport_slows_its_own_bits_alone():
    transports = {16: Transport(efficiency=0.5, s_per_element=1e-9, call_s=0.25, latency_s=2.0)}
    plain, slow = four_nodes(), four_nodes(transports=transports)
    assert slow.exchange(1e6, 32) == plain.exchange(1e6, 32)
    cost = slow.exchange(1e6, 16)
    assert cost.bandwidth_s == pytest.approx(2 * plain.exchange(1e6, 16).bandwidth_s)
    assert cost.transport_s == pytest.approx(0.25 + 1e-3)
    assert cost.latency_s == pytest.approx(6 * 2.0)


def test_gather_and_scatter_move_half_of_an_exchange():
    cluster = four_nodes(between=Link(1e9, 1e-3))
    for bits in (32, 16):
        both = cluster.allgather(1e6, bits) + cluster.reduce_scatter(1e6, bits)
        assert both.total_s == pytest.approx(cluster.exchange(1e6, bits).total_s)
    both = cluster.allgather(1e6, 8) + cluster.reduce_scatter(1e6, 8)
    assert both.total_s == pytest.approx(cluster.exchange(1e6, 8).total_s)


# ----------------------------------------------------------------------------------- several workers per node


def nodes_of_4(**changes) -> Cluster:
    return Cluster(
        **{
            "workers": 8,
            "workers_per_node": 4,
            "between": Link(1e9, 1e-3),
            "within": Link(1e11, 1e-6),
            "coding": FREE,
            **changes,
        }
    )


def test_a_flat_ring_is_as_slow_as_the_link_between_nodes():
    cost = nodes_of_4().exchange(8e6, 32)
    assert cost.bandwidth_s == pytest.approx(2 * 7 / 8 * 32e6 / 1e9)
    assert cost.latency_s == pytest.approx(14e-3)


def test_a_flat_alltoall_shares_a_nodes_link():
    cluster = nodes_of_4(coding=Coding(block_size=None))
    cost = cluster.exchange(1e6, 8)
    message = 64 + 1e6 / 8 + 4
    alltoall = 4 * 4 * message / 1e9  # 4 workers send to 4 others each
    allgather = 7 * message / 1e9
    assert cost.bandwidth_s == pytest.approx(alltoall + allgather)
    assert cost.latency_s == pytest.approx(4e-3 + 7e-3)


def test_a_flat_8_bit_exchange_gains_nothing_between_large_nodes():
    cluster = Cluster(64, 8, Link(1e9), Link(1e12), FREE)
    assert cluster.exchange(1e8, 8).bandwidth_s > cluster.exchange(1e8, 32).bandwidth_s
    tree = Cluster(64, 8, Link(1e9), Link(1e12), FREE, hierarchical=True)
    assert tree.exchange(1e8, 8).bandwidth_s < 0.27 * tree.exchange(1e8, 32).bandwidth_s


def test_hierarchical_exchange_by_hand():
    cost = nodes_of_4(hierarchical=True).exchange(8e6, 32)
    inside_bytes, inside_messages = 2 * 3 * 8e6, 2 * 3  # 2 (w-1) messages of n / w float32
    between_bytes = 2 * 1 / 2 * 32e6  # 2 (M-1)/M n
    assert cost.bandwidth_s == pytest.approx(inside_bytes / 1e11 + between_bytes / 1e9)
    assert cost.latency_s == pytest.approx(inside_messages * 1e-6 + 2 * 1e-3)


def test_hierarchical_coding_takes_a_workers_share():
    coding = Coding(1e-9, 0, 1e-9)
    flat, tree = nodes_of_4(coding=coding), nodes_of_4(coding=coding, hierarchical=True)
    assert tree.exchange(8e6, 8).coding_s == pytest.approx(2e6 * (1e-9 * 1.5 + 1e-9))
    assert flat.exchange(8e6, 8).coding_s == pytest.approx(8e6 * (1e-9 * 1.125 + 1e-9))


def test_a_single_node_uses_the_link_inside():
    cluster = Cluster(4, 8, within=Link(1e10, 1e-6), coding=FREE)
    assert (cluster.local, cluster.nodes) == (4, 1)
    assert cluster.exchange(1e6, 32).bandwidth_s == pytest.approx(2 * 3 / 4 * 4e6 / 1e10)
    assert cluster.send(1e6, 32).total_s == pytest.approx(4e6 / 1e10 + 1e-6)


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(0), "bandwidth_bytes_per_s must be above 0"),
        (lambda: Link(math.inf), "bandwidth_bytes_per_s must be above 0"),
        (lambda: Link(1, -1), "latency_s must be 0 or more, in seconds, got -1"),
        (lambda: Coding(encode_s_per_element=-1), "encode_s_per_element must be 0 or more"),
        (lambda: Coding(block_size=48), "block_size must be a multiple of 64"),
        (lambda: Coding(hidden_share=1.5), "hidden_share must lie in"),
        (lambda: Transport(efficiency=0), "efficiency must be above 0"),
        (lambda: Cluster(0), "workers must be an integer of at least 1, got 0"),
        (lambda: Cluster(2.5), "workers must be an integer"),
        (lambda: Cluster(4), "between, the link between nodes, is needed for 4 nodes"),
        (lambda: Cluster(4, 4), "within, the link inside a node, is needed"),
        (
            lambda: Cluster(6, 4, Link(1), Link(1)),
            "workers must fill whole nodes: a multiple of workers_per_node=4",
        ),
        (lambda: Cluster(2, between=Link(1), transports={64: Transport()}), "transports must be by bits"),
        (lambda: Cluster(2, between=Link(1), bits=(32, 4)), "bits must be, of .* got "),
        (lambda: four_nodes(bits=(32, 8)).exchange(10, 16), "bits must be one of 32, 8, .*, got 16"),
        (lambda: four_nodes().exchange(10, 4), "bits must be one of 32, 16, 8, got 4"),
    ],
)
def test_errors_name_argument_rule_and_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_model_loads_no_tensorflow():
    code = (
        "import sys, hvd8bit\n"
        "s = hvd8bit.speedup\n"
        "w = s.load('gpt2-small').timed(0.2)\n"
        "s.compare(w, s.Cluster(8, between=s.Link(1e9)))\n"
        "s.paper.rows()\n"
        "wrong = {'tensorflow', 'horovod', 'keras', 'matplotlib'} & set(sys.modules)\n"
        "assert not wrong, wrong"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_predict_is_a_function_of_the_package():
    assert callable(predict_function)
