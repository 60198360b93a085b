"""Seeds of stochastic rounding, and what exchanges make of them: no bias, no error that goes with another."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit import EightBit, Selection, activations, dither, planning, reference
from hvd8bit.collectives import LoopbackComm
from hvd8bit.encoding import Encoding
from hvd8bit.exchange import exchange, exchange_slices
from hvd8bit.gathered import check_headers
from hvd8bit.modes import MODES
from hvd8bit.parallel import transfer

STOCHASTIC = Encoding(block_size=64, rounding="stochastic")
SEEDED = Encoding(block_size=64, rounding="stochastic", seed=5)
NUMBERS = 4096


def drawn(encoding=SEEDED, steps=3, **settings) -> list[int]:
    """The seeds of so many steps of a graph of its own."""
    step = tf.function(lambda: dither.seeds(encoding, **settings)[0], autograph=False)
    return [int(step()) for _ in range(steps)]


def inputs(workers: int) -> list[np.ndarray]:
    return [np.random.default_rng(rank).standard_normal(NUMBERS).astype(np.float32) for rank in range(workers)]


def correlation(a, b) -> float:
    return float(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1])


# Seeds.


def test_each_step_draws_another_one_and_each_run_the_same():
    first = drawn()
    assert len(set(first)) == 3
    assert drawn() == first
    assert drawn(Encoding(rounding="stochastic", seed=6)) != first


def test_a_seed_of_its_own_does_not_depend_on_tensorflows():
    tf.random.set_seed(1)
    first, free = drawn(), drawn(STOCHASTIC)
    tf.random.set_seed(2)
    assert drawn() == first
    assert drawn(STOCHASTIC) != free
    tf.random.set_seed(1)
    assert drawn(STOCHASTIC) == free


@pytest.mark.parametrize("encoding", [STOCHASTIC, SEEDED], ids=["TensorFlow's generator", "a seed"])
def test_graphs_that_draw_alike_get_other_seeds_by_their_names(encoding):
    """A tensor that travels alone has a graph of its own, and TensorFlow starts each one in the same state."""
    tf.random.set_seed(3)
    by_name = [drawn(encoding, name=name) for name in ("a", "b", "b")]
    assert not set(by_name[0]) & set(by_name[1])
    assert by_name[1] == by_name[2]


def test_workers_that_draw_alike_get_other_seeds():
    class Comm:
        def __init__(self, rank):
            self.global_rank_tensor = lambda: tf.constant(rank)

    of_ranks = [drawn(comm=Comm(rank)) for rank in range(3)]
    assert [np.diff([one, other]).tolist() for one, other in zip(of_ranks[0], of_ranks[1])] == [[2**32]] * 3
    assert len({seed for seeds in of_ranks for seed in seeds}) == 9


def test_one_draw_gives_several_and_the_nearest_value_needs_none():
    a, b, c = (int(seed) for seed in dither.seeds(SEEDED, 3))
    assert (b - a, c - a) == (1, 2)
    assert [int(seed) for seed in dither.seeds(Encoding(seed=5), 2)] == [0, 0]
    graph = tf.function(lambda: dither.seeds(Encoding(seed=5), 2), autograph=False).get_concrete_function().graph
    assert {op.type for op in graph.get_operations()} <= {"Const", "Identity", "NoOp"}


@pytest.mark.parametrize("apart", [1, dither.SEEDS_PER_WORKER, 3 * dither.SEEDS_PER_WORKER + 1])
def test_neighbouring_seeds_round_independently(apart):
    """Those of codes and sum, and those of two workers."""
    base = 123456789
    one, other = (reference.random_numbers(seed, 0, 2**18) for seed in (base, base + apart))
    for shift in (0, 1, 64):
        assert abs(correlation(one[shift:], other[: other.size - shift])) < 5 / 2**9


# Exchanges.


@pytest.mark.parametrize("mode", MODES)
def test_the_exchange_has_no_bias(mode):
    """60 steps of three workers: all agree in each. The mean over the steps nears the sum as the square root says, and
    the errors of one step say nothing about those of the next."""
    x, times = inputs(3), 60

    def work(comm):
        mine = tf.constant(x[comm.rank()])
        return [
            exchange([mine], STOCHASTIC, comm, factor=tf.constant(3.0, tf.float64), name="sum", mode=mode)[0].numpy()
            for _ in range(times)
        ]

    workers = LoopbackComm.run(3, work)
    for other in workers[1:]:
        assert np.array_equal(workers[0], other)
    steps = np.array(workers[0], np.float64)
    error = steps - np.sum(x, axis=0, dtype=np.float64)
    one_step = np.sqrt(np.mean(error**2))
    # 4096 numbers: the RMS of their means is known to within a few percent.
    assert 0.9 < np.sqrt(np.mean(error.mean(axis=0) ** 2)) / (one_step / np.sqrt(times)) < 1.1
    for apart in (1, 2, 7):
        assert abs(correlation(error[apart:], error[:-apart])) < 5 / np.sqrt(error[apart:].size)
    assert len({step.tobytes() for step in steps}) == times


def test_rounding_to_the_nearest_value_has_a_bias_that_stays():
    """What the test above would see otherwise."""
    (x,) = inputs(1)
    error = hvd8bit.decode(hvd8bit.encode(x, block_size=64)).numpy() - x
    again = hvd8bit.decode(hvd8bit.encode(x, block_size=64)).numpy() - x
    assert correlation(error, again) > 0.99


class Watched:
    """A comm that keeps what its worker sends first."""

    def __init__(self, comm: LoopbackComm):
        self._comm, self.sent = comm, None

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def alltoall(self, payload, splits, name):
        self.sent = payload if self.sent is None else self.sent
        return self._comm.alltoall(payload, splits, name)

    def allgather(self, chunk, name):
        self.sent = chunk if self.sent is None else self.sent
        return self._comm.allgather(chunk, name)


@pytest.mark.parametrize("mode", MODES)
def test_workers_that_draw_alike_round_differently(mode, monkeypatch):
    """Three with the same numbers. The mean of what they send is better than one's, as the square root says."""
    monkeypatch.setattr(dither, "_draw", lambda seed: tf.constant(77, tf.int64))
    (x,) = inputs(1)

    def work(comm):
        comm = Watched(comm)
        (mean,) = exchange([tf.constant(x)], STOCHASTIC, comm, factor=1.0, name="mean", mode=mode)
        return comm.sent.numpy(), mean.numpy()

    def rms(error):
        return np.sqrt(np.mean(error.astype(np.float64) ** 2))

    done = LoopbackComm.run(3, work)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert 0.2 < np.mean(done[one][0] != done[other][0]) < 0.6
    if mode == "allgather":
        one = rms(hvd8bit.decode(hvd8bit.encode(x, block_size=64, rounding="stochastic", seed=1)).numpy() - x)
        assert abs(rms(done[0][1] - x) / one * np.sqrt(3) - 1) < 0.1


