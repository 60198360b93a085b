"""The primitives of model parallelism among threads of one process: values, gradients, shapes, bytes, errors."""

from __future__ import annotations

import functools
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from codec_cases import reference_exchange
from codec_inputs import DTYPES, assert_same_numbers

from hvd8bit import EightBit, activations, parallel, reference
from hvd8bit.collectives import LoopbackComm
from hvd8bit.encoding import Encoding
from hvd8bit.layout import Layout
from hvd8bit.parallel.partition import part_range, part_sizes

ALL = EightBit(min_elements=0)
MODES = {
    "exact": None,
    "eightbit": ALL,
    "linear": ALL(data_type="linear", block_size=64),
    "paper": ALL(block_size=None),
}


def run(workers, fn):
    """fn(comm, rank) for every worker."""
    return LoopbackComm.run(workers, lambda comm: fn(comm, comm.rank()), timeout_s=60)


def with_gradient(fn, x, upstream=None):
    """fn(x) and the gradient of the sum of fn(x) times `upstream(value)`, which is what comes back."""
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = fn(x)
        target = y if upstream is None else tf.reduce_sum(y * tf.constant(upstream(y), y.dtype))
    return y.numpy(), tape.gradient(target, x).numpy()


def rounded(array, compression):
    """What a receiver sees of it, by the reference."""
    if compression is None:
        return array
    (result,) = reference.decode_list(
        [reference.encode_list([array], 1, compression.encoding)], [array], compression.encoding
    )
    return result


def summed(arrays, compression):
    """The sum as `all_reduce` gives it."""
    if compression is None:
        return functools.reduce(np.add, arrays)
    return reference_exchange([[array] for array in arrays], compression.encoding, factor=float(len(arrays)))[0]


def values(rng, workers, shape, dtype=np.float32):
    return [np.asarray(rng.standard_normal(shape)).astype(dtype) for _ in range(workers)]


def weights(y):
    return np.cos(np.arange(np.prod(y.shape))).reshape(y.shape)


