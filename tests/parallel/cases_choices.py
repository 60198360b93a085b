"""What people can choose: mode of the exchange, which tensors, sparse gradients, process sets."""

import contextlib
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from oracle import exchanged, rank_values

import hvd8bit
from hvd8bit import collectives, exchange, modes, reduction

ALL = hvd8bit.EightBit(min_elements=0)
MODES = [*modes.MODES, "auto"]

pytestmark = pytest.mark.usefixtures("several")


@pytest.fixture
def several(hvd):
    if hvd.size() == 1:
        pytest.skip("nothing is exchanged")


def of_all(hvd, make):
    return [make(rank) for rank in range(hvd.size())]


def same_on_all_ranks(hvd, tensor):
    bits = np.frombuffer(np.ascontiguousarray(tensor.numpy()).tobytes(), np.uint8)
    return np.all(hvd.allgather(tf.constant(bits[None]), name="same_on_all_ranks").numpy() == bits)


# ---- modes ----


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_equal_the_reference(hvd, mode, traced):
    compression = ALL(exchange=mode, block_size=64)
    shapes, dtypes = [[300], [40, 50], [], [1025], [0]], ["float32", "float32", "bfloat16", "float16", "float64"]

    def values(rank):
        return [tf.cast(rank_values(rank, s, seed=i), d).numpy() for i, (s, d) in enumerate(zip(shapes, dtypes))]

    def single(t):
        return hvd.allreduce(t, compression=compression, name=f"single_{mode}")

    def group(*tensors):
        return hvd.grouped_allreduce(list(tensors), compression=compression, name=f"group_{mode}")

    mine = [tf.constant(value) for value in values(hvd.rank())]
    expected = exchanged([[v[1]] for v in of_all(hvd, values)], compression.encoding, exchange=mode)[0]
    got = (tf.function(single) if traced else single)(mine[1])
    np.testing.assert_array_equal(got.numpy(), expected)
    assert same_on_all_ranks(hvd, got)
    same_dtype = [0, 1, 2, 3]  # float64 has a probe of its own dtype
    expected = exchanged([[v[i] for i in same_dtype] for v in of_all(hvd, values)], compression.encoding, exchange=mode)
    for ours, right in zip((tf.function(group) if traced else group)(*[mine[i] for i in same_dtype]), expected):
        np.testing.assert_array_equal(tf.cast(ours, tf.float32).numpy(), right.astype(np.float32))
        assert ours.shape == right.shape


@pytest.mark.parametrize("mode", MODES)
def test_modes_keep_sums_factors_and_gradients(hvd, mode):
    n = hvd.size()
    x = tf.fill([2000], hvd.rank() + 1.0)
    got = hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0, compression=ALL(exchange=mode))
    assert np.all(got.numpy() == 6 * n * (n + 1) / 2)

    def gradient(compression):
        v = tf.Variable(tf.fill([2000], 3.0))
        with tf.GradientTape() as tape:
            y = hvd.allreduce(v * (hvd.rank() + 1.0), op=hvd.Sum, compression=compression, name="gradient")
            loss = tf.reduce_sum(y * (hvd.rank() + 2.0))
        return tape.gradient(loss, v).numpy()

    plain = gradient(hvd.Compression.none)
    np.testing.assert_allclose(gradient(ALL(exchange=mode)), plain, rtol=1e-6)


def test_an_allgather_sends_what_it_says(hvd):
    for elements in (5000, 100_000):
        collectives.reset_sent_bytes()
        hvd.allreduce(tf.ones([elements]), compression=ALL(exchange="allgather"), name="counted")
        assert collectives.sent_bytes() == modes.wire_bytes((elements,), hvd.size(), 1024, modes.ALLGATHER)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_workers_that_choose_other_modes_are_told(hvd, traced):
    """The first round has one name in both modes: Horovod sees that it is not one operation."""
    compression = ALL(exchange="scatter_reduce" if hvd.rank() == 0 else "allgather")

    def step():
        return hvd.allreduce(tf.ones([2000]), compression=compression, name="other_mode")

    with pytest.raises(tf.errors.OpError, match="Mismatched operations"):
        (tf.function(step) if traced else step)()
    with pytest.raises(ValueError, match=r"workers differ in the settings.*scatter_reduce.*allgather"):
        reduction.reduce_gradients([tf.ones([2000])], ["v"], compression=compression, scope="other_mode")
    assert np.all(hvd.allreduce(tf.ones([2000]), compression=ALL).numpy() == 1)


