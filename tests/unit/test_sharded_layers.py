"""Parallel layers among threads of one process, against the plain layers of Keras."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvd8bit import EightBit, parallel
from hvd8bit.collectives import LoopbackComm
from hvd8bit.keras.callbacks import _shared_variables
from hvd8bit.parallel.partition import part_range
from hvd8bit.variables import is_sharded, mark_sharded, name_of, optimizer_variables, tf_variable

keras = parallel.ColumnParallelDense.keras
IS_KERAS2 = keras.__version__.startswith("2.")
ALL = EightBit(min_elements=0)
SEED = 4
ALONE = LoopbackComm.run(1, lambda comm: comm)[0]


def column(**settings):
    return [parallel.ColumnParallelDense(11, activation="tanh", name="column", **settings)]


def row(**settings):
    return [parallel.RowParallelDense(9, bias_initializer="ones", name="row", **settings)]


def chained(**settings):
    return [
        parallel.ColumnParallelDense(11, activation="tanh", gather_output=False, name="first", **settings),
        parallel.RowParallelDense(9, input_is_parallel=True, input_units=11, name="second", **settings),
    ]


def convolution(**settings):
    return [parallel.ColumnParallelConv2D(10, 3, strides=2, padding="same", name="convolution", **settings)]


# Name -> shape of an input, the layers, the plain ones.
CASES = {
    "column": ((13,), column, lambda **s: [keras.layers.Dense(11, activation="tanh", **s)]),
    "row": ((13,), row, lambda **s: [keras.layers.Dense(9, bias_initializer="ones", **s)]),
    "chained": (
        (13,),
        chained,
        lambda **s: [keras.layers.Dense(11, activation="tanh", **s), keras.layers.Dense(9, **s)],
    ),
    "convolution": ((7, 6, 3), convolution, lambda **s: [keras.layers.Conv2D(10, 3, strides=2, padding="same", **s)]),
}


def passed(layers, x):
    """Output, gradients by the input and the weights."""
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for layer in layers:
            y = layer(y)
        loss = tf.reduce_sum(tf.sin(y))
    weights = [tf_variable(weight) for layer in layers for weight in layer.trainable_variables]
    dx, *by_weights = tape.gradient(loss, [x, *weights])
    return y.numpy(), dx.numpy(), [gradient.numpy() for gradient in by_weights]


def difference(got, want):
    assert got.shape == want.shape
    return np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("mode", ["float32", "float64", "eightbit"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_equal_to_plain_layers_from_the_same_seeds(workers, name, mode, rng):
    shape, split, plain = CASES[name]
    dtype = "float64" if mode == "float64" else "float32"
    forward, backward = {"float32": (1e-6, 1e-5), "float64": (1e-14, 1e-13), "eightbit": (0.02, 0.04)}[mode]
    x = rng.standard_normal((40, *shape)).astype(dtype)
    whole = plain(dtype=dtype)
    for number, layer in enumerate(whole):
        layer.kernel_initializer = keras.initializers.GlorotUniform(seed=SEED + number)
    want, want_dx, want_weights = passed(whole, x)

    def work(comm):
        settings = {"compression": ALL if mode == "eightbit" else None, "process_set": comm, "dtype": dtype}
        layers = split(**settings)
        for number, layer in enumerate(layers):
            layer.kernel_initializer = keras.initializers.GlorotUniform(seed=SEED + number)
        return layers, passed(layers, x), [w for layer in layers for w in layer.whole_weights()]

    results = LoopbackComm.run(workers, work)
    for rank, (layers, (y, dx, by_weights), weights) in enumerate(results):
        for got, weight in zip(weights, [w for layer in whole for w in layer.get_weights()]):
            np.testing.assert_array_equal(got, weight)
        assert difference(y, want) <= forward
        assert difference(dx, want_dx) <= backward
        parts = [part for layer in layers for part in layer._parts.values()]
        assert len(parts) == len(by_weights) == len(want_weights)
        for got, weight, (full, axis) in zip(by_weights, want_weights, parts):
            assert weight.shape == full
            if axis is not None:
                weight = np.take(weight, range(*part_range(full[axis], workers, rank)), axis)
            assert difference(got, weight) <= backward
        marked = [is_sharded(weight) for layer in layers for weight in layer.weights]
        assert marked == [axis is not None and workers > 1 for _, axis in parts]
        assert y.tobytes() == results[0][1][0].tobytes()
        assert dx.tobytes() == results[0][1][1].tobytes()
    if mode == "eightbit" and workers > 1:
        assert difference(results[0][1][0], want) > 1e-4


def test_each_boundary_has_its_own_compression(rng):
    """The output exactly, the input's error signal in 8 bits; and so again from the configuration."""
    x = rng.standard_normal((40, 13)).astype(np.float32)
    linear = ALL(data_type="linear")
    made = parallel.ColumnParallelDense(11, compression={"input": linear, "output": None})
    again = type(made).from_config(made.get_config())
    assert made.compression == again.compression == {"input": linear, "output": None}

    def work(comm):
        layer = parallel.ColumnParallelDense(11, compression={"input": linear, "output": None}, process_set=comm)
        layer.kernel_initializer = keras.initializers.GlorotUniform(seed=SEED)
        return passed([layer], x)

    plain = keras.layers.Dense(11, kernel_initializer=keras.initializers.GlorotUniform(seed=SEED))
    want, want_dx, _ = passed([plain], x)
    for y, dx, _ in LoopbackComm.run(2, work):
        assert difference(y, want) <= 1e-6
        assert 1e-4 < difference(dx, want_dx) <= 0.04
    for wrong in ({}, {"output": None, "middle": None}):
        with pytest.raises(ValueError, match="must name boundaries, input or output"):
            parallel.ColumnParallelDense(11, compression=wrong)