def test_slices_do_not_change_the_result(monkeypatch):
    monkeypatch.setattr(dither, "_draw", lambda seed: tf.constant(77, tf.int64))
    x = inputs(2)
    for mode in MODES:

        def work(comm, slices, mode=mode):
            mine = [tf.constant(x[comm.rank()]), tf.constant(x[comm.rank()][:130])]
            results = exchange(mine, STOCHASTIC, comm, factor=1.0, name="s", mode=mode, slices=slices)
            return [result.numpy() for result in results]

        one, three = (LoopbackComm.run(2, lambda comm, n=n: work(comm, n))[1] for n in (1, 3))
        for a, b in zip(one, three):
            assert np.array_equal(a, b)


def test_sparse_gradients_are_the_same_on_all_workers_and_have_no_bias():
    x, times = inputs(2), 40

    def work(comm):
        rows = tf.IndexedSlices(tf.reshape(tf.constant(x[comm.rank()]), [64, 64]), tf.range(64))
        return [
            exchange_slices(rows, STOCHASTIC, comm, average=False, name="rows").values.numpy() for _ in range(times)
        ]

    one, other = LoopbackComm.run(2, work)
    assert np.array_equal(one, other)
    error = np.array(one, np.float64).reshape(times, -1) - np.concatenate(x)
    assert np.sqrt(np.mean(error.mean(axis=0) ** 2)) < 1.1 * np.sqrt(np.mean(error**2) / times)


