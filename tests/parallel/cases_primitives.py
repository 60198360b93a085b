"""The primitives of model parallelism between real workers: eager, traced, retraced; shapes, names, process sets."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit import collectives, parallel
from hvd8bit.parallel.partition import part_range, part_sizes

ALL = hvd8bit.EightBit(min_elements=0)


@pytest.fixture(params=["exact", "eightbit"])
def compression(request):
    return None if request.param == "exact" else ALL


@pytest.fixture(params=["eager", "traced", "any batch", "retraced by one worker"])
def run(request, hvd):
    """Runs fn(tensor) in one of the ways people do."""

    def call(fn, x):
        if request.param == "eager":
            return fn(x)
        if request.param == "any batch":
            traced = tf.function(fn, input_signature=[tf.TensorSpec([None, *x.shape[1:]], x.dtype)])
            return traced(x)
        traced = tf.function(fn)
        if request.param.startswith("retraced") and hvd.rank() == 0:
            traced.get_concrete_function(tf.TensorSpec([None, *x.shape[1:]], x.dtype))
            traced.get_concrete_function(tf.TensorSpec(x.shape, x.dtype))
        return traced(x)

    return call


def value(rank, shape, dtype="float32"):
    return np.random.default_rng(rank).standard_normal(shape).astype(dtype)


def assert_same_on_all_ranks(hvd, tensor):
    bits = np.frombuffer(np.ascontiguousarray(tensor.numpy()).tobytes(), np.uint8)
    everyone = hvd.allgather(tf.constant(bits[None]), name="same_on_all_ranks")
    assert np.all(everyone.numpy() == bits), "ranks hold different bits"


def near(got, want, compression, dtype="float32"):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    limit = 0.02 if compression is not None else 1e-12 if dtype == "float64" else 1e-6
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pairs(hvd, run, compression, dtype):
    """copy, matmul with own columns, all_gather; scatter, matmul with own rows, all_reduce: FIELD-CASES M1."""
    n, rank = hvd.size(), hvd.rank()
    x, w, v = value(1, [8, 12], dtype), value(2, [12, 7], dtype), value(3, [7, 5], dtype)
    up = value(4, [8, 5], dtype)
    lo, hi = part_range(7, n, rank)
    sizes = part_sizes(7, n)

    def split(x):
        settings = {"compression": compression}
        mine = tf.constant(w[:, lo:hi]), tf.constant(v[lo:hi])
        with tf.GradientTape() as tape:
            tape.watch([x, *mine])
            h = tf.matmul(parallel.copy(x, name="in", **settings), mine[0])
            h = parallel.all_gather(h, axis=-1, name="columns", sizes=sizes, **settings)
            part = parallel.scatter(h, axis=-1, name="rows", **settings)
            y = parallel.all_reduce(tf.matmul(part, mine[1]), name="out", **settings)
            loss = tf.reduce_sum(y * up)
        return [h, y, *tape.gradient(loss, [x, *mine])]

    h, y, dx, dw, dv = run(split, tf.constant(x))
    near(h, x @ w, compression, dtype)
    near(y, x @ w @ v, compression and ALL, dtype)
    limit = compression and ALL
    near(dv, ((x @ w).T @ up)[lo:hi], limit, dtype)
    near(dw, (x.T @ (up @ v.T))[:, lo:hi], limit, dtype)
    near(dx, up @ v.T @ w.T, limit, dtype)
    for tensor in (h, y, dx):
        assert_same_on_all_ranks(hvd, tensor)


def test_uneven_parts_of_unknown_size(hvd, run, compression):
    """Each worker has a batch of its own size, one of them none; the gradient is a sum of all workers' shares."""
    n, rank = hvd.size(), hvd.rank()
    rows = [(r + n - 1) % n * 3 for r in range(n)] if n > 1 else [3]
    parts = [value(r, [rows[r], 6]) for r in range(n)]
    start = sum(rows[:rank])
    weights = value(9, [sum(rows), 6])

    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = parallel.all_gather(x, compression=compression, name="batch", gradient="sum")
            loss = tf.reduce_sum(y * weights) * (rank + 1)
        return y, tape.gradient(loss, x)

    y, dx = run(fn, tf.constant(parts[rank]))
    near(y, np.concatenate(parts), compression)
    near(dx, weights[start : start + rows[rank]] * n * (n + 1) / 2, compression)
    assert_same_on_all_ranks(hvd, y)


