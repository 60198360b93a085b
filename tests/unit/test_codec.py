"""The op library against the NumPy reference, bit for bit, on the table of codec_inputs.py."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from codec_cases import assert_ops_match_reference, to_tensor
from codec_inputs import BLOCK_SIZES, DTYPES, INPUTS, SCALINGS, as_dtype, assert_same_numbers, every_encoding, million
from hypothesis import strategies as st

from hvd8bit import ops, reference
from hvd8bit.datatypes import DATA_TYPES
from hvd8bit.encoding import Encoding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data_type", DATA_TYPES)
@pytest.mark.parametrize("case", INPUTS)
def test_edge_inputs(case, data_type, dtype):
    values = as_dtype(INPUTS[case](data_type), dtype)
    for block_size in BLOCK_SIZES:
        for scaling in SCALINGS:
            assert_ops_match_reference([[values]], Encoding(data_type, block_size, scaling))
    # As a sum: the same values in another order, and so out of step with the blocks.
    workers = [[values], [values[::-1].copy()], [np.roll(values, 100)]]
    assert_ops_match_reference(workers, Encoding(data_type, 64), slices=2, factor=1.0)
    assert_ops_match_reference(workers, Encoding(data_type, 1024, 1.0), factor=3.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_of_up_to_three_blocks(dtype, rng):
    values = as_dtype(rng.standard_normal(3 * 1024 + 1).astype(np.float32), dtype)
    for length in range(3 * 64 + 2):
        assert_ops_match_reference([[values[:length]]], Encoding(block_size=64))
    for length in (1, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049, 3071, 3072, 3073):
        assert_ops_match_reference([[values[:length]], [values[-length:]]], Encoding(block_size=1024))


@pytest.mark.parametrize("encoding", every_encoding(), ids=str)
def test_lists_of_mixed_tensors(encoding, rng):
    """Scalars, empty tensors and all dtypes in one list, cut for several workers, in slices."""
    shapes = [(), (0,), (3, 0, 2), (70,), (5, 13), (), (1, 1, 129), (64,)]
    for shards, slices in ((1, 1), (2, 3), (3, 2), (8, 1)):
        workers = [
            [
                np.asarray(rng.standard_normal(shape)).astype(dtype)
                for shape, dtype in zip(shapes, list(DTYPES.values()) * 2)
            ]
            for _ in range(shards)
        ]
        assert_ops_match_reference(workers, encoding, slices=slices, factor=float(shards))


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_nothing_to_encode(shards):
    """Lists of empty tensors alone: chunks are headers."""
    assert_ops_match_reference([[np.zeros((0,), np.float32)]] * shards, Encoding(), slices=2)
    assert_ops_match_reference([[np.zeros((0, 3), np.float16), np.zeros((2, 0))]] * shards, Encoding(block_size=None))


@pytest.mark.parametrize("data_type", DATA_TYPES)
@pytest.mark.parametrize("kind", ["normal", "any exponent"])
def test_a_million_random_numbers(kind, data_type):
    values = million(kind)
    assert_ops_match_reference([[values], [values[::-1].copy()]], Encoding(data_type))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_a_million_random_numbers_in_other_dtypes(dtype):
    assert_ops_match_reference([[as_dtype(million("normal"), dtype)]], Encoding())


def test_blocks_above_the_kept_sum(rng):
    """A sum of blocks above 4096 elements is formed in pieces."""
    for block_size in (4096, 4160, 65536, None):
        workers = [[rng.standard_normal(150_000).astype(np.float32)] for _ in range(2)]
        assert_ops_match_reference(workers, Encoding(block_size=block_size))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_number(dtype, scaling):
    values = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype])
    assert_ops_match_reference([[values]], Encoding(block_size=64, scaling=scaling))
    shuffled = np.random.default_rng(9).permutation(values)
    finite = np.where(np.isfinite(shuffled.astype(np.float32)), shuffled, DTYPES[dtype](0))
    assert_ops_match_reference([[finite]], Encoding(block_size=64, scaling=scaling))


@pytest.mark.parametrize("data_type", DATA_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_rounded_to_the_dtype(dtype, data_type, rng):
    """Every code under scales and factors that lead through all of the dtype's range."""
    values = np.resize(np.concatenate([np.linspace(-1, 1, 255), [0]]), 64 * 64).astype(np.float32)
    scales = 2.0 ** rng.uniform(-30, 16, 64)
    values = (values.reshape(64, 64) * scales[:, None]).reshape(-1).astype(DTYPES[dtype])
    encoding = Encoding(data_type, 64)
    chunks = reference.encode_list([values], 1, encoding)
    for factor in (1.0, -1.0, 1 / 3, 1e-3, 1e-8, 1e-40, 7.7, 1e6, 1e38, 0.0):
        (got,) = ops.decode_list([to_tensor(chunks)], [tf.constant(values)], 1, encoding, factor=factor)
        (expected,) = reference.decode_list([chunks], [values], encoding, factor)
        assert_same_numbers(got.numpy(), expected, f"factor {factor}")