@pytest.mark.skipif(IS_KERAS2, reason="for Keras 3")
def test_keras_does_not_turn_xla_on():
    """XLA cannot compile collectives; on machines with a GPU Keras 3 would use it by itself."""
    assert keras.layers.Dense(3).supports_jit
    assert not parallel.ColumnParallelDense(3).supports_jit


def test_unknown_names_of_the_package():
    with pytest.raises(AttributeError, match=r"no attribute 'AllGather'; it has .*all_gather"):
        parallel.AllGather  # noqa: B018
    assert {"all_gather", "ColumnParallelDense", "merge"} <= set(dir(parallel))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_embedding(workers, rng):
    table = rng.standard_normal((10, 6)).astype(np.float32)
    ids = np.array([[0, 9, 3], [3, 5, 9]])

    def work(comm):
        layer = parallel.ParallelEmbedding(10, 6, compression=None, process_set=comm)
        layer.build(None)
        layer.set_whole_weights([table])
        with tf.GradientTape() as tape:
            y = layer(tf.constant(ids))
            loss = 2 * tf.reduce_sum(y)
        gradient = tf.convert_to_tensor(tape.gradient(loss, tf_variable(layer.embeddings)))
        return y.numpy(), gradient.numpy()

    want = np.zeros_like(table)
    np.add.at(want, ids.reshape(-1), 2)
    for rank, (y, gradient) in enumerate(LoopbackComm.run(workers, work)):
        np.testing.assert_array_equal(y, table[ids])
        np.testing.assert_array_equal(gradient, want[slice(*part_range(10, workers, rank))])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
@pytest.mark.parametrize("workers", [1, 2])
def test_embedding_ids_keep_their_precision(workers, policy):
    """Keras makes float32 of ids; bfloat16 has no 259, 517 or 901, float16 no 2999."""
    table = np.arange(3000, dtype=np.float32)[:, None] % [7, 11]
    ids = tf.constant([[3, 259, 517, 901, 2999]], tf.float32)

    def work(comm):
        layer = parallel.ParallelEmbedding(3000, 2, compression=None, process_set=comm, dtype=policy)
        layer.build(None)
        layer.set_whole_weights([table])
        return layer(ids)

    for rows in LoopbackComm.run(workers, work):
        assert rows.dtype.name == policy.removeprefix("mixed_")
        np.testing.assert_array_equal(tf.cast(rows, tf.int32), table[[[3, 259, 517, 901, 2999]]])


LEGACY = getattr(keras.optimizers, "legacy", None)
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(amsgrad=True),
    "averages": lambda: keras.optimizers.SGD(momentum=0.9, use_ema=True, name="dense"),
    "legacy Adam": lambda: LEGACY.Adam(),
    "legacy SGD": lambda: LEGACY.SGD(momentum=0.9),
}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if IS_KERAS2 or "legacy" not in name])
def test_the_state_of_weights_with_names_like_a_part_s_is_shared(name):
    """Only slots of parts are kept from the broadcast, not those of weights whose names hold a part's."""
    ids = keras.Input((4,), dtype="int32")
    parts = keras.layers.Embedding(9, 4, name="embedding")
    whole = keras.layers.Embedding(8, 4, name="position_embedding")
    inner = keras.Sequential([keras.Input((4, 4)), keras.layers.Dense(4, name="embedding")], name="dense")
    x = keras.layers.Dense(4, name="embedding_embeddings")(inner(parts(ids) + whole(ids)))
    model = keras.Model(ids, keras.layers.Dense(4, name="dense_embedding_2")(x))
    mark_sharded(parts.embeddings)
    optimizer = OPTIMIZERS[name]()
    optimizer.apply_gradients([(tf.zeros(weight.shape), weight) for weight in model.trainable_variables])
    slots = [variable for variable in optimizer_variables(optimizer) if tuple(variable.shape) == (9, 4)]
    shared = {id(variable) for variable in _shared_variables(optimizer, model.weights)}
    kept = [variable for variable in optimizer_variables(optimizer) if id(variable) not in shared]
    assert [name_of(variable) for variable in kept] == [name_of(variable) for variable in slots]
    assert slots


