"""The three ops of the exchange: a list of tensors to chunks, chunks to their sum, sums to tensors; and the sum itself.

All take the list of tensors, `tensors` or `like`: only its shapes and dtypes count for all but the first, and the
decoding one may write its results over them if nobody else holds them. What must agree on all workers: shapes, dtypes
and order of the list, the encoding, the number of shards, slices. None of the ops has a gradient; `hvd8bit.exchange`
defines that of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvd8bit import dither, native
from hvd8bit.encoding import Encoding

DTYPES = (tf.float32, tf.float64, tf.float16, tf.bfloat16)


def encode_list(
    tensors: Sequence[tf.Tensor], shards, encoding: Encoding, *, slices: int = 1, slice_: int = 0, seed=None
):
    """Encodes one slice of every chunk of a list of tensors.

    Args:
      tensors: float32, float64, float16 or bfloat16 tensors of any shapes.
      shards: int32 scalar, the number of chunks: one for each worker.
      encoding: how.
      slices, slice_: of how many slices of each chunk this is which.
      seed: int64 scalar, for stochastic rounding: the same one gives the same codes, whatever the number of slices.
        None draws one (`hvd8bit.dither`).

    Returns:
      payload: uint8 [bytes], the chunks one after another; splits: int32 [shards], bytes of each.

    Raises:
      tf.errors.InvalidArgumentError: shards out of range, or a chunk of 2^31 bytes or more.
    """
    payload, splits = native.load().hvd8bit_encode_list(
        tensors=tensors,
        shards=shards,
        seed=_seed(seed, encoding),
        slices=slices,
        slice=slice_,
        **_settings(encoding),
    )
    return payload, splits


def reduce_shards(
    payload, splits, like: Sequence[tf.Tensor], shards, shard, encoding: Encoding, *, slices=1, slice_=0, seed=None
):
    """Decodes what all workers sent for one chunk, adds it in the order of the workers, encodes the sum.

    Args:
      payload: uint8 [bytes], the same slice of the same chunk from every worker, in order.
      splits: int32 [shards], bytes of each.
      like: the tensors that were encoded.
      shards: int32 scalar; shard: int32 scalar, which chunk it is.
      seed: as in `encode_list`, for the sum; not the one that the codes were made with.

    Returns:
      uint8 [bytes of the chunk].

    Raises:
      tf.errors.InvalidArgumentError: a chunk is truncated, oversized, corrupt, or was made from other tensors or with
        other settings; the message says which worker's and what. It is logged at once, too.
    """
    return native.load().hvd8bit_reduce_shards(
        payload=payload,
        splits=splits,
        like=like,
        shards=shards,
        shard=shard,
        seed=_seed(seed, encoding),
        slices=slices,
        slice=slice_,
        **_settings(encoding),
    )


def sum_shards(payload, splits, like: Sequence[tf.Tensor], shards, shard, encoding: Encoding, *, slices=1, slice_=0):
    """The sum that `reduce_shards` encodes, in float32. On CPUs only.

    Args:
      payload, splits, like, shards, shard, slices, slice_: as there.

    Returns:
      sum: float32 [n], elements [first, first + n) of the list's elements one after another; first: int64 scalar.

    Raises:
      tf.errors.InvalidArgumentError: as `reduce_shards`.
    """
    with tf.device("CPU:0"):
        # Shapes of tensors in a GPU's memory are at hand, the tensors need not be copied for them.
        shapes = [tf.raw_ops.Empty(shape=tf.shape(tensor), dtype=tensor.dtype) for tensor in like]
        return native.load().hvd8bit_sum_shards(
            payload=payload,
            splits=splits,
            like=shapes,
            shards=shards,
            shard=shard,
            slices=slices,
            slice=slice_,
            **_settings(encoding),
        )


def decode_list(payloads: Sequence[tf.Tensor], like: Sequence[tf.Tensor], shards, encoding: Encoding, *, factor=1.0):
    """Decodes all chunks and multiplies by factor / shards.

    Args:
      payloads: for each slice uint8 [bytes], the slice of all chunks in order.
      like: the tensors that were encoded.
      shards: int32 scalar.
      factor: float64 scalar.

    Returns:
      A list of tensors with the shapes and dtypes of `like`.

    Raises:
      tf.errors.InvalidArgumentError: as `reduce_shards`.
    """
    # tf.cast alone would take a Python number by way of float32.
    factor = tf.cast(factor, tf.float64) if tf.is_tensor(factor) else tf.constant(factor, tf.float64)
    return native.load().hvd8bit_decode_list(
        payloads=payloads, like=like, shards=shards, factor=factor, **_settings(encoding)
    )


def _seed(seed, encoding: Encoding) -> tf.Tensor:
    return dither.seeds(encoding)[0] if seed is None else tf.convert_to_tensor(seed, tf.int64)


def _settings(encoding: Encoding) -> dict:
    return {
        "data_type": encoding.data_type,
        "block_size": encoding.block_size or 0,
        "fixed_scale": encoding.fixed_scale,
        "rounding": encoding.rounding,
    }


for _name in ("Hvd8bitEncodeList", "Hvd8bitReduceShards", "Hvd8bitSumShards", "Hvd8bitDecodeList"):
    tf.no_gradient(_name)
