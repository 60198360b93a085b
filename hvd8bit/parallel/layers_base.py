"""What the parallel layers share: parts of weights, boundaries, configuration. For Keras 3 and Keras 2 alike."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvd8bit.collectives import HorovodComm, known_process_set
from hvd8bit.compression import EightBit, EightBitCompressor
from hvd8bit.parallel import primitives
from hvd8bit.parallel.boundary import check_activation_compression, comm_of
from hvd8bit.parallel.partition import part_range, part_sizes
from hvd8bit.variables import mark_sharded

if TYPE_CHECKING:
    from tensorflow.keras.layers import Layer as _KerasLayer
else:
    _KerasLayer = object


class ParallelLayer(_KerasLayer):
    """Mixed in before a Keras layer class, that of `self.keras`; see `hvd8bit.parallel.layers`.

    A worker holds its part of each weight. It starts as that part of what the initializer gives for the whole weight,
    so that with the same seed the layer equals the whole one, whatever the number of workers. While it is made, a
    worker holds the whole weight for a moment.
    """

    keras: Any

    def __init__(self, *, compression=EightBit, process_set=None, **settings):
        if settings.get("activity_regularizer") is not None:
            raise ValueError(
                f"activity_regularizer must be None for {type(self).__name__}, got "
                f"{settings['activity_regularizer']!r}: a worker may see a part of the output only; put an "
                "ActivityRegularization layer behind it"
            )
        super().__init__(**settings)
        self.supports_jit = False  # XLA cannot compile collectives; Keras 3 asks before it turns XLA on
        self._compressions = compressions_of(compression)
        same = self._compressions["input"] == self._compressions["output"]
        self.compression = self._compressions["output"] if same else dict(self._compressions)
        self._process_set = process_set_of(process_set, self._compressions)
        self._parts: dict[str, tuple[tuple[int, ...], int | None]] = {}

    # ---- who takes part ----

    @property
    def comm(self):
        """The workers that share the layer."""
        comm, _ = (comm_of(self._process_set, one) for one in self._compressions.values())
        return comm

    @property
    def workers(self) -> int:
        """How many they are."""
        return self.comm.size()

    def _exchange(self, boundary: str) -> dict:
        """Arguments of a primitive at one of the layer's boundaries."""
        return {
            "compression": self._compressions[boundary],
            "process_set": self._process_set,
            "name": f"{self.name}/{boundary}",
        }

    input_gradient_is_summed = False
    """Whether somebody else adds up the workers' error signals of this layer's input: `HybridModel` says so."""

    def _copy(self, x):
        if self.input_gradient_is_summed:
            return x
        return primitives.copy(x, **self._exchange("input"))

    def _gather(self, y, units: int):
        """The whole output of parts that are split by its last dimension."""
        sizes = part_sizes(units, self.workers)
        return primitives.all_gather(y, axis=-1, sizes=sizes, **self._exchange("output"))

    # ---- weights ----

    def _add_part(self, name: str, shape, axis: int | None, initializer):
        """This worker's part of a weight of the whole shape, cut along `axis`; None: all of it, on all workers."""
        shape = tuple(int(dimension) for dimension in shape)
        self._parts[name] = (shape, axis)
        if axis is None or self.workers == 1:
            return self.add_weight(name=name, shape=shape, initializer=initializer, trainable=True)
        start, stop = part_range(shape[axis], self.workers, self.comm.rank())

        def initial_part(_, dtype=None, **settings):
            whole = tf.convert_to_tensor(initializer(shape, dtype=dtype))
            return whole[(slice(None),) * axis + (slice(start, stop),)]

        own = (*shape[:axis], stop - start, *shape[axis + 1 :])
        weight = self.add_weight(name=name, shape=own, initializer=initial_part, trainable=True)
        mark_sharded(weight)
        return weight

    def whole_weights(self) -> list:
        """The whole weights as arrays, in the order of `get_weights()`. All workers must call it."""
        whole = []
        for number, ((name, (shape, axis)), part) in enumerate(zip(self._parts.items(), self.get_weights())):
            if axis is None or self.workers == 1:
                whole.append(part)
                continue
            sizes = part_sizes(shape[axis], self.workers)
            gathered = primitives.all_gather(
                tf.constant(part),
                axis=axis,
                sizes=sizes,
                compression=None,
                process_set=self.comm,
                name=f"{self.name}/{name}_{number}",
            )
            whole.append(gathered.numpy())
        return whole

    def set_whole_weights(self, weights) -> None:
        """Takes over this worker's part of whole weights, in the order of `get_weights()`."""
        own = []
        for (name, (shape, axis)), weight in zip(self._parts.items(), weights):
            if tuple(weight.shape) != shape:
                raise ValueError(f"{self.name}: {name} must have the shape {shape}, got {tuple(weight.shape)}")
            if axis is not None:
                start, stop = part_range(shape[axis], self.workers, self.comm.rank())
                weight = weight[(slice(None),) * axis + (slice(start, stop),)]
            own.append(weight)
        self.set_weights(own)

    # ---- configuration ----

    def get_config(self):
        """The layer's settings; the same on all workers, and nothing of how many there are."""
        config = super().get_config()
        settings = {boundary: _settings_of(one) for boundary, one in self._compressions.items()}
        config["compression"] = settings if isinstance(self.compression, dict) else settings["output"]
        config["process_set"] = _ranks_of(self._process_set)
        return config

    def _check_units(self, argument: str, value: int) -> None:
        if value < self.workers:
            raise ValueError(
                f"{argument} must be at least the number of workers, {self.workers}, got {value} for layer "
                f"{self.name!r}: each worker takes a part; use the plain Keras layer, or a smaller process_set"
            )


