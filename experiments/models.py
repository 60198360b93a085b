"""The models, whole or with layers that are cut over played or real workers.

A task builds a `Net`: what every worker holds (`lower`), and what is cut over the workers (`upper`); either may be
missing. In mode "data" all is `lower`, in mode "model" all is `upper`.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

import hvd8bit
from experiments import rounding
from experiments.configuration import Arm, Experiment


@dataclasses.dataclass(frozen=True)
class Net:
    """Keras models; `upper` takes what `lower` gives for all workers' batches together."""

    lower: Any
    upper: Any


class Clock:
    """Tells dropout which mask is due, so that a step has the same masks whoever computes it."""

    def __init__(self, seed: int):
        self.seed = seed
        self.time = tf.Variable(0, dtype=tf.int64, trainable=False)

    def set(self, step, worker: int, workers: int) -> None:
        """Before a worker's forward pass in a step."""
        self.time.assign(tf.cast(step, tf.int64) * workers + worker)


class Dropout(keras.layers.Layer):
    """Dropout with masks that depend on the clock, the place of the layer, and nothing else."""

    def __init__(self, rate: float, clock: Clock, place: int):
        super().__init__()
        self.rate, self._clock, self._place = rate, clock, place

    def call(self, x, training=False):
        if not training or not self.rate:
            return x
        seed = tf.stack([tf.constant(self._clock.seed * 1000 + self._place, tf.int64), self._clock.time.read_value()])
        keep = tf.random.stateless_uniform(tf.shape(x), seed) >= self.rate
        return tf.where(keep, x * (1.0 / (1.0 - self.rate)), 0.0)

    def get_config(self):
        """For copies in this process, as `hvd8bit.parallel.merge` makes them."""
        return {"rate": self.rate, "clock": self._clock, "place": self._place}


class SplitDense(keras.layers.Layer):
    """A dense layer cut by outputs over played workers; every value that they would exchange is rounded.

    `hvd8bit.parallel.ColumnParallelDense`, all workers in one process: each computes its columns, all columns are
    gathered, and everyone takes the activation function of them. Backward, the error signals are added up.
    """

    def __init__(self, units: int, workers: int, arm: Arm, activation=None, exact_input: bool = False):
        super().__init__()
        self.units, self.workers, self.arm = units, workers, arm
        self.activation = keras.activations.get(activation)
        self.exact_input = exact_input
        self._initializer = keras.initializers.GlorotUniform()  # takes its seed here, as whole layers do

    def build(self, shape):
        whole = self._initializer((shape[-1], self.units))
        self.kernels, self.biases = [], []
        for worker, part in enumerate(tf.split(whole, part_sizes(self.units, self.workers), axis=1)):
            self.kernels.append(self.add_weight(name=f"kernel_{worker}", shape=part.shape, initializer=_value(part)))
            self.biases.append(self.add_weight(name=f"bias_{worker}", shape=part.shape[1:], initializer="zeros"))

    def call(self, x):
        # The first layer's input needs no error signal.
        xs = [x] * self.workers if self.exact_input else rounding.fan_out(x, self.workers, self.arm)
        parts = [tf.matmul(x, kernel) + bias for x, kernel, bias in zip(xs, self.kernels, self.biases)]
        return self.activation(rounding.gather(parts, self.arm))


