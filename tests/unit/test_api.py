"""`hvd8bit.encode` and `hvd8bit.decode`: one tensor there and back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from codec_inputs import BFLOAT16, DTYPES, assert_same_numbers

import hvd8bit
from hvd8bit import reference
from hvd8bit.encoding import Encoding


def by_reference(x: np.ndarray, **settings):
    """Codes, scales and what they decode to."""
    encoding = Encoding(**settings)
    chunks = reference.encode_list([x], 1, encoding)
    blocks = -(-x.size // (encoding.block_size or max(x.size, 1)))
    raw = np.frombuffer(chunks[0], np.uint8)
    (decoded,) = reference.decode_list([chunks], [x], encoding)
    return raw[64 : 64 + x.size], raw[len(raw) - 4 * blocks :].view("<f4"), decoded


@pytest.mark.parametrize("block_size", [64, 1024, None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (3,), (5, 10), (2, 3, 4, 50)])
def test_there_and_back(shape, dtype, block_size, rng):
    x = np.asarray(rng.standard_normal(shape)).astype(DTYPES[dtype])
    encoded = hvd8bit.encode(x, "linear", block_size)
    codes, scales, decoded = by_reference(x, data_type="linear", block_size=block_size)
    assert_same_numbers(encoded.codes.numpy(), codes)
    assert_same_numbers(encoded.scales.numpy(), scales)
    assert encoded.dtype.name == dtype
    assert tuple(encoded.shape.numpy()) == shape
    assert_same_numbers(hvd8bit.decode(encoded).numpy(), decoded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ones_come_back_as_ones(dtype):
    x = tf.ones([5, 10], dtype)
    got = hvd8bit.decode(hvd8bit.encode(x))
    assert got.dtype == x.dtype
    assert np.all(got.numpy() == 1)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool", "complex64", "string"])
def test_other_dtypes_are_refused_by_name(dtype):
    x = tf.constant(["a"]) if dtype == "string" else tf.cast(tf.ones([5, 10]), dtype)
    with pytest.raises(TypeError, match=f"x must be one of float32, float64, float16, bfloat16, got {dtype}"):
        hvd8bit.encode(x)


def test_lists_and_numbers_are_float32():
    assert hvd8bit.encode([1.0, 2.0]).dtype == tf.float32
    assert hvd8bit.decode(hvd8bit.encode(3.5)).numpy() == 3.5
    assert hvd8bit.decode(hvd8bit.encode(BFLOAT16(3.5))).dtype == tf.bfloat16


def test_a_block_size_larger_than_the_tensor():
    encoded = hvd8bit.encode(tf.range(10.0), block_size=65536)
    assert encoded.scales.numpy().tolist() == [9.0]


def _unaligned(values: np.ndarray) -> np.ndarray:
    """The same numbers, starting one byte off."""
    raw = b"?" + values.tobytes()
    return np.frombuffer(raw, np.uint8)[1:].view(values.dtype).reshape(values.shape)


_table = np.random.default_rng(4).standard_normal((130, 67)).astype(np.float32)

VIEWS = {
    "tf x[1:]": lambda: tf.constant(_table)[1:],
    "tf x[:, 1:]": lambda: tf.constant(_table)[:, 1:],
    "tf x[::2]": lambda: tf.constant(_table)[::2],
    "tf x[::-1]": lambda: tf.constant(_table)[::-1],
    "tf transpose": lambda: tf.transpose(tf.constant(_table)),
    "tf split": lambda: tf.split(tf.constant(_table), [3, 127])[1],
    "tf unstack": lambda: tf.unstack(tf.constant(_table))[1],
    "numpy x[1:]": lambda: _table[1:],
    "numpy x[:, ::3]": lambda: _table[:, ::3],
    "numpy x[::-1]": lambda: _table[::-1],
    "numpy transpose": lambda: _table.T,
    "numpy Fortran order": lambda: np.asfortranarray(_table),
    "numpy odd offset": lambda: _unaligned(_table),
    "numpy broadcast": lambda: np.broadcast_to(_table[0], (20, 67)),
    "big-endian numpy": lambda: _table.astype(">f4"),
    "tf.Variable": lambda: tf.Variable(_table),
    "slice of a tf.Variable": lambda: tf.Variable(_table)[1:, 1:],
}


@pytest.mark.parametrize("case", VIEWS)
def test_a_view_is_read_as_what_it_shows(case):
    view = VIEWS[case]()
    shown = view.numpy() if hasattr(view, "numpy") else view
    fresh = np.array(shown, np.float32, order="C")
    codes, scales, decoded = by_reference(fresh, block_size=64)
    encoded = hvd8bit.encode(view, block_size=64)
    assert_same_numbers(encoded.codes.numpy(), codes)
    assert_same_numbers(encoded.scales.numpy(), scales)
    assert_same_numbers(hvd8bit.decode(encoded).numpy(), decoded)


def test_slices_inside_a_graph():
    """There a slice may share the memory of the whole, from an odd place on."""

    @tf.function(autograph=False)
    def run(x):
        encoded = [hvd8bit.encode(part, block_size=64) for part in (x[1:], x[:, 1:], tf.reshape(x, [-1])[1:], x[::2])]
        return [hvd8bit.decode(e) for e in encoded]

    for got, view in zip(run(_table), (_table[1:], _table[:, 1:], _table.reshape(-1)[1:], _table[::2])):
        assert_same_numbers(got.numpy(), by_reference(np.ascontiguousarray(view), block_size=64)[2])


@pytest.mark.parametrize("traced", [False, True])
def test_the_input_is_not_changed(traced):
    x = tf.constant(_table)
    variable = tf.Variable(_table)

    def run(x):
        y = x * 1.5
        return hvd8bit.decode(hvd8bit.encode(y)), y, hvd8bit.decode(hvd8bit.encode(variable))

    _, y, _ = (tf.function(run, autograph=False) if traced else run)(x)
    assert x.numpy().tobytes() == _table.tobytes()
    assert variable.numpy().tobytes() == _table.tobytes()
    assert y.numpy().tobytes() == (_table * np.float32(1.5)).tobytes()


def test_static_shapes_survive():
    seen = {}

    @tf.function(input_signature=[tf.TensorSpec([None, 16]), tf.TensorSpec([40, 16], tf.float16), tf.TensorSpec(None)])
    def run(partly, fully, unknown):
        for name, x in (("partly", partly), ("fully", fully), ("unknown", unknown)):
            encoded = hvd8bit.encode(x, block_size=64)
            decoded = hvd8bit.decode(encoded)
            seen[name] = (encoded.codes.shape, encoded.scales.shape, decoded.shape, decoded.dtype)
        return decoded

    run(tf.ones([3, 16]), tf.ones([40, 16], tf.float16), tf.ones([5]))
    assert seen["partly"][0].as_list() == [None]
    assert seen["partly"][1].as_list() == [None]
    assert seen["partly"][2].as_list() == [None, 16]
    assert seen["fully"] == ([640], [10], [40, 16], tf.float16)
    assert seen["unknown"][0].rank == 1
    assert seen["unknown"][2].rank is None


def test_a_static_shape_is_kept_where_the_graph_cannot_know_it():
    """The shape's values come from outside the graph; what is known of it is in `Encoded`."""
    encoded = hvd8bit.encode(tf.ones([4, 16]))
    shapes = []

    @tf.function(autograph=False)
    def run(chunk, shape):
        inside = dataclasses.replace(encoded, chunk=chunk, shape=shape, static_shape=tf.TensorShape([None, 16]))
        shapes.append(hvd8bit.decode(inside).shape.as_list())
        return hvd8bit.decode(inside)

    assert run(encoded.chunk, encoded.shape).shape == (4, 16)
    assert shapes == [[None, 16]]


def test_a_graph_with_unknown_shapes_gives_the_same():
    @tf.function(input_signature=[tf.TensorSpec(None)])
    def run(x):
        encoded = hvd8bit.encode(x, block_size=64)
        return encoded.codes, encoded.scales, hvd8bit.decode(encoded)

    for shape in ((), (0, 3), (5,), (130, 67)):
        x = np.resize(_table, shape)
        for got, expected in zip(run(x), by_reference(x, block_size=64)):
            assert_same_numbers(got.numpy(), expected)


def test_settings_reach_the_codes():
    encoded = hvd8bit.encode([5.0, 500.0], scaling=100.0)
    assert encoded.scales.numpy().tolist() == [100]
    assert hvd8bit.decode(encoded).numpy()[1] == 100
    with pytest.raises(TypeError, match="blocksize"):
        hvd8bit.encode([1.0], blocksize=64)
