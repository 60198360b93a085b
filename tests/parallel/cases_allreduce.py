"""`compression=EightBit` in Horovod's own calls: eager and traced, any dtype and shape, every factor."""

import numpy as np
import pytest
import tensorflow as tf
from oracle import exchanged, rank_values

import hvd8bit

ALL = hvd8bit.EightBit(min_elements=0)


@pytest.fixture(params=["eager", "traced", "retraced"])
def run(request):
    """Runs fn(*tensors) in one of the ways people do."""

    def call(fn, *tensors):
        if request.param == "eager":
            return fn(*tensors)
        traced = tf.function(fn)
        if request.param == "retraced":
            traced(*[tf.concat([t[:1], t], 0) if t.shape.rank else t for t in tensors])
        return traced(*tensors)

    return call


def assert_same_on_all_ranks(hvd, tensor):
    bits = np.frombuffer(np.ascontiguousarray(tensor.numpy()).tobytes(), np.uint8)
    everyone = hvd.allgather(tf.constant(bits[None]), name="same_on_all_ranks")
    assert np.all(everyone.numpy() == bits), "ranks hold different bits"


@pytest.mark.parametrize("compression", [hvd8bit.EightBit, ALL], ids=["default", "everything"])
def test_factors_are_exact_for_constant_blocks(hvd, run, compression):
    """FIELD-CASES A1: average, sum, and any scaling around them."""
    n = hvd.size()
    mean, total = (n + 1) / 2, n * (n + 1) / 2
    x = tf.fill([2000], float(hvd.rank() + 1))
    average = run(lambda t: hvd.allreduce(t, compression=compression, name="average"), x)
    assert np.all(average.numpy() == np.float32(mean))
    added = run(lambda t: hvd.allreduce(t, op=hvd.Sum, compression=compression, name="sum"), x)
    assert np.all(added.numpy() == total)
    scaled = run(
        lambda t: hvd.allreduce(
            t, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0, compression=compression, name="scaled"
        ),
        x,
    )
    assert np.all(scaled.numpy() == 6 * total)


def test_equals_the_reference(hvd, run):
    """Bit for bit what reference.py makes of the same values, for the settings that people can choose."""
    for settings in (
        {},
        {"data_type": "linear"},
        {"data_type": "mantissa", "scaling": 10.0},
        {"data_type": "static_tree", "block_size": 64},
        {"block_size": None},
    ):
        compression = ALL(**settings)
        x = rank_values(hvd.rank(), [5000])
        got = run(lambda t, c=compression: hvd.allreduce(t, compression=c, name="reference"), tf.constant(x))
        expected = exchanged([[rank_values(r, [5000])] for r in range(hvd.size())], compression.encoding)[0]
        np.testing.assert_array_equal(got.numpy(), expected)
        assert_same_on_all_ranks(hvd, got)


def test_values_are_added_and_not_codes(hvd, run):
    """FIELD-CASES A2."""
    x = np.zeros(256, np.float32)
    x[0] = 1.0
    x[1] = 0.9 if hvd.rank() == 0 else 0.001
    got = run(lambda t: hvd.allreduce(t, compression=ALL, name="a2"), tf.constant(x))
    exact = (0.9 + (hvd.size() - 1) * 0.001) / hvd.size()
    assert abs(float(got[1]) - exact) <= 0.0172


@pytest.mark.parametrize("elements", [3, 3000])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_float_dtypes_come_back_as_they_were(hvd, run, dtype, elements):
    """FIELD-CASES A7."""
    for compression in (hvd8bit.EightBit, ALL):
        x = tf.cast(tf.fill([elements], float(hvd.rank() + 1)), dtype)
        got = run(lambda t, c=compression: hvd.allreduce(t, compression=c, name="dtype"), x)
        assert got.dtype == dtype
        np.testing.assert_allclose(tf.cast(got, tf.float64).numpy(), (hvd.size() + 1) / 2, rtol=1e-2)


