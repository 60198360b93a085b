"""hvd8bit's own wrappers: the gradient tape, lists of gradients, broadcast; and what they say when workers differ."""

import logging
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from oracle import exchanged, rank_values

import hvd8bit
from hvd8bit import collectives, logs, reduction
from hvd8bit.exchange import ELEMENTS_PER_SLICE

ALL = hvd8bit.EightBit(min_elements=0)
MANY_SLICES = 3 * ELEMENTS_PER_SLICE


def reduce(gradients, names=None, **settings):
    settings = {"compression": ALL, "scope": "test", **settings}
    return reduction.reduce_gradients(gradients, names or [f"v{i}" for i in range(len(gradients))], **settings)


def assert_weights_agree(hvd, tensors):
    crc = [float(tf.reduce_sum(tf.cast(t, tf.float64) * 1.000001)) for t in tensors]
    everyone = hvd.allgather(tf.constant([crc], tf.float64), name="crc").numpy()
    assert np.all(everyone == everyone[0])


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_list_equals_the_reference(hvd, traced):
    shapes = [[3000], [50, 60], [5], []]
    values = {r: [rank_values(r, s, seed=i) for i, s in enumerate(shapes)] for r in range(hvd.size())}
    run = tf.function(reduce) if traced else reduce
    got = run([tf.constant(v) for v in values[hvd.rank()]])
    # The list is packed from its end, as the backward pass makes it.
    expected = exchanged([values[r][::-1] for r in range(hvd.size())], ALL.encoding)[::-1]
    for ours, right in zip(got, expected):
        np.testing.assert_array_equal(ours.numpy(), right)