def test_chained_layers_exchange_nothing_between(rng):
    """One exchange forward, one backward, for both."""

    class Spy:
        def __init__(self, comm):
            self._comm, self.calls = comm, []

        def __getattr__(self, name):
            return getattr(self._comm, name)

        def allgather(self, chunk, name):
            self.calls.append(name)
            return self._comm.allgather(chunk, name)

    def work(comm):
        spy = Spy(comm)
        passed(chained(process_set=spy, compression=ALL), rng.standard_normal((40, 13)).astype(np.float32))
        return spy.calls

    assert LoopbackComm.run(2, work)[0] == ["hvd8bit_second_output_back_0", "hvd8bit_first_input_grad_back_0"]


def parts(units=8, name="parts"):
    return parallel.ColumnParallelDense(units, gather_output=False, name=name, process_set=ALONE)


def images(**settings):
    return parallel.ColumnParallelConv2D(4, 3, gather_output=False, name="parts", process_set=ALONE, **settings)


def twice(layer):
    return lambda x: layer([parts()(x), parts(name="parts_2")(x)])


# Name -> shape of an input, what makes the input of a RowParallelDense of it, the layer that spoils it.
SPOILED = {
    "Flatten": ((4, 4, 1), lambda x: keras.layers.Flatten()(images()(x)), "Flatten"),
    "Reshape": ((3, 4), lambda x: keras.layers.Reshape((-1,))(parts()(x)), "Reshape"),
    "Permute": ((3, 4), lambda x: keras.layers.Permute((2, 1))(parts()(x)), "Permute"),
    "Concatenate": ((4,), twice(keras.layers.Concatenate()), "Concatenate"),
    "normalised": ((4,), lambda x: keras.layers.BatchNormalization()(parts()(x)), "BatchNormalization"),
    "softmax": ((4,), lambda x: keras.layers.Activation("softmax")(parts()(x)), "Activation"),
    "plain layer": ((4,), lambda x: keras.layers.ReLU()(keras.layers.Dense(8)(parts()(x))), "Dense"),
    "whole added": ((8,), lambda x: keras.layers.Add()([x, parts()(x)]), "InputLayer"),
    "gathered added": (
        (8,),
        lambda x: keras.layers.Add()([parallel.ColumnParallelDense(8, process_set=ALONE)(x), parts()(x)]),
        "ColumnParallelDense",
    ),
    "other size": ((8,), lambda x: keras.layers.Add()([parts(1)(x), parts(8, "spoils")(x)]), "ColumnParallelDense"),
    "channels first": ((1, 4, 4), lambda x: images(data_format="channels_first")(x), "ColumnParallelConv2D"),
    "pooled": ((3, 4), lambda x: keras.layers.MaxPooling1D(data_format="channels_first")(parts()(x)), "MaxPooling1D"),
    "nested": (
        (3, 4),
        lambda x: keras.layers.ReLU()(keras.Sequential([keras.Input((3, 8)), keras.layers.Flatten()])(parts()(x))),
        "Flatten",
    ),
}


@pytest.mark.parametrize("input_units", [None, 32])
@pytest.mark.parametrize("name", SPOILED)
def test_parts_that_are_no_block_of_the_whole_are_refused(name, input_units):
    """Merge and split cut the kernel by blocks of its rows: with these layers it would be another model's."""
    shape, before, spoils = SPOILED[name]
    row = parallel.RowParallelDense(2, input_is_parallel=True, input_units=input_units, name="row", process_set=ALONE)
    message = rf"input of layer 'row' must be this worker's part.*\({spoils}\).*set gather_output=True"
    with pytest.raises(ValueError, match=message):
        row(before(keras.Input(shape)))


def test_parts_pass_layers_that_work_by_place():
    layers, settings = keras.layers, {"gather_output": False, "process_set": ALONE}
    pooled = layers.MaxPooling2D()(parallel.ColumnParallelConv2D(7, 3, **settings)(keras.Input((6, 6, 1))))
    vector = layers.GlobalAveragePooling2D()(keras.Sequential([keras.Input((2, 2, 7)), layers.ReLU()])(pooled))
    one, other = (parallel.ColumnParallelDense(7, **settings)(keras.Input((5,))) for _ in range(2))
    gated = layers.Multiply()([layers.Activation("sigmoid")(one), layers.Dropout(0.5)(other)])
    for x in (vector, gated, keras.Sequential([keras.Input((5,)), parts(7)])(keras.Input((5,)))):
        row = parallel.RowParallelDense(2, input_is_parallel=True, process_set=ALONE)
        row(x)
        assert row.input_units == 7
        wrong = parallel.RowParallelDense(2, input_is_parallel=True, input_units=8, process_set=ALONE, name="wrong")
        with pytest.raises(ValueError, match=r"input_units of layer 'wrong' must be 7, .*got 8; leave it out"):
            wrong(x)
