"""Parallel layers in Keras' hands: fit, shapes, saving, merge and split, beside data parallelism, wrong use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from split_models import ALL, MODELS, assert_same_on_all_ranks, difference, keras, made, sequential

import hvd8bit
import hvd8bit.keras
from hvd8bit import parallel
from hvd8bit.parallel.layers_base import ParallelLayer
from hvd8bit.parallel.partition import part_sizes

IS_KERAS2 = keras.__version__.startswith("2.")


@pytest.fixture(autouse=True)
def fresh_names(hvd):
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)


@pytest.fixture(params=["exact", "eightbit"])
def compression(request):
    return None if request.param == "exact" else ALL


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
    assert difference(model(x), parallel.merge(model)(x)) <= 0.02 * 2**0.5  # two layers, each within 2 %


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


class Scaled(keras.Model):
    """A model of its own call, with a weight of its own beside a layer."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.dense = keras.layers.Dense(8)
        self.scale = self.add_weight(name="scale", shape=(8,), initializer="ones")

    def call(self, x):
        return self.dense(x) * self.scale

    def get_config(self):
        return {"name": self.name}


def test_weights_of_nested_models_of_another_kind(hvd):
    nested = Scaled(name="nested")
    plain = sequential(nested, keras.layers.Dense(6, name="fc"), shape=(8,), dtype="float32")
    nested.scale.assign(np.arange(8.0))
    model = parallel.split(plain, ["fc"], compression=None)
    for one in (model, parallel.merge(model)):
        np.testing.assert_array_equal(np.array(one.get_layer("nested").scale), np.arange(8.0))
        for got, want in zip(one.get_layer("nested").get_weights(), nested.get_weights()):
            np.testing.assert_array_equal(got, want)


class Block(keras.layers.Layer):
    """A layer that holds a parallel one."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.inner = parallel.ColumnParallelDense(8, name="inner")

    def build(self, shape):
        self.inner.build(shape)
        self.built = True

    def call(self, x):
        return self.inner(x)

    def get_config(self):
        return {"name": self.name}


def test_merge_refuses_parallel_layers_that_it_cannot_replace(hvd):
    inner = parallel.ColumnParallelDense(8, name="inner")
    for layer, shape in ((Block(name="outer"), (8,)), (keras.layers.TimeDistributed(inner, name="outer"), (3, 8))):
        nested = keras.Sequential([keras.Input(shape), layer])
        with pytest.raises(ValueError, match=r"layer 'outer' of type .* must hold no parallel layer.*'inner'"):
            parallel.merge(sequential(nested, shape=shape, dtype="float32"))


class Owner(keras.Sequential):
    """A sequential model with a weight of its own."""

    def __init__(self, layers=None, name=None, **settings):
        super().__init__(layers, name=name)
        self.own = self.add_weight(name="own", shape=(2,), initializer="ones")


def test_merge_and_split_refuse_models_with_weights_of_their_own(hvd):
    model = Owner([keras.Input((4,)), keras.layers.Dense(8)], name="owner")
    for convert in (parallel.merge, parallel.split):
        with pytest.raises(ValueError, match=r"model 'owner' must have no weights but those of its layers, got .*own"):
            convert(model)


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
    if IS_KERAS2:  # Horovod's own reduces where the gradients are computed
        optimizer.minimize(
            lambda: tf.add_n([tf.reduce_sum(weight) * (rank + 1.0) for weight in model.trainable_variables]),
            model.trainable_variables,
        )
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


@pytest.mark.parametrize("broadcast", [False, True], ids=["alone", "broadcast"])
def test_the_broadcast_callback_leaves_parts_and_their_state_alone(hvd, broadcast):
    """Parts of 3 and 4 columns cannot be broadcast; with the same seeds nothing changes at all."""
    weights = []
    for callbacks in ([], [hvd8bit.keras.callbacks.BroadcastGlobalVariablesCallback(0)])[: 1 + broadcast]:
        model, _, x, y = made("deep", None, "float32")
        model.compile(keras.optimizers.Adam(0.01), loss="mse")
        model.fit(x, y, batch_size=3, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        weights.append([np.array(weight) for weight in model.weights])
        keras.utils.set_random_seed(7)
    for one, other in zip(weights[0], weights[-1]):
        np.testing.assert_array_equal(one, other)


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
