"""Split models and the same as plain ones: what the cases of parallel layers share."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import hvd8bit
from hvd8bit import parallel
from hvd8bit.parallel.layers_base import ParallelLayer
from hvd8bit.parallel.partition import part_range

ALL = hvd8bit.EightBit(min_elements=0)
keras = parallel.ColumnParallelDense.keras
"""Keras 3, or Keras 2 where tf.keras is that."""


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
    "conv chained": (
        (9, 8, 3),
        lambda s: [
            parallel.ColumnParallelConv2D(6, 3, activation="relu", gather_output=False, **s),
            keras.layers.MaxPooling2D(dtype=s["dtype"]),
            keras.layers.GlobalAveragePooling2D(dtype=s["dtype"]),
            parallel.RowParallelDense(5, input_is_parallel=True, **s),
        ],
    ),
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
