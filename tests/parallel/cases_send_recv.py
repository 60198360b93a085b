"""send_recv: what arrives, what comes back, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit.parallel import measure_boundaries, send_recv

ENCODE_ALL = hvd8bit.EightBit(min_elements=0)


def numbers(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def rms(a, b):
    a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
    return np.sqrt(np.mean((a - b) ** 2)) / np.sqrt(np.mean(b**2))


def sent_and_returned(hvd, x, error, source, destination, compression, *, traced, name="boundary"):
    """What arrives of x at the destination, and on the source what comes back of `error`."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            arrived = send_recv(x, source, destination, compression=compression, name=name)
        seed = error if hvd.rank() == destination else arrived
        return arrived, tape.gradient(arrived, x, output_gradients=seed)

    step = tf.function(step, input_signature=[tf.TensorSpec([None, *x.shape[1:]], x.dtype)]) if traced else step
    return step(tf.constant(x if hvd.rank() == source else x[:0]))


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("rows", [0, 1, 77])
@pytest.mark.parametrize("compression", [None, hvd8bit.EightBit, ENCODE_ALL], ids=["exact", "eightbit", "everything"])
def test_forward_and_back(hvd, compression, rows, traced):
    x, error = numbers((rows, 50)), numbers((rows, 50), 1)
    for source, destination in [(0, 1), (hvd.size() - 1, 0)]:
        arrived, returned = sent_and_returned(hvd, x, error, source, destination, compression, traced=traced)
        assert arrived.shape[1:] == returned.shape[1:] == (50,)
        encoded = compression is not None and (compression == ENCODE_ALL or rows * 50 >= 1024)
        if hvd.rank() == destination:
            assert arrived.shape == x.shape
            if encoded and rows:
                assert 0 < rms(arrived, x) < 0.02
            else:
                assert np.array_equal(arrived, x)
        else:
            assert arrived.shape[0] == 0
        if hvd.rank() == source:
            # Straight through: 1, rounded on its way back, and no factor.
            assert returned.shape == x.shape
            if encoded and rows:
                assert 0 < rms(returned, error) < 0.02
            else:
                assert np.array_equal(returned, error)
        else:
            assert not np.any(returned)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int32", "bool", "uint8"])
def test_other_dtypes_arrive_as_they_are(hvd, dtype):
    x = tf.cast(numbers((40, 40)) * 10, dtype)
    arrived = send_recv(x if hvd.rank() == 0 else x[:0], 0, 1, name="boundary")
    assert arrived.dtype == x.dtype
    if hvd.rank() == 1:
        assert arrived.shape == x.shape
        if x.dtype.is_floating:
            assert 0 < rms(tf.cast(arrived, "float64"), tf.cast(x, "float64")) < 0.03
        else:
            assert np.array_equal(arrived, x)


def test_constants_in_a_graph_are_sent_each_time_it_runs(hvd):
    """TensorFlow's optimizer would run a collective with constant input once and keep the result."""

    @tf.function
    def step(scale):
        first = send_recv(tf.ones([3, 4]), 0, 1, compression=None, name="first")
        second = send_recv(tf.ones([3, 4]), 0, 1, compression=None, name="second")  # the same input: not to be merged
        return scale * tf.reduce_sum(first), scale * tf.reduce_sum(second)

    sent = hvd8bit.collectives.sent_bytes()
    for scale in (1.0, 2.0):
        expected = 12 * scale if hvd.rank() == 1 else 0
        assert [float(value) for value in step(tf.constant(scale))] == [expected, expected]
    payload = 3 * 4 * 4 + 8 * (3 + 2)
    assert hvd8bit.collectives.sent_bytes() - sent == (4 * payload if hvd.rank() == 0 else 0)


def test_transfers_under_way_at_once_meet_in_any_order(hvd):
    """All rings and directions at once: nothing waits for a turn."""
    n = hvd.size()

    @tf.function
    def step():
        arrived = {}
        for hop in range(n):
            for source in range(n) if hvd.rank() % 2 else reversed(range(n)):  # traced in another order
                destination = (source + hop) % n
                if source != destination:
                    x = tf.fill([2, 3], float(10 * source + hop))
                    y = send_recv(x, source, destination, name=f"hop_{hop}_from_{source}")
                    arrived[hop, source] = tf.reduce_sum(y)
        return arrived

    found = step()
    assert len(found) == n * (n - 1)
    for (hop, source), total in found.items():
        assert float(total) == (6 * (10 * source + hop) if (source + hop) % n == hvd.rank() else 0)


def test_the_report_tells_bytes_and_error_of_each_direction(hvd):
    x, error = numbers((64, 64)), numbers((64, 64), 1)
    with measure_boundaries() as report:
        sent_and_returned(hvd, x, error, 0, 1, hvd8bit.EightBit, traced=True, name="watched")
    rows = {row["direction"]: row for row in report.rows()}
    assert set(rows) == {0: {"forward"}, 1: {"backward"}}.get(hvd.rank(), set())
    for row in rows.values():
        assert row["boundary"] == "watched"
        assert row["elements"] == 64 * 64
        assert row["sent_bytes"] == 64 * 64 + 4 * 4 + 64
        assert 0.005 < row["relative_error"] < 0.02


@pytest.mark.parametrize(
    ("ends", "shape", "message"),
    [
        ((0, 9), [2, 2], "destination must be the global rank"),
        ((1, 1), [2, 2], "two workers, got 1 for both"),
        ((0, 1), [], "rows"),
    ],
)
def test_wrong_arguments(hvd, ends, shape, message):
    with pytest.raises(ValueError, match=message):
        send_recv(tf.zeros(shape), *ends, name="boundary")


def test_what_compression_can_be(hvd):
    with pytest.raises(TypeError, match=r"compression must be hvd8bit\.EightBit"):
        send_recv(tf.zeros([1, 1]), 0, 1, compression=hvd.Compression.fp16, name="boundary")


@pytest.mark.parametrize("compression", [None, ENCODE_ALL], ids=["exact", "eightbit"])
@pytest.mark.parametrize("other", [{"shape": [5, 3]}, {"dtype": tf.float64}], ids=["shape", "dtype"])
def test_ends_that_differ_are_found_out_by_the_receiver(hvd, compression, other):
    mine = {"shape": [5, 4], "dtype": tf.float32, **(other if hvd.rank() == 1 else {})}
    x = tf.ones(**mine)
    if hvd.rank() != 1:
        assert send_recv(x, 0, 1, compression=compression, name="boundary").shape[0] == 0
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"another tensor than expected|holds other tensors"):
        send_recv(x, 0, 1, compression=compression, name="boundary")


def test_settings_that_differ_are_found_out_by_the_receiver(hvd):
    compression = ENCODE_ALL(data_type="linear") if hvd.rank() == 1 else ENCODE_ALL
    if hvd.rank() != 1:
        send_recv(tf.ones([5, 4]), 0, 1, compression=compression, name="boundary")
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match="encoded with other settings"):
        send_recv(tf.ones([5, 4]), 0, 1, compression=compression, name="boundary")
