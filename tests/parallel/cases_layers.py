"""Parallel layers against the whole model in one process: for Keras 3, and for Keras 2 where tf.keras is that."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
import hvd8bit.keras
from hvd8bit import parallel
from hvd8bit.parallel.layers_base import ParallelLayer
from hvd8bit.parallel.partition import part_range, part_sizes

ALL = hvd8bit.EightBit(min_elements=0)
keras = parallel.ColumnParallelDense.keras
IS_KERAS2 = keras.__version__.startswith("2.")


@pytest.fixture(autouse=True)
def fresh_names(hvd):
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)


@pytest.fixture(params=["exact", "eightbit"])
def compression(request):
    return None if request.param == "exact" else ALL


def sequential(*layers, shape, dtype):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers])


def conv_net(settings, padding):
    return [
        parallel.ColumnParallelConv2D(6, 3, padding=padding, strides=2, activation="relu", **settings),
        keras.layers.Flatten(),
        parallel.ColumnParallelDense(5, **settings),
    ]


# Name -> the shape of an input, and the layers of a model.
MODELS = {
    "column": ((12,), lambda s: [parallel.ColumnParallelDense(10, activation="tanh", name="fc_3", **s)]),
    "column without bias, rank 3": (
        (3, 12),
        lambda s: [parallel.ColumnParallelDense(9, use_bias=False, activation="softmax", **s)],
    ),
    "row": ((11,), lambda s: [parallel.RowParallelDense(6, activation="tanh", bias_initializer="ones", **s)]),
    "row, rank 3": ((2, 11), lambda s: [parallel.RowParallelDense(6, **s)]),
    "chained": (
        (12,),
        lambda s: [
            parallel.ColumnParallelDense(10, activation="tanh", gather_output=False, **s),
            keras.layers.Activation("linear", dtype=s["dtype"]),
            parallel.RowParallelDense(7, input_is_parallel=True, **s),
        ],
    ),
    "deep": (
        (12,),
        lambda s: [
            parallel.ColumnParallelDense(10, activation="tanh", **s),
            parallel.RowParallelDense(9, activation="tanh", **s),
            keras.layers.Dense(8, activation="tanh", dtype=s["dtype"]),
            parallel.ColumnParallelDense(7, **s),
        ],
    ),
    "conv valid": ((9, 8, 3), lambda s: conv_net(s, "valid")),
    "conv same": ((9, 8, 3), lambda s: conv_net(s, "same")),
    "local": (
        (7, 8, 3),
        lambda s: [
            parallel.LocallyConnected2D(5, (2, 3), activation="tanh", kernel_initializer="random_normal", **s),
            parallel.LocallyConnected2D(6, 3, strides=2, kernel_initializer="random_normal", **s),
        ],
    ),
    "embedding": (
        (6,),
        lambda s: [parallel.ParallelEmbedding(20, 5, **s), parallel.ColumnParallelDense(8, **s)],
    ),
}


def made(name, compression, dtype, batch=9):
    """The split model, the same with plain layers, and a batch."""
    shape, layers = MODELS[name]
    is_ids = name == "embedding"
    model = sequential(
        *layers({"compression": compression, "dtype": dtype}), shape=shape, dtype="int32" if is_ids else dtype
    )
    plain = parallel.merge(model)
    random = np.random.default_rng(5)
    x = random.integers(0, 20, (batch, *shape)) if is_ids else random.standard_normal((batch, *shape))
    y = random.standard_normal((batch, *tuple(plain.output_shape)[1:])) if batch else np.zeros((0, 1))
    return model, plain, tf.constant(x, "int32" if is_ids else dtype), tf.constant(y, dtype)


def step(model, x, y):
    """Loss, output, gradients by the input and by the weights."""

    @tf.function
    def run(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = model(x, training=True)
            loss = tf.reduce_mean(tf.square(output - y))
        sources = [w if isinstance(w, tf.Variable) else w.value for w in model.trainable_variables]
        by_input, *by_weights = tape.gradient(loss, [x, *sources])
        return loss, output, by_input, [tf.convert_to_tensor(gradient) for gradient in by_weights]

    return run(x, y)


def own_parts(model, whole):
    """Of tensors like a plain model's weights, what belongs to this worker."""
    whole, own = list(whole), []
    for layer in model.layers:
        if not isinstance(layer, ParallelLayer):
            own += [whole.pop(0) for _ in layer.trainable_weights]
            continue
        for shape, axis in layer._parts.values():
            weight = np.asarray(whole.pop(0)).reshape(shape)
            if axis is not None:
                start, stop = part_range(shape[axis], layer.workers, layer.comm.rank())
                weight = np.take(weight, range(start, stop), axis)
            own.append(weight)
    assert not whole
    return own