class LayerWithKernel(ParallelLayer):
    """One with a kernel, a bias and an activation, whose settings are those of Keras' own layers."""

    def __init__(
        self,
        activation=None,
        use_bias=True,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        **settings,
    ):
        super().__init__(**settings)
        self.activation = self.keras.activations.get(activation)
        self.use_bias = bool(use_bias)
        self.kernel_initializer = self.keras.initializers.get(kernel_initializer)
        self.bias_initializer = self.keras.initializers.get(bias_initializer)

    def _add_kernel(self, shape, axis: int) -> None:
        self.kernel = self._add_part("kernel", shape, axis, self.kernel_initializer)

    def _add_bias(self, shape, axis: int | None) -> None:
        self.bias = self._add_part("bias", shape, axis, self.bias_initializer) if self.use_bias else None

    def get_config(self):
        """As `ParallelLayer.get_config`."""
        config = super().get_config()
        config.update(
            activation=self.keras.activations.serialize(self.activation),
            use_bias=self.use_bias,
            kernel_initializer=self.keras.initializers.serialize(self.kernel_initializer),
            bias_initializer=self.keras.initializers.serialize(self.bias_initializer),
        )
        return config


_NOT_BY_PARTS = ("softmax", "log_softmax", "sparsemax", "glu")
"""Activations that look at the whole output, not at each element."""


def works_by_parts(activation) -> bool:
    """Whether an activation may see a part of the output."""
    return getattr(activation, "__name__", "") not in _NOT_BY_PARTS


class ColumnParallel(LayerWithKernel):
    """One that is split by its output's last dimension."""

    def __init__(self, gather_output=True, **settings):
        super().__init__(**settings)
        self.gather_output = bool(gather_output)
        if not self.gather_output and not works_by_parts(self.activation):
            raise ValueError(
                "activation must work element by element with gather_output=False, got "
                f"{self.activation.__name__!r}: a worker has a part "
                "of the output only; leave gather_output, or put the activation behind the layer that joins the parts"
            )

    def _finish(self, y, units: int):
        if self.gather_output:
            y = self._gather(y, units)
        return y if self.activation is None else self.activation(y)

    def _own_units(self, units: int) -> int:
        return units if self.gather_output else part_sizes(units, self.workers)[self.comm.rank()]

    def get_config(self):
        """As `ParallelLayer.get_config`."""
        return {**super().get_config(), "gather_output": self.gather_output}


def positive(argument: str, value) -> int:
    """The argument as an integer; raises ValueError unless it is one of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{argument} must be an integer of at least 1, got {value!r}")
    return int(value)


def last_dimension(layer, input_shape) -> int:
    """The size of the input's last dimension, which a layer's weights need."""
    size = input_shape[-1]
    if size is None:
        raise ValueError(
            f"the last dimension of the input of layer {layer.name!r} must be known, got shape {tuple(input_shape)}"
        )
    return int(size)


_BOUNDARIES = ("input", "output")


def compressions_of(compression) -> dict[str, EightBitCompressor | None]:
    """By boundary, what a layer was told as its compression."""
    return {boundary: _compression_at(boundary, compression) for boundary in _BOUNDARIES}


def _compression_at(boundary: str, compression) -> EightBitCompressor | None:
    """What a layer was told for one of its boundaries; also as its configuration says it."""
    if isinstance(compression, dict):
        if not compression or set(compression) & set(_BOUNDARIES):
            unknown = set(compression) - set(_BOUNDARIES)
            if unknown or not compression:
                raise ValueError(f"compression must name boundaries, input or output, got {sorted(unknown)}")
            return _compression_at(boundary, compression.get(boundary, EightBit))
        return EightBit(**compression)
    return check_activation_compression(compression)


def _settings_of(compression: EightBitCompressor | None) -> dict | None:
    if compression is None:
        return None
    return {
        "data_type": compression.encoding.data_type,
        "block_size": compression.encoding.block_size,
        "scaling": compression.encoding.scaling,
        "rounding": compression.encoding.rounding,
        "seed": compression.encoding.seed,
        "min_elements": compression.select.min_elements,
    }


def _ranks_of(process_set):
    if process_set is None:
        return None
    return process_set.ranks() if isinstance(process_set, HorovodComm) else list(process_set.ranks)


def process_set_of(process_set, compressions: dict):
    """Who shares a layer: the process set that it is given, also by its ranks, as a configuration names it, or that of
    its compressions; None: all workers.
    """
    if isinstance(process_set, (list, tuple)):
        known = known_process_set(process_set)
        if known is None:
            raise ValueError(
                f"process_set must be known to Horovod, got that of ranks {list(process_set)} from a layer's "
                "configuration; make it with hvd.add_process_set before"
            )
        process_set = known
    given = [process_set, *(one.process_set for one in compressions.values() if one is not None)]
    process_set = next((one for one in given if one is not None), None)
    return None if getattr(process_set, "process_set_id", None) == 0 else process_set
