"""Run by test_cuda_ops.py, with the ops' CUDA kernels on emulated CUDA: what differs from the CPU's kernels."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvd8bit import native, ops
from hvd8bit.encoding import Encoding
from hvd8bit.layout import HEADER_BYTES

ENCODING = Encoding(block_size=64)
X = np.linspace(-1, 1, 1000, dtype=np.float32)


def damaged(payload: tf.Tensor, at: int) -> np.ndarray:
    copy = payload.numpy().copy()
    copy[at] ^= 1
    return copy


def test_these_are_the_cuda_kernels():
    assert native.c_library().hvd8bit_cuda_built() == 1


def test_decode_makes_nan_of_a_chunk_that_does_not_fit_and_the_next_op_says_why():
    payload, splits = ops.encode_list([X], 2, ENCODING)
    border = 64 * (16 // 2)
    (decoded,) = ops.decode_list([damaged(payload, splits[0] + 20)], [X], 2, ENCODING, factor=2.0)
    assert np.all(np.isfinite(decoded.numpy()[:border]))
    assert np.all(np.isnan(decoded.numpy()[border:]))
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"DecodeList.*: the chunk from worker 1 is part 1 of shard 1 where part 0 of shard 1 was expected",
    ):
        ops.encode_list([X], 2, ENCODING)
    ops.encode_list([X], 2, ENCODING)  # once


def test_the_worker_is_named_whose_slice_does_not_fit():
    payloads = [ops.encode_list([X], 2, ENCODING, slices=2, slice_=slice_)[0] for slice_ in range(2)]
    for at in (6, 16):  # data type, shard: worker 0's slice is the third of four chunks
        ops.decode_list([payloads[0], damaged(payloads[1], at)], [X], 2, ENCODING)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"DecodeList.*: the chunk from worker 0 "):
            ops.encode_list([X], 2, ENCODING)


def test_a_sum_with_a_chunk_that_does_not_fit_is_nan_for_everyone():
    payload, splits = ops.encode_list([X], 2, ENCODING)
    first = payload[: splits[0]]
    received = tf.concat([first, damaged(first, 6)], 0)
    reduced = ops.reduce_shards(received, [splits[0]] * 2, [X], 2, 0, ENCODING)
    assert reduced.numpy()[:HEADER_BYTES].tobytes() == first.numpy()[:HEADER_BYTES].tobytes()
    with pytest.raises(tf.errors.InvalidArgumentError, match="worker 1 was encoded with other settings"):
        ops.decode_list([payload], [X], 2, ENCODING)
    (decoded,) = ops.decode_list([tf.concat([reduced, payload[splits[0] :]], 0)], [X], 2, ENCODING)
    assert np.all(np.isnan(decoded.numpy()[:512]))
    assert np.all(np.isfinite(decoded.numpy()[512:]))


def test_wrong_sizes_are_refused_at_once():
    payload, splits = ops.encode_list([X], 2, ENCODING)
    first = payload[: splits[0]]
    with pytest.raises(tf.errors.InvalidArgumentError, match="worker 1 is truncated or oversized"):
        ops.reduce_shards(tf.concat([first, first[:-4]], 0), [splits[0], splits[0] - 4], [X], 2, 0, ENCODING)
    with pytest.raises(tf.errors.InvalidArgumentError, match="chunks of 1 workers were received where 2"):
        ops.reduce_shards(first, [splits[0]], [X], 2, 0, ENCODING)
    with pytest.raises(tf.errors.InvalidArgumentError, match="payload is truncated or oversized"):
        ops.decode_list([payload[:-1]], [X], 2, ENCODING)