def test_what_is_not_compressed_is_exact(hvd):
    """FIELD-CASES S5, A6: small, integer, sparse and absent gradients beside compressed ones."""
    n, r = hvd.size(), hvd.rank()
    rows = tf.IndexedSlices(tf.fill([2, 4], r + 1.0), tf.constant([r, 5]), dense_shape=tf.constant([8, 4]))
    tensors = [
        tf.fill([2000], float(r)),
        tf.constant([0.1 * (r + 1)] * 10),
        tf.constant([r, 1], tf.int64),
        None,
        rows,
        tf.constant([1.5] * 3, tf.bfloat16),
    ]
    got = reduce(tensors, compression=hvd8bit.EightBit)
    assert np.all(got[0].numpy() == np.float32((n - 1) / 2))
    np.testing.assert_allclose(got[1].numpy(), 0.1 * (n + 1) / 2, rtol=1e-6)
    assert got[2].numpy().tolist() == [(n - 1) // 2, 1] if n % 2 else True
    assert got[3] is None
    assert got[5].dtype == tf.bfloat16
    assert np.all(tf.cast(got[5], tf.float32).numpy() == 1.5)
    dense = tf.convert_to_tensor(got[4]).numpy()[:, 0] if n > 1 else None
    if n == 2:
        assert dense.tolist() == [0.5, 1, 0, 0, 0, 1.5, 0, 0]
    for dtype in (tf.int32, tf.bfloat16):
        other = tf.IndexedSlices(tf.fill([1, 4], tf.cast(2 * n, dtype)), tf.constant([r]), tf.constant([8, 4]))
        got = reduce([other])[0]
        assert n == 1 or (got.values.dtype == dtype and np.all(tf.cast(got.values, tf.int32).numpy() == 2))
    bfloat16 = reduce([tf.ones([10], tf.bfloat16)], compression=hvd.Compression.none)[0]
    assert bfloat16.dtype == tf.bfloat16
    packed = reduce([rows, tf.ones([2000])], sparse_as_dense=True)
    if n == 2:
        np.testing.assert_allclose(packed[0].numpy()[:, 0], [0.5, 1, 0, 0, 0, 1.5, 0, 0], atol=0.0172 * 1.5)
        assert np.all(packed[0].numpy()[[2, 3, 4, 6, 7]] == 0)


def test_sum_and_predivide(hvd):
    n = hvd.size()
    x = [tf.fill([1500], hvd.rank() + 1.0)]
    assert np.all(reduce(x, op=hvd.Sum)[0].numpy() == n * (n + 1) / 2)
    assert np.all(reduce(x, gradient_predivide_factor=2.0)[0].numpy() == (n + 1) / 2)
    np.testing.assert_allclose(reduce(x, gradient_predivide_factor=3.0)[0].numpy(), (n + 1) / 2, rtol=1e-6)
    for wrong in ({"op": hvd.Max}, {"op": hvd.Sum, "gradient_predivide_factor": 2.0}, {"gradient_predivide_factor": 0}):
        with pytest.raises(ValueError, match=r"op must be|gradient_predivide_factor must be"):
            reduce(x, **wrong)


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_horovods_own_compressors_work_too(hvd, name):
    x = [tf.fill([1500], hvd.rank() + 1.0), tf.fill([3], 2.0)]
    got = reduce(x, compression=getattr(hvd.Compression, name))
    for tensor, right in zip(got, [(hvd.size() + 1) / 2, 2.0]):
        np.testing.assert_allclose(tensor.numpy(), right, rtol=1e-3)
    collectives.reset_sent_bytes()
    reduce([tf.ones([3000])], compression=getattr(hvd.Compression, name))
    width = {"none": 4, "fp16": 2}[name]
    assert collectives.sent_bytes() == 2 * (hvd.size() - 1) * width * 3000 // hvd.size()


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        (lambda r: ([tf.ones([2000 + r])], ["dense/kernel"], {}), r"gradient 0.*dense/kernel: float32 \(2000,\).*2001"),
        (lambda r: ([tf.ones([20, 100] if r else [100, 20])], ["kernel"], {}), r"kernel: float32 \(100, 20\).*20, 100"),
        (lambda r: ([tf.ones([2000], tf.float16 if r else tf.float32)], ["k"], {}), r"k: float32.*k: float16"),
        (lambda r: ([tf.ones([2000])] * (1 + min(r, 1)), ["k", "b"][: 1 + min(r, 1)], {}), r"no such gradient"),
        (lambda r: ([tf.ones([2000])], ["b" if r else "k"], {}), r"'k: .*'b: "),
        (
            lambda r: ([tf.ones([2000])], ["k"], {"compression": ALL(data_type="linear" if r else "mantissa")}),
            r"the settings.*mantissa.*linear",
        ),
    ],
    ids=["shape", "dimensions", "dtype", "number", "name", "setting"],
)
def test_workers_that_differ_are_told_before_anything_is_exchanged(hvd, mine, expected):
    """FIELD-CASES D7: an error on every worker that names the gradient and both values."""
    if hvd.size() == 1:
        return
    gradients, names, settings = mine(hvd.rank())
    with pytest.raises(ValueError, match=rf"(?s)workers differ in .*{expected}"):
        reduce(gradients, names, **settings)
    with pytest.raises(ValueError, match="workers differ in"):
        tf.function(lambda: reduce(gradients, names, **settings))()
    assert np.all(reduce([tf.ones([10])])[0].numpy() == 1)  # nothing is stuck


def test_layer_numbers_of_keras_may_differ(hvd):
    got = reduce([tf.fill([2000], float(hvd.rank()))], [f"dense_{hvd.rank() + 3}/kernel"])
    assert np.all(got[0].numpy() == np.float32((hvd.size() - 1) / 2))