def difference(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-300)


def assert_same_on_all_ranks(hvd, array):
    bits = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    everyone = hvd.allgather(tf.constant(bits[None]), name="same_on_all_ranks")
    assert np.all(everyone.numpy() == bits), "ranks hold different bits"


# ---- equal to one process ----


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_exact_mode_equals_one_process(hvd, name, dtype):
    """FIELD-CASES M1, exact: outputs, every gradient, 20 losses, weights afterwards."""
    bound = 1e-5 if dtype == "float32" else 1e-10
    model, plain, x, y = made(name, None, dtype)
    loss, output, by_input, by_weights = step(model, x, y)
    plain_loss, plain_output, plain_by_input, plain_by_weights = step(plain, x, y)
    assert difference(loss, plain_loss) <= bound
    assert difference(output, plain_output) <= bound
    if by_input is not None:
        assert difference(by_input, plain_by_input) <= bound
    for got, want in zip(by_weights, own_parts(model, plain_by_weights)):
        assert difference(got, want) <= bound
    losses, plain_losses = train(model, x, y), train(plain, x, y)
    assert losses[-1] < losses[0]
    assert difference(losses, plain_losses) <= bound
    final = [np.asarray(w) for w in plain.trainable_variables]
    for got, want in zip(model.trainable_variables, own_parts(model, final)):
        assert difference(got, want) <= bound


def train(model, x, y, steps=20, rate=0.1):
    """Losses of plain gradient descent."""
    optimizer = keras.optimizers.SGD(rate)
    optimizer.build(model.trainable_variables)

    @tf.function
    def one():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return [float(one()) for _ in range(steps)]


@pytest.mark.parametrize("name", MODELS)
def test_eight_bits_are_near_one_process(hvd, name):
    """FIELD-CASES M1, 8 bits: 2 % RMS forward and 4 % backward, 20 losses within 2 %; the same bits on all workers."""
    model, plain, x, y = made(name, ALL, "float32", batch=33)
    _, output, by_input, by_weights = step(model, x, y)
    _, plain_output, plain_by_input, plain_by_weights = step(plain, x, y)
    assert difference(output, plain_output) <= 0.02
    if by_input is not None:
        assert difference(by_input, plain_by_input) <= 0.04
    for got, want in zip(by_weights, own_parts(model, plain_by_weights)):
        assert difference(got, want) <= 0.04
    if name != "chained" or hvd.size() == 1:
        assert_same_on_all_ranks(hvd, output)
    rounded = difference(output, plain_output) > 1e-6
    assert rounded == (hvd.size() > 1)
    losses, plain_losses = train(model, x, y), train(plain, x, y)
    np.testing.assert_allclose(losses, plain_losses, rtol=0.02)
    for layer in model.layers:
        parts = getattr(layer, "_parts", dict.fromkeys(range(len(layer.weights)), ((), None)))
        for weight, (_, axis) in zip(layer.weights, parts.values()):
            if axis is None:
                assert_same_on_all_ranks(hvd, np.asarray(weight))


@pytest.mark.parametrize("name", ["column", "row", "conv valid", "embedding"])
def test_the_same_seed_gives_the_weights_of_plain_layers(hvd, name):
    plain = {
        "column": lambda: [keras.layers.Dense(10)],
        "row": lambda: [keras.layers.Dense(6, bias_initializer="ones")],
        "conv valid": lambda: [keras.layers.Conv2D(6, 3, strides=2), keras.layers.Flatten(), keras.layers.Dense(5)],
        "embedding": lambda: [keras.layers.Embedding(20, 5), keras.layers.Dense(8)],
    }[name]
    shape, layers = MODELS[name]
    keras.utils.set_random_seed(11)
    want = sequential(*plain(), shape=shape, dtype="float32").get_weights()
    keras.utils.set_random_seed(11)
    model = sequential(*layers({"compression": None, "dtype": "float32"}), shape=shape, dtype="float32")
    for got, weight in zip(parallel.merge(model).get_weights(), want):
        np.testing.assert_array_equal(got, weight)
    for got, weight in zip(model.get_weights(), own_parts(model, want)):
        np.testing.assert_array_equal(got, weight)


