"""The exchange among threads of one process: equal to the reference, the same everywhere, bytes counted."""

from __future__ import annotations

import threading
import time
import types

import numpy as np
import pytest
import tensorflow as tf
from codec_cases import reference_exchange
from codec_inputs import DTYPES, assert_same_numbers

from hvd8bit import exchange as exchange_module
from hvd8bit import ops, reference
from hvd8bit.collectives import HorovodComm, LoopbackComm, sent_bytes
from hvd8bit.encoding import Encoding
from hvd8bit.exchange import exchange, number_of_slices
from hvd8bit.layout import Layout, ring_bytes
from hvd8bit.selection import pays

DEFAULTS = Encoding()
ALL_DTYPES = tuple(DTYPES.values())


class CountingComm:
    """A `LoopbackComm` that adds up what its worker sends to others."""

    def __init__(self, comm: LoopbackComm):
        self._comm = comm
        self.sent = self.calls = 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def alltoall(self, payload, splits, name):
        self.calls += 1
        self.sent += int(tf.reduce_sum(splits) - splits[self.rank_tensor()])
        return self._comm.alltoall(payload, splits, name)

    def allgather(self, chunk, name):
        self.calls += 1
        gathered = self._comm.allgather(chunk, name)
        self.sent += int(tf.size(gathered) - tf.size(chunk))  # a ring passes on what it receives
        return gathered


def run(workers, encoding=DEFAULTS, factor=1.0):
    """The exchange of `workers[rank][tensor]`: each worker's result, and its comm."""

    def work(comm):
        comm = CountingComm(comm)
        tensors = [tf.constant(array) for array in workers[int(comm.rank_tensor())]]
        results = exchange(tensors, encoding, comm, factor=tf.constant(factor, tf.float64), name="test")
        return [result.numpy() for result in results], comm

    done = LoopbackComm.run(len(workers), work)
    return [results for results, _ in done], [comm for _, comm in done]


def mean_sent(comms):
    """Mean over the workers, computed as `Layout.wire_bytes` computes it, so that it can be equal."""
    total, left = divmod(sum(comm.sent for comm in comms), 2 * (len(comms) - 1) or 1)
    assert left == 0
    return 2 * (len(comms) - 1) / len(comms) * total


def assert_exchange(workers, encoding=DEFAULTS, factor=1.0, slices=1):
    """Equal to the reference in one slice, on all workers; the layout's bytes, mean over the workers."""
    results, comms = run(workers, encoding, factor)
    expected = reference_exchange(workers, encoding, factor=factor)
    for rank, tensors in enumerate(results):
        for got, want in zip(tensors, expected):
            assert_same_numbers(got, want, f"rank {rank} of {len(workers)}, {encoding}")
    assert all(comm.calls == 2 * slices for comm in comms)
    layout = Layout([array.size for array in workers[0]], len(workers), encoding.block_size, slices)
    assert mean_sent(comms) == layout.wire_bytes()
    return results[0]


SHAPES = [(), (70,), (0, 3), (5, 13, 3), (1000,), (64,), (1,)]


def random_workers(rng, count, shapes=SHAPES, dtypes=ALL_DTYPES):
    return [
        [
            np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3)).astype(dtypes[i % len(dtypes)])
            for i, shape in enumerate(shapes)
        ]
        for _ in range(count)
    ]


ENCODINGS = [
    Encoding(),
    Encoding("linear", 64),
    Encoding("mantissa", None, 10.0),
    Encoding("static_tree", 128),
    Encoding(block_size=None),
]


@pytest.mark.parametrize("count", range(1, 9))
def test_equals_the_reference_on_every_worker(count, rng):
    for encoding in ENCODINGS:
        for factor in (1.0, float(count), 0.3):
            assert_exchange(random_workers(rng, count), encoding, factor)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("per_slice", [64, 150, 400])
def test_slices_do_not_change_the_result(count, per_slice, rng, monkeypatch):
    monkeypatch.setattr(exchange_module, "ELEMENTS_PER_SLICE", per_slice)
    workers = random_workers(rng, count)
    slices = number_of_slices([tf.constant(array) for array in workers[0]])
    assert slices > 1
    for encoding in ENCODINGS:
        assert_exchange(workers, encoding, slices=slices)


@pytest.mark.parametrize("count", [16, 64])
def test_many_workers(count, rng):
    assert_exchange(random_workers(rng, count), Encoding(block_size=64), factor=float(count))