def test_retrace_of_one_worker_alone(hvd):
    """A worker that traces again, with an extra op in its graph, says nothing and waits for nobody."""
    x = tf.fill([2000], float(hvd.rank()))
    mean = np.float32((hvd.size() - 1) / 2)

    @tf.function(reduce_retracing=False)
    def bare(t, extra):
        if extra:
            t = t * tf.sqrt(tf.cast(extra, tf.float32)) / tf.sqrt(tf.cast(extra, tf.float32))
        return hvd.allreduce(tf.identity(t, name="gradient"), compression=hvd8bit.EightBit)

    @tf.function(reduce_retracing=False)
    def listed(t, extra):
        scale = tf.sqrt(tf.cast(extra + 1, tf.float32))
        return reduce([t * scale / scale])[0]

    for extra in (0, 0, 1 if hvd.rank() == 0 else 0, 0):
        np.testing.assert_allclose(bare(x, extra).numpy(), mean)
        np.testing.assert_allclose(listed(x, extra).numpy(), mean, rtol=1e-2)


@pytest.mark.parametrize("wrapper", ["hvd8bit", "horovod", "horovod with groups"])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_gradient_tape(hvd, wrapper, traced):
    """FIELD-CASES D2 and D0: other names on one rank, same weights on all."""
    if hvd.rank() == 0:
        for _ in range(3):
            tf.keras.layers.Dense(2)(tf.ones([1, 1]))
    if wrapper != "hvd8bit" and hvd.size() == 1:
        return
    w = tf.Variable(tf.zeros([1200]), name="w")
    b = tf.Variable(0.0, name="b")

    def step():
        with tf.name_scope("outer" if hvd.rank() else "other"), tf.GradientTape() as tape:
            loss = (tf.reduce_sum(w) + b) * (hvd.rank() + 1.0)
        if wrapper == "hvd8bit":
            tape = hvd8bit.DistributedGradientTape(tape, compression=ALL, name=f"tape_{traced}")
        else:
            groups = {"groups": 1} if wrapper.endswith("groups") else {}
            tape = hvd.DistributedGradientTape(tape, compression=ALL, **groups)
        return tape.gradient(loss, [w, b], use_generic_names=True)

    run = tf.function(step) if traced else step
    for _ in range(2):
        gradients = run()
        for gradient in gradients:
            assert np.all(gradient.numpy() == np.float32((hvd.size() + 1) / 2))


def test_one_name_in_several_scopes_and_calls(hvd):
    """As with Horovod itself, what is around a collective counts: a function called twice, name scopes."""
    if hvd.size() == 1:
        return
    mean = np.float32((hvd.size() + 1) / 2)

    @tf.function
    def inner(x):
        return hvd.allreduce(x, compression=ALL)

    @tf.function
    def twice(x):
        return inner(x), inner(x * 10)

    @tf.function
    def scopes(x):
        with tf.name_scope("a"):
            first = hvd.allreduce(x, compression=ALL, name="g")
        with tf.name_scope("b"):
            second = hvd.allreduce(x * 10, compression=ALL, name="g")
        return first, second

    for step in (twice, scopes):
        for _ in range(3):
            first, second = step(tf.fill([2000], hvd.rank() + 1.0))
            assert np.all(first.numpy() == mean)
            assert np.all(second.numpy() == 10 * mean)


def test_process_sets(hvd, monkeypatch):
    """Some workers among themselves: the compressor gets the same process set as the call, wrappers pass theirs on."""
    if hvd.size() < 3:
        return
    members = [0, 2]
    some = hvd.add_process_set(members)
    w = tf.Variable(tf.zeros([2000]))
    try:
        if hvd.rank() in members:
            x = tf.fill([2000], hvd.rank() + 1.0)
            for traced in (False, True):

                def reduce_bare(t):
                    return hvd.allreduce(t, process_set=some, compression=ALL(process_set=some), name="of_some")

                def reduce_list(t):
                    return reduce([t], process_set=some, scope="of_some")[0]

                def reduce_tape(t, compression=ALL):
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_sum(w * t)
                    tape = hvd8bit.DistributedGradientTape(tape, process_set=some, compression=compression)
                    return tape.gradient(loss, [w])[0]

                for call in (reduce_bare, reduce_list, reduce_tape):
                    assert np.all((tf.function(call) if traced else call)(x).numpy() == 2.0)
                of_all = ALL(process_set=hvd.global_process_set)
                with pytest.raises(ValueError, match="process_set differs"):
                    (tf.function(reduce_tape) if traced else reduce_tape)(x, of_all)
            assert np.all(hvd8bit.allreduce(x, process_set=some, name="of_some").numpy() == 2.0)
            with pytest.raises(ValueError, match=r"process_set|needs a sum or an average"):
                hvd.allreduce(x, process_set=some, compression=ALL, name="of_some")
            with pytest.raises(ValueError, match="process_set differs"):
                tf.function(lambda: hvd.allreduce(x, process_set=some, compression=ALL, name="of_some"))()
        else:
            untouched = reduce([tf.ones([2000])], process_set=some, scope="of_some")
            assert np.all(untouched[0].numpy() == 1)
    finally:
        hvd.remove_process_set(some)