def test_locally_connected_is_the_layer_of_keras_2(hvd):
    tf_keras = pytest.importorskip("tf_keras")
    layer = parallel.LocallyConnected2D(5, (2, 3), strides=(1, 2), compression=None)
    whole = tf_keras.layers.LocallyConnected2D(5, (2, 3), strides=(1, 2))
    x = np.random.default_rng(0).standard_normal((4, 6, 8, 3)).astype("float32")
    want = whole(x)
    layer.build(x.shape)
    random = np.random.default_rng(1)
    weights = [random.standard_normal(w.shape).astype("float32") for w in whole.get_weights()]
    whole.set_weights(weights)
    layer.set_whole_weights(weights)
    want = whole(x)
    assert tuple(layer.compute_output_shape(x.shape)) == tuple(want.shape)
    np.testing.assert_allclose(layer(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_channels_first(hvd, padding):
    x = np.random.default_rng(0).standard_normal((4, 6, 8, 3)).astype("float32")
    for cls in (parallel.ColumnParallelConv2D, parallel.LocallyConnected2D):
        last = cls(5, 3, padding=padding, compression=None, data_format="channels_last")
        first = cls(5, 3, padding=padding, compression=None, data_format="channels_first")
        want = last(x)
        turned = np.transpose(x, [0, 3, 1, 2])
        first.build(turned.shape)
        first.set_weights(last.get_weights())
        got = first(turned)
        assert tuple(first.compute_output_shape(turned.shape)) == tuple(got.shape)
        np.testing.assert_allclose(np.transpose(got, [0, 2, 3, 1]), want, rtol=1e-5, atol=1e-6)


# ---- Keras' own loop ----


def test_fit_evaluate_predict(hvd, compression):
    """All workers see the same data; the last batch is a short one. A plain optimizer is enough."""
    random = np.random.default_rng(2)
    x, y = random.standard_normal((50, 12)).astype("float32"), random.standard_normal((50, 7)).astype("float32")
    model, plain, *_ = made("deep", compression, "float32")
    histories = []
    for one in (model, plain):
        one.compile(keras.optimizers.SGD(0.1), loss="mse")
        histories.append(one.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history["loss"])
    bound = 1e-5 if compression is None else 0.02
    np.testing.assert_allclose(*histories, rtol=bound)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(plain.evaluate(x, y, verbose=0), rel=bound)
    predicted = model.predict(x, batch_size=16, verbose=0)
    assert difference(predicted, plain.predict(x, batch_size=16, verbose=0)) <= max(bound, 1e-5)
    assert_same_on_all_ranks(hvd, predicted)


def test_mixed_precision(hvd):
    """float16 activations travel as such; weights stay float32."""
    model = sequential(
        parallel.ColumnParallelDense(64, dtype="mixed_float16", activation="relu"),
        parallel.RowParallelDense(16, dtype="mixed_float16"),
        keras.layers.Activation("linear", dtype="float32"),
        shape=(32,),
        dtype="float32",
    )
    assert {weight.dtype if isinstance(weight.dtype, str) else weight.dtype.name for weight in model.weights} == {
        "float32"
    }
    x = np.random.default_rng(0).standard_normal((64, 32)).astype("float32")
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    losses = model.fit(x, x[:, :16], epochs=5, batch_size=32, shuffle=False, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert difference(model(x), parallel.merge(model)(x)) <= 0.02


# ---- shapes ----


@pytest.mark.parametrize("name", MODELS)
def test_static_shapes(hvd, compression, name):
    """FIELD-CASES F6, and what a model shows of itself."""
    model, plain, x, _ = made(name, compression, "float32")
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec([None, *x.shape[1:]], x.dtype)])
    def run(x):
        for layer in model.layers:
            x = layer(x)
            shapes.append(x.shape.as_list())
        return x

    y = run(x)
    assert shapes[-1] == list(plain.output_shape)
    assert y.shape == (9, *plain.output_shape[1:])
    assert tuple(model.output_shape) == tuple(plain.output_shape)
    lines = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    assert any(str(plain.output_shape[-1]) in line for line in lines)


def test_unknown_batch_and_length(hvd, compression):
    inputs = keras.Input((None,), dtype="int32")
    model = keras.Model(
        inputs,
        parallel.ColumnParallelDense(8, compression=compression)(
            parallel.ParallelEmbedding(20, 6, mask_zero=True, compression=compression)(inputs)
        ),
    )
    assert tuple(model.output_shape) == (None, None, 8)
    for shape in ((2, 3), (5, 1), (1, 7)):
        assert tuple(model(np.ones(shape, "int32")).shape) == (*shape, 8)


@pytest.mark.parametrize("name", MODELS)
def test_empty_batches(hvd, compression, name):
    """FIELD-CASES F2: no NaN, no hang."""
    model, *_ = made(name, compression, "float32")
    shape, _ = MODELS[name]
    x = tf.zeros([0, *shape], "int32" if name == "embedding" else "float32")
    for call in (model, tf.function(model)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(call(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        assert float(loss) == 0
        for gradient, weight in zip(gradients, model.trainable_variables):
            assert tuple(gradient.shape) == tuple(weight.shape)
            assert not np.any(tf.convert_to_tensor(gradient).numpy())


def test_gather_output_false_gives_the_own_part(hvd, compression):
    n, rank = hvd.size(), hvd.rank()
    layer = parallel.ColumnParallelDense(7, gather_output=False, compression=compression)
    y = layer(tf.ones([3, 4]))
    assert y.shape == (3, part_sizes(7, n)[rank])
    assert tuple(layer.compute_output_shape((None, 4))) == (None, part_sizes(7, n)[rank])


# ---- configuration, saving, merge and split ----


@pytest.mark.parametrize("name", MODELS)
def test_saving_merging_splitting(hvd, compression, name):
    model, plain, x, _ = made(name, compression, "float32")
    want = model(x).numpy()
    with tempfile.TemporaryDirectory() as folder:
        own = os.path.join(folder, "own.keras")
        model.save(own)
        loaded = keras.models.load_model(own)
        np.testing.assert_array_equal(loaded(x).numpy(), want)
        for old, new in zip(model.layers, loaded.layers):
            assert getattr(old, "compression", None) == getattr(new, "compression", None)

        path = os.path.join(folder, "merged.keras")
        plain.save(path)
        names = [layer.name for layer in model.layers if isinstance(layer, ParallelLayer)]
        chosen = {
            layer.name: {"split": "row", "input_is_parallel": layer.input_is_parallel}
            if hasattr(layer, "input_is_parallel")
            else {"gather_output": layer.gather_output}
            if hasattr(layer, "gather_output")
            else {}
            for layer in model.layers
            if layer.name in names
        }
        again = parallel.split(keras.models.load_model(path), chosen, compression=compression)
        np.testing.assert_array_equal(again(x).numpy(), want)
        assert [type(layer) for layer in again.layers] == [type(layer) for layer in model.layers]
        for got, weight in zip(again.get_weights(), model.get_weights()):
            np.testing.assert_array_equal(got, weight)


def test_a_merged_model_loads_without_hvd8bit(hvd):
    """In a process that has neither hvd8bit nor Horovod."""
    _, plain, x, _ = made("deep", ALL, "float32")
    _, local_plain, image, _ = made("local", ALL, "float32")
    if hvd.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            for name, one, batch in (("deep", plain, x), ("local", local_plain, image)):
                one.save(f"{folder}/{name}.keras")
                np.savez(f"{folder}/{name}.npz", x=batch.numpy(), y=one(batch).numpy())
            code = (
                "import sys; sys.modules['hvd8bit'] = sys.modules['horovod'] = None\n"
                f"import numpy as np, {keras.__name__} as keras\n"
                "for name in ('deep', 'local'):\n"
                f"    data = np.load(f'{folder}/{{name}}.npz')\n"
                f"    model = keras.models.load_model(f'{folder}/{{name}}.keras')\n"
                "    np.testing.assert_allclose(model(data['x']), data['y'], rtol=1e-5, atol=1e-6)\n"
                "print('loaded')"
            )
            env = {key: value for key, value in os.environ.items() if not key.startswith("HOROVOD")}
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100)
            assert done.stdout.strip().endswith("loaded"), done.stderr[-2000:]
    hvd.allreduce(tf.ones(1), name="rank 0 is done")


def test_functional_and_nested_models(hvd, compression):
    inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(10, activation="tanh"), keras.layers.Dense(6)])
    inputs = keras.Input((8,))
    shared = keras.layers.Dense(8, name="shared")
    added = keras.layers.Add()([shared(inputs), shared(shared(inputs))])
    plain = keras.Model(inputs, [inner(added), keras.layers.Dense(5, name="head")(added)])
    model = parallel.split(plain, compression=compression)
    x = np.random.default_rng(0).standard_normal((40, 8)).astype("float32")
    bound = 1e-5 if compression is None else 0.03
    for got, want in zip(model(x), plain(x)):
        assert difference(got, want) <= bound
    back = parallel.merge(model)
    for got, want in zip(back.get_weights(), plain.get_weights()):
        np.testing.assert_array_equal(got, want)
    assert [type(layer).__name__ for layer in back.layers] == [type(layer).__name__ for layer in plain.layers]


def test_a_layer_called_several_times_in_a_step(hvd, compression):
    layer = parallel.ColumnParallelDense(6, compression=compression)
    layer.build((None, 6))

    @tf.function
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x) + layer(2 * x) + layer(layer(x))
        return y, tape.gradient(y, x)

    x = tf.ones([5, 6])
    y, dx = run(x)
    kernel = layer.whole_weights()[0]
    assert difference(y, x @ (3 * kernel + kernel @ kernel)) <= (1e-5 if compression is None else 0.02)
    assert difference(dx, tf.ones([5, 6]) @ (3 * kernel + kernel @ kernel).T) <= (1e-5 if compression is None else 0.04)


