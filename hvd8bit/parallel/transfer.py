"""One tensor from one worker to another: what a pipeline's activations and error signals travel by.

Horovod has no send and receive. A transfer is an alltoall of its own in which all workers but the sender have nothing
to send:

* Nobody waits for a turn. All take part under the transfer's name as soon as they can, which is at once for all but the
  sender; it runs when the sender has the tensor, beside whatever is computed. So no order of transfers can deadlock,
  and neither pairs of workers nor their process sets have to be set up.
* Its price is a message without content between those that have nothing to do with it. Horovod's workers meet several
  hundred times a second anyhow to agree on what comes next, all of them.

What travels tells what it is: a chunk (docs/wire-format.md) for a tensor in 8 bits, or a few words with dtype and shape
in front of the tensor's own bytes. So the sender alone decides, by a tensor's size when the step runs, and the receiver
learns from it how many rows have come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from hvd8bit import dither, ops, wire
from hvd8bit.compression import EightBitCompressor
from hvd8bit.graphs import unordered
from hvd8bit.selection import ENCODABLE

EXACT_MAGIC = 0x5A5A_6578_6163_7431
"""First word in front of a tensor that travels as it is."""
_WORD = 8


def pack(tensor, compression: EightBitCompressor | None, encoded=None, *, comm=None, name: str = "") -> tf.Tensor:
    """A tensor as uint8 [bytes], by itself enough for `unpack`.

    Args:
      tensor: of any dtype but string; its first dimension counts rows.
      compression: `EightBit`: 8 bits, but for dtypes that are not float; None: as it is.
      encoded: whether it travels in 8 bits, a bool or a bool scalar; None: if it may.
      comm, name: of the transfer, for stochastic rounding.
    """
    if compression is None or tensor.dtype.name not in ENCODABLE or encoded is False:
        return _pack_exact(tensor)

    # Not in the branch, which would have a state then, and wait for others that have one.
    (seed,) = dither.seeds(compression.encoding, comm=comm, name=name)

    def encode():
        return ops.encode_list([tensor], 1, compression.encoding, seed=seed)[0]

    if encoded is None or encoded is True:
        return encode()
    return tf.cond(encoded, encode, lambda: _pack_exact(tensor))


def unpack(payload, row_shape: Sequence[int], dtype, compression: EightBitCompressor | None) -> tf.Tensor:
    """The tensor that `pack` made the payload of.

    Args:
      payload: uint8 [bytes].
      row_shape: the tensor's shape without its first dimension.
      dtype: the tensor's dtype.
      compression: as in `pack`; whether this tensor was encoded is seen from the payload.

    Returns:
      [rows, *row_shape], of `dtype`.

    Raises:
      tf.errors.InvalidArgumentError: the payload holds a tensor of another dtype or row shape, was made with other
        settings, or is damaged.
    """
    with unordered():
        return _unpack(payload, list(row_shape), tf.as_dtype(dtype), compression)


def _unpack(payload, row_shape: list[int], dtype, compression) -> tf.Tensor:
    if compression is None or dtype.name not in ENCODABLE:
        return _unpack_exact(payload, row_shape, dtype)
    start = tf.pad(payload[: len(wire.MAGIC)], [[0, len(wire.MAGIC)]])[: len(wire.MAGIC)]
    is_chunk = tf.reduce_all(tf.equal(start, tf.constant(list(wire.MAGIC), tf.uint8)))
    tensor = tf.cond(
        is_chunk,
        lambda: _decode(payload, row_shape, dtype, compression),
        lambda: _unpack_exact(payload, row_shape, dtype),
    )
    tensor.set_shape([None, *row_shape])
    return tensor


def carry(payload, source: int, destination: int, comm, name: str) -> tf.Tensor:
    """Moves bytes from one worker to another.

    Args:
      payload: uint8 [bytes] on the sender, None on the others.
      source, destination: ranks within `comm`.
      comm: a `HorovodComm` or `LoopbackComm`; all its workers must call.
      name: of the transfer, the same on all workers and unique among those in flight.

    Returns:
      uint8 [bytes] on the receiver; on the others an empty tensor, which has to count for something, see `tied`.
    """
    mine = comm.rank_tensor()
    if payload is None:
        payload = tf.cast(_nothing(mine), tf.uint8)
    return _alltoall(payload, tf.one_hot(destination, comm.size(), dtype=tf.int32) * tf.size(payload), mine, comm, name)


def deal(payloads: Sequence | None, comm, name: str) -> tf.Tensor:
    """Moves bytes from one worker, the only one with `payloads`, to each: `payloads[rank]`. Else as `carry`."""
    mine = comm.rank_tensor()
    if payloads is None:
        payload, splits = tf.cast(_nothing(mine), tf.uint8), tf.zeros([comm.size()], tf.int32)
    else:
        payload, splits = tf.concat(payloads, 0), tf.stack([tf.size(part) for part in payloads])
    return _alltoall(payload, splits, mine, comm, name)


def share(payload, comm, name: str) -> tf.Tensor:
    """The bytes of the only worker that does not give None, on all workers."""
    return comm.allgather(tf.cast(_nothing(comm.rank_tensor()), tf.uint8) if payload is None else payload, name)


def tied(value, ends: Sequence) -> tf.Tensor:
    """The value, a number, once the transfers have ended whose empty ends these are.

    A control dependency would not do: TensorFlow's optimizer drops an op without state of which nothing else is used.
    """
    nothing = tf.add_n([tf.size(end) for end in ends]) if ends else tf.zeros([], tf.int32)
    return value + tf.cast(nothing, value.dtype)


def bytes_of(tensor) -> tf.Tensor:
    """A tensor's own bytes, uint8 [bytes]."""
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def exact_bytes(rows, row_shape: Sequence[int], dtype):
    """How many bytes `pack` makes of a tensor that travels as it is; int64 scalar like `rows`."""
    width = 1 if dtype == tf.bool else dtype.size
    return rows * (math.prod(row_shape) * width) + _WORD * (4 + len(row_shape))