def test_1024_workers(rng):
    """More workers than places of 64 elements: most chunks are empty. Ops alone: threads take minutes."""
    count, elements, encoding = 1024, 700, Encoding(block_size=64)
    values = rng.standard_normal((count, elements)).astype(np.float32)
    encoded = [ops.encode_list([row], count, encoding) for row in values]
    payloads = np.stack([payload.numpy() for payload, _ in encoded])
    splits = encoded[0][1].numpy()
    ends = np.cumsum(splits)
    reduced = [
        ops.reduce_shards(
            payloads[:, end - size : end].reshape(-1), [size] * count, [values[0]], count, shard, encoding
        )
        for shard, (end, size) in enumerate(zip(ends, splits))
    ]
    (got,) = ops.decode_list([tf.concat(reduced, 0)], [values[0]], count, encoding, factor=float(count))
    for start in range(0, elements, 64):  # a chunk of 64 elements or less is one block
        total = np.float32(0)
        for row in values:
            codes, scale = reference.encode_block(row[start : start + 64], encoding)
            total = total + reference.decode_block(codes, scale, encoding.data_type)
        codes, scale = reference.encode_block(total, encoding)
        expected = reference.decode_block(codes, scale, encoding.data_type)
        assert_same_numbers(got.numpy()[start : start + 64], expected, f"element {start}")
    assert sum(size > 64 for size in splits) == 11


@pytest.mark.soak
def test_1024_workers_in_threads(rng):
    base = rng.standard_normal((1024, 700)).astype(np.float32)
    assert_exchange([[row] for row in base], Encoding(block_size=64), factor=1024.0)


@pytest.mark.parametrize(
    ("count", "elements"),
    [
        (2, 1024),
        (8, 1500),
        (2, 131_072),
        (3, 200_000),
        (4, 2**20),
        (8, 64 * 8 * 1024),
        (8, 2**23),
        (32, 64 * 32 * 1024),
        (64, 2**17),
    ],
)
def test_executed_bytes_against_float32(count, elements):
    """The bytes do not depend on the numbers; here they are counted where they leave."""
    block_size = Encoding().block_size
    workers = [[np.zeros(elements, np.float32)]] * count
    results, comms = run(workers)
    assert not results[-1][0].any()
    sent = mean_sent(comms)
    slices = number_of_slices([tf.TensorSpec([elements])])
    assert sent == Layout([elements], count, block_size, slices).wire_bytes()
    assert pays((elements,), count, block_size)
    assert sent < ring_bytes(elements, count)
    if elements >= 64 * count * block_size:
        assert sent <= 0.26 * ring_bytes(elements, count)


def test_constants_are_exact():
    """A constant block is its own scale: means and sums of constants have no error."""
    workers = [[np.full(1000, rank + 1.0, np.float32)] for rank in range(2)]
    for factor, expected in (
        (1.0, 1.5),
        (2.0, 3.0),
        (12.0, 18.0),
    ):  # mean, sum, and a sum scaled by 2 and by 3
        assert np.all(assert_exchange(workers, factor=factor)[0] == expected)
    assert np.all(assert_exchange([[np.full(1000, -1.0, np.float32)]] * 2)[0] == -1)


def test_values_are_added_not_codes():
    """A mean of codes would give 0.149."""
    workers = [[np.zeros(256, np.float32)] for _ in range(2)]
    workers[0][0][:2], workers[1][0][:2] = (1, 0.9), (1, 0.001)
    result = assert_exchange(workers)[0]
    assert result[0] == 1
    assert result[1] == pytest.approx(0.4505, abs=0.0172)


def test_sums_of_large_values_do_not_wrap():
    for dtype in (np.float32, np.float64):
        workers = [[np.full(1000, 1e30, dtype)]] * 64
        result = assert_exchange(workers, factor=64.0)[0]
        # 63 additions in float32, each rounded.
        assert np.allclose(result.astype(np.float64), 64e30, rtol=63 * 2.0**-24)


@pytest.mark.parametrize(("data_type", "tolerance"), [("dynamic_tree", 0.0172), ("linear", 0.0079)])
def test_error_of_one_exchange(data_type, tolerance, rng):
    """Two roundings, each by at most half the widest gap (0.55/64 and 1/127) of what shares a scale."""
    workers = [[rng.standard_normal(64 * 50).astype(np.float32)] for _ in range(4)]
    result = assert_exchange(workers, Encoding(data_type, 64))[0]
    blocks = np.stack([tensors[0] for tensors in workers]).reshape(4, 50, 64)
    largest = np.abs(blocks).max(axis=2).mean(axis=0)
    error = np.abs(result.reshape(50, 64) - blocks.astype(np.float64).mean(axis=0)).max(axis=1)
    assert np.all(error <= tolerance * largest)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_non_finite_values_are_seen_by_all_and_stay_in_their_block(bad, dtype):
    workers = [[np.ones(1000, dtype)] for _ in range(2)]
    workers[1][0][700] = bad
    results, _ = run(workers, Encoding(block_size=64))
    # Two chunks of 512 and 488: element 700 lies in block 2 of the second.
    own = np.zeros(1000, bool)
    own[512 + 128 : 512 + 192] = True
    for result in results:
        assert np.all(np.isnan(result[0][own]))
        assert np.all(result[0][~own] == 1)
    assert results[0][0].tobytes() == results[1][0].tobytes()