def test_eager_exchanges_of_many_sizes_trace_a_few_graphs(hvd):
    exchange._graph_of_exchange.cache_clear()
    for elements in range(1000, 1300, 10):
        got = hvd.allreduce(tf.fill([elements], float(hvd.rank())), compression=ALL(data_type="mantissa"))
        assert np.all(got.numpy() == np.float32((hvd.size() - 1) / 2))
    graph = exchange._graph_of_exchange(
        exchange.exchange,
        hvd8bit.EightBit(data_type="mantissa").encoding,
        collectives.HorovodComm(),
        "hvd8bit_eager",
        modes.choose("auto", (1000,), hvd.size(), 1024),
        1,
    )
    assert 1 <= graph.experimental_get_tracing_count() <= 3


@pytest.mark.parametrize("mode", MODES)
def test_constants_are_exchanged_in_every_step(hvd, mode):
    """TensorFlow's optimizer runs a collective with constant inputs by itself, once, and keeps what came of it. Then a
    worker that traces anew, alone, would wait for the others for ever."""
    select = hvd8bit.Selection(min_elements=100, sparse="compress")
    compressions = [hvd8bit.EightBit(select=select, exchange=mode), hvd.Compression.none]

    @tf.function(reduce_retracing=False)
    def step(extra):
        rows = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([1, 3]), tf.constant([8, 4]))
        constants = [tf.ones([2000]), tf.ones([3]), tf.constant(1.0), rows]
        return [
            reduction.reduce_gradients(
                constants, ["a", "b", "c", "d"], compression=compression, op=hvd.Sum, scope=f"constants_{mode}_{number}"
            )
            for number, compression in enumerate(compressions)
        ], tf.constant(extra)

    for extra in (0, 0, 1 if hvd.rank() == 0 else 0, 0):
        results, _ = step(extra)
        for dense, small, scalar, rows in results:
            assert np.all(dense.numpy() == hvd.size())
            assert np.all(small.numpy() == hvd.size())
            assert float(scalar) == hvd.size()
            assert np.all(rows.values.numpy() == 1)
            assert rows.indices.numpy().tolist() == [1, 3] * hvd.size()


def test_two_gradients_of_one_exchange(hvd):
    """A persistent tape asks for the exchange's gradient twice: two collectives in flight have two names."""
    x = tf.Variable(tf.fill([2000], 1.0))

    @tf.function
    def both():
        with tf.GradientTape(persistent=True) as tape:
            y = hvd.allreduce(x * 2.0, op=hvd.Sum, compression=ALL, name="twice")
            first, second = tf.reduce_sum(y * (hvd.rank() + 1.0)), tf.reduce_sum(y * 10.0)
        return tape.gradient(first, x), tape.gradient(second, x)

    for _ in range(3):
        first, second = both()
        n = hvd.size()
        np.testing.assert_allclose(first.numpy(), n * (n + 1), rtol=1e-6)
        np.testing.assert_allclose(second.numpy(), 20.0 * n, rtol=1e-6)


def test_two_tapes_without_names_in_one_function(hvd):
    v, w = tf.Variable(tf.zeros([1500])), tf.Variable(tf.zeros([1500]))

    @tf.function
    def step(scale):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v) * scale
        with tf.GradientTape() as other:
            loss_2 = tf.reduce_sum(w) * scale * 10.0
        tapes = [hvd8bit.DistributedGradientTape(t, compression=ALL) for t in (tape, other)]
        return tapes[0].gradient(loss, v), tapes[1].gradient(loss_2, w)

    for _ in range(3):
        first, second = step(tf.constant(hvd.rank() + 1.0))
        mean = np.float32((hvd.size() + 1) / 2)
        assert np.all(first.numpy() == mean)
        assert np.all(second.numpy() == 10 * mean)


def test_a_function_with_an_exchange_can_be_exported(hvd):
    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([2000])])
        def mean(self, x):
            return hvd.allreduce(x, compression=hvd8bit.EightBit, name="exported")

    x = tf.fill([2000], float(hvd.rank()))
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(Module(), folder)
        loaded = tf.saved_model.load(folder)
        assert np.all(loaded.mean(x).numpy() == np.float32((hvd.size() - 1) / 2))