def test_process_sets_that_follow_each_other(hvd, monkeypatch):
    """Horovod numbers a new set like one that was removed; its workers have other plans behind them."""
    if hvd.size() < 3:
        return
    everyones = []
    for members in ([0, 1], [0, 2], [1, 2], [0, 1]):
        some = hvd.add_process_set(members)
        everyones.append(some.process_set_id)
        try:
            if hvd.rank() in members:
                # The first list is known to some of its workers, the second one is new.
                for count, scope in ((1, "following"), (1 + len(everyones), f"new_{len(everyones)}")):
                    tensors = [tf.fill([2000], hvd.rank() + 1.0)] * count
                    for mean in reduce(tensors, process_set=some, scope=scope):
                        assert np.all(mean.numpy() == np.mean(members) + 1)
        finally:
            hvd.remove_process_set(some)
    assert len(set(everyones)) == 1


@pytest.mark.parametrize("skewed", [False, True], ids=["", "workers in different order"])
def test_a_function_that_is_called_twice_in_a_step(hvd, skewed):
    """Both calls' exchanges have the same names."""
    w = tf.Variable(tf.zeros([2000]))

    @tf.function
    def gradient_of(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * x)
        tape = hvd8bit.DistributedGradientTape(tape, compression=ALL, name=f"called_twice_{skewed}")
        return tape.gradient(loss, [w])[0]

    def late(x, rank):
        if not skewed or hvd.rank() != rank:
            return x
        slow = tf.numpy_function(lambda value: (time.sleep(0.5), value)[1], [x], tf.float32, stateful=False)
        return tf.ensure_shape(slow, x.shape)

    @tf.function
    def step(a, b):
        a, b = late(a, 0), late(b, hvd.size() - 1)
        return gradient_of(a), gradient_of(b)

    mean = (hvd.size() + 1) / 2
    first, second = step(tf.fill([2000], hvd.rank() + 1.0), tf.fill([2000], 10 * (hvd.rank() + 1.0)))
    assert np.all(first.numpy() == mean)
    assert np.all(second.numpy() == 10 * mean)


@pytest.mark.parametrize("kind", ["process set", "instance without a repr"])
def test_settings_that_are_shown_by_an_address(hvd, kind):
    """Workers compare them as text."""

    class Own:
        def compress(self, tensor):
            return tensor, None

        def decompress(self, tensor, ctx):
            return tensor

    given = {"compression": Own()}
    if kind == "process set":
        given = {"compression": ALL(process_set=hvd.global_process_set), "process_set": hvd.global_process_set}
    (mean,) = reduce([tf.fill([2000], hvd.rank() + 1.0)], scope=kind.replace(" ", "_"), **given)
    assert np.all(mean.numpy() == (hvd.size() + 1) / 2)


