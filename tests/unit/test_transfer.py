"""One tensor from one worker to another: what is packed comes out, and what does not belong is refused."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit import layout, wire
from hvd8bit.collectives import LoopbackComm
from hvd8bit.parallel import transfer
from hvd8bit.parallel.boundary import Boundary
from hvd8bit.parallel.neighbours import differentiable_move

DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64"]


def numbers(shape, dtype="float32"):
    return tf.cast(np.random.default_rng(0).standard_normal(shape) * 10, dtype)


@functools.cache
def traced(row_shape, dtype, compression):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.uint8)])
    def run(payload):
        tensor = transfer.unpack(payload, row_shape, dtype, compression)
        assert tensor.shape.as_list() == [None, *row_shape]
        return tensor

    return run


def traced_unpack(payload, x, compression):
    return traced(tuple(x.shape[1:]), x.dtype, compression)(payload)


@pytest.mark.parametrize("unpack", [traced_unpack, lambda p, x, c: transfer.unpack(p, x.shape[1:], x.dtype, c)])
@pytest.mark.parametrize("shape", [(0, 3), (5, 3), (7,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_tensors_come_out_as_they_went_in(dtype, shape, unpack):
    x = numbers(shape, dtype)
    for compression in (None, hvd8bit.EightBit):  # which the receiver may have, too: the sender decides
        y = unpack(transfer.pack(x, None), x, compression)
        assert (y.dtype, y.shape) == (x.dtype, x.shape)
        assert np.array_equal(x, y)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_eight_bits_come_out_as_encode_and_decode_make_them(dtype):
    x = numbers((30, 50), dtype)
    compression = hvd8bit.EightBit(block_size=256)
    payload = transfer.pack(x, compression)
    assert payload.shape[0] == layout.Layout([1500], 1, 256).chunk_bytes(0)
    expected = hvd8bit.decode(hvd8bit.encode(x, block_size=256))
    assert np.array_equal(traced_unpack(payload, x, compression), expected)
    assert not np.array_equal(expected, x)


def test_no_rows_in_eight_bits():
    x = tf.zeros([0, 5])
    payload = transfer.pack(x, hvd8bit.EightBit)
    assert payload.shape[0] == layout.HEADER_BYTES
    assert traced_unpack(payload, x, hvd8bit.EightBit).shape == (0, 5)


def test_integers_are_never_encoded():
    x = numbers((40, 40), "int32")
    assert np.array_equal(transfer.unpack(transfer.pack(x, hvd8bit.EightBit), [40], x.dtype, hvd8bit.EightBit), x)


def test_exact_bytes_is_the_size_of_what_pack_makes():
    for dtype in DTYPES:
        for shape in ((0, 3), (5, 3), (7,)):
            x = numbers(shape, dtype)
            size = transfer.exact_bytes(tf.constant(shape[0], tf.int64), shape[1:], x.dtype)
            assert int(size) == transfer.pack(x, None).shape[0]


def test_text_cannot_be_sent():
    with pytest.raises(TypeError, match="must not be of dtype string"):
        transfer.pack(tf.constant(["a"]), None)


ALL = hvd8bit.EightBit(min_elements=0)


@pytest.mark.parametrize(
    ("sent", "received", "message"),
    [
        ((None, (4, 6), "float32"), (None, (4, 5), "float32"), "another tensor than expected"),
        ((None, (4, 6), "float32"), (None, (4, 6), "float64"), "another tensor than expected"),
        ((None, (4, 6), "float32"), (None, (4, 6, 1), "float32"), "another tensor than expected"),
        ((None, (4, 6), "int32"), (None, (4, 6), "float32"), "another tensor than expected"),
        ((ALL, (4, 6), "float32"), (None, (4, 6), "float32"), "another tensor than expected"),
        ((ALL, (4, 6), "float32"), (ALL, (4, 5), "float32"), "holds other tensors"),
        ((ALL, (4, 6), "float32"), (ALL, (4, 6), "float64"), "holds other tensors"),
        ((ALL, (4, 6), "float32"), (ALL(data_type="linear"), (4, 6), "float32"), "encoded with other settings"),
        ((ALL, (4, 6), "float32"), (ALL(block_size=64), (4, 6), "float32"), "encoded with other settings"),
    ],
)
def test_a_receiver_that_expects_something_else_is_told(sent, received, message):
    compression, shape, dtype = sent
    payload = transfer.pack(numbers(shape, dtype), compression)
    compression, shape, dtype = received
    for unpack in (traced_unpack, lambda p, x, c: transfer.unpack(p, x.shape[1:], x.dtype, c)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            unpack(payload, numbers(shape, dtype), compression)


@pytest.mark.parametrize("compression", [None, ALL], ids=["exact", "eightbit"])
def test_a_damaged_payload_is_an_error_and_nothing_worse(compression):
    x = numbers((10, 30))
    payload = transfer.pack(x, compression).numpy()
    header = layout.HEADER_BYTES if compression else 40
    damaged = [payload[:n] for n in (0, 3, 4, 31, 40, 63, 64, len(payload) - 1)]
    damaged += [np.concatenate([payload, payload[:4]])]
    for place in range(header):
        flipped = payload.copy()
        flipped[place] ^= 0xFF
        damaged.append(flipped)
    # An element count that would take all memory: refused before anything is allocated for it.
    absurd = payload.copy()
    absurd[wire.ELEMENTS_OFFSET : wire.ELEMENTS_OFFSET + 8] = [0, 0, 0, 0, 0, 0, 0, 0x70]
    damaged.append(absurd)
    for bytes_ in damaged:
        with pytest.raises(tf.errors.InvalidArgumentError):
            traced_unpack(tf.constant(bytes_), x, compression)


def test_elements_offset_is_where_the_header_has_them():
    payload = transfer.pack(numbers((7, 100)), ALL).numpy()
    assert int.from_bytes(bytes(payload[wire.ELEMENTS_OFFSET : wire.ELEMENTS_OFFSET + 8]), "little") == 700


def test_bytes_go_where_they_are_sent():
    def work(comm):
        payload = tf.constant([1, 2, 3], tf.uint8) if comm.rank() == 1 else None
        carried = transfer.carry(payload, 1, 2, comm, "carry")
        payloads = [tf.fill([rank], tf.cast(rank, tf.uint8)) for rank in range(4)] if comm.rank() == 0 else None
        dealt = transfer.deal(payloads, comm, "deal")
        shared = transfer.share(tf.constant([7, 8], tf.uint8) if comm.rank() == 3 else None, comm, "share")
        return [list(part.numpy()) for part in (carried, dealt, shared)]

    found = LoopbackComm.run(4, work)
    assert [carried for carried, _, _ in found] == [[], [], [1, 2, 3], []]
    assert [dealt for _, dealt, _ in found] == [[], [1], [2, 2], [3, 3, 3]]
    assert all(shared == [7, 8] for _, _, shared in found)


@pytest.mark.parametrize("compression", [None, ALL], ids=["exact", "eightbit"])
def test_a_tensor_and_its_error_signal(compression):
    x, error = numbers((6, 20)), numbers((6, 20)) + 1

    def work(comm):
        boundary = Boundary("there_and_back", compression, comm)
        mine = tf.constant(x if comm.rank() == 2 else x[:0])
        with tf.GradientTape() as tape:
            tape.watch(mine)
            arrived = differentiable_move(boundary, mine, 2, 0, "forward")
        return arrived, tape.gradient(arrived, mine, output_gradients=error if comm.rank() == 0 else arrived)

    found = LoopbackComm.run(3, work)
    round_trip = (lambda tensor: tensor) if compression is None else (lambda t: hvd8bit.decode(hvd8bit.encode(t)))
    assert np.array_equal(found[0][0], round_trip(x))
    assert np.array_equal(found[2][1], round_trip(error))
    assert [arrived.shape[0] for arrived, _ in found] == [6, 0, 0]
    assert [gradient.shape[0] for _, gradient in found] == [0, 0, 6]