def test_process_sets(hvd, compression):
    """Two pairs of workers, each with a layer of its own."""
    if hvd.size() < 4:
        return
    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    try:
        mine = pairs[hvd.rank() // 2]
        layer = parallel.ColumnParallelDense(10, compression=compression, process_set=mine)
        model = sequential(layer, shape=(12,), dtype="float32")
        assert layer.weights[0].shape == (12, 5)
        x = np.random.default_rng(hvd.rank() // 2).standard_normal((30, 12)).astype("float32")
        plain = parallel.merge(model)
        assert difference(model(x), plain(x)) <= 0.02
        again = type(layer).from_config(layer.get_config())
        assert again._process_set is mine
        assert parallel.split(plain, process_set=mine).layers[-1].weights[0].shape == (12, 5)
    finally:
        for pair in pairs:
            hvd.remove_process_set(pair)


# ---- beside data parallelism ----


def test_gradients_of_parts_are_not_averaged(hvd):
    """hvd8bit's optimizer, tape and broadcast leave the parts of a layer to each worker."""
    n, rank = hvd.size(), hvd.rank()
    model = sequential(
        keras.layers.Dense(4, name="all"),
        parallel.ColumnParallelDense(4, name="parts"),
        parallel.RowParallelDense(3, name="rows"),
        shape=(4,),
        dtype="float32",
    )
    before = [np.array(weight) for weight in model.trainable_variables]
    values = [tf.fill(weight.shape, rank + 1.0) for weight in model.trainable_variables]
    optimizer = hvd8bit.keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(model.trainable_variables)
    if IS_KERAS2:
        optimizer.apply_gradients(zip(values, model.trainable_variables))
    else:
        optimizer.apply(values, model.trainable_variables)
    mean = (n + 1) / 2
    expected = [mean, mean, rank + 1, rank + 1, rank + 1, mean]
    for weight, old, change in zip(model.trainable_variables, before, expected):
        np.testing.assert_allclose(np.array(weight), old - change, rtol=1e-5, atol=1e-5)

    sources = [w if isinstance(w, tf.Variable) else w.value for w in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(source) * (rank + 1.0) for source in sources])
    gradients = hvd8bit.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    for gradient, change in zip(gradients, expected):
        np.testing.assert_allclose(gradient, change, rtol=1e-6)

    for weight in model.weights:
        weight.assign(tf.fill(weight.shape, float(rank)))
    hvd8bit.broadcast_variables(model.weights, root_rank=0)
    for weight, part in zip(model.weights, [False, False, True, True, True, False]):
        assert np.all(np.array(weight) == (rank if part else 0))


# ---- wrong use ----


def test_wrong_arguments(hvd):
    n = hvd.size()
    for build, message in (
        (lambda: parallel.ColumnParallelDense(0), "units must be an integer of at least 1, got 0"),
        (lambda: parallel.ColumnParallelDense(4, compression="8"), "compression must be hvd8bit.EightBit"),
        (
            lambda: parallel.ColumnParallelDense(4, gather_output=False, activation="softmax"),
            "element by element with gather_output=False, got 'softmax'",
        ),
        (lambda: parallel.RowParallelDense(4, activity_regularizer="l2"), "activity_regularizer must be None"),
        (lambda: parallel.ColumnParallelConv2D(4, (3, 3, 3)), "kernel_size must be an integer or two"),
        (lambda: parallel.LocallyConnected2D(4, 3, padding="full"), "padding must be 'valid' or 'same', got 'full'"),
        (lambda: parallel.LocallyConnected2D(4, 9)(tf.ones([1, 5, 5, 3])), "must fit into the input"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            build()
    if n == 1:
        return
    for build, message in (
        (lambda: parallel.ColumnParallelDense(n - 1)(tf.ones([2, 3])), f"units must be at least .*{n}, got {n - 1}"),
        (
            lambda: parallel.RowParallelDense(3)(tf.ones([2, n - 1])),
            f"at least the number of workers, {n}, got {n - 1}",
        ),
        (lambda: parallel.ParallelEmbedding(n - 1, 3)(tf.zeros([2], tf.int32)), "input_dim must be at least"),
        (
            lambda: parallel.RowParallelDense(3, input_is_parallel=True, input_units=4 * n)(tf.ones([2, 5])),
            f"must be this worker's part of {4 * n}, 4 places, got shape .*input_units",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            build()


def test_ids_out_of_range_are_an_error_on_every_worker(hvd):
    layer = parallel.ParallelEmbedding(20, 3)
    layer(tf.constant([[0, 19]]))
    for ids in ([[3, 20]], [[-1, 3]]):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"must be in \[0, input_dim=20\)"):
            layer(tf.constant(ids))


@pytest.mark.parametrize("name", ["column", "row", "conv valid", "local", "embedding"])
def test_different_batches_are_an_error_on_every_worker(hvd, compression, name):
    if hvd.size() == 1:
        return
    model, _, x, _ = made(name, compression, "float32")
    with pytest.raises(tf.errors.OpError):
        model(x[: 5 if hvd.rank() else 4])


def test_wrong_use_of_merge_and_split(hvd):
    class Own(keras.Model):
        def call(self, x):
            return x

    plain = sequential(keras.layers.Dense(8, name="fc"), keras.layers.ReLU(name="relu"), shape=(4,), dtype="float32")
    heavy = sequential(keras.layers.Dense(8, kernel_regularizer="l2", name="fc"), shape=(4,), dtype="float32")
    for call, error, message in (
        (lambda: parallel.split(plain, ["fc2"]), ValueError, r"names of layers.*\['fc2'\]; it has \['fc', 'relu'\]"),
        (lambda: parallel.split(plain, ["relu"]), ValueError, "'relu' of type ReLU cannot be split"),
        (lambda: parallel.split(plain, {"fc": {"split": "diagonal"}}), ValueError, "must be 'column', or 'row'"),
        (lambda: parallel.split(heavy), ValueError, "kernel_regularizer of layer 'fc' must be None"),
        (lambda: parallel.merge(Own()), ValueError, "must be functional or sequential"),
        (lambda: parallel.merge(keras.Sequential([keras.layers.Dense(2)])), ValueError, "must be built"),
        (lambda: parallel.merge("model"), TypeError, "must be a Keras model"),
    ):
        with pytest.raises(error, match=message):
            call()