def test_two_threads_with_gradients_of_their_own(hvd):
    """Workers start them in different orders, and threads follow each other."""
    means, errors = {}, []

    def train(number):
        try:
            for length in (2000, 3000):
                tensors = [tf.fill([length], (hvd.rank() + 1.0) * (number + 1))]
                (means[number, length],) = reduce(tensors, scope=f"thread_{number}")
        except Exception as error:
            errors.append(error)

    order = [0, 1, 2] if hvd.rank() else [2, 1, 0]
    threads = [threading.Thread(target=train, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert not errors
    for (number, _), mean in means.items():
        assert np.all(mean.numpy() == (number + 1) * (hvd.size() + 1) / 2)


def test_many_gradients_one_by_one(hvd):
    """Horovod's tape without groups: each gradient has an exchange of its own, under a name of its own."""
    if hvd.size() == 1:
        return
    weights = [tf.Variable(tf.zeros([1100]), name=f"w{i}") for i in range(40)]

    @tf.function
    def step(shift):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w) * (i + shift) for i, w in enumerate(weights)])
        return hvd.DistributedGradientTape(tape, compression=ALL).gradient(loss, weights)

    for _ in range(3):
        for i, gradient in enumerate(step(tf.constant(float(hvd.rank())))):
            np.testing.assert_allclose(gradient.numpy(), i + (hvd.size() - 1) / 2, rtol=1e-6)


def test_tape_with_local_sources_nests_and_keras_variables(hvd):
    model = tf.keras.Sequential([tf.keras.layers.Input([40]), tf.keras.layers.Dense(50)])
    hvd8bit.broadcast_variables(model.variables)
    local = tf.Variable(2.0, name="local")
    unused = tf.Variable(1.0, name="unused")
    with hvd8bit.DistributedGradientTape(tf.GradientTape(persistent=True), name="nested") as tape:
        loss = tf.reduce_sum(model(tf.ones([1, 40]))) * (hvd.rank() + 1.0) + local * hvd.size()
    tape.register_local_source(local)
    weights = list(model.trainable_variables)
    gradients = tape.gradient(loss, {"weights": weights, "local": local, "unused": unused})
    for gradient in gradients["weights"]:
        assert np.all(gradient.numpy() == np.float32((hvd.size() + 1) / 2))
    assert float(gradients["local"]) == 1.0
    assert gradients["unused"] is None
    with pytest.raises(ValueError, match="tape must not be"):
        hvd8bit.DistributedGradientTape(tape)


def test_broadcast_of_all_kinds_of_variables(hvd):
    keras_variable = tf.keras.layers.Dense(3)
    keras_variable.build([None, 4])
    variables = {
        "keras": keras_variable.weights,
        "tf": [
            tf.Variable(tf.cast(tf.fill([3], hvd.rank() + 1), dtype))
            for dtype in ("float32", "bfloat16", "float16", "int64")
        ],
        "scalar": tf.Variable(hvd.rank()),
        "flag": tf.Variable(hvd.rank() == 0),
        "uint32": tf.Variable(tf.cast(hvd.rank() + 7, tf.uint32)),
    }
    hvd8bit.broadcast_variables(variables, root_rank=0)
    assert int(variables["scalar"]) == 0
    assert bool(variables["flag"])
    assert int(variables["uint32"]) == 7
    assert all(np.all(tf.cast(v, tf.float32).numpy() == 1) for v in variables["tf"])
    assert_weights_agree(hvd, [tf.convert_to_tensor(v) for v in keras_variable.weights])


def test_replicas_stay_bit_identical(hvd):
    """FIELD-CASES D0: ten steps on different data."""
    w = tf.Variable(rank_values(0, [300, 40]))
    for step in range(10):
        x = tf.constant(rank_values(hvd.rank(), [16, 300], seed=step + 1))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ w))
        w.assign_sub(0.01 * hvd8bit.DistributedGradientTape(tape, name="d0").gradient(loss, [w])[0])
    bits = hvd.allgather(tf.constant(w.numpy().view(np.uint8)[None]), name="bits").numpy()
    assert np.all(bits == bits[0])