def test_a_session_of_tensorflow_1(hvd):
    """Horovod's optimizer for TensorFlow 1, in a graph and a session of it."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("weight", initializer=tf.zeros([2000]))
        loss = tf.reduce_sum(weight) * (hvd.rank() + 1.0)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), compression=ALL)
        train = optimizer.minimize(loss)
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            session.run(train)
        assert np.all(session.run(weight) == -3 * np.float32((hvd.size() + 1) / 2))


@pytest.mark.parametrize(
    ("how", "min_elements"), [("wrapper", 0), ("wrapper", 1024), ("groups", 0), ("groups", 1024), ("bare", 1024)]
)
def test_many_small_gradients_take_few_collectives(hvd, how, min_elements):
    """FIELD-CASES B6: 200 gradients of 64 elements travel together, or as they are; not by 400 collectives."""
    if hvd.size() > 2:
        pytest.skip("the graph is the same with two")  # and takes its time to trace
    compression = hvd8bit.EightBit(min_elements=min_elements)
    count = 50 if how == "bare" else 200  # one by one they take long to trace
    variables = [tf.Variable(tf.zeros([64]), name=f"v{i}") for i in range(count)]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) for v in variables])
        if how == "wrapper":
            tape = hvd8bit.DistributedGradientTape(tape, compression=compression)
        else:
            groups = {"groups": 1} if how == "groups" else {}
            tape = hvd.DistributedGradientTape(tape, compression=compression, **groups)
        return tape.gradient(loss, variables)

    definition = step.get_concrete_function().graph.as_graph_def()
    nodes = [*definition.node, *(node for f in definition.library.function for node in f.node_def)]
    rounds = [node.op for node in nodes if node.op in ("HorovodAlltoall", "HorovodAllgather")]
    assert len(rounds) <= 2
    assert bool(rounds) == (min_elements == 0)
    assert all(np.all(gradient.numpy() == 1) for gradient in step())


def test_horovods_branches_for_single_gradients_overlap(hvd):
    """Each gradient's exchange is in a branch of its own, and none waits for another one's."""
    variables = [tf.Variable(rank_values(hvd.rank(), [1500], seed=i)) for i in range(5)]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * v) / 2 for v in variables])
        tape = hvd.DistributedGradientTape(tape, compression=hvd8bit.EightBit(exchange="scatter_reduce"))
        return tape.gradient(loss, variables)

    branches = [op for op in step.get_concrete_function().graph.get_operations() if op.type == "If"]
    assert len(branches) == 5
    assert not any(other in branches for op in branches for other in op.control_inputs)
    for _ in range(3):
        for i, gradient in enumerate(step()):
            values = of_all(hvd, lambda rank, i=i: [rank_values(rank, [1500], seed=i)])
            assert np.array_equal(gradient, exchanged(values, ALL.encoding, exchange="scatter_reduce")[0])


# ---- which tensors ----


def gradients_of(tape_settings, variables, scale, traced=False, steps=1):
    def step(number):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * x) for v, x in zip(variables, scale)])
        return hvd8bit.DistributedGradientTape(tape, **tape_settings(number)).gradient(loss, variables)

    step = tf.function(step) if traced else step
    return [step(tf.constant(number)) for number in range(steps)]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_rules_by_variable(hvd, traced):
    """FIELD-CASES B4: excluded layers are exact; others have settings of their own."""
    names = ["first/kernel", "first/bias", "last/kernel"]
    variables = [tf.Variable(tf.zeros([1500]), name=name) for name in names]
    values = of_all(hvd, lambda rank: [rank_values(rank, [1500], seed=i) for i in range(3)])
    select = hvd8bit.Selection(
        exclude=["*/bias", lambda variable: variable.shape[0] == 7],
        per_variable={"last/*": {"data_type": "linear", "block_size": 64}},
        min_elements=0,
    )
    compression = hvd8bit.EightBit(select=select)
    (got,) = gradients_of(lambda _: {"compression": compression}, variables, values[hvd.rank()], traced)
    exact = reduction.reduce_gradients(
        [tf.constant(x) for x in values[hvd.rank()]], names, compression=hvd.Compression.none, scope="exact"
    )
    # With three workers the order in which Horovod adds depends on what else is in the group.
    np.testing.assert_allclose(got[1].numpy(), exact[1].numpy(), rtol=1e-5, atol=1e-6)
    assert np.any(got[0].numpy() != exact[0].numpy())
    usual, linear = compression.encoding, hvd8bit.EightBit(data_type="linear", block_size=64).encoding
    for i, encoding in ((0, usual), (2, linear)):
        np.testing.assert_array_equal(got[i].numpy(), exchanged([[v[i]] for v in values], encoding)[0])


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_compression_starts_at_a_step(hvd, traced):
    variable = [tf.Variable(tf.zeros([1500]), name="w")]
    values = of_all(hvd, lambda rank: rank_values(rank, [1500]))
    compression = hvd8bit.EightBit(select=hvd8bit.Selection(start_step=2))
    seen = gradients_of(
        lambda number: {"compression": compression, "step": number}, variable, [values[hvd.rank()]], traced, steps=4
    )
    mean = np.mean(values, axis=0, dtype=np.float64)
    for number, (gradient,) in enumerate(seen):
        assert same_on_all_ranks(hvd, gradient)
        if number < 2:
            np.testing.assert_allclose(gradient.numpy(), mean, rtol=1e-5, atol=1e-6)
        else:
            right = exchanged([[v] for v in values], compression.encoding)[0]
            np.testing.assert_array_equal(gradient.numpy(), right)


def test_workers_at_other_steps_are_told(hvd):
    compression = hvd8bit.EightBit(select=hvd8bit.Selection(start_step=5))
    variable, step = [tf.Variable(tf.zeros([1500]), name="w")], tf.Variable(hvd.rank(), name="step")
    settings = {"compression": compression, "step": step, "name": "other_steps"}
    with pytest.raises(ValueError, match=r"workers differ in the settings.*step 0.*step 1"):
        gradients_of(lambda _: settings, variable, [1.0], traced=True)
    with pytest.raises(ValueError, match=r"start_step=5\) needs the number of the step: give it to"):
        gradients_of(lambda _: {"compression": compression}, variable, [1.0])


# ---- sparse gradients ----


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("average", [True, False], ids=["mean", "sum"])
def test_values_of_sparse_gradients_in_8_bits(hvd, traced, average):
    """Every worker has another number of rows, the first one none; a dense gradient stands beside."""
    n, rows, width = hvd.size(), 40, 128

    def gradient(rank):
        return rank_values(rank, [rank * 3, width]), (np.arange(rank * 3) * 7) % rows

    values, indices = gradient(hvd.rank())
    compression = hvd8bit.EightBit(select=hvd8bit.Selection(sparse="compress"))

    def step(values, indices):
        sparse = tf.IndexedSlices(values, indices, dense_shape=tf.constant([rows, width]))
        settings = {"compression": compression, "op": hvd.Average if average else hvd.Sum, "scope": "rows"}
        got = reduction.reduce_gradients([sparse, tf.ones([2000])], ["table", "dense"], **settings)
        return tf.convert_to_tensor(got[0]), got[0].indices, got[1]

    if traced:
        step = tf.function(step, input_signature=[tf.TensorSpec([None, width]), tf.TensorSpec([None], tf.int64)])
    collectives.reset_sent_bytes()
    dense, got_indices, beside = step(tf.constant(values), tf.constant(indices))
    sent = collectives.sent_bytes()
    everyone = of_all(hvd, gradient)
    assert got_indices.numpy().tolist() == [int(i) for _, index in everyone for i in index]
    exact = np.zeros([rows, width])
    for value, index in everyone:
        np.add.at(exact, index, value / (n if average else 1))
    # Half a gap of dynamic_tree for each row that is added.
    bound = 0.0086 * sum(np.abs(value).max(initial=0) for value, _ in everyone) * 3
    np.testing.assert_allclose(dense.numpy(), exact, atol=bound / (n if average else 1))
    assert np.any(dense.numpy() != exact.astype(np.float32))
    assert np.all(dense.numpy()[exact == 0] == 0)
    assert np.all(beside.numpy() == (1 if average else n))
    assert same_on_all_ranks(hvd, dense)
    others = sum(value.size for rank, (value, _) in enumerate(everyone) if rank != hvd.rank())
    assert sent < 0.5 * 4 * others + 8 * 2000  # the dense one's bytes included


def test_sparse_gradients_of_other_widths_are_told(hvd):
    compression = hvd8bit.EightBit(select=hvd8bit.Selection(sparse="compress"))
    sparse = tf.IndexedSlices(tf.ones([2, 4 + hvd.rank()]), tf.constant([0, 1]), tf.constant([8, 4 + hvd.rank()]))
    with pytest.raises(ValueError, match=r"workers differ in gradient 0.*rows of \(4,\).*rows of \(5,\)"):
        reduction.reduce_gradients([sparse], ["table"], compression=compression, scope="widths")


# ---- process sets ----


@contextlib.contextmanager
def process_set(hvd, ranks):
    made = hvd.add_process_set(ranks)
    try:
        yield made
    finally:
        hvd.remove_process_set(made)


@pytest.mark.parametrize("mode", MODES)
def test_modes_in_a_process_set(hvd, mode):
    if hvd.size() < 3:
        return
    with process_set(hvd, [1, 2]) as some:
        if hvd.rank() in (1, 2):
            x = rank_values(hvd.rank(), [3000])
            compression = ALL(exchange=mode)
            right = exchanged([[rank_values(r, [3000])] for r in (1, 2)], compression.encoding, exchange=mode)[0]
            for call in (lambda t: hvd8bit.allreduce(t, process_set=some, compression=compression, name="of_some"),):
                np.testing.assert_array_equal(call(tf.constant(x)).numpy(), right)
                np.testing.assert_array_equal(tf.function(call)(tf.constant(x)).numpy(), right)


@pytest.mark.timeout(60)
def test_a_part_and_all_in_one_graph(hvd):
    """Workers outside of the set make one call less."""
    with process_set(hvd, list(range(hvd.size() - 1))) as some:

        @tf.function
        def step(x):
            part = x
            if some.included():
                part = hvd.allreduce(2 * x, compression=ALL(process_set=some), process_set=some, name="of_a_part")
            return part, hvd.allreduce(3 * x, compression=ALL, name="of_all")

        part, everyone = step(tf.ones([5000]))
        assert np.all(part.numpy() == (2 if some.included() else 1))
        assert np.all(everyone.numpy() == 3)


def test_an_exchange_in_a_process_set_can_be_exported(hvd):
    with process_set(hvd, [hvd.size() - 1]) as some:
        comm = collectives.HorovodComm(some)

        @tf.function(input_signature=[tf.TensorSpec([2000])])
        def mean(x):
            return exchange.exchange(
                [x], ALL.encoding, comm, factor=tf.constant(1.0, tf.float64), name="exported_of_some"
            )

        # A Python function would not be there in another process.
        assert not {"PyFunc", "EagerPyFunc"} & {op.type for op in mean.get_concrete_function().graph.get_operations()}
        rank = tf.function(lambda: comm.rank_tensor())
        if some.included():
            assert rank() == comm.rank() == 0


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_other_process_set_in_call_and_compressor_is_an_error(hvd, traced):
    """On members and on others, before anything is exchanged."""
    with process_set(hvd, [0, hvd.size() - 1] if hvd.size() > 2 else [0]) as some:

        def all_workers():
            return hvd.allreduce(tf.ones([2000]), compression=ALL(process_set=some), name="differs")

        if hvd.size() > 2:  # with one worker in the set there is nothing to exchange: Horovod's own sum
            with pytest.raises(ValueError, match=r"process_set differs|needs a sum or an average over the"):
                (tf.function(all_workers) if traced else all_workers)()
        with pytest.raises(ValueError, match=r"process_set differs: 0 in the call, .* leave it out of EightBit"):
            hvd8bit.allreduce(tf.ones([2000]), compression=ALL(process_set=some))
        with pytest.raises(ValueError, match=r"process_set differs: 0 in the call"):
            reduction.reduce_gradients([tf.ones([2000])], ["v"], compression=ALL(process_set=some), scope="differs")
    assert np.all(hvd.allreduce(tf.ones([2000]), compression=ALL).numpy() == 1)


def test_a_process_set_that_horovod_does_not_know(hvd):
    with pytest.raises(ValueError, match=r"process_set must be known to Horovod, got .*hvd\.add_process_set"):
        reduction.reduce_gradients([tf.ones([2000])], ["v"], compression=ALL, process_set=hvd.ProcessSet([0]))
    with pytest.raises(ValueError, match="process_set must be known to Horovod"):
        ALL(process_set=hvd.ProcessSet([0])).compress(tf.ones([2000]))


# ---- joining ----


def test_a_worker_that_has_joined(hvd):
    """FIELD-CASES D4: one worker has a step more than the others; it gets an error, and nobody hangs."""

    def step():
        return hvd.allreduce(tf.ones([2000]), compression=ALL, name="join")

    for _ in range(2):
        step()
    if hvd.rank() == 0:
        with pytest.raises((ValueError, tf.errors.OpError), match=r"hvd\.join|not supported with Join"):
            step()
    hvd.join()
    assert np.all(step().numpy() == 1)
