"""Functions on tensors: encode and decode one, reduce over the workers, broadcast variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import Average, Sum

from hvd8bit import collectives, layout, native, ops
from hvd8bit.compression import EightBit, EightBitCompressor, check_compression, check_process_set
from hvd8bit.encoding import Encoding
from hvd8bit.variables import is_sharded, tf_variable

__all__ = [
    "Average",
    "Encoded",
    "Sum",
    "allreduce",
    "broadcast_variables",
    "decode",
    "encode",
    "grouped_allreduce",
]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A tensor in 8 bits.

    Attributes:
      chunk: uint8 [bytes], header, codes and scales as they would travel (docs/wire-format.md).
      shape: int64 [rank], the tensor's shape.
      static_shape: what is known of it when a graph is built.
      dtype: the tensor's dtype.
      encoding: how it was encoded.
    """

    chunk: tf.Tensor
    shape: tf.Tensor
    static_shape: tf.TensorShape
    dtype: tf.DType
    encoding: Encoding

    @property
    def codes(self) -> tf.Tensor:
        """uint8 [n]: sign bit and index into the codebook for each element."""
        n = tf.reduce_prod(self.shape)
        codes = self.chunk[layout.HEADER_BYTES : layout.HEADER_BYTES + n]
        codes.set_shape([self.static_shape.num_elements()])
        return codes

    @property
    def scales(self) -> tf.Tensor:
        """float32 [ceil(n / block_size)], or [1] for block_size=None and n > 0."""
        n = tf.reduce_prod(self.shape)
        codes_and_padding = -(-n // layout.SCALE_BYTES) * layout.SCALE_BYTES
        scales = tf.bitcast(tf.reshape(self.chunk[layout.HEADER_BYTES + codes_and_padding :], [-1, 4]), tf.float32)
        elements = self.static_shape.num_elements()
        if elements is not None:
            scales.set_shape([-(-elements // (self.encoding.block_size or max(elements, 1)))])
        return scales


def encode(
    x, data_type: str = Encoding.data_type, block_size: int | None = Encoding.block_size, seed=None, **settings
) -> Encoded:
    """Encodes one tensor in 8 bits.

    Args:
      x: float16, bfloat16, float32 or float64 tensor, variable or array of any shape. float64 is rounded to float32
        first.
      data_type, block_size, **settings: see `hvd8bit.encoding.Encoding`.
      seed: integer that decides how `rounding="stochastic"` rounds; None: TensorFlow's generator does.

    Returns:
      An `Encoded`: `.codes` uint8 [n], `.scales` float32 [ceil(n / block_size)].

    Raises:
      TypeError: x is not of one of these dtypes. ValueError: a setting is out of range.
    """
    encoding = Encoding(data_type, block_size, **settings)
    x = tf.convert_to_tensor(x)
    if x.dtype not in ops.DTYPES:
        raise TypeError(
            f"x must be one of {', '.join(dtype.name for dtype in ops.DTYPES)}, got {x.dtype.name}; cast it first"
        )
    chunk, _ = ops.encode_list([x], 1, encoding, seed=seed)
    return Encoded(chunk, tf.shape(x, out_type=tf.int64), x.shape, x.dtype, encoding)


def decode(encoded: Encoded) -> tf.Tensor:
    """The tensor that `encode` made `encoded` of, rounded: same shape and dtype."""
    like = tf.raw_ops.Empty(shape=tf.cast(encoded.shape, tf.int32), dtype=encoded.dtype)
    (tensor,) = ops.decode_list([encoded.chunk], [like], 1, encoded.encoding)
    tensor.set_shape(encoded.static_shape)
    return tensor


def load_ops() -> None:
    """Registers hvd8bit's ops with TensorFlow, before `tf.saved_model.load` of a function that holds an exchange.

    Nothing else needs it: whatever uses the ops loads them.

    Raises:
      ImportError: the op library is missing, or was built for another TensorFlow; says both versions and the remedy.
    """
    native.load()


def allreduce(tensor, op=None, *, compression=None, name=None, prescale_factor=1.0, postscale_factor=1.0, **settings):
    """Averages (the default) or sums a tensor over all workers, in 8 bits on the wire.

    Args:
      tensor: tensor, variable or IndexedSlices of any dtype; integers and small tensors are reduced exactly. Shape
        and dtype must be the same on all workers.
      op: `hvd8bit.Average` or `hvd8bit.Sum`.
      compression: `EightBit` (the default) or any Horovod compressor.
      name, prescale_factor, postscale_factor, **settings: as in `horovod.tensorflow.allreduce`.

    Returns:
      A tensor like `tensor`, the same bits on all workers, differentiable as Horovod's.
    """
    return hvd.allreduce(
        tf_variable(tensor),
        op=hvd.Average if op is None else op,
        compression=_compression_for(compression, settings),
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        **settings,
    )


def grouped_allreduce(
    tensors: Sequence, op=None, *, compression=None, name=None, prescale_factor=1.0, postscale_factor=1.0, **settings
) -> list:
    """`allreduce` of several tensors, which travel as one buffer.

    Args:
      tensors: a list of what `allreduce` takes; integers and small tensors are reduced exactly. Number, order, shapes
        and dtypes must be the same on all workers.
      op, compression, name, prescale_factor, postscale_factor, **settings: see `allreduce`.

    Returns:
      A list like `tensors`, the same bits on all workers.
    """
    return hvd.grouped_allreduce(
        [tf_variable(tensor) for tensor in tensors],
        op=hvd.Average if op is None else op,
        compression=_compression_for(compression, settings),
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        **settings,
    )


_CARRIERS = {tf.bfloat16: tf.int16, tf.uint32: tf.int32, tf.uint64: tf.int64}
"""Dtypes that Horovod does not broadcast, and what carries their bits."""


def broadcast_variables(variables, root_rank: int = 0, process_set=None) -> None:
    """Sets variables to the values that they have on one worker, exactly.

    Args:
      variables: TensorFlow and Keras variables, in any nest. Number, order, shapes and dtypes must be the same on
        all workers. Those of which each worker has a part of its own (`hvd8bit.parallel`) stay as they are.
      root_rank: global rank of that worker.
      process_set: the Horovod process set; None: all workers.
    """
    flat = [tf_variable(variable) for variable in tf.nest.flatten(variables) if not is_sharded(variable)]
    process_set = hvd.global_process_set if process_set is None else process_set
    if process_set.size() == 1 or not flat:
        return
    # One after another under numbered names: variables' own names may differ between workers.
    for number, variable in enumerate(flat):
        value = tf.convert_to_tensor(variable)
        carrier = _CARRIERS.get(value.dtype)
        if carrier is not None:
            value = tf.bitcast(value, carrier)
        value = hvd.broadcast(value, root_rank, name=f"hvd8bit_broadcast_{number}", process_set=process_set)
        variable.assign(value if carrier is None else tf.bitcast(value, variable.dtype))


def _compression_for(compression, settings: dict):
    compression = EightBit if compression is None else compression
    check_compression(compression)
    if not isinstance(compression, EightBitCompressor):
        return compression
    compression.refuse_rules_of_wrappers()  # here, since Horovod does not ask a compressor about sparse gradients
    process_set = settings.get("process_set")
    if compression.process_set is None:
        return compression if process_set is None else compression(process_set=process_set)
    check_process_set(compression, collectives.HorovodComm(process_set))
    return compression
