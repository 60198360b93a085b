"""Everyone sends everything to everyone: one rounding, the same bits everywhere, errors that name the worker."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
from codec_inputs import DTYPES

from hvd8bit import exchange as exchange_module
from hvd8bit import modes, ops, reference
from hvd8bit.collectives import LoopbackComm
from hvd8bit.encoding import Encoding
from hvd8bit.exchange import exchange, exchange_slices
from hvd8bit.gathered import check_headers
from hvd8bit.modes import ALLGATHER, SCATTER_REDUCE

SHAPES = [(), (70,), (0, 3), (5, 13, 3), (3000,), (64,), (1,)]
ENCODINGS = [Encoding(), Encoding("linear", 64), Encoding("mantissa", None, 10.0), Encoding(block_size=None)]


class CountingComm:
    """A `LoopbackComm` that adds up what its worker sends to others."""

    def __init__(self, comm: LoopbackComm):
        self._comm = comm
        self.sent = self.calls = 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def allgather(self, chunk, name):
        self.calls += 1
        gathered = self._comm.allgather(chunk, name)
        self.sent += int(tf.size(gathered) - tf.size(chunk))
        return gathered


def run(workers, encoding, factor=1.0):
    def work(comm):
        comm = CountingComm(comm)
        tensors = [tf.constant(array) for array in workers[int(comm.rank_tensor())]]
        results = exchange(tensors, encoding, comm, factor=tf.constant(factor, tf.float64), name="t", mode=ALLGATHER)
        return [result.numpy() for result in results], comm

    done = LoopbackComm.run(len(workers), work)
    return [results for results, _ in done], [comm for _, comm in done]


def expected(workers, encoding, factor):
    """Each worker's list by the reference, added in float32 in the order of the workers."""
    decoded = [
        reference.decode_list([reference.encode_list(tensors, 1, encoding)], tensors, encoding) for tensors in workers
    ]
    results = []
    for parts in zip(*decoded):
        total = np.asarray(parts[0]).astype(np.float32)
        for part in parts[1:]:
            total = total + np.asarray(part).astype(np.float32)
        results.append((total.astype(np.float64) * factor / len(workers)).astype(parts[0].dtype))
    return results