def test_bare_compressor_with_other_shapes_or_settings(hvd, caplog):
    """FIELD-CASES D7 where no wrapper sees the list: the chunk headers tell every worker."""
    if hvd.size() == 1:
        return
    r = hvd.rank()
    many = r"chunk from worker.*holds other tensors.*20"
    for chosen in (ALL(exchange="scatter_reduce"), ALL(exchange="allgather")):
        for other, message in (
            (lambda c=chosen: hvd.allreduce(tf.ones([2000 + r]), compression=c), r"holds other tensors.*20"),
            (lambda c=chosen: hvd.allreduce(tf.ones([20, 100] if r else [100, 20]), compression=c), r"other tensors"),
            (
                lambda c=chosen: hvd.allreduce(tf.ones([2000], tf.float16 if r else tf.float32), compression=c),
                r"chunk from worker.*holds other tensors.*20",
            ),
            (lambda c=chosen: hvd.allreduce(tf.ones([MANY_SLICES if r else 2000]), compression=c), many),
            (tf.function(lambda c=chosen: hvd.allreduce(tf.ones([MANY_SLICES if r else 2000]), compression=c)), many),
        ):
            with pytest.raises(tf.errors.OpError, match=rf"(?s){message}"):
                other()
    # By itself one worker takes one round, where the other one takes two.
    for call, message in (
        (hvd.allreduce, r"exchange in different ways.*another one holds other tensors"),
        (tf.function(hvd.allreduce), "Mismatched operations"),
    ):
        with pytest.raises(tf.errors.OpError, match=rf"(?s){message}"):
            call(tf.ones([MANY_SLICES if r else 2000]), compression=ALL)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)other settings.*data_type"):
        hvd.allreduce(tf.ones([2000]), compression=ALL(data_type="linear" if r else "mantissa"))
    assert np.all(hvd.allreduce(tf.ones([2000]), compression=ALL).numpy() == 1)


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_one_worker_is_left_alone(hvd, monkeypatch, elastic, traced):
    """FIELD-CASES D5: with one worker nothing is rounded, whether the job could grow or not."""
    if elastic:
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    # Horovod keeps graphs by their settings, also where the environment has changed since.
    compression = hvd8bit.EightBit(block_size=512 if elastic else 1024)
    x = rank_values(0, [3000])
    w = tf.Variable(tf.zeros([3000]))

    def step(wrap):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * x)
        return wrap(tape).gradient(loss, [w])[0]

    for number, wrap in enumerate(
        [
            lambda tape: hvd8bit.DistributedGradientTape(
                tape, compression=compression, name=f"alone_{elastic}_{traced}"
            ),
            lambda tape: hvd.DistributedGradientTape(tape, compression=compression),
            lambda tape: hvd.DistributedGradientTape(tape, compression=compression, groups=1),
        ]
    ):
        collectives.reset_sent_bytes()
        got = (tf.function(step) if traced else step)(wrap).numpy()
        if hvd.size() == 1:
            np.testing.assert_array_equal(got, x, err_msg=f"wrapper {number}")
            assert collectives.sent_bytes() == 0
        else:
            np.testing.assert_array_equal(got, exchanged([[x]] * hvd.size(), compression.encoding)[0])


def test_allreduce_of_the_api(hvd):
    mean = np.float32((hvd.size() + 1) / 2)
    x = tf.Variable(tf.fill([2000], hvd.rank() + 1.0))
    assert np.all(hvd8bit.allreduce(x, name="api").numpy() == mean)
    assert np.all(hvd8bit.allreduce(x, op=hvd8bit.Sum, name="api").numpy() == hvd.size() * mean)
    many = hvd8bit.grouped_allreduce([x, x], compression=hvd8bit.EightBit(data_type="linear"), name="apis")
    assert all(np.all(y.numpy() == mean) for y in many)


def test_small_tensors_are_named_once_in_the_log(hvd, caplog):
    if hvd.size() == 1:
        return

    logs.forget()
    with caplog.at_level(logging.INFO, logger="hvd8bit"):
        for _ in range(3):
            hvd.allreduce(tf.ones([10]), compression=hvd8bit.EightBit, name="small")
    assert sum("min_elements=1024" in record.message for record in caplog.records) == 1