def test_the_factor_is_a_float64(rng):
    """A factor that float32 would round changes the result."""
    values = rng.standard_normal(4096).astype(np.float32)
    encoding = Encoding(block_size=64)
    chunks = reference.encode_list([values], 1, encoding)
    factor = 1 + 2.0**-24 + 2.0**-40
    for given in (factor, tf.constant(factor, tf.float64)):
        (got,) = ops.decode_list([to_tensor(chunks)], [tf.constant(values)], 1, encoding, factor=given)
        assert_same_numbers(got.numpy(), reference.decode_list([chunks], [values], encoding, factor)[0])


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    shapes=st.lists(st.lists(st.integers(0, 12), max_size=3), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from(sorted(DTYPES)), min_size=6, max_size=6),
    shards=st.integers(1, 8),
    slices=st.integers(1, 6),
    encoding=st.sampled_from(every_encoding()),
    # Not -0.0: TensorFlow keeps Python scalars that it has seen, and takes 0.0 for it.
    factor=st.floats(-1e3, 1e3).map(lambda factor: factor + 0.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_list(shapes, dtypes, shards, slices, encoding, factor, seed):
    rng = np.random.default_rng(seed)
    spread = 10.0 ** rng.integers(-6, 5)
    workers = [
        [
            as_dtype(np.asarray(spread * rng.standard_normal(shape), np.float32), dtype)
            for shape, dtype in zip(shapes, dtypes)
        ]
        for _ in range(shards)
    ]
    assert_ops_match_reference(workers, encoding, slices, factor)


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=200),
    data_type=st.sampled_from(DATA_TYPES),
    scaling=st.sampled_from(SCALINGS),
)
def test_any_numbers(values, data_type, scaling):
    values = np.array(values, np.float32)
    assert_ops_match_reference([[values], [values[::-1].copy()]], Encoding(data_type, 64, scaling))


def test_a_traced_op_gives_the_same(rng):
    tensors = [rng.standard_normal(shape).astype(np.float32) for shape in ((70,), (5, 200), ())]
    encoding = Encoding(block_size=64)

    @tf.function(autograph=False)
    def there_and_back(tensors, shards, factor):
        payload, splits = ops.encode_list(tensors, shards, encoding)
        return payload, splits, ops.decode_list([payload], tensors, shards, encoding, factor=factor)

    payload, splits, decoded = there_and_back(tensors, tf.constant(3), tf.constant(2.0, tf.float64))
    chunks = reference.encode_list(tensors, 3, encoding)
    assert payload.numpy().tobytes() == b"".join(chunks)
    assert splits.numpy().tolist() == [len(chunk) for chunk in chunks]
    for got, expected in zip(decoded, reference.decode_list([chunks], tensors, encoding, 2.0)):
        assert_same_numbers(got.numpy(), expected)