def random_workers(rng, count):
    dtypes = tuple(DTYPES.values())
    return [
        [np.asarray(rng.standard_normal(shape)).astype(dtypes[i % len(dtypes)]) for i, shape in enumerate(SHAPES)]
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("per_slice", [None, 400])
def test_equals_the_reference_on_every_worker(count, per_slice, rng, monkeypatch):
    if per_slice:
        monkeypatch.setattr(exchange_module, "ELEMENTS_PER_SLICE", per_slice)
    for encoding in ENCODINGS:
        for factor in (float(count), 0.3):
            workers = random_workers(rng, count)
            results, comms = run(workers, encoding, factor)
            for want, *everyones in zip(expected(workers, encoding, factor), *results):
                for got in everyones:
                    np.testing.assert_array_equal(got, want)
            slices = exchange_module.number_of_slices([tf.constant(array) for array in workers[0]])
            assert (slices > 1) == bool(per_slice)
            assert all(comm.calls == slices for comm in comms)
            if slices == 1:
                sizes = tuple(array.size for array in workers[0])
                sent = modes.wire_bytes(sizes, count, encoding.block_size, ALLGATHER)
                assert all(comm.sent == sent for comm in comms)


def test_one_rounding_less_than_a_scatter_reduce(rng):
    workers = [[rng.standard_normal(64 * 500).astype(np.float32)] for _ in range(4)]
    exact = np.mean([tensors[0].astype(np.float64) for tensors in workers], axis=0)

    def error(mode):
        def work(comm):
            mine = tf.constant(workers[int(comm.rank_tensor())][0])
            return exchange([mine], Encoding(block_size=64), comm, factor=1.0, name="t", mode=mode)[0].numpy()

        return float(np.sqrt(np.mean((LoopbackComm.run(4, work)[0] - exact) ** 2)))

    assert error(ALLGATHER) < 0.8 * error(SCATTER_REDUCE)


def test_constants_are_exact_for_every_number_of_workers():
    for count in (3, 41):
        for factor, right in ((1.0, 1.0), (float(count), float(count))):
            results, _ = run([[np.ones(100, np.float32)]] * count, Encoding(), factor)
            assert np.all(results[-1][0] == right)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_non_finite_values_are_seen_by_all_and_stay_in_their_block(bad):
    workers = [[np.ones(1000, np.float32)] for _ in range(2)]
    workers[1][0][700] = bad
    results, _ = run(workers, Encoding(block_size=64))
    own = np.zeros(1000, bool)
    own[640:704] = True
    for result in results:
        assert np.all(~np.isfinite(result[0][own]))
        assert np.all(result[0][~own] == 1)


DIFFERENCES = {
    "shape": (lambda r: [np.ones((2, 60 + (r == 2)), np.float32)], {}, r"from worker 2 holds other tensors: 122 .*120"),
    "order": (lambda r: [np.ones((60, 2) if r == 2 else (2, 60), np.float32)], {}, "from worker 2 holds other tensors"),
    "dtype": (lambda r: [np.ones(120, np.float16 if r == 2 else np.float32)], {}, "from worker 2 holds other tensors"),
    "number": (lambda r: [np.ones(120, np.float32)] * (1 + (r == 2)), {}, r"from worker 2 .* in 2 tensor\(s\)"),
    "data type": (
        lambda r: [np.ones(120, np.float32)],
        {"data_type": ("linear", "linear", "mantissa")},
        "from worker 2 was encoded with other settings: data_type=mantissa, block_size=1024, rounding=nearest, this "
        "worker uses data_type=linear",
    ),
    "scaling": (
        lambda r: [np.ones(120, np.float32)],
        {"scaling": ("absmax", "absmax", 1.0)},
        "from worker 2 was encoded with other settings",
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_workers_that_differ_get_an_error_that_names_one(case):
    tensors, settings, message = DIFFERENCES[case]
    errors = {}

    def work(comm):
        rank = int(comm.rank_tensor())
        encoding = Encoding(**{name: values[rank] for name, values in settings.items()})
        try:
            exchange([tf.constant(a) for a in tensors(rank)], encoding, comm, factor=1.0, name="t", mode=ALLGATHER)
        except tf.errors.InvalidArgumentError as error:
            errors[rank] = str(error).replace("\n", " ")

    LoopbackComm.run(3, work, timeout_s=20)
    assert sorted(errors) == [0, 1, 2]
    assert re.search(message, errors[0]), errors[0]
    assert "from worker 0" in errors[2]


def test_headers_are_checked_in_graphs_and_missing_chunks_told():
    own, _ = ops.encode_list([tf.ones([2000])], 1, Encoding())
    other, _ = ops.encode_list([tf.ones([2001])], 1, Encoding())
    check = tf.function(lambda everyones: check_headers(everyones, own, tf.constant(2, tf.int64)))
    both = tf.concat([own, own], 0)
    np.testing.assert_array_equal(check(both), both)
    for received, message in (
        (tf.concat([own, other], 0), "from worker 1 holds other tensors"),
        (tf.concat([other, own], 0), "from worker 0 holds other tensors"),
        (own, r"from worker 1 is missing: 2072 bytes came from all; a worker that has called hvd\.join"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            check(received)


@pytest.mark.parametrize("index", [tf.int32, tf.int64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_rows_of_all_workers(index, dtype, rng):
    """Worker 0 has no rows at all, the others as many as their rank; indices may repeat."""
    rows = [rng.standard_normal((rank, 3, 5)) for rank in range(4)]

    def work(comm):
        rank = int(comm.rank_tensor())
        values = tf.cast(tf.constant(rows[rank]), dtype)
        indices = tf.cast(tf.constant([7] * rank), index)
        given = tf.IndexedSlices(values, indices, dense_shape=tf.constant([8, 3, 5]))
        got = exchange_slices(given, Encoding(), comm, average=True, name="t")
        assert got.values.dtype == dtype
        assert got.indices.dtype == index
        return tf.cast(got.values, tf.float64).numpy(), got.indices.numpy()

    results = LoopbackComm.run(4, work)
    for values, indices in results:
        np.testing.assert_array_equal(values, results[0][0])
        assert indices.tolist() == [7] * 6
        everyones = np.concatenate(rows)
        half_gap = 0.0172 / 2  # dynamic_tree, one rounding
        for got, right in zip(values, everyones):
            np.testing.assert_allclose(got, right / 4, atol=(half_gap + 2**-7) * np.abs(everyones).max() / 4)


def test_rows_of_another_width_are_an_error():
    def work(comm):
        rank = int(comm.rank_tensor())
        given = tf.IndexedSlices(tf.ones([2, 3 + rank]), tf.constant([0, 1]), dense_shape=tf.constant([8, 3 + rank]))
        exchange_slices(given, Encoding(), comm, average=False, name="t")

    with pytest.raises(tf.errors.InvalidArgumentError, match="holds other tensors"):
        LoopbackComm.run(2, work)


# The rule of "auto".


def test_auto_takes_one_round_for_little_data_and_few_workers():
    assert modes.choose("auto", (2000,), 2, 1024) == ALLGATHER
    assert modes.choose("auto", (modes.MAX_ALLGATHER_ELEMENTS,), 2, 1024) == ALLGATHER
    assert modes.choose("auto", (modes.MAX_ALLGATHER_ELEMENTS + 1,), 2, 1024) == SCATTER_REDUCE
    assert modes.choose("auto", (2000,), 1024, 1024) == SCATTER_REDUCE
    # What an allgather sends more: (N-1)(N-2)/N bytes per element.
    limit = int(modes.ROUND_BYTES * 5 / 12)
    assert modes.choose("auto", (limit,), 5, 1024) == ALLGATHER
    assert modes.choose("auto", (limit + 1,), 5, 1024) == SCATTER_REDUCE


def test_auto_scatters_what_it_cannot_judge():
    assert modes.choose("auto", (2000, None), 2, 1024) == SCATTER_REDUCE
    assert modes.choose("auto", (2000,), None, 1024) == SCATTER_REDUCE  # elastic


def test_what_is_asked_for_is_done():
    for mode in modes.MODES:
        for sizes in ((10,), (10**9,), (None,)):
            for workers in (2, 1000, None):
                assert modes.choose(mode, sizes, workers, 1024) == mode


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 8, 16])
def test_auto_never_sends_more_than_float32(workers):
    for elements in (1, 64, 100, 1024, 5000, 10**5):
        if modes.choose("auto", (elements,), workers, 1024) == ALLGATHER:
            assert modes.pays((elements,), workers, 1024, ALLGATHER)


def test_two_workers_send_the_same_bytes_either_way():
    sizes = (64 * 1000, 64 * 2000)
    ours = [modes.wire_bytes(sizes, 2, 64, mode) for mode in modes.MODES]
    assert abs(ours[0] - ours[1]) <= 64  # a header more
