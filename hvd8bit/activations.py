"""The path of an activation: parts that stay apart are encoded once and decoded where they arrive.

The path of a gradient (`hvd8bit.exchange`) adds up and hands the sum to all. Here nothing is added on the way:

* `gather`: everyone gets everyone's part.            encode_list → allgather → decode_list
* `scatter_sum`: everyone gets its part of the sum.   encode_list → alltoall → decode_list, add

A part is a list of one tensor in one chunk. Each receiver checks the header of each chunk: parts of other shapes,
dtypes or settings than expected are an error. A worker's own part is the decoded one, too, so that all hold the same
bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvd8bit import dither, ops
from hvd8bit.collectives import one_when_run
from hvd8bit.encoding import Encoding
from hvd8bit.layout import HEADER_BYTES, SCALE_BYTES


def gather(part, axis: int, sizes: Sequence, encoding: Encoding, comm, *, name: str) -> tf.Tensor:
    """All workers' parts, in 8 bits on the wire, one after another along an axis.

    Args:
      part: this worker's part: float32, float64, float16 or bfloat16; the same dtype, and the same shape but for
        `axis`, on all workers.
      axis: along which the parts are stacked, not negative.
      sizes: how many places each worker's part takes along the axis, by rank: integers or int scalars; the same on all
        workers.
      encoding, comm, name: as in `hvd8bit.exchange.exchange`.

    Returns:
      A tensor of `part`'s dtype, bit-identical on all workers. Each worker sends (1 + 4/block_size) bytes for each
      element of N-1 parts: a ring passes on what it receives.

    Raises:
      tf.errors.InvalidArgumentError: workers' parts or settings differ; on every worker.
    """
    (seed,) = dither.seeds(encoding, comm=comm, name=name)
    chunk, _ = ops.encode_list([part], one_when_run(comm), encoding, seed=seed)
    gathered = comm.allgather(chunk, f"{name}_allgather")
    shapes = [shape_of_part(part, axis, size) for size in sizes]
    places = [coded_bytes(elements(shape), encoding) for shape in shapes]
    expected = sum(tf.cast(place, tf.int64) for place in places)
    fits = tf.debugging.assert_equal(
        tf.size(gathered, out_type=tf.int64),
        expected,
        message=(
            f"boundary {name}: all workers must hold parts of the same batch, with the sizes {_shown(sizes)} along "
            f"axis {axis}; what came is not as many bytes as {len(shapes)} parts like this worker's {part.shape}; give "
            "all workers the same input"
        ),
    )
    with tf.control_dependencies([] if fits is None else [fits]):
        chunks = tf.split(gathered, tf.stack([tf.cast(place, tf.int64) for place in places]), num=len(places))
    return tf.concat([_decode(chunk, shape, part.dtype, encoding) for chunk, shape in zip(chunks, shapes)], axis)


def scatter_sum(tensor, axis: int, sizes: Sequence, encoding: Encoding, comm, *, name: str) -> tf.Tensor:
    """This worker's part of the sum of all workers' tensors, in 8 bits on the wire.

    Each worker cuts its tensor, encodes part k for worker k, and adds up in float32 what it decodes.

    Args:
      tensor: float32, float64, float16 or bfloat16; the same shape and dtype on all workers.
      axis, sizes: where it is cut, as in `gather`.
      encoding, comm, name: as in `hvd8bit.exchange.exchange`.

    Returns:
      A tensor of the same dtype. Worker k sends (1 + 4/block_size) bytes for each element of the parts that are not its
      own; one rounding, before the sum.

    Raises:
      tf.errors.InvalidArgumentError: workers' tensors or settings differ.
    """
    parts = tf.split(tf.cast(tensor, tf.float32), tf.stack(sizes), axis=axis, num=len(sizes))
    one = one_when_run(comm)
    seeds = dither.seeds(encoding, len(parts), comm=comm, name=name)
    chunks = [ops.encode_list([part], one, encoding, seed=seed)[0] for part, seed in zip(parts, seeds)]
    received, splits = comm.alltoall(
        tf.concat(chunks, 0), tf.stack([tf.size(chunk) for chunk in chunks]), f"{name}_alltoall"
    )
    shape = shape_of_part(tensor, axis, sizes[comm.rank()])
    came = tf.split(received, splits, num=len(sizes))
    return tf.cast(tf.add_n([_decode(chunk, shape, tf.float32, encoding) for chunk in came]), tensor.dtype)


def round_trip(tensor, encoding: Encoding) -> tf.Tensor:
    """The tensor as it is after it was encoded and decoded: what its receivers see, but for chance."""
    chunk, _ = ops.encode_list([tensor], 1, encoding)
    return _decode(chunk, shape_of_part(tensor, None, None), tensor.dtype, encoding)


def shape_of_part(part, axis: int | None, size) -> list:
    """The part's shape with another size along an axis: integers, and int32 scalars where not known statically."""
    known = part.shape.as_list()
    needed = any(places is None for dimension, places in enumerate(known) if dimension != axis)
    actual = tf.shape(part) if needed else known
    shape = [actual[dimension] if places is None else places for dimension, places in enumerate(known)]
    if axis is not None:
        shape[axis] = size
    return shape


def elements(shape: Sequence):
    """How many elements a shape of `shape_of_part` has: an integer, or an int64 scalar."""
    if all(isinstance(dimension, int) for dimension in shape):
        count = 1
        for dimension in shape:
            count *= dimension
        return count
    return tf.reduce_prod([tf.cast(dimension, tf.int64) for dimension in shape])


def coded_bytes(count, encoding: Encoding):
    """Bytes of one tensor of `count` elements in one chunk: header, codes, scales. An integer, or an int64 scalar."""
    codes = (count + SCALE_BYTES - 1) // SCALE_BYTES * SCALE_BYTES
    if encoding.block_size is not None:
        blocks = (count + encoding.block_size - 1) // encoding.block_size
    elif isinstance(count, int):
        blocks = min(count, 1)
    else:
        blocks = tf.minimum(count, 1)
    return HEADER_BYTES + codes + SCALE_BYTES * blocks


def _decode(chunk, shape: Sequence, dtype, encoding: Encoding) -> tf.Tensor:
    like = tf.raw_ops.Empty(shape=tf.cast(tf.stack(shape), tf.int32) if shape else [], dtype=dtype)
    (tensor,) = ops.decode_list([chunk], [like], 1, encoding)
    tensor.set_shape([dimension if isinstance(dimension, int) else None for dimension in shape])
    return tensor


def _shown(sizes: Sequence) -> list:
    return [size if isinstance(size, int) else "?" for size in sizes]