class Local(keras.layers.Layer):
    """A locally connected layer, 3×3, "same": a convolution with weights of its own at each place.

    Cut by filters over played workers, as `SplitDense`; with one worker it is a plain layer.
    """

    def __init__(self, filters: int, workers: int, arm: Arm):
        super().__init__()
        self.filters, self.workers, self.arm = filters, workers, arm
        self._initializer = keras.initializers.HeUniform()

    def build(self, shape):
        _, height, width, channels = shape
        self.places, inputs = height * width, 9 * channels
        whole = self._initializer((inputs, self.places * self.filters))
        whole = tf.transpose(tf.reshape(whole, (inputs, self.places, self.filters)), (1, 0, 2))
        self.kernels, self.biases = [], []
        for worker, part in enumerate(tf.split(whole, part_sizes(self.filters, self.workers), axis=2)):
            self.kernels.append(self.add_weight(name=f"kernel_{worker}", shape=part.shape, initializer=_value(part)))
            shape_of_bias = (part.shape[0], part.shape[2])
            self.biases.append(self.add_weight(name=f"bias_{worker}", shape=shape_of_bias, initializer="zeros"))

    def call(self, x):
        parts = []
        for x_of_worker, kernel, bias in zip(rounding.fan_out(x, self.workers, self.arm), self.kernels, self.biases):
            patches = tf.image.extract_patches(x_of_worker, (1, 3, 3, 1), (1, 1, 1, 1), (1, 1, 1, 1), "SAME")
            _, height, width, inputs = patches.shape
            rows = tf.transpose(tf.reshape(patches, (-1, height * width, inputs)), (1, 0, 2))
            out = tf.transpose(tf.matmul(rows, kernel), (1, 0, 2)) + bias
            parts.append(tf.reshape(out, (-1, height, width, kernel.shape[2])))
        return tf.nn.relu(rounding.gather(parts, self.arm))


class ContrastNormalization(keras.layers.Layer):
    """Local response normalisation over neighbouring channels (Krizhevsky 2012, sec. 3.3)."""

    def call(self, x):
        return tf.nn.local_response_normalization(x, depth_radius=4, bias=1.0, alpha=0.001 / 9, beta=0.75)


