"""Functions on tensors: encode and decode one, reduce over the workers, broadcast variables."""

from __future__ import annotations

import dataclasses
from typing import Sequence

import tensorflow as tf

from hvd8bit import layout, ops
from hvd8bit.encoding import Encoding


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


def encode(x, data_type: str = Encoding.data_type, block_size: int | None = Encoding.block_size, **settings) -> Encoded:
    """Encodes one tensor in 8 bits.

    Args:
      x: float16, bfloat16, float32 or float64 tensor, variable or array of any shape. float64 is rounded to float32
        first.
      data_type, block_size, **settings: see `hvd8bit.encoding.Encoding`.

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
    chunk, _ = ops.encode_list([x], 1, encoding)
    return Encoded(chunk, tf.shape(x, out_type=tf.int64), x.shape, x.dtype, encoding)


def decode(encoded: Encoded) -> tf.Tensor:
    """The tensor that `encode` made `encoded` of, rounded: same shape and dtype."""
    like = tf.raw_ops.Empty(shape=tf.cast(encoded.shape, tf.int32), dtype=encoded.dtype)
    (tensor,) = ops.decode_list([encoded.chunk], [like], 1, encoded.encoding)
    tensor.set_shape(encoded.static_shape)
    return tensor