# Activations.


def test_activations_are_the_same_on_all_workers_and_have_no_bias():
    x, times = inputs(2), 40

    def work(comm):
        mine = tf.reshape(tf.constant(x[comm.rank()]), [64, 64])
        gathered = [activations.gather(mine, 0, [64, 64], STOCHASTIC, comm, name="g").numpy() for _ in range(times)]
        parts = [activations.scatter_sum(mine, 0, [40, 24], STOCHASTIC, comm, name="s").numpy() for _ in range(times)]
        return np.array(gathered), np.array(parts)

    (one, first_part), (other, second_part) = LoopbackComm.run(2, work)
    assert np.array_equal(one, other)
    sums = np.concatenate([first_part, second_part], axis=1)
    for got, right in ((one, np.concatenate(x)), (sums, x[0].astype(np.float64) + x[1])):
        error = got.astype(np.float64).reshape(times, -1) - right
        assert np.sqrt(np.mean(error.mean(axis=0) ** 2)) < 1.1 * np.sqrt(np.mean(error**2) / times)
        assert abs(correlation(error[1:], error[:-1])) < 5 / np.sqrt(error[1:].size)


def test_a_transfer_rounds_anew_each_time():
    x = tf.reshape(tf.constant(inputs(1)[0]), [64, 64])
    compression = EightBit(block_size=64, rounding="stochastic")
    for encoded in (True, tf.constant(True)):
        one, other = (transfer.pack(x, compression, encoded, name="t") for _ in range(2))
        assert not np.array_equal(one, other)
        for payload in (one, other):
            y = transfer.unpack(payload, [64], tf.float32, compression)
            assert 0 < np.max(np.abs(y - x)) < 0.3


# Settings.


def test_settings_reach_a_plan_and_a_summary(capsys):
    select = Selection(min_elements=0, per_variable={"b*": {"rounding": "stochastic", "seed": 3}})
    compression = EightBit(select=select)
    specs = [tf.TensorSpec([2000]), tf.TensorSpec([3000])]
    plan = planning.make(specs, ["a", "b"], None, compression, sparse_as_dense=False)
    assert [gradient.encoding for gradient in plan] == [Encoding(), Encoding(rounding="stochastic", seed=3)]
    assert "rounding='stochastic', seed=3" in plan[1].describe(compression.encoding)
    assert "rounding" not in plan[0].describe(compression.encoding)
    assert len(list(planning.encoded_buckets(plan, compression, 2, 2))) == 2
    variables = [tf.Variable(tf.zeros([2000]), name="a"), tf.Variable(tf.zeros([3000]), name="b")]
    rows = hvd8bit.summary(variables, compression, workers=2)
    assert [row["rounding"] for row in rows[:2]] == ["nearest", "stochastic"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.count(", stochastic") for line in lines if line.startswith(("a:0", "b:0"))] == [0, 1]


def test_headers_tell_another_rounding():
    def chunk(encoding):
        return hvd8bit.encode(tf.ones([100]), encoding.data_type, 64, rounding=encoding.rounding).chunk

    near, random = chunk(Encoding()), chunk(STOCHASTIC)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"worker 1 was encoded with other settings: .*rounding=stochastic, this worker uses .*=nearest",
    ):
        check_headers(tf.concat([near, random], 0), near, tf.constant(2, tf.int64))


def test_layers_keep_rounding_and_seed():
    from hvd8bit import parallel

    layer = parallel.ColumnParallelDense(4, compression=EightBit(rounding="stochastic", seed=9))
    again = parallel.ColumnParallelDense.from_config(layer.get_config())
    assert again.compression == layer.compression
    assert again.compression.encoding == Encoding(rounding="stochastic", seed=9)