# ---- forward and backward, against the definition ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather(workers, mode, axis, rng):
    """Uneven parts, one of them empty; backward the own slice."""
    compression = MODES[mode]
    shapes = [[3, 5, 7] for _ in range(workers)]
    for rank in range(workers):
        shapes[rank][axis] = (rank + 2) % 4 if workers > 1 else 3
    parts = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    whole = np.concatenate([rounded(part, compression) if workers > 1 else part for part in parts], axis)
    starts = np.cumsum([0, *(part.shape[axis] for part in parts)])

    def work(comm, rank):
        def fn(x):
            return parallel.all_gather(x, axis=axis, compression=compression, process_set=comm, name="a")

        return with_gradient(fn, parts[rank], weights)

    for rank, (y, dx) in enumerate(run(workers, work)):
        np.testing.assert_array_equal(y, whole)
        own = np.take(weights(whole), range(starts[rank], starts[rank + 1]), axis)
        np.testing.assert_array_equal(dx, own.astype(np.float32))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_all_gather_with_partial_error_signals(workers, mode, rng):
    """`gradient="sum"`: worker r weighs with (r + 1) w, so the sum is w times N (N + 1) / 2."""
    compression = MODES[mode]
    parts = [rng.standard_normal((rank + 1, 6)).astype(np.float32) for rank in range(workers)]
    starts = np.cumsum([0, *(len(part) for part in parts)])

    def work(comm, rank):
        def fn(x):
            return parallel.all_gather(x, compression=compression, process_set=comm, name="a", gradient="sum")

        return with_gradient(fn, parts[rank], lambda y: (rank + 1) * weights(y))

    for rank, (y, dx) in enumerate(run(workers, work)):
        signals = [((r + 1) * weights(y)).astype(np.float32)[starts[rank] : starts[rank + 1]] for r in range(workers)]
        if workers > 1:
            signals = [rounded(np.ascontiguousarray(signal), compression) for signal in signals]
        np.testing.assert_allclose(dx, functools.reduce(np.add, signals), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", range(1, 9))
def test_all_reduce_and_copy(workers, mode, rng):
    compression = MODES[mode]
    terms = values(rng, workers, (4, 50))
    signals = values(rng, workers, (4, 50))

    def work(comm, rank):
        settings = {"compression": compression, "process_set": comm, "name": "a"}
        added = with_gradient(lambda x: parallel.all_reduce(x, **settings), terms[rank], weights)
        copied = with_gradient(lambda x: parallel.copy(x, **settings), terms[0], lambda _: signals[rank])
        return added, copied

    for (y, dy), (same, dx) in run(workers, work):
        want = terms[0] if workers == 1 else summed(terms, compression)
        np.testing.assert_allclose(y, want, rtol=0, atol=1e-5 if compression is None else 0)
        np.testing.assert_array_equal(dy, weights(y).astype(np.float32))  # the identity: no factor of N
        np.testing.assert_array_equal(same, terms[0])
        want = signals[0] if workers == 1 else summed(signals, compression)
        np.testing.assert_allclose(dx, want, rtol=0, atol=1e-5 if compression is None else 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("axis", [0, 1])
def test_reduce_scatter_and_scatter(workers, mode, axis, rng):
    """7 places over up to 8 workers: uneven, and one gets nothing."""
    compression = MODES[mode]
    terms = values(rng, workers, (7, 7))

    def own_of(array, rank):
        return np.ascontiguousarray(np.take(array, range(*part_range(7, workers, rank)), axis))

    def work(comm, rank):
        settings = {"axis": axis, "compression": compression, "process_set": comm, "name": "a"}
        own_weights = functools.partial(lambda y: own_of(weights(np.zeros((7, 7))), rank))
        added = with_gradient(lambda x: parallel.reduce_scatter(x, **settings), terms[rank], own_weights)
        cut = with_gradient(lambda x: parallel.scatter(x, **settings), terms[0], own_weights)
        return added, cut

    whole = weights(np.zeros((7, 7))).astype(np.float32)
    pieces = [own_of(whole, rank) for rank in range(workers)]
    back = np.concatenate([rounded(piece, compression) if workers > 1 else piece for piece in pieces], axis)
    for rank, ((y, dy), (part, dx)) in enumerate(run(workers, work)):
        own = [own_of(term, rank) for term in terms]
        if workers > 1:
            own = [rounded(term, compression) for term in own]
        np.testing.assert_allclose(y, functools.reduce(np.add, own), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(dy, back)
        np.testing.assert_array_equal(part, own_of(terms[0], rank))
        np.testing.assert_array_equal(dx, back)


def test_straight_through(rng):
    """FIELD-CASES M4: the gradient of the rounding is 1 everywhere: at zeros, at the largest value, between."""
    x = np.concatenate([np.zeros(5), [3.0, -3.0, 1e-9, 1e-30], rng.standard_normal(100)]).astype(np.float32)

    def work(comm, rank):
        _, dx = with_gradient(
            lambda v: parallel.all_gather(v, compression=ALL, process_set=comm, name="a"), x, lambda y: np.ones(y.shape)
        )
        _, dz = with_gradient(
            lambda v: parallel.all_reduce(v, compression=ALL, process_set=comm, name="b"), x, lambda y: np.ones(y.shape)
        )
        # Ones are their own scale: coded on the way back, too, they stay ones.
        _, dc = with_gradient(
            lambda v: parallel.copy(v, compression=ALL, process_set=comm, name="c"), x, lambda y: np.ones(y.shape)
        )
        return dx, dz, dc

    for dx, dz, dc in run(2, work):
        assert np.all(dx == 1)
        assert np.all(dz == 1)
        assert np.all(dc == 2)  # both workers' error signals


def test_gradients_of_gradients(rng):
    """sum(x³) through each primitive: the second derivative of the sum over workers is 6 x in exact mode."""
    parts = values(rng, 3, (5, 4), np.float64)

    def work(comm, rank):
        x = tf.constant(parts[rank])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = parallel.all_gather(x, axis=1, compression=None, process_set=comm, name="a")
                loss = tf.reduce_sum(y**3)
            first = inner.gradient(loss, x)
        return first.numpy(), outer.gradient(first, x).numpy()

    for rank, (first, second) in enumerate(run(3, work)):
        np.testing.assert_allclose(first, 3 * parts[rank] ** 2, rtol=1e-12)
        np.testing.assert_allclose(second, 6 * parts[rank], rtol=1e-12)


# ---- dtypes ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["exact", "eightbit"])
def test_float_dtypes_come_back_as_they_were(dtype, mode, rng):
    parts = values(rng, 3, (6, 40), DTYPES[dtype])

    def work(comm, rank):
        settings = {"compression": MODES[mode], "process_set": comm, "name": "a"}
        x = tf.constant(parts[rank])
        return [
            parallel.all_gather(x, axis=1, **settings),
            parallel.all_reduce(x, **settings),
            parallel.reduce_scatter(x, **settings),
            parallel.scatter(x, **settings),
            parallel.copy(x, **settings),
        ]

    results = run(3, work)
    exact = [part.astype(np.float64) for part in parts]
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-6) if mode == "exact" else 0.03
    for rank, (gathered, added, own, cut, copied) in enumerate(results):
        assert {t.dtype.name for t in (gathered, added, own, cut, copied)} == {dtype}
        pairs = [
            (gathered, np.concatenate(exact, 1)),
            (added, sum(exact)),
            (own, sum(exact)[2 * rank : 2 * rank + 2]),
            (cut, exact[rank][2 * rank : 2 * rank + 2]),
            (copied, exact[rank]),
        ]
        for got, want in pairs:
            error = np.linalg.norm(tf.cast(got, tf.float64).numpy() - want) / np.linalg.norm(want)
            assert error <= tolerance, dtype
        if mode == "exact" and dtype == "float64":
            np.testing.assert_array_equal(gathered.numpy(), np.concatenate(parts, 1))
            np.testing.assert_allclose(added.numpy(), sum(parts), rtol=1e-14, atol=1e-14)


def test_integers_and_booleans_are_never_rounded():
    def work(comm, rank):
        settings = {"compression": ALL, "process_set": comm, "name": "a"}
        tokens = tf.constant([1000001 + rank, 3], tf.int64)
        return (
            parallel.all_gather(tokens, **settings).numpy().tolist(),
            parallel.all_reduce(tokens, **settings).numpy().tolist(),
            parallel.all_gather(tf.constant([rank == 0]), **settings).numpy().tolist(),
        )

    assert run(2, work) == [([1000001, 3, 1000002, 3], [2000003, 6], [True, False])] * 2


# ---- small tensors ----


class SpyComm:
    """A `LoopbackComm` that notes its calls, and counts what it sends to others."""

    def __init__(self, comm):
        self._comm = comm
        self.calls, self.sent = [], 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def allgather(self, chunk, name):
        gathered = self._comm.allgather(chunk, name)
        self.calls.append(name)
        self.sent += int(tf.size(gathered) - tf.size(chunk))  # a ring passes on what it receives
        return gathered

    def alltoall(self, payload, splits, name):
        self.calls.append(name)
        self.sent += int(tf.reduce_sum(splits) - splits[self._comm.rank()])
        return self._comm.alltoall(payload, splits, name)

    def gather_rows(self, rows, name):
        self.calls.append(name)
        return self._comm.gather_rows(rows, name)

    def swap_rows(self, rows, splits, name):
        self.calls.append(name)
        return self._comm.swap_rows(rows, splits, name)

    def add_up(self, tensor, name):
        self.calls.append(name)
        return self._comm.add_up(tensor, name)


@pytest.mark.parametrize(("elements", "coded"), [(0, False), (100, False), (1023, False), (1024, True), (5000, True)])
def test_small_parts_travel_exactly(elements, coded, rng):
    parts = values(rng, 2, (elements,))

    def work(comm, rank):
        spy = SpyComm(comm)
        x = tf.constant(parts[rank])
        sizes = [elements, elements]
        gathered = parallel.all_gather(x, process_set=spy, name="a", sizes=sizes).numpy()
        parallel.reduce_scatter(tf.concat([x, x], 0), process_set=spy, name="b", sizes=sizes)
        return gathered, spy.calls

    for gathered, calls in run(2, work):
        expected = ["hvd8bit_a_allgather", "hvd8bit_b_alltoall"]
        assert calls == expected
        exact = np.concatenate(parts)
        assert np.array_equal(gathered, exact) != coded


@pytest.mark.parametrize("known", [False, True])
def test_the_largest_part_decides_for_all(known, rng):
    """Workers with small parts must not send them otherwise than the one with a large part."""
    sizes = [3, 2000]
    parts = [rng.standard_normal(size).astype(np.float32) for size in sizes]

    def work(comm, rank):
        given = sizes if known else None
        return parallel.all_gather(tf.constant(parts[rank]), process_set=comm, name="a", sizes=given).numpy()

    want = np.concatenate([rounded(part, EightBit) for part in parts])
    for got in run(2, work):
        np.testing.assert_array_equal(got, want)


def test_sizes_are_exchanged_only_where_nobody_gave_them():
    def work(comm, rank):
        spy = SpyComm(comm)
        x = tf.zeros([2, rank + 1])
        parallel.all_gather(x, axis=1, compression=ALL, process_set=spy, name="a")
        parallel.all_gather(x, axis=1, compression=ALL, process_set=spy, name="b", sizes=[1, 2])
        return spy.calls

    assert run(2, work)[0] == ["hvd8bit_a_sizes", "hvd8bit_a_allgather", "hvd8bit_b_allgather"]


# ---- bytes ----


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("block_size", [64, 1024, None])
def test_bytes_on_the_wire(workers, block_size):
    """What docs/model-parallelism.md says of each scheme."""
    compression = ALL(block_size=block_size)
    batch, features = 37, 53
    total = sum(part_sizes(features, workers))
    sizes = part_sizes(features, workers)

    def part_bytes(size):
        n = batch * size
        return 64 + -(-n // 4) * 4 + 4 * (-(-n // block_size) if block_size else min(n, 1))

    def work(comm, rank):
        sent = []
        for call in (
            lambda c: parallel.all_gather(
                tf.zeros([batch, sizes[rank]]), axis=1, compression=compression, process_set=c, name="a", sizes=sizes
            ),
            lambda c: parallel.reduce_scatter(
                tf.zeros([batch, total]), axis=1, compression=compression, process_set=c, name="a"
            ),
            lambda c: parallel.all_reduce(tf.zeros([batch, total]), compression=compression, process_set=c, name="a"),
            lambda c: parallel.copy(tf.zeros([batch, total]), compression=compression, process_set=c, name="a"),
            lambda c: parallel.scatter(
                tf.zeros([batch, total]), axis=1, compression=compression, process_set=c, name="a"
            ),
        ):
            spy = SpyComm(comm)
            call(spy)
            sent.append(spy.sent)
        return sent

    everyone = run(workers, work)
    for rank, sent in enumerate(everyone):
        others = [part_bytes(size) for other, size in enumerate(sizes) if other != rank]
        assert sent[0] == sent[1] == sum(others)
        assert sent[3:] == [0, 0]
    layout = Layout([batch * features], workers, block_size)
    assert np.mean([sent[2] for sent in everyone]) == pytest.approx(layout.wire_bytes())


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_quarter_of_the_bytes_for_a_megabyte(workers):
    sizes = part_sizes(1024, workers)
    exact = [4 * 256 * sum(size for other, size in enumerate(sizes) if other != rank) for rank in range(workers)]

    def work(comm, rank):
        spy = SpyComm(comm)
        parallel.all_gather(tf.zeros([256, sizes[rank]]), axis=1, process_set=spy, name="a", sizes=sizes)
        return spy.sent

    for sent, plain in zip(run(workers, work), exact):
        assert 0.25 * plain < sent <= 0.27 * plain


@hypothesis.given(
    n=st.integers(0, 5000),
    block_size=st.one_of(st.none(), st.integers(1, 1024).map(lambda k: 64 * k)),
)
def test_coded_bytes_are_those_of_the_layout(n, block_size):
    encoding = Encoding(block_size=block_size)
    assert activations.coded_bytes(n, encoding) == Layout([n], 1, block_size).chunk_bytes(0)
    assert int(activations.coded_bytes(tf.constant(n, tf.int64), encoding)) == Layout([n], 1, block_size).chunk_bytes(0)


# ---- properties ----


@hypothesis.given(total=st.integers(0, 10000), parts=st.integers(1, 64))
def test_parts_are_nearly_the_same_and_make_the_whole(total, parts):
    sizes = part_sizes(total, parts)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [part_range(total, parts, part)[1] for part in range(parts)][-1] == total
    assert [int(size) for size in part_sizes(tf.constant(total), parts)] == sizes


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    workers=st.integers(2, 5),
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    axis=st.integers(0, 2),
    encoding=st.sampled_from(["exact", "eightbit", "linear", "paper"]),
    seed=st.integers(0, 1000),
)
def test_scatter_then_gather_gives_the_whole_again(workers, shape, axis, encoding, seed):
    axis %= len(shape)
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    def work(comm, rank):
        settings = {"axis": axis, "compression": MODES[encoding], "process_set": comm}
        own = parallel.scatter(tf.constant(x), name="s", **settings)
        assert own.shape[axis] == part_sizes(shape[axis], workers)[rank]
        return parallel.all_gather(own, name="g", **settings).numpy()

    results = run(workers, work)
    assert len({result.tobytes() for result in results}) == 1
    assert results[0].shape == x.shape
    # Half the widest gap between values times the largest magnitude; 0 where exact.
    bound = {"exact": 0.0, "linear": 0.5 / 127}.get(encoding, 0.0086)
    assert np.all(np.abs(results[0] - x) <= bound * np.abs(x).max(initial=0))


# ---- one worker, non-finite values ----


def test_one_worker_touches_nothing(rng):
    x = tf.constant(rng.standard_normal((3, 2000)).astype(np.float32))

    def work(comm, rank):
        spy = SpyComm(comm)
        settings = {"compression": ALL, "process_set": spy, "name": "a"}
        results = [
            parallel.all_gather(x, **settings),
            parallel.all_reduce(x, **settings),
            parallel.copy(x, **settings),
            parallel.reduce_scatter(x, **settings),
            parallel.scatter(x, **settings),
        ]
        assert spy.calls == []
        return all(result is x for result in results)

    assert run(1, work) == [True]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_seen_by_all_and_stay_in_their_block(bad):
    def work(comm, rank):
        x = np.ones(256, np.float32)
        if rank == 1:
            x[100] = bad
        return parallel.all_gather(tf.constant(x), compression=ALL(block_size=64), process_set=comm, name="a").numpy()

    own = np.zeros(512, bool)
    own[256 + 64 : 256 + 128] = True
    for got in run(2, work):
        assert np.all(np.isnan(got[own]))
        assert np.all(got[~own] == 1)


# ---- wrong use ----


def calls_of(comm, **settings):
    settings = {"process_set": comm, "name": "a", **settings}
    return {
        "all_gather": lambda x: parallel.all_gather(x, **settings),
        "all_reduce": lambda x: parallel.all_reduce(x, **settings),
        "reduce_scatter": lambda x: parallel.reduce_scatter(x, **settings),
    }


@pytest.mark.parametrize("primitive", ["all_gather", "all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("difference", ["batch", "settings"])
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_differ_all_get_an_error(primitive, difference, workers):
    errors = {}
    met = threading.Barrier(workers)

    def work(comm, rank):
        odd = rank == 1
        compression = ALL(data_type="linear" if odd and difference == "settings" else "dynamic_tree")
        rows = 5 if odd and difference == "batch" else 4
        settings = {} if primitive == "all_reduce" else {"axis": 1, "sizes": [3] * workers}
        columns = 3 if primitive == "all_gather" else 3 * workers
        try:
            calls_of(comm, compression=compression, **settings)[primitive](tf.ones([rows, columns]))
        except tf.errors.InvalidArgumentError as error:
            errors[rank] = str(error)
        met.wait(20)

    run(workers, work)
    assert sorted(errors) == list(range(workers))
    cause = "other settings" if difference == "settings" else "other tensors"
    if difference == "batch" and primitive == "all_gather":  # the bytes do not fit, before a header is looked at
        cause = "give all workers the same input"
    for text in errors.values():
        assert cause in text


def test_unknown_sizes_are_compared_with_all_workers():
    errors = []

    def work(comm, rank):
        try:
            parallel.all_gather(tf.ones([4 + rank, 3]), axis=1, compression=ALL, process_set=comm, name="tower/out")
        except tf.errors.InvalidArgumentError as error:
            errors.append(str(error))

    run(3, work)
    assert len(errors) == 3
    assert all("tower/out" in text and "axis 1" in text for text in errors)


WRONG = {
    "axis": (lambda c: parallel.all_gather(tf.ones([2]), axis=1, process_set=c, name="a"), r"axis must be .*\[-1, 1\)"),
    "scalar": (lambda c: parallel.all_gather(1.0, process_set=c, name="a"), "axis must be"),
    "gradient": (
        lambda c: parallel.all_gather(tf.ones([2]), process_set=c, name="a", gradient="mean"),
        "gradient must be one of slice, sum, got 'mean'",
    ),
    "sizes": (
        lambda c: parallel.all_gather(tf.ones([2]), process_set=c, name="a", sizes=[2, 2, 2]),
        r"as many as workers, 2, got \[2, 2, 2\]",
    ),
    "own size": (
        lambda c: parallel.all_gather(tf.ones([2]), process_set=c, name="a", sizes=[3, 3]),
        "this worker's size along axis 0, 2",
    ),
    "cut": (lambda c: parallel.scatter(tf.ones([7]), process_set=c, name="a", sizes=[3, 3]), "must add up to 7"),
    "name": (lambda c: parallel.copy(tf.ones([7]), process_set=c, name=""), "name must be a string"),
    "compression": (
        lambda c: parallel.copy(tf.ones([7]), process_set=c, name="a", compression="8bit"),
        "compression must be hvd8bit.EightBit",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    call, message = WRONG[case]
    with pytest.raises((ValueError, TypeError), match=message):
        run(2, lambda comm, rank: call(comm))


def test_elastic_jobs_are_refused(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ValueError, match="fixed number of workers"):
        run(2, lambda comm, rank: parallel.copy(tf.ones([7]), process_set=comm, name="a"))


def test_the_same_numbers_as_the_reference_in_every_dtype(rng):
    for dtype in DTYPES.values():
        parts = values(rng, 2, (3, 100), dtype)
        results = run(
            2,
            lambda comm, rank, parts=parts: parallel.all_gather(
                tf.constant(parts[rank]), compression=ALL, process_set=comm, name="a"
            ).numpy(),
        )
        for got in results:
            assert_same_numbers(got, np.concatenate([rounded(part, ALL) for part in parts]), str(dtype))