def part_sizes(units: int, workers: int) -> list[int]:
    """How many of the units each worker holds: nearly the same, the first ones one more."""
    return [units // workers + (worker < units % workers) for worker in range(workers)]


def _value(value):
    return lambda shape, dtype: tf.cast(value, dtype)


# ---- tasks ----


def mlp(experiment: Experiment, arm: Arm, clock: Clock, shape: Sequence[int]) -> Net:
    """Options: hidden (sizes), dropout (of the input and each hidden layer), batch_norm, outlier (a factor for one
    pixel in the middle, as if one input had been left without normalisation)."""
    options = dict(experiment.options)
    hidden, dropout = options.get("hidden", [1024, 1024]), options.get("dropout", [0.2, 0.3, 0.3])
    split = experiment.mode == "model"

    def dense(units, activation=None, first=False):
        if split and experiment.exchange == "real":
            return _parallel_dense(units, activation, arm, experiment.min_elements)
        if split:
            return SplitDense(units, experiment.workers, arm, activation, exact_input=first)
        return keras.layers.Dense(units, activation)

    layers: list[Any] = [keras.Input(shape), keras.layers.Flatten()]
    if "outlier" in options:
        layers.append(keras.layers.Rescaling(_outlier_factors(shape, options["outlier"])))
    for place, (units, rate) in enumerate(zip(hidden, dropout)):
        layers += [Dropout(rate, clock, place), dense(units, None if options.get("batch_norm") else "relu", place == 0)]
        if options.get("batch_norm"):
            layers += [keras.layers.BatchNormalization(momentum=0.9), keras.layers.ReLU()]
    layers += [Dropout(dropout[len(hidden)], clock, len(hidden)), dense(10)]
    model = keras.Sequential(layers)
    return Net(None, model) if split else Net(model, None)


def _outlier_factors(shape: Sequence[int], factor: float) -> list[float]:
    size = math.prod(shape)
    return [factor if pixel == size // 2 + shape[1] // 2 else 1.0 for pixel in range(size)]


def _parallel_dense(units: int, activation, arm: Arm, min_elements: int):
    """The product's own layer; this worker's part of it."""
    if arm.text == "fp16":
        raise ValueError("activations of real workers travel in 32 or 8 bits, got arm fp16")
    parallel = importlib.import_module("hvd8bit.parallel")
    return parallel.ColumnParallelDense(units, activation=activation, compression=compression_of(arm, min_elements))


def compression_of(arm: Arm, min_elements: int):
    """What to give to `compression=` of hvd8bit: `EightBit` with the arm's settings; None for 32 bit."""
    if arm.encoding is None:
        return None
    settings = {key: getattr(arm.encoding, key) for key in ("data_type", "block_size", "scaling", "rounding")}
    return hvd8bit.EightBit(**settings, error_feedback=arm.feedback, min_elements=min_elements)


def transformer(experiment: Experiment, arm: Arm, clock: Clock, shape: Sequence[int]) -> Net:
    """A small one over an image's rows. Options: width, blocks, heads."""
    _only_data(experiment)
    options = dict(experiment.options)
    width, heads = options.get("width", 64), options.get("heads", 4)
    inputs = keras.Input(shape)
    x = keras.layers.Dense(width)(keras.layers.Reshape((shape[0], -1))(inputs))
    x = x + keras.layers.Embedding(shape[0], width)(tf.range(shape[0])[None])
    for _ in range(options.get("blocks", 2)):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(heads, width // heads)(y, y)
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(width)(keras.layers.Dense(4 * width, "gelu")(y))
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
    return Net(keras.Model(inputs, keras.layers.Dense(10)(x)), None)


def lstm(experiment: Experiment, arm: Arm, clock: Clock, shape: Sequence[int]) -> Net:
    """One LSTM over an image's rows. Options: units."""
    _only_data(experiment)
    inputs = keras.Input(shape)
    rows = keras.layers.Reshape((shape[0], -1))(inputs)
    x = keras.layers.LSTM(dict(experiment.options).get("units", 128), unroll=True)(rows)
    return Net(keras.Model(inputs, keras.layers.Dense(10)(x)), None)


def cifar(experiment: Experiment, arm: Arm, clock: Clock, shape: Sequence[int]) -> Net:
    """The paper's (Dettmers 2016, sec. 3.4): conv 64@5x5, conv 64@3x3, each with max-pool and contrast normalisation,
    two locally connected layers, softmax. Options: local (their filters)."""
    filters = dict(experiment.options).get("local", [64, 32])
    hybrid = experiment.mode == "hybrid"
    workers = experiment.workers if hybrid else 1
    conv: list[Any] = [keras.Input(shape)]
    for size in (5, 3):
        conv += [
            keras.layers.Conv2D(64, size, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(3, 2, padding="same"),
            ContrastNormalization(),
        ]
    lower = keras.Sequential(conv)
    local: list[Any] = [keras.Input(lower.output_shape[1:])]
    local += [Local(count, workers, arm) for count in filters]
    local += [keras.layers.Flatten()]
    local += [SplitDense(10, workers, arm) if hybrid else keras.layers.Dense(10)]
    if hybrid:
        return Net(lower, keras.Sequential(local))
    if experiment.mode == "model":
        raise ValueError(f"{experiment.id}: task cifar has modes data and hybrid, got model")
    return Net(keras.Sequential([*conv, *local[1:]]), None)


TASKS: dict[str, Callable[[Experiment, Arm, Clock, Sequence[int]], Net]] = {
    "mlp": mlp,
    "transformer": transformer,
    "lstm": lstm,
    "cifar": cifar,
}


def build(experiment: Experiment, arm: Arm, clock: Clock, shape: Sequence[int]) -> Net:
    """The experiment's model, with weights that depend on the clock's seed alone.

    Raises:
      ValueError: there is no such task, or it has not the experiment's mode.
      RuntimeError: Keras is older than 3.
    """
    if int(keras.__version__.partition(".")[0]) < 3:
        raise RuntimeError(f"the experiments need Keras 3 (TensorFlow 2.16 or later), got Keras {keras.__version__}")
    if experiment.task not in TASKS:
        raise ValueError(f"{experiment.id}: task must be one of {', '.join(TASKS)}, got {experiment.task!r}")
    keras.utils.set_random_seed(clock.seed)
    return TASKS[experiment.task](experiment, arm, clock, shape)


def _only_data(experiment: Experiment) -> None:
    if experiment.mode != "data":
        raise ValueError(f"{experiment.id}: task {experiment.task} has mode data alone, got {experiment.mode}")