def test_reduce_scatter(hvd, run, compression):
    n, rank = hvd.size(), hvd.rank()
    lo, hi = part_range(9, n, rank)
    up = value(50, [9, 6])[lo:hi]

    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = parallel.reduce_scatter(x, compression=compression, name="rs")
            loss = tf.reduce_sum(y * up)
        return y, tape.gradient(loss, x)

    y, dx = run(fn, tf.constant(value(rank, [9, 6])))
    near(y, sum(value(r, [9, 6]) for r in range(n))[lo:hi], compression)
    near(dx, value(50, [9, 6]), compression)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "bool", "uint16"])
def test_dtypes(hvd, compression, dtype):
    n, rank = hvd.size(), hvd.rank()
    x = tf.cast(tf.fill([3, 5], rank + 1), dtype)
    gathered = parallel.all_gather(x, compression=compression, name="a")
    added = parallel.all_reduce(x, compression=compression, name="b")
    own = parallel.reduce_scatter(tf.concat([x] * n, 0), compression=compression, name="c")
    want = [[(dtype == "bool") or r + 1] * 5 for r in range(n) for _ in range(3)]
    np.testing.assert_array_equal(tf.cast(gathered, tf.float64).numpy(), want)
    total = n * (n + 1) // 2 if dtype != "bool" else 1
    assert {added.dtype, own.dtype, gathered.dtype} == {tf.as_dtype(dtype)}
    np.testing.assert_allclose(tf.cast(added, tf.float64).numpy(), np.full([3, 5], total), rtol=0.01)
    if dtype != "bool":
        np.testing.assert_allclose(tf.cast(own, tf.float64).numpy(), np.full([3, 5], total), rtol=0.01)


def test_static_shapes_are_kept(hvd, compression):
    """FIELD-CASES F6."""
    n = hvd.size()
    settings = {"compression": compression}
    shapes = {}

    @tf.function(input_signature=[tf.TensorSpec([None, 16])])
    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            c = parallel.copy(x, name="a", **settings)
            r = parallel.all_reduce(c, name="b", **settings)
            own = parallel.scatter(r, axis=1, name="c", **settings)
            g = parallel.all_gather(own, axis=1, sizes=part_sizes(16, n), name="d", **settings)
            s = parallel.reduce_scatter(g, axis=1, name="e", **settings)
        dx = tape.gradient(s, x)
        shapes.update(c=c.shape, r=r.shape, own=own.shape, g=g.shape, s=s.shape, dx=dx.shape)
        return s, dx

    y, dx = fn(tf.ones([3, 16]))
    own = part_sizes(16, n)[hvd.rank()]
    assert {name: shape.as_list() for name, shape in shapes.items()} == {
        "c": [None, 16],
        "r": [None, 16],
        "own": [None, own],
        "g": [None, 16],
        "s": [None, own],
        "dx": [None, 16],
    }
    assert np.all(y.numpy() == n * n)
    assert np.all(dx.numpy() == n)
    assert y.shape == (3, own)


def test_empty_batches(hvd, run, compression):
    """FIELD-CASES F2."""
    n = hvd.size()

    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = parallel.all_reduce(
                parallel.copy(x, compression=compression, name="a"), compression=compression, name="b"
            )
            own = parallel.scatter(y, axis=1, compression=compression, name="c")
            y = parallel.all_gather(own, axis=1, compression=compression, name="d", sizes=part_sizes(6, n))
            loss = tf.reduce_sum(y)
        return y, tape.gradient(loss, x)

    y, dx = run(fn, tf.zeros([0, 6]))
    assert y.shape == dx.shape == (0, 6)


def test_constants_are_not_folded(hvd, compression):
    """Grappler must not run a collective of constants when it optimises: one worker retraces alone."""
    n = hvd.size()

    def build():
        @tf.function
        def fn():
            x = tf.fill([2, 3], 2.0)
            y = parallel.all_gather(x, compression=compression, name="a")
            z = parallel.all_reduce(x, compression=compression, name="b")
            s = parallel.reduce_scatter(tf.fill([n, 3], 2.0), compression=compression, name="c")
            return tf.reduce_sum(y) + tf.reduce_sum(z) + tf.reduce_sum(s)

        return fn

    fn = build()
    collectives.reset_sent_bytes()
    once = float(fn())
    sent = collectives.sent_bytes()
    assert once == 12 * n + 12 * n + 6 * n
    if hvd.rank() == 0:
        fn = build()  # a new graph here, the old one elsewhere
    assert float(fn()) == once
    assert collectives.sent_bytes() == 2 * sent
    assert (sent > 0) == (n > 1)