@pytest.mark.parametrize("shape", [(), (0, 3), (777,)])
def test_scalars_nothing_and_zeros(shape):
    result = assert_exchange([[np.zeros(shape, np.float32)]] * 2)[0]
    assert result.shape == shape
    assert not result.any()
    assert assert_exchange([[np.array(rank + 1.0)] for rank in range(2)])[0] == 1.5


DIFFERENCES = {
    "shape": (
        lambda rank: [np.ones((rank + 2, 60), np.float32)],
        {},
        r"holds other tensors: .*this worker has",
    ),
    "same size, other shape": (
        lambda rank: [np.ones((60, 2) if rank else (2, 60), np.float32)],
        {},
        "holds other tensors",
    ),
    "dtype": (lambda rank: [np.ones(120, np.float16 if rank else np.float32)], {}, "holds other tensors"),
    "number": (lambda rank: [np.ones(120, np.float32)] * (rank + 1), {}, "holds other tensors"),
    "data type": (
        lambda rank: [np.ones(120, np.float32)],
        {"data_type": ("linear", "mantissa")},
        "other settings: data_type=.*, block_size=1024, this worker uses data_type=",
    ),
    "block size": (lambda rank: [np.ones(120, np.float32)], {"block_size": (64, 128)}, "other settings"),
    "scaling": (lambda rank: [np.ones(120, np.float32)], {"scaling": ("absmax", 1.0)}, "other settings"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_workers_that_differ_get_an_error_not_a_number(case):
    tensors, settings, message = DIFFERENCES[case]
    errors = []

    def work(comm):
        rank = int(comm.rank_tensor())
        encoding = Encoding(**{name: values[rank] for name, values in settings.items()})
        try:
            exchange([tf.constant(array) for array in tensors(rank)], encoding, comm, factor=1.0, name="test")
        except tf.errors.InvalidArgumentError as error:
            errors.append(str(error))
            raise

    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        LoopbackComm.run(2, work, timeout_s=20)
    assert all("worker" in error for error in errors)


# The stand-in for Horovod itself.


def test_loopback_alltoall_and_allgather():
    def work(comm):
        rank = int(comm.rank_tensor())
        assert comm.size() == int(comm.size_tensor()) == 3
        payload = tf.constant([10 * rank + to for to in range(3) for _ in range(to)])
        received, splits = comm.alltoall(payload, tf.constant([0, 1, 2]), "a")
        return (
            received.numpy().tolist(),
            splits.numpy().tolist(),
            comm.allgather(tf.fill([rank], rank), "b").numpy().tolist(),
        )

    assert LoopbackComm.run(3, work) == [
        ([], [0, 0, 0], [1, 2, 2]),
        ([1, 11, 21], [1, 1, 1], [1, 2, 2]),
        ([2, 2, 12, 12, 22, 22], [2, 2, 2], [1, 2, 2]),
    ]


def test_loopback_raises_what_a_worker_raised_and_lets_nobody_wait():
    def work(comm):
        if int(comm.rank_tensor()) == 1:
            raise KeyError("worker 1")
        comm.allgather(tf.zeros([1]), "a")

    before, start = threading.active_count(), time.monotonic()
    with pytest.raises(KeyError, match="worker 1"):
        LoopbackComm.run(3, work, timeout_s=60)
    assert time.monotonic() - start < 30
    assert threading.active_count() == before


def test_the_count_of_sent_bytes_goes_beyond_32_bits():
    """A payload of 4 GB: the splits are 32-bit numbers, their sum is not. Horovod itself is played."""
    comm = object.__new__(HorovodComm)
    comm.process_set = types.SimpleNamespace(process_set_id=0)
    comm._ignore_name_scope = True
    comm._hvd = types.SimpleNamespace(
        rank_op=lambda: tf.constant(1), alltoall=lambda payload, splits, **_: (payload, splits)
    )
    before = sent_bytes()
    comm.alltoall(tf.zeros([1], tf.uint8), tf.constant([2**30] * 4), "a")
    assert sent_bytes() - before == 3 * 2**30