def _alltoall(payload, splits, mine, comm, name: str) -> tf.Tensor:
    splits = tf.concat([splits, _nothing(mine)], 0)
    splits.set_shape([comm.size()])  # tf.ensure_shape would let the optimizer see through it
    received, _ = comm.alltoall(payload, splits, name)
    return received


def _nothing(mine) -> tf.Tensor:
    """Empty, but not for TensorFlow's optimizer: it would run a collective with constant input once, when it likes, and
    take two with equal input for one."""
    return tf.range(mine, mine)


def _pack_exact(tensor) -> tf.Tensor:
    if tensor.dtype == tf.string:
        raise TypeError("tensor must not be of dtype string: text cannot be sent; encode it as numbers first")
    words = tf.concat(
        [
            tf.constant([EXACT_MAGIC, tensor.dtype.as_datatype_enum, tensor.shape.rank], tf.int64),
            tf.shape(tensor, tf.int64),
        ],
        0,
    )
    # Booleans have no bits that bitcast would know.
    plain = tf.cast(tensor, tf.uint8) if tensor.dtype == tf.bool else tensor
    return tf.concat([bytes_of(words), bytes_of(plain)], 0)


def _unpack_exact(payload, row_shape: list[int], dtype) -> tf.Tensor:
    rank = 1 + len(row_shape)
    words_bytes = _WORD * (3 + rank)
    expected = tf.constant([EXACT_MAGIC, dtype.as_datatype_enum, rank, *row_shape], tf.int64)
    long_enough = tf.debugging.assert_greater_equal(
        tf.size(payload), words_bytes, message="a transfer brought fewer bytes than its header has: it is damaged"
    )
    with tf.control_dependencies([] if long_enough is None else [long_enough]):
        words = tf.reshape(tf.bitcast(tf.reshape(payload[:words_bytes], [-1, _WORD]), tf.int64), [3 + rank])
    found = tf.concat([words[:3], words[4:]], 0)
    same = tf.debugging.assert_equal(
        found,
        expected,
        message=(
            f"a transfer brought another tensor than expected, {dtype.name} with rows of shape {row_shape} (below: "
            "magic "
            "number, dtype number, rank, row shape); sender and receiver must name the same dtype, row shape and "
            "compression"
        ),
    )
    with tf.control_dependencies([] if same is None else [same]):
        body = payload[words_bytes:]
    width = 1 if dtype == tf.bool else dtype.size
    if dtype.size == 1 or dtype == tf.bool:
        flat = tf.cast(body, tf.bool) if dtype == tf.bool else tf.bitcast(body, dtype)
    else:
        flat = tf.bitcast(tf.reshape(body, [-1, width]), dtype)
    tensor = tf.reshape(flat, tf.concat([words[3:4], tf.constant(row_shape, tf.int64)], 0))
    tensor.set_shape([None, *row_shape])
    return tensor


def _decode(payload, row_shape: list[int], dtype, compression: EightBitCompressor) -> tf.Tensor:
    offset = wire.ELEMENTS_OFFSET
    elements = tf.reshape(tf.bitcast(tf.reshape(payload[offset : offset + 8], [1, 8]), tf.int64), [])
    # The op checks the header. That nothing absurd is allocated before it does so is left to this.
    elements = tf.clip_by_value(elements, 0, tf.size(payload, tf.int64))
    rows = elements // max(math.prod(row_shape), 1)
    like = tf.raw_ops.Empty(shape=tf.cast(tf.stack([rows, *row_shape]), tf.int32), dtype=dtype)
    (tensor,) = ops.decode_list([payload], [like], 1, compression.encoding)
    tensor.set_shape([None, *row_shape])
    return tensor
