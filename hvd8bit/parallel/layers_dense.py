"""Dense layers that several workers share, split by output or by input."""

from __future__ import annotations

import tensorflow as tf

from hvd8bit.parallel import primitives
from hvd8bit.parallel.layers_base import (
    ColumnParallel,
    LayerWithKernel,
    ParallelLayer,
    last_dimension,
    positive,
    works_by_parts,
)
from hvd8bit.parallel.partition import part_sizes


class ColumnParallelDense(ColumnParallel):
    """A Dense layer split by output: each worker has a part of the kernel's columns and of the bias.

        worker 0   x ─→ copy ─→ x W₀ + b₀ ──┐               ┌─→ [x W₀ + b₀, x W₁ + b₁]
        worker 1   x ─→ copy ─→ x W₁ + b₁ ──┴─ all_gather ──┴─→ [x W₀ + b₀, x W₁ + b₁]

    All workers must call it with the same input. Forward the output travels; backward the input's error signal, which
    is added up, unless nobody asks for it, as in a first layer.

    Args:
      units: size of the whole output; at least the number of workers. Parts differ by at most one.
      gather_output: False leaves each worker with its part, for a `RowParallelDense(input_is_parallel=True)`.
      activation, use_bias, kernel_initializer, bias_initializer: as in `keras.layers.Dense`. The activation works on
        the gathered output.
      compression: `hvd8bit.EightBit`, a configured copy of it, or None: exact. Or one for each boundary: {"input":
        None, "output": EightBit}; the input's is that of its error signal. The same on all workers.
      process_set: the `horovod.tensorflow.ProcessSet` of the workers that share the layer; None: all.
      settings: those of any Keras layer: name, dtype, ...

    Raises:
      ValueError: an argument is out of range; the message names it.
    """

    def __init__(self, units, gather_output=True, **settings):
        super().__init__(gather_output=gather_output, **settings)
        self.units = positive("units", units)
        self.supports_masking = True

    def build(self, input_shape):
        """Makes this worker's part of kernel and bias."""
        self._check_units("units", self.units)
        shape = (last_dimension(self, input_shape), self.units)
        self._add_kernel(shape, 1)
        self._add_bias(shape[1:], 0)
        self.built = True

    def call(self, inputs):
        """The whole output on all workers, or this worker's part of it."""
        y = _product(self._copy(inputs), self.kernel)
        if self.use_bias:
            y = y + self.bias
        return self._finish(y, self.units)

    def compute_output_shape(self, input_shape):
        """The input's shape with the units that this worker gets."""
        return (*tuple(input_shape)[:-1], self._own_units(self.units))

    def get_config(self):
        """As `ParallelLayer.get_config`."""
        return {**super().get_config(), "units": self.units}


class RowParallelDense(LayerWithKernel):
    """A Dense layer split by input: each worker has a part of the kernel's rows; all have the bias.

        worker 0   x ─→ scatter ─→ x₀ W₀ ──┐               ┌─→ x₀ W₀ + x₁ W₁ ─→ + b
        worker 1   x ─→ scatter ─→ x₁ W₁ ──┴─ all_reduce ──┴─→ x₀ W₀ + x₁ W₁ ─→ + b

    All workers must call it with the same input, or each with its part. Forward the output travels and is added up;
    backward the input's error signal, unless `input_is_parallel`.

    Args:
      units: size of the output.
      input_is_parallel: the input is this worker's part, as `ColumnParallelDense(gather_output=False)` gives it, and
        nothing is exchanged between the two layers.
      input_units: with `input_is_parallel`: the size of the whole input. None: that of the layer that split it, where
        Keras knows it, as in functional and sequential models; else the parts are taken to be equal.
      compression, process_set: as in `ColumnParallelDense`.
      activation, use_bias, kernel_initializer, bias_initializer: as in `keras.layers.Dense`.
      settings: those of any Keras layer: name, dtype, ...

    Raises:
      ValueError: an argument is out of range; the message names it.
    """

    def __init__(self, units, input_is_parallel=False, input_units=None, **settings):
        super().__init__(**settings)
        self.units = positive("units", units)
        self.supports_masking = True
        self.input_is_parallel = bool(input_is_parallel)
        self.input_units = None if input_units is None else positive("input_units", input_units)

    def __call__(self, inputs, *arguments, **settings):
        """Calls the layer; see `call`."""
        if self.input_is_parallel:
            self.input_units = self._units_before(inputs)
        return super().__call__(inputs, *arguments, **settings)

    def _units_before(self, inputs) -> int | None:
        """The whole size of the input, of which this worker has a part: of the layer that split it, else `input_units`.

        Raises ValueError where it is known that the input is no such part: the kernel would be cut in other places.
        """
        sources, between = _history(inputs)
        wholes = [_whole_of_part(source) for source in sources]
        found = next(filter(None, wholes), None)
        if found is None:
            return self.input_units
        wrong = [layer for layer in between if not _keeps_parts(layer)]
        wrong += [one for one, whole in zip(sources, wholes) if whole != found or not _channels_last(one)]
        if wrong:
            raise ValueError(
                f"the input of layer {self.name!r} must be this worker's part of {found} places, through layers that "
                f"work on each of them by itself, such as {', '.join(_BY_PLACE[:3])} and pooling, got one through "
                f"{', '.join(f'{layer.name!r} ({type(layer).__name__})' for layer in wrong)}; set gather_output=True "
                "in the layer that splits, and input_is_parallel=False here"
            )
        if self.input_units not in (None, found):
            raise ValueError(
                f"input_units of layer {self.name!r} must be {found}, the whole size of its input, got "
                f"{self.input_units}; leave it out"
            )
        return found

    def build(self, input_shape):
        """Makes this worker's part of the kernel, and the bias."""
        own = last_dimension(self, input_shape)
        if not self.input_is_parallel:
            whole = own
            self._check_units("the input's last dimension", whole)
        else:
            whole = own * self.workers if self.input_units is None else self.input_units
            mine = part_sizes(whole, self.workers)[self.comm.rank()]
            if mine != own:
                raise ValueError(
                    f"the input of layer {self.name!r} must be this worker's part of {whole}, {mine} places, got shape "
                    f"{tuple(input_shape)}; give the whole size as input_units, and set gather_output=False before it"
                )
        self._add_kernel((whole, self.units), 0)
        self._add_bias((self.units,), None)
        self.built = True

    def call(self, inputs):
        """The output, the same on all workers."""
        if not self.input_is_parallel:
            inputs = primitives.scatter(inputs, axis=-1, **self._exchange("input"))
        y = primitives.all_reduce(_product(inputs, self.kernel), **self._exchange("output"))
        if self.use_bias:
            y = y + self.bias
        return y if self.activation is None else self.activation(y)

    def compute_output_shape(self, input_shape):
        """The input's shape with `units` places."""
        return (*tuple(input_shape)[:-1], self.units)

    def get_config(self):
        """As `ParallelLayer.get_config`."""
        own = {"input_is_parallel": self.input_is_parallel, "input_units": self.input_units}
        return {**super().get_config(), "units": self.units, **own}