def test_integers_are_never_rounded(hvd, run):
    """FIELD-CASES A7."""
    n = hvd.size()
    x = tf.constant([1000001 + hvd.rank(), 3], tf.int64)
    got = run(lambda t: hvd.allreduce(t, op=hvd.Sum, compression=ALL, name="integers"), x)
    assert got.numpy().tolist() == [1000001 * n + n * (n - 1) // 2, 3 * n]


def test_odd_shapes(hvd, run):
    """FIELD-CASES F2: scalars, empty tensors, zeros."""
    for compression in (hvd8bit.EightBit, ALL):

        def reduce(t, c=compression):
            return hvd.allreduce(t, compression=c, name="odd")

        assert float(run(reduce, tf.constant(hvd.rank() + 1.0))) == (hvd.size() + 1) / 2
        empty = run(reduce, tf.zeros([0, 3]))
        assert empty.shape == (0, 3)
        zeros = run(reduce, tf.zeros([7, 111]))
        assert zeros.shape == (7, 111)
        assert np.all(zeros.numpy() == 0)
        cube = run(reduce, tf.fill([3, 5, 7], -1.0))
        assert cube.shape == (3, 5, 7)
        assert np.all(cube.numpy() == -1.0)


def test_negative_constants_do_not_shrink(hvd, run):
    """FIELD-CASES E6."""
    for data_type in ("dynamic_tree", "linear"):
        got = run(
            lambda t, d=data_type: hvd.allreduce(t, compression=ALL(data_type=d), name="negative"),
            tf.fill([1000], -1.0),
        )
        assert np.all(got.numpy() == -1.0)


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_not_finite_stays_not_finite_in_its_block_alone(hvd, run, poison):
    """FIELD-CASES C2."""
    x = np.ones(3000, np.float32)
    if hvd.rank() == hvd.size() - 1:
        x[1700] = poison
    got = run(lambda t: hvd.allreduce(t, compression=ALL(block_size=64), name="poison"), tf.constant(x))
    values = got.numpy()
    broken = ~np.isfinite(values)
    assert broken[1700]
    assert broken.sum() <= 64
    assert np.all(values[~broken] == 1.0)
    assert_same_on_all_ranks(hvd, got)


def test_unknown_static_shape(hvd):
    """FIELD-CASES F6: the static shape is kept, and size does not matter."""

    @tf.function(input_signature=[tf.TensorSpec([None, 16])])
    def reduce(t):
        result = hvd.allreduce(t, compression=hvd8bit.EightBit, name="unknown")
        assert result.shape.as_list() == [None, 16]
        return result

    for rows in (1, 100, 0):
        got = reduce(tf.fill([rows, 16], float(hvd.rank())))
        assert got.shape == (rows, 16)
        assert np.all(got.numpy() == np.float32((hvd.size() - 1) / 2))


def test_groups_travel_as_one_buffer(hvd, run):
    """What grouped_allreduce compresses together is exchanged together, each tensor in its own dtype and shape."""
    shapes = [[300], [40, 50], [], [1025], [0]]
    dtypes = ["float32", "float32", "bfloat16", "float16", "float32"]
    mine = [tf.cast(rank_values(hvd.rank(), s, seed=i), d) for i, (s, d) in enumerate(zip(shapes, dtypes))]
    theirs = [
        [tf.cast(rank_values(r, s, seed=i), d).numpy() for i, (s, d) in enumerate(zip(shapes, dtypes))]
        for r in range(hvd.size())
    ]

    def reduce(*tensors):
        return hvd.grouped_allreduce(list(tensors), compression=ALL, name="group")

    expected = exchanged(theirs, ALL.encoding)
    for got, right in zip(run(reduce, *mine), expected):
        np.testing.assert_array_equal(tf.cast(got, tf.float32).numpy(), right.astype(np.float32))


def test_half_precision_passes_through_a_group(hvd, run):
    """Small half-precision tensors beside encoded ones: a group must have one dtype."""
    tensors = [tf.ones([5000]), tf.ones([3], tf.float16), tf.ones([3], tf.bfloat16), tf.ones([3])]
    got = run(lambda *ts: hvd.grouped_allreduce(list(ts), compression=hvd8bit.EightBit, name="halves"), *tensors)
    for tensor, result in zip(tensors, got):
        assert result.dtype == tensor.dtype
        assert np.all(tf.cast(result, tf.float32).numpy() == 1)


def test_gradient_is_that_of_horovods_allreduce(hvd):
    for op in (hvd.Average, hvd.Sum):
        for traced in (False, True):

            def gradient(compression, op=op):
                x = tf.Variable(tf.fill([2000], 3.0))
                with tf.GradientTape() as tape:
                    y = hvd.allreduce(
                        x * (hvd.rank() + 1.0), op=op, prescale_factor=0.5, compression=compression, name="grad"
                    )
                    loss = tf.reduce_sum(y * (hvd.rank() + 2.0))
                return tape.gradient(loss, x)

            if traced:
                x0 = tf.Variable(tf.fill([2000], 3.0))

                @tf.function
                def both(op=op, x0=x0):
                    results = []
                    for index, compression in enumerate((hvd8bit.EightBit, hvd.Compression.none)):
                        with tf.GradientTape() as tape:
                            y = hvd.allreduce(x0 * (hvd.rank() + 1.0), op=op, compression=compression, name=f"g{index}")
                            loss = tf.reduce_sum(y * (hvd.rank() + 2.0))
                        results.append(tape.gradient(loss, x0))
                    return results

                ours, plain = both()
            else:
                ours, plain = gradient(hvd8bit.EightBit), gradient(hvd.Compression.none)
            np.testing.assert_allclose(ours.numpy(), plain.numpy(), rtol=1e-6)


def test_gradient_that_is_sparse(hvd, run):
    """What a gather hands back is rows with indices."""

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, z = hvd.grouped_allreduce([x, 2 * x], compression=ALL, op=hvd.Sum, name="gathered")
            loss = tf.reduce_sum(tf.gather(y, [0, 1, 1])) + tf.reduce_sum(z)
        return tape.gradient(loss, x)

    expected = hvd.size() * np.array([3, 4, 2, 2], np.float32)
    np.testing.assert_allclose(run(gradient, tf.ones([4])).numpy()[-4:], expected, rtol=0.02)


@pytest.mark.timeout(60)
def test_calls_may_be_made_in_any_order_in_a_graph(hvd):
    """They meet by their names, as with plain Horovod."""

    @tf.function
    def both(x):
        results = {}
        for name in ("a", "b") if hvd.rank() == 0 else ("b", "a"):
            results[name] = hvd.allreduce(x * (1 + (name == "b")), compression=ALL, name=f"in_order_{name}")
        return results["a"], results["b"]

    for _ in range(2):
        a, b = both(tf.ones([5000]))
        assert np.all(a.numpy() == 1)
        assert np.all(b.numpy() == 2)


def test_other_reductions_are_refused_on_every_worker(hvd, run):
    if hvd.size() == 1:
        return
    for op in (hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(ValueError, match=r"Min, Max, Product|op must be Average or Sum"):
            run(lambda t, op=op: hvd.allreduce(t, op=op, compression=ALL, name="refused"), tf.ones([2000]))
    with pytest.raises(ValueError, match=r"reducescatter|HorovodReducescatter"):
        run(lambda t: hvd.reducescatter(t, op=hvd.Sum, compression=ALL), tf.ones([2000]))
    with pytest.raises(ValueError, match=r"reducescatter|HorovodGroupedReducescatter"):
        run(lambda t: hvd.grouped_reducescatter([t, t], op=hvd.Sum, compression=ALL)[0], tf.ones([2000]))


def test_handles_of_a_call_that_raised_are_not_sent(hvd):
    if hvd.size() == 1:
        return
    with pytest.raises(ValueError):
        hvd.grouped_allreduce([tf.ones([2000]), tf.ones([3000])], op=hvd.Max, compression=ALL)
    # On one worker alone: the others would notice if they were sent.
    leftovers = [ALL.compress(tf.ones([10])) for _ in range(2 if hvd.rank() == 0 else 0)]
    got = hvd.grouped_allreduce([tf.fill([2000], float(hvd.rank())), tf.ones([5])], compression=ALL)
    assert np.all(got[0].numpy() == np.float32((hvd.size() - 1) / 2))
    assert np.all(got[1].numpy() == 1)
    del leftovers


def test_settings_do_not_mix(hvd):
    """FIELD-CASES B7: two compressors in one process keep their settings, and show them."""
    x = {r: rank_values(r, [4096]) for r in range(hvd.size())}
    for settings in ({"data_type": "linear"}, {"block_size": 512}, {"data_type": "linear", "block_size": 512}):
        compression = hvd8bit.EightBit(**settings)
        with tf.GradientTape() as tape:
            v = tf.Variable(tf.zeros([4096]))
            tape.watch(v)
            loss = tf.reduce_sum(v * x[hvd.rank()])
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        got = tape.gradient(loss, [v])[0]
        expected = exchanged([[x[r]] for r in range(hvd.size())], compression.encoding)[0]
        if hvd.size() == 1:
            expected = x[0]
        np.testing.assert_array_equal(got.numpy(), expected)
        for key, value in settings.items():
            assert f"{key}={value!r}" in repr(compression)


def test_other_traffic_is_untouched(hvd):
    """FIELD-CASES B4: metrics and broadcasts are bit-equal to plain Horovod's."""
    value = tf.constant(np.float32(0.1 + hvd.rank() / 7))
    everyone = [np.float32(0.1 + r / 7) for r in range(hvd.size())]
    before = hvd.allreduce(value, name="metric_before")
    hvd.allreduce(tf.random.normal([5000]), compression=hvd8bit.EightBit, name="gradient")
    after = hvd.allreduce(value, name="metric_after")
    assert before.numpy() == after.numpy()
    np.testing.assert_allclose(after.numpy(), np.mean(everyone), rtol=1e-6)
    noise = tf.constant(rank_values(hvd.rank(), [5000]))
    np.testing.assert_array_equal(hvd.broadcast(noise, 0, name="bits").numpy(), rank_values(0, [5000]))


def test_sent_bytes(hvd, run):
    """Counted as they are handed to Horovod: a quarter of float32's."""
    n, elements = hvd.size(), 100_000
    x = tf.ones([elements])

    def reduce(t):
        return hvd.allreduce(t, compression=hvd8bit.EightBit, name="counted")

    from hvd8bit import collectives

    traced = tf.function(reduce)
    traced(x)
    collectives.reset_sent_bytes()
    for _ in range(3):
        traced(x)
    sent = collectives.sent_bytes() / 3 / elements
    floor = 2 * (n - 1) / n
    assert floor <= sent <= 1.02 * floor
    collectives.reset_sent_bytes()
    reduce(tf.ones([100]))  # passes through as float32
    assert collectives.sent_bytes() == 2 * (n - 1) * 400 // n
    collectives.reset_sent_bytes()
    whole = [tf.ones([100], tf.int32)]  # fp16 leaves them alone
    collectives.HorovodComm().allreduce(whole, "counted_whole", op=hvd.Sum, compression=hvd.Compression.fp16)
    assert collectives.sent_bytes() == 2 * (n - 1) * 400 // n


@pytest.mark.parametrize("exchange", ["scatter_reduce", "allgather"])
@pytest.mark.parametrize("execution", ["eager", "traced"])
def test_stochastic_rounding(hvd, exchange, execution):
    """The same bits everywhere in each step, other ones in the next; the mean over the steps nears the exact one, and
    with a seed all of it comes again."""
    if hvd.size() == 1:
        return
    compression = hvd8bit.EightBit(rounding="stochastic", seed=11, exchange=exchange)
    x, steps = tf.constant(rank_values(hvd.rank(), [6000])), 60

    def reduce(t, name):
        return hvd.allreduce(t, compression=compression, name=name)

    def run():
        step = tf.function(lambda t: reduce(t, "random")) if execution == "traced" else lambda t: reduce(t, "random")
        return tf.stack([step(x) for _ in range(steps)])

    got = run()
    assert_same_on_all_ranks(hvd, got)
    rows = got.numpy()
    assert len({row.tobytes() for row in rows}) == steps
    exact = np.mean([rank_values(r, [6000]) for r in range(hvd.size())], axis=0, dtype=np.float64)
    error = rows.astype(np.float64) - exact
    shrunk = np.sqrt(np.mean(error.mean(axis=0) ** 2)) / np.sqrt(np.mean(error**2))
    assert 0.9 < shrunk * np.sqrt(steps) < 1.1
    between = np.corrcoef(error[1:].ravel(), error[:-1].ravel())[0, 1]
    assert abs(between) < 5 / np.sqrt(error[1:].size)
    if execution == "traced":
        np.testing.assert_array_equal(run().numpy(), rows)
        # Two tensors of one step, each in a graph of its own, are not rounded alike.
        both = tf.function(lambda t: (reduce(t, "one"), reduce(t, "other")))(x)
        assert np.mean(both[0].numpy() != both[1].numpy()) > 0.2


def test_ranks_with_the_same_seed_round_differently(hvd):
    """Of the same numbers on N workers the mean is better than what one worker sends, as the square root says."""
    n = hvd.size()
    if n == 1:
        return
    tf.random.set_seed(4)
    x = rank_values(0, [20_000])

    def rms(error):
        return np.sqrt(np.mean(np.square(error, dtype=np.float64)))

    one = rms(hvd8bit.decode(hvd8bit.encode(x, rounding="stochastic")) - x)
    for settings in ({}, {"seed": 11}):
        compression = hvd8bit.EightBit(rounding="stochastic", exchange="allgather", **settings)
        mean = tf.function(lambda t, c=compression: hvd.allreduce(t, compression=c, name="alike"))(tf.constant(x))
        assert abs(rms(mean.numpy() - x) / one * np.sqrt(n) - 1) < 0.1


def test_other_roundings_and_seeds_are_refused_before_anything_is_sent(hvd):
    if hvd.size() == 1:
        return
    for name, mine in (("rounding", {"rounding": "nearest"}), ("seed", {"seed": 1 + hvd.rank()})):
        settings = {"rounding": "stochastic", **(mine if hvd.rank() == hvd.size() - 1 else {})}
        with tf.GradientTape() as tape:
            v = tf.Variable(tf.ones([3000]))
            loss = tf.reduce_sum(v * v)
        wrapped = hvd8bit.DistributedGradientTape(tape, compression=hvd8bit.EightBit(**settings))
        with pytest.raises(ValueError, match=f"workers differ in the settings.*rounding.*{name}="):
            wrapped.gradient(loss, [v])
