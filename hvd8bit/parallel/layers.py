"""Keras layers that several workers share. Each holds a part of the weights; all see the same batch.

    layer                              split by   sent forward            sent backward
    ColumnParallelDense                output     output (all_gather)     input's error signal (all_reduce)
      gather_output=False                         nothing                 the same
    RowParallelDense                   input      output (all_reduce)     input's error signal (all_gather)
      input_is_parallel=True                      output (all_reduce)     nothing
    ColumnParallelConv2D               filters    as ColumnParallelDense
    LocallyConnected2D                 filters    as ColumnParallelDense
    ParallelEmbedding                  rows       output (all_reduce)     nothing

They come for the Keras that `tf.keras` is: Keras 3, or Keras 2 with `TF_USE_LEGACY_KERAS=1` and up to TensorFlow 2.15.
`layers_for(keras)` makes them for another one.
"""

from __future__ import annotations

import importlib
import types

import tensorflow as tf

from hvd8bit.compression import EightBit
from hvd8bit.parallel import primitives
from hvd8bit.parallel.layers_base import ParallelLayer, last_dimension, positive
from hvd8bit.parallel.partition import part_range, part_sizes

_NOT_BY_PARTS = ("softmax", "log_softmax", "sparsemax", "glu")
"""Activations that look at the whole output, not at each element."""


class _ColumnParallel(ParallelLayer):
    """A layer that is split by its output's last dimension."""

    def _set_output(self, gather_output: bool, activation, use_bias, kernel_initializer, bias_initializer):
        self.gather_output = bool(gather_output)
        self.activation = self.keras.activations.get(activation)
        self.use_bias = bool(use_bias)
        self.kernel_initializer = self.keras.initializers.get(kernel_initializer)
        self.bias_initializer = self.keras.initializers.get(bias_initializer)
        name = getattr(self.activation, "__name__", "")
        if not self.gather_output and name in _NOT_BY_PARTS:
            raise ValueError(
                f"activation must work element by element with gather_output=False, got {name!r}: a worker has a part "
                "of the output only; leave gather_output, or put the activation behind the layer that joins the parts"
            )

    def _finish(self, y, units: int):
        if self.gather_output:
            y = self._gather(y, units)
        return y if self.activation is None else self.activation(y)

    def _own_units(self, units: int) -> int:
        return units if self.gather_output else part_sizes(units, self.workers)[self.comm.rank()]

    def get_config(self):
        config = super().get_config()
        config.update(
            gather_output=self.gather_output,
            activation=self.keras.activations.serialize(self.activation),
            use_bias=self.use_bias,
            kernel_initializer=self.keras.initializers.serialize(self.kernel_initializer),
            bias_initializer=self.keras.initializers.serialize(self.bias_initializer),
        )
        return config


class ColumnParallelDense(_ColumnParallel):
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

    def __init__(
        self,
        units,
        gather_output=True,
        compression=EightBit,
        process_set=None,
        activation=None,
        use_bias=True,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        **settings,
    ):
        super().__init__(compression=compression, process_set=process_set, **settings)
        self.units = positive("units", units)
        self.supports_masking = True
        self._set_output(gather_output, activation, use_bias, kernel_initializer, bias_initializer)

    def build(self, input_shape):
        """Makes this worker's part of kernel and bias."""
        self._check_units("units", self.units)
        shape = (last_dimension(self, input_shape), self.units)
        self.kernel = self._add_part("kernel", shape, 1, self.kernel_initializer)
        self.bias = self._add_part("bias", shape[1:], 0, self.bias_initializer) if self.use_bias else None
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