def _product(x, kernel):
    kernel = tf.convert_to_tensor(kernel)
    return tf.matmul(x, kernel) if x.shape.rank == 2 else tf.tensordot(x, kernel, [[-1], [0]])


_IMAGES = ("Cropping", "ZeroPadding", "UpSampling", "SpatialDropout", "MaxPooling", "AveragePooling",
           "GlobalMaxPooling", "GlobalAveragePooling")  # fmt: skip
_BY_PLACE = ("Activation", "Dropout", "Multiply", "Add", "Subtract", "Average", "Maximum", "Minimum", "ReLU", "ELU",
             "LeakyReLU", "Identity", "ActivityRegularization", "AlphaDropout", "GaussianDropout", "GaussianNoise",
             *(name + dimensions for name in _IMAGES for dimensions in ("1D", "2D", "3D")))  # fmt: skip
"""Keras' layers without weights that treat each place of the last dimension by itself."""


def _keeps_parts(layer) -> bool:
    """Whether a layer makes of a part of its input the same part of its output."""
    return (
        type(layer).__module__.partition(".")[0] in ("keras", "tf_keras")
        and type(layer).__name__ in _BY_PLACE
        and works_by_parts(getattr(layer, "activation", None))
        and _channels_last(layer)
    )


def _channels_last(layer) -> bool:
    return getattr(layer, "data_format", None) in (None, "channels_last")


def _whole_of_part(source) -> int | None:
    """The size of the whole that a layer gives a part of; None: it gives none."""
    if not isinstance(source, ColumnParallel) or source.gather_output:
        return None
    return getattr(source, "units", None) or source.filters


def _history(inputs) -> tuple[list, list]:
    """The parallel layers and Inputs that symbolic tensors come from, and the layers between; nested models opened."""
    sources, between, seen = [], [], {}
    nowhere: dict = {}
    pending: list = [(tensor, nowhere) for tensor in tf.nest.flatten(inputs)]
    while pending:
        tensor, outside = pending.pop()  # outside: of the inputs of a nested model, what it was called with
        history = tuple(getattr(tensor, "_keras_history", ()))
        if not history or (history, id(outside)) in seen:
            continue
        seen[history, id(outside)] = outside
        layer, node, output = history
        if history in outside:
            pending.append(outside[history])
            continue
        if isinstance(layer, ParallelLayer) or type(layer).__name__ == "InputLayer":
            sources.append(layer)
            continue
        before = [(one, outside) for one in tf.nest.flatten(layer._inbound_nodes[node].input_tensors)]
        if getattr(layer, "outputs", None):
            own = [tuple(one._keras_history) for one in layer.inputs]
            pending.append((layer.outputs[output], dict(zip(own, before))))
        else:
            between.append(layer)
            pending += before
    return sources, between