def test_one_name_several_times_in_a_step(hvd, compression):
    """Calls of one name in one graph, with nothing that orders them, do not collide."""
    n = hvd.size()

    @tf.function
    def fn(x):
        return [parallel.all_reduce(x * float(i), compression=compression, name="same") for i in range(5)]

    for i, y in enumerate(fn(tf.ones([64]))):
        assert np.all(y.numpy() == i * n)


def test_names_do_not_depend_on_what_a_worker_built_before(hvd, compression):
    n = hvd.size()
    name = f"dense_{7 * hvd.rank()}/out" if hvd.rank() else "dense/out"
    y = tf.function(lambda x: parallel.all_reduce(x, compression=compression, name=name))(tf.ones([64]))
    assert np.all(y.numpy() == n)


@pytest.mark.parametrize("known", [True, False], ids=["known batch", "any batch"])
@pytest.mark.parametrize(
    "send",
    [
        lambda x, n: parallel.all_gather(x, axis=1, name="differs", sizes=[16] * n),
        lambda x, n: parallel.all_reduce(x, name="differs"),
        lambda x, n: parallel.reduce_scatter(x, axis=1, name="differs"),
    ],
    ids=["all_gather", "all_reduce", "reduce_scatter"],
)
def test_batches_on_both_sides_of_min_elements_are_an_error_on_every_worker(hvd, send, known):
    """One worker encodes, the others do not: they must not wait for each other."""
    n, rows = hvd.size(), 300 if hvd.rank() == 0 else 3
    if n == 1:
        return
    signature = [tf.TensorSpec([rows if known else None, 16])]
    with pytest.raises(tf.errors.OpError, match=r"Mismatched|must hold parts of the same batch"):
        tf.function(lambda x: send(x, n), input_signature=signature)(tf.ones([rows, 16]))


def test_small_tensors_travel_exactly_whatever_is_known_statically(hvd):
    """One worker knows the batch when it traces, the others do not: all must decide alike."""
    n, rank = hvd.size(), hvd.rank()
    for rows in (3, 300):
        x = value(rank, [rows, 16])
        signature = [tf.TensorSpec([rows if rank == 0 else None, 16])]

        @tf.function(input_signature=signature)
        def fn(x):
            return (
                parallel.all_gather(x, axis=1, name="g", sizes=[16] * n),
                parallel.all_reduce(x, name="r"),
                parallel.reduce_scatter(x, axis=1, name="s"),
            )

        gathered, added, own = fn(tf.constant(x))
        exact = np.concatenate([value(r, [rows, 16]) for r in range(n)], 1)
        assert np.array_equal(gathered.numpy(), exact) == (rows == 3 or n == 1)
        near(added, sum(value(r, [rows, 16]) for r in range(n)), hvd8bit.EightBit if rows > 3 else None)
        lo, hi = part_range(16, n, rank)
        near(own, sum(value(r, [rows, 16]) for r in range(n))[:, lo:hi], hvd8bit.EightBit if rows > 3 else None)