class RowParallelDense(ParallelLayer):
    """A Dense layer split by input: each worker has a part of the kernel's rows; all have the bias.

        worker 0   x ─→ scatter ─→ x₀ W₀ ──┐               ┌─→ x₀ W₀ + x₁ W₁ ─→ + b
        worker 1   x ─→ scatter ─→ x₁ W₁ ──┴─ all_reduce ──┴─→ x₀ W₀ + x₁ W₁ ─→ + b

    All workers must call it with the same input, or each with its part. Forward the output travels and is added up;
    backward the input's error signal, unless `input_is_parallel`.

    Args:
      units: size of the output.
      input_is_parallel: the input is this worker's part, as `ColumnParallelDense(gather_output=False)` gives it, and
        nothing is exchanged between the two layers.
      input_units: with `input_is_parallel`: the size of the whole input. None: that of the ColumnParallelDense before
        it, where Keras knows it, as in functional and sequential models; else the parts are taken to be equal.
      compression, process_set: as in `ColumnParallelDense`.
      activation, use_bias, kernel_initializer, bias_initializer: as in `keras.layers.Dense`.
      settings: those of any Keras layer: name, dtype, ...

    Raises:
      ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        units,
        input_is_parallel=False,
        compression=EightBit,
        process_set=None,
        activation=None,
        use_bias=True,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        input_units=None,
        **settings,
    ):
        super().__init__(compression=compression, process_set=process_set, **settings)
        self.units = positive("units", units)
        self.supports_masking = True
        self.input_is_parallel = bool(input_is_parallel)
        self.input_units = None if input_units is None else positive("input_units", input_units)
        self.activation = self.keras.activations.get(activation)
        self.use_bias = bool(use_bias)
        self.kernel_initializer = self.keras.initializers.get(kernel_initializer)
        self.bias_initializer = self.keras.initializers.get(bias_initializer)

    def __call__(self, inputs, *arguments, **settings):
        """Calls the layer; see `call`."""
        if self.input_is_parallel and self.input_units is None and not self.built:
            self.input_units = _units_before(inputs)
        return super().__call__(inputs, *arguments, **settings)

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
        self.kernel = self._add_part("kernel", (whole, self.units), 0, self.kernel_initializer)
        self.bias = self._add_part("bias", (self.units,), None, self.bias_initializer) if self.use_bias else None
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
        config = super().get_config()
        config.update(
            units=self.units,
            input_is_parallel=self.input_is_parallel,
            input_units=self.input_units,
            activation=self.keras.activations.serialize(self.activation),
            use_bias=self.use_bias,
            kernel_initializer=self.keras.initializers.serialize(self.kernel_initializer),
            bias_initializer=self.keras.initializers.serialize(self.bias_initializer),
        )
        return config


class _Spatial(_ColumnParallel):
    """What the two layers over images share."""

    def __init__(
        self,
        filters,
        kernel_size,
        strides=(1, 1),
        padding="valid",
        data_format=None,
        gather_output=True,
        compression=EightBit,
        process_set=None,
        activation=None,
        use_bias=True,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        **settings,
    ):
        super().__init__(compression=compression, process_set=process_set, **settings)
        self.filters = positive("filters", filters)
        self.kernel_size = _pair("kernel_size", kernel_size)
        self.strides = _pair("strides", strides)
        if padding not in ("valid", "same"):
            raise ValueError(f"padding must be 'valid' or 'same', got {padding!r}")
        self.padding = padding
        data_format = data_format or self.keras.backend.image_data_format()
        if data_format not in ("channels_last", "channels_first"):
            raise ValueError(f"data_format must be 'channels_last' or 'channels_first', got {data_format!r}")
        self.data_format = data_format
        self._set_output(gather_output, activation, use_bias, kernel_initializer, bias_initializer)

    def _channels_last(self, shape) -> tuple:
        """A shape [batch, rows, columns, channels], of one in the layer's data format."""
        shape = tuple(shape)
        if len(shape) != 4:
            raise ValueError(f"the input of layer {self.name!r} must have 4 dimensions, got shape {shape}")
        return shape if self.data_format == "channels_last" else (shape[0], *shape[2:], shape[1])

    def _places(self, size, axis: int):
        """How many places the kernel takes along rows or columns."""
        if size is None:
            return None
        dilation = getattr(self, "dilation_rate", (1, 1))[axis]
        reach = (self.kernel_size[axis] - 1) * dilation + 1
        return -(-(size if self.padding == "same" else size - reach + 1) // self.strides[axis])

    def call(self, inputs):
        """The whole output on all workers, or this worker's filters."""
        first = self.data_format == "channels_first"
        x = self._copy(inputs)
        y = self._convolve(tf.transpose(x, [0, 2, 3, 1]) if first else x)
        if self.use_bias:
            y = y + self.bias
        y = self._finish(y, self.filters)
        return tf.transpose(y, [0, 3, 1, 2]) if first else y

    def compute_output_shape(self, input_shape):
        """The shape of `call`'s result."""
        batch, rows, columns, _ = self._channels_last(input_shape)
        places = (self._places(rows, 0), self._places(columns, 1))
        filters = self._own_units(self.filters)
        if self.data_format == "channels_last":
            return (batch, *places, filters)
        return (batch, filters, *places)

    def get_config(self):
        config = super().get_config()
        config.update(
            filters=self.filters,
            kernel_size=self.kernel_size,
            strides=self.strides,
            padding=self.padding,
            data_format=self.data_format,
        )
        return config


class ColumnParallelConv2D(_Spatial):
    """A Conv2D layer split by filters; what travels is as in `ColumnParallelDense`.

    Args:
      filters: of the whole layer; at least the number of workers.
      kernel_size, strides, padding, data_format, dilation_rate, activation, use_bias, kernel_initializer,
        bias_initializer: as in `keras.layers.Conv2D`.
      gather_output: False leaves each worker with its filters.
      compression, process_set: as in `ColumnParallelDense`.
      settings: those of any Keras layer: name, dtype, ...

    Raises:
      ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        filters,
        kernel_size,
        strides=(1, 1),
        padding="valid",
        data_format=None,
        dilation_rate=(1, 1),
        gather_output=True,
        compression=EightBit,
        process_set=None,
        activation=None,
        use_bias=True,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        **settings,
    ):
        super().__init__(
            filters,
            kernel_size,
            strides,
            padding,
            data_format,
            gather_output,
            compression,
            process_set,
            activation,
            use_bias,
            kernel_initializer,
            bias_initializer,
            **settings,
        )
        self.dilation_rate = _pair("dilation_rate", dilation_rate)

    def build(self, input_shape):
        """Makes this worker's filters."""
        self._check_units("filters", self.filters)
        channels = last_dimension(self, self._channels_last(input_shape))
        self.kernel = self._add_part("kernel", (*self.kernel_size, channels, self.filters), 3, self.kernel_initializer)
        self.bias = self._add_part("bias", (self.filters,), 0, self.bias_initializer) if self.use_bias else None
        self.built = True

    def _convolve(self, x):
        kernel = tf.convert_to_tensor(self.kernel)

        def convolve():
            return tf.nn.conv2d(x, kernel, self.strides, self.padding.upper(), dilations=self.dilation_rate)

        if x.shape[0]:
            return convolve()
        # On the CPU TensorFlow's own gives an empty batch the wrong shape (seen with 2.18).
        size = tf.shape(x)

        def nothing():
            shape = [0, self._places(size[1], 0), self._places(size[2], 1), kernel.shape[-1]]
            return tf.zeros(shape, kernel.dtype) + tf.reduce_sum(kernel)  # so that the kernel has a gradient, zero

        y = tf.cond(size[0] > 0, convolve, nothing)
        batch, rows, columns, _ = x.shape
        y.set_shape([batch, self._places(rows, 0), self._places(columns, 1), kernel.shape[-1]])
        return y

    def get_config(self):
        """As `ParallelLayer.get_config`."""
        return {**super().get_config(), "dilation_rate": self.dilation_rate}


class LocallyConnected2D(_Spatial):
    """A convolution with weights of its own at each place, split by filters.

    The layer of Keras 2 that Keras 3 no longer has; the paper's CIFAR-10 network has two. What travels is as in
    `ColumnParallelDense`. Its weights have the shapes of Keras 2: kernel [places, rows · columns · channels of the
    window, filters], bias [rows, columns, filters]. Initializers that look at the shape, such as the default, count all
    places as one window, as in Keras 2: the weights start small.

    Args:
      filters: of the whole layer; at least the number of workers.
      kernel_size, strides, data_format, activation, use_bias, kernel_initializer, bias_initializer: as in
        `keras.layers.Conv2D`.
      padding: "valid" or "same".
      gather_output: False leaves each worker with its filters.
      compression, process_set: as in `ColumnParallelDense`.
      settings: those of any Keras layer: name, dtype, ...

    Raises:
      ValueError: an argument is out of range; the message names it.
    """

    def build(self, input_shape):
        """Makes this worker's filters."""
        self._check_units("filters", self.filters)
        _, rows, columns, channels = self._channels_last(input_shape)
        if rows is None or columns is None or channels is None:
            raise ValueError(
                f"rows, columns and channels of the input of layer {self.name!r} must be known, got shape "
                f"{tuple(input_shape)}: it has weights for each place"
            )
        self.input_places = (rows, columns)
        self.places = (self._places(rows, 0), self._places(columns, 1))
        if min(self.places) < 1:
            raise ValueError(
                f"kernel_size {self.kernel_size} of layer {self.name!r} must fit into the input, got shape "
                f"{tuple(input_shape)}"
            )
        window = self.kernel_size[0] * self.kernel_size[1] * channels
        shape = (self.places[0] * self.places[1], window, self.filters)
        self.kernel = self._add_part("kernel", shape, 2, self.kernel_initializer)
        self.bias = None
        if self.use_bias:
            self.bias = self._add_part("bias", (*self.places, self.filters), 2, self.bias_initializer)
        self.built = True

    # `split` puts the layer where Keras 3 had a Sequential, which is called with all of these.
    def call(self, inputs, training=None, mask=None):
        """The whole output on all workers, or this worker's filters."""
        return super().call(inputs)

    def _convolve(self, x):
        kernel = tf.convert_to_tensor(self.kernel)
        places, window, filters = kernel.shape
        by_place = tf.transpose(tf.reshape(self._windows(x), [-1, places, window]), [1, 0, 2])
        return tf.reshape(tf.transpose(tf.matmul(by_place, kernel), [1, 0, 2]), [-1, *self.places, filters])

    def _windows(self, x):
        """[batch, rows, columns, window]. Of slices: tf.image.extract_patches has no gradient for an empty batch."""
        if self.padding == "same":
            both = [
                max((places - 1) * stride + size - length, 0)
                for places, stride, size, length in zip(self.places, self.strides, self.kernel_size, self.input_places)
            ]
            x = tf.pad(x, [[0, 0], *([pad // 2, pad - pad // 2] for pad in both), [0, 0]])
        (rows, columns), (down, right) = self.places, self.strides
        slices = [
            x[:, i : i + (rows - 1) * down + 1 : down, j : j + (columns - 1) * right + 1 : right]
            for i in range(self.kernel_size[0])
            for j in range(self.kernel_size[1])
        ]
        return tf.concat(slices, -1)

    def get_config(self):
        """As `ParallelLayer.get_config`."""
        return super().get_config()


class ParallelEmbedding(ParallelLayer):
    """An Embedding layer split by rows of its table.

        worker 0   ids ─→ its rows, else 0 ──┐               ┌─→ all rows
        worker 1   ids ─→ its rows, else 0 ──┴─ all_reduce ──┴─→ all rows

    All workers must call it with the same ids; one out of range is an error on all.

    Args:
      input_dim: rows of the whole table; at least the number of workers.
      output_dim: size of a row.
      embeddings_initializer, mask_zero: as in `keras.layers.Embedding`.
      compression, process_set: as in `ColumnParallelDense`.
      settings: those of any Keras layer: name, dtype, ...

    Raises:
      ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        input_dim,
        output_dim,
        compression=EightBit,
        process_set=None,
        embeddings_initializer="uniform",
        mask_zero=False,
        **settings,
    ):
        super().__init__(compression=compression, process_set=process_set, **settings)
        self.input_dim = positive("input_dim", input_dim)
        self.output_dim = positive("output_dim", output_dim)
        self.embeddings_initializer = self.keras.initializers.get(embeddings_initializer)
        self.mask_zero = bool(mask_zero)
        self.supports_masking = self.mask_zero

    def build(self, input_shape=None):
        """Makes this worker's rows."""
        self._check_units("input_dim", self.input_dim)
        shape = (self.input_dim, self.output_dim)
        self.embeddings = self._add_part("embeddings", shape, 0, self.embeddings_initializer)
        self.built = True

    def call(self, inputs):
        """The rows of the ids, the same on all workers."""
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        in_range = tf.debugging.assert_equal(
            tf.reduce_all((ids >= 0) & (ids < self.input_dim)),
            True,
            message=f"ids for layer {self.name!r} must be in [0, input_dim={self.input_dim})",
        )
        with tf.control_dependencies([] if in_range is None else [in_range]):
            ids = tf.identity(ids)
        table = tf.convert_to_tensor(self.embeddings)
        if self.workers == 1:
            return tf.gather(table, ids)
        start, stop = part_range(self.input_dim, self.workers, self.comm.rank())
        mine = (ids >= start) & (ids < stop)
        rows = tf.gather(table, tf.where(mine, ids - start, tf.zeros_like(ids)))
        rows = tf.where(mine[..., None], rows, tf.zeros_like(rows))
        return primitives.all_reduce(rows, **self._exchange("output"))

    def compute_mask(self, inputs, mask=None):
        """Where the ids are not 0, with `mask_zero`."""
        ops = getattr(self.keras, "ops", tf)  # Keras 3 asks with symbolic tensors of its own
        return ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape):
        """The ids' shape and the size of a row."""
        return (*tuple(input_shape), self.output_dim)

    def get_config(self):
        """As `ParallelLayer.get_config`."""
        config = super().get_config()
        config.update(
            input_dim=self.input_dim,
            output_dim=self.output_dim,
            embeddings_initializer=self.keras.initializers.serialize(self.embeddings_initializer),
            mask_zero=self.mask_zero,
        )
        return config


def layers_for(keras) -> types.SimpleNamespace:
    """The layers as classes of one Keras.

    Args:
      keras: the module: `keras`, `tf_keras` or `tf.keras`.

    Returns:
      A namespace with ColumnParallelDense, RowParallelDense, ColumnParallelConv2D, LocallyConnected2D and
      ParallelEmbedding, which that Keras saves and loads.
    """
    base = keras.layers.Layer
    if base not in _made:
        # tf.keras is a view of it that lacks some of its parts.
        whole = importlib.import_module(base.__module__.partition(".")[0])
        classes = {mixin.__name__: _class_of(mixin, base, whole) for mixin in _MIXINS}
        _made[base] = types.SimpleNamespace(**classes)
    return _made[base]


_MIXINS = (ColumnParallelDense, RowParallelDense, ColumnParallelConv2D, LocallyConnected2D, ParallelEmbedding)
_made: dict[type, types.SimpleNamespace] = {}


def _class_of(mixin: type, base: type, keras) -> type:
    members = {"__module__": "hvd8bit.parallel", "__doc__": mixin.__doc__, "keras": keras}
    return keras.saving.register_keras_serializable("hvd8bit")(type(mixin.__name__, (mixin, base), members))


def _product(x, kernel):
    kernel = tf.convert_to_tensor(kernel)
    return tf.matmul(x, kernel) if x.shape.rank == 2 else tf.tensordot(x, kernel, [[-1], [0]])


def _pair(argument: str, value) -> tuple[int, int]:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(values) != 2:
        raise ValueError(f"{argument} must be an integer or two, got {value!r}")
    return positive(argument, values[0]), positive(argument, values[1])


def _units_before(inputs) -> int | None:
    """The whole size of a tensor of which this worker has a part: the units of the layer that split it.

    Keras keeps how a symbolic tensor came about; layers between, such as Dropout, are passed.
    """
    pending, seen = [inputs], set()
    while pending:
        history = getattr(pending.pop(), "_keras_history", None)
        if history is None:
            continue
        layer, node = history[0], history[1]
        if isinstance(layer, _ColumnParallel):
            return None if layer.gather_output else getattr(layer, "units", None) or getattr(layer, "filters", None)
        if (id(layer), node) not in seen:
            seen.add((id(layer), node))
            nodes = getattr(layer, "_inbound_nodes", [])
            if node < len(nodes):
                pending += tf.nest.flatten(nodes[node].input_tensors)
    return None
