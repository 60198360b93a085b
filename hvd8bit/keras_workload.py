"""Reads a Keras model's layers for the predictive model: parameters, activations, FLOPs.

Outside `hvd8bit.speedup`, which stays free of TensorFlow.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator
from typing import Any

from hvd8bit.speedup import Layer, Workload

PREFIX = "keras:"


def is_keras(model: str) -> bool:
    """Whether `model` names what `load` reads: keras:NAME, a .keras or .h5 file, or a SavedModel folder."""
    return model.startswith(PREFIX) or model.endswith((".keras", ".h5", ".hdf5")) or os.path.isdir(model)


def load(model: str) -> Workload:
    """The layers of a model of keras.applications (`keras:ResNet50`, without weights) or of a saved one.

    Raises:
      ValueError: there is no such model, or it cannot be read; says why.
    """
    import keras

    if model.startswith(PREFIX):
        name = model[len(PREFIX) :]
        build: Any = getattr(keras.applications, name, None)
        if not inspect.isfunction(build):
            known = ", ".join(k for k in dir(keras.applications) if k[0].isupper())
            raise ValueError(f"model must be keras:NAME with a NAME of keras.applications ({known}), got {model!r}")
        return from_model(build(weights=None))
    try:
        loaded = keras.models.load_model(model, compile=False)
    except (ValueError, OSError, TypeError) as error:
        raise ValueError(f"model {model!r} is none that Keras {keras.__version__} can load: {error}") from error
    return from_model(loaded)


def from_model(model: Any, samples: int = 32) -> Workload:
    """The layers of a built Keras model (Keras 2 or 3), in its order; nested models are opened.

    Parameters are the trainable ones. Activations are the values of the output per sample; FLOPs are counted
    for layers with a kernel, 2 for each weight and place that it is applied at, and for the two products of
    MultiHeadAttention; all else counts as none. Dense layers are marked split: model. Unknown sizes of the
    input, a sequence's length say, raise ValueError.
    """
    layers = []
    names: dict[str, int] = {}
    for layer in _leaves(model):
        count = names[layer.name] = names.get(layer.name, 0) + 1
        name = layer.name if count == 1 else f"{layer.name}_{count}"
        output = _output_shape(layer)
        layers.append(
            Layer(
                name,
                sum(_size(weight.shape) for weight in layer.trainable_weights),
                _size(output),
                _flops(layer, output),
                "model" if type(layer).__name__ == "Dense" else "data",
            )
        )
    return Workload(layers, samples=samples, name=model.name, source="a Keras model")


def _leaves(model: Any) -> Iterator[Any]:
    for layer in model.layers:
        if hasattr(layer, "layers"):
            yield from _leaves(layer)
        elif type(layer).__name__ != "InputLayer":
            yield layer


def _output_shape(layer: Any) -> tuple[int, ...]:
    """Of one sample; of a layer with several outputs, the first's."""
    try:
        output = layer.output
    except (AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"layer {layer.name!r} has no known output: build the model with an Input first ({error})"
        ) from error
    shape = (output[0] if isinstance(output, (list, tuple)) else output).shape
    sizes = tuple(shape)[1:]
    if any(size is None for size in sizes):
        raise ValueError(
            f"the output of layer {layer.name!r} has no known size, {tuple(shape)}: build the model for "
            f"inputs of a fixed size"
        )
    return tuple(int(size) for size in sizes)


def _flops(layer: Any, output: tuple[int, ...]) -> float:
    kind = type(layer).__name__
    if kind == "MultiHeadAttention":
        tokens, width = _size(output[:-1]), layer._value_dim * layer._num_heads
        projections = sum(_size(w.shape) for w in layer.weights if len(w.shape) > 2)
        return 2.0 * tokens * projections + 4.0 * tokens * tokens * width
    if kind == "Embedding":
        return 0.0
    # A kernel is applied at each place of the output: pixels of a convolution, tokens of a dense layer.
    kernels = [weight for weight in layer.weights if len(weight.shape) > 1]
    places = _size(output[:-1])
    if getattr(layer, "data_format", None) == "channels_first":
        places = _size(output[1:])
    return 2.0 * places * sum(_size(weight.shape) for weight in kernels)


def _size(shape: Any) -> int:
    return math.prod(int(size) for size in shape)