def test_process_sets(hvd, compression):
    """Two pairs at once, or one and a worker alone."""
    if hvd.size() < 3:
        return
    pairs = [[r for r in (2 * k, 2 * k + 1) if r < hvd.size()] for k in range((hvd.size() + 1) // 2)]
    sets = [hvd.add_process_set(pair) for pair in pairs]
    try:
        mine = sets[hvd.rank() // 2]
        x = tf.fill([2, 40], hvd.rank() + 1.0)
        y = parallel.all_gather(x, compression=compression, process_set=mine, name="p")
        z = tf.function(lambda x: parallel.all_reduce(x, compression=compression, process_set=mine, name="q"))(x)
        pair = pairs[hvd.rank() // 2]
        np.testing.assert_array_equal(y.numpy()[:, 0], [r + 1 for r in pair for _ in range(2)])
        assert np.all(z.numpy() == sum(r + 1 for r in pair))
        if compression is not None:
            again = parallel.all_reduce(x, compression=compression(process_set=mine), name="r")
            np.testing.assert_array_equal(again.numpy(), z.numpy())
        other = sets[hvd.rank() // 2 - 1]
        if len(sets) > 1:
            with pytest.raises(ValueError, match="must include this worker"):
                parallel.copy(x, compression=compression, process_set=other, name="s")
    finally:
        for process_set in sets:
            hvd.remove_process_set(process_set)


@pytest.mark.parametrize("primitive", ["all_gather", "all_gather, sizes known", "all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_different_batches_are_an_error_on_every_worker(hvd, compression, primitive, traced):
    n, rank = hvd.size(), hvd.rank()
    if n == 1:
        return
    settings = {"compression": compression, "name": f"wrong_{primitive}_{traced}"}

    def fn(x):
        if primitive == "all_gather":
            return parallel.all_gather(x, axis=1, **settings)
        if primitive == "all_gather, sizes known":
            return parallel.all_gather(x, axis=1, sizes=[8] * n, **settings)
        if primitive == "all_reduce":
            return parallel.all_reduce(x, **settings)
        return parallel.reduce_scatter(x, axis=1, **settings)

    with pytest.raises(tf.errors.OpError):
        (tf.function(fn) if traced else fn)(tf.ones([5 if rank == 1 else 4, 8]))


PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "model-parallelism.md"


@pytest.mark.parametrize("batch", [64, 1024])
def test_the_pages_formulas_are_what_is_counted(hvd, compression, batch):
    """docs/model-parallelism.md: bytes of each primitive, forward and backward, equal parts."""
    workers, rank = hvd.size(), hvd.rank()
    if workers == 1:
        return
    width = 64 * workers
    rows = re.findall(
        r"^\| `(\w+)`(, `gradient=\"sum\"`)? \| [^|]+ \| `([^`]+)` \| `([^`]+)` \|$", PAGE.read_text("utf-8"), re.M
    )
    assert len(rows) == 6

    def chunk(elements):
        return 64 + -(-elements // 4) * 4 + -(-elements // 1024) * 4 if compression is not None else 4 * elements

    for primitive, gradient, *formulas in rows:
        own_part = primitive == "all_gather"
        x = tf.constant(value(rank, [batch, width // workers if own_part else width]))
        settings = {} if primitive in ("copy", "all_reduce") else {"axis": 1}
        if own_part:
            settings.update(gradient="sum" if gradient else "slice", sizes=[width // workers] * workers)
        with parallel.measure_boundaries() as report, tf.GradientTape() as tape:
            tape.watch(x)
            y = getattr(parallel, primitive)(x, compression=compression, name="page", **settings)
            tape.gradient(y, x)
        counted = {row["direction"]: row["sent_bytes"] for row in report.rows()}
        for direction, formula in zip(("forward", "backward"), formulas):
            expected = eval(formula, {"N": workers, "n": batch * width // 1, "chunk": lambda m: chunk(int(m))})
            assert counted.get(direction, 0) == expected, (primitive, gradient, direction)
            if compression is not None and 4 * batch * width / workers >= 2**20:
                assert expected <= 0.27 * eval(formula, {"N": workers, "n": batch * width, "chunk": lambda m: 4 * m})


def test_reports(hvd, compression):
    """Bytes and relative error by boundary and direction; nothing of it in graphs traced outside."""
    n, rank = hvd.size(), hvd.rank()
    x = tf.constant(value(rank, [64, 32]))

    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = parallel.all_gather(
                parallel.copy(x, compression=compression, name="tower/in"),
                axis=1,
                compression=compression,
                name="tower/out",
                sizes=[32] * n,
            )
        return tape.gradient(y, x)

    outside = tf.function(fn)
    outside(x)
    plain = len(outside.get_concrete_function(x).graph.get_operations())
    with parallel.measure_boundaries() as report:
        outside(x)
        assert report.rows() == []
        inside = tf.function(fn)
        collectives.reset_sent_bytes()
        for _ in range(3):
            inside(x)
        rows = report.rows()
        assert sum(row["sent_bytes"] for row in rows) == collectives.sent_bytes()
    assert len(tf.function(fn).get_concrete_function(x).graph.get_operations()) == plain
    if n == 1:
        assert rows == []
        return
    forward, backward = rows
    assert (forward["boundary"], forward["direction"], forward["exchanges"]) == ("tower/out", "forward", 3)
    assert (backward["boundary"], backward["direction"], backward["exchanges"]) == ("tower/in", "backward", 3)
    assert forward["elements"] == backward["elements"] == 3 * 64 * 32
    size = 64 + 2048 + 8 if compression is not None else 4 * 2048
    assert forward["sent_bytes"] == 3 * (n - 1) * size
    if compression is None:
        assert forward["relative_error"] == backward["relative_error"] == 0
    else:
        assert 0.005 < forward["relative_error"] < 0.02
        assert backward["relative_error"] < 1e-6  # ones
    assert "tower/out" in str(report)
