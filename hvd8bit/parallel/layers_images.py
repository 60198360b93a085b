"""Layers over images that several workers share, split by filters."""

from __future__ import annotations

import tensorflow as tf

from hvd8bit.parallel.layers_base import ColumnParallel, last_dimension, positive


class _Spatial(ColumnParallel):
    """What the two layers over images share."""

    def __init__(
        self,
        filters,
        kernel_size,
        strides=(1, 1),
        padding="valid",
        data_format=None,
        **settings,
    ):
        super().__init__(**settings)
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
        """As `ParallelLayer.get_config`."""
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
        **settings,
    ):
        super().__init__(filters, kernel_size, strides, padding, data_format, **settings)
        self.dilation_rate = _pair("dilation_rate", dilation_rate)

    def build(self, input_shape):
        """Makes this worker's filters."""
        self._check_units("filters", self.filters)
        channels = last_dimension(self, self._channels_last(input_shape))
        self._add_kernel((*self.kernel_size, channels, self.filters), 3)
        self._add_bias((self.filters,), 0)
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
        self._add_kernel((self.places[0] * self.places[1], window, self.filters), 2)
        self._add_bias((*self.places, self.filters), 2)
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


def _pair(argument: str, value) -> tuple[int, int]:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(values) != 2:
        raise ValueError(f"{argument} must be an integer or two, got {value!r}")
    return positive(argument, values[0]), positive(argument, values[1])
