"""Reads a Keras model's layers for the predictive model: parameters, activations, FLOPs.

Outside `hvd8bit.speedup`, which stays free of TensorFlow.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from hvd8bit.speedup import Layer, Workload

PREFIX = "keras:"

Shape = tuple[int, ...]


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

    Parameters are the trainable ones. Activations are the values of the output per sample. FLOPs are 2 for each
    weight of a kernel, which is one that its layer calls so (`kernel`, `depthwise_kernel`, …), and place that it is
    applied at: a pixel of a convolution's output or of a transposed one's input, a step of a sequence; and those of
    the two products of attention. All else counts as none. Dense layers are marked split: model. Unknown sizes of
    the input, a sequence's length say, raise ValueError.
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
                _flops(layer, _input_shapes(layer), output) if _kernels(layer) else 0.0,
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


def _output_shape(layer: Any) -> Shape:
    """Of one sample; of a layer with several outputs, the first's."""
    try:
        output = layer.output
    except (AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"layer {layer.name!r} has no known output: build the model with an Input first ({error})"
        ) from error
    return _shape_of_a_sample(layer, "output", output[0] if isinstance(output, (list, tuple)) else output)


def _input_shapes(layer: Any) -> list[Shape]:
    """Of one sample, of all that the layer is first called with."""
    node = layer._inbound_nodes[0]
    tensors = node.keras_inputs if hasattr(node, "keras_inputs") else node.input_tensors  # Keras 2, Keras 3
    return [_shape_of_a_sample(layer, "input", tensor) for tensor in tensors]


def _shape_of_a_sample(layer: Any, side: str, tensor: Any) -> Shape:
    shape = tuple(tensor.shape)
    if any(size is None for size in shape[1:]):
        raise ValueError(
            f"the {side} of layer {layer.name!r} has no known size, {shape}: build the model for inputs of a fixed size"
        )
    return tuple(int(size) for size in shape[1:])


def _kernels(layer: Any) -> list[Shape]:
    """Shapes of the weights that are multiplied with the input: not those of a norm, an embedding, or PReLU."""
    names = [weight.name.rpartition("/")[2].partition(":")[0] for weight in layer.weights]
    return [tuple(weight.shape) for name, weight in zip(names, layer.weights) if name.endswith("kernel")]


def _flops(layer: Any, inputs: Sequence[Shape], output: Shape) -> float:
    """Of a layer with kernels, for one sample: shapes of its inputs and of its output."""
    kinds = {kind.__name__ for kind in type(layer).__mro__}
    if "TimeDistributed" in kinds:
        inner, steps = layer.layer, inputs[0][0]
        if hasattr(inner, "layers"):
            return steps * sum(x.flops for x in from_model(inner).layers)
        return steps * _flops(inner, [inputs[0][1:]], output[1:])
    if "Bidirectional" in kinds:
        return sum(_flops(one_way, inputs, output) for one_way in (layer.forward_layer, layer.backward_layer))
    if "Wrapper" in kinds:
        return _flops(layer.layer, inputs, output)
    if hasattr(layer, "_query_dense"):
        return _flops_of_attention(layer, *inputs[:2])
    return 2.0 * _places(layer, kinds, inputs[0], output) * sum(map(_size, _kernels(layer)))


def _places(layer: Any, kinds: set[str], input_: Shape, output: Shape) -> int:
    """How often each weight of the kernels is multiplied."""
    if "EinsumDense" in kinds:  # once for each value of the input's indices that the kernel does not have
        ours, _, theirs = layer.equation.partition("->")[0].partition(",")
        shared = [size for index, size in zip(theirs.strip(), layer.kernel.shape) if index in ours]
        return _size(input_) // _size(shared)
    if any(kind.startswith("LocallyConnected") for kind in kinds):
        return 1
    steps = 1
    if hasattr(layer, "cell"):
        steps, output = input_[0], output[1:] if layer.return_sequences else output
    pixels = input_ if any(kind.endswith("Transpose") for kind in kinds) else output
    return steps * _size(pixels[1:] if getattr(layer, "data_format", None) == "channels_first" else pixels[:-1])


def _flops_of_attention(layer: Any, queries: Shape, values: Shape) -> float:
    """Four projections, and two products of each query with each value."""
    query, key, value, out = (
        _size(getattr(layer, f"_{name}_dense").kernel.shape) for name in ("query", "key", "value", "output")
    )
    rows, columns = _size(queries[:-1]), _size(values[:-1])
    widths = query // queries[-1] + out // layer._output_dense.kernel.shape[-1]
    return 2.0 * (rows * (query + out) + columns * (key + value) + rows * columns * widths)


def _size(shape: Any) -> int:
    return math.prod(int(size) for size in shape)
