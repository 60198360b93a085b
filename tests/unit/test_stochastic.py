"""Stochastic rounding: unbiased, a function of seed and place, the same from every back end."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from codec_cases import assert_same_bytes
from codec_inputs import DTYPES, INPUTS, as_dtype, codebook_values, under_one

import hvd8bit
from hvd8bit import c_api, native, ops, reference
from hvd8bit.c_api import Lists
from hvd8bit.datatypes import DATA_TYPES, codebook
from hvd8bit.encoding import Encoding

SEED = -7


def stochastic(data_type="dynamic_tree", block_size=64, scaling="absmax") -> Encoding:
    return Encoding(data_type, block_size, scaling, "stochastic")


def rounded(x, seed, **settings) -> np.ndarray:
    return hvd8bit.decode(hvd8bit.encode(x, rounding="stochastic", seed=seed, **settings)).numpy()


# The random numbers.


def test_the_random_numbers_stay():
    """Of SplitMix64, whose outputs for the state 0 are 0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, ...: the first makes
    the key of seed 0."""
    mask = 2**64 - 1

    def mix(z):
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        key = mix((seed + 0x9E3779B97F4A7C15) & mask)
        expected = [(mix((key + place * 0x9E3779B97F4A7C15) & mask) >> 40) / 2**24 for place in range(5, 15)]
        assert reference.random_numbers(seed, 5, 10).tolist() == expected


def test_the_random_numbers_are_even():
    """In 256 bins, for places, for seeds, for both: chi-square within 5 deviations; neighbours do not go together."""
    by_place = reference.random_numbers(1, 0, 2**18)
    by_seed = np.array([reference.random_numbers(seed, 17, 1)[0] for seed in range(2**14)])
    for numbers in (by_place, by_seed):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts, _ = np.histogram(numbers, 256, (0, 1))
        mean = len(numbers) / 256
        chi_square = np.sum((counts - mean) ** 2) / mean
        assert abs(chi_square - 255) < 5 * np.sqrt(2 * 255)
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 5 / np.sqrt(len(numbers))
    assert abs(np.corrcoef(by_place, reference.random_numbers(2, 0, 2**18))[0, 1]) < 5 / 2**9


# What is done with them.


@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_the_mean_is_the_number(data_type):
    """Each of 60 numbers 20,000 times: the mean within 5 deviations of it, which are derived from its neighbours."""
    book = np.unique(codebook(data_type)).astype(np.float64)
    y = np.random.default_rng(1).uniform(0, 1, 60).astype(np.float32)
    times = 20_000
    block = np.concatenate([np.ones(1), y, np.zeros(3)]).astype(np.float32)
    got = rounded(np.tile(block, times), 3, data_type=data_type, block_size=64)
    means = got.reshape(times, 64)[:, 1:61].astype(np.float64).mean(axis=0)
    above = np.clip(np.searchsorted(book, y, side="right"), 1, len(book) - 1)
    low, high = book[above - 1], book[above]
    deviation = np.sqrt((y - low) * (high - y) / times)
    assert np.all(np.abs(means - y) <= 5 * deviation + 2.0**-23)
    assert np.mean(np.abs(means - y) <= deviation) > 0.5


@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_only_the_neighbours_come_out(data_type):
    x = np.random.default_rng(2).standard_normal(64 * 200).astype(np.float32)
    nearest = hvd8bit.decode(hvd8bit.encode(x, data_type, 64)).numpy()
    got = rounded(x, 1, data_type=data_type, block_size=64)
    book = np.unique(np.concatenate([codebook(data_type), -codebook(data_type)]))
    scales = np.abs(x.reshape(-1, 64)).max(axis=1, keepdims=True)
    y = x.reshape(-1, 64) / scales
    at = np.searchsorted(book, y, side="right")
    low, high = book[at - 1], book[np.minimum(at, len(book) - 1)]
    got_y = got.reshape(-1, 64)
    assert np.all((got_y == low * scales) | (got_y == high * scales))
    assert 0.05 < np.mean(got != nearest) < 0.6


@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_codebook_values_stay(data_type):
    x = under_one(codebook_values(data_type)) * np.float32(0.7371)
    for seed in range(5):
        assert np.array_equal(rounded(x, seed, data_type=data_type, block_size=64), x)


def test_seed_and_place_decide():
    x = np.random.default_rng(4).standard_normal(1000).astype(np.float32)
    once = rounded(x, 1)
    assert np.array_equal(rounded(x, 1), once)
    assert not np.array_equal(rounded(x, 2), once)
    twice = rounded(np.tile(x[:128], 2), 1, block_size=128)
    assert not np.array_equal(twice[:128], twice[128:])


def test_nan_spoils_its_block_alone():
    x = np.ones(192, np.float32) * 0.3
    x[[0, 64, 128]] = 1
    x[70] = np.nan
    got = rounded(x, 1, block_size=64)
    assert np.all(np.isnan(got[64:128]))
    assert np.all(np.isfinite(got[:64]))
    assert np.all(np.isfinite(got[128:]))


# Every back end.


@pytest.mark.parametrize("scaling", ["absmax", 1.0])
@pytest.mark.parametrize("block_size", [64, 192, 4160, None])
@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_back_ends_follow_the_reference(data_type, block_size, scaling, emulated_cuda):
    encoding = stochastic(data_type, block_size, scaling)
    tensors = [as_dtype(case(data_type), dtype) for case in INPUTS.values() for dtype in DTYPES]
    like = [(tensor.dtype.name, tensor.size) for tensor in tensors]
    for slices, slice_ in ((1, 0), (2, 1)):
        expected = b"".join(reference.encode_list(tensors, 2, encoding, slices, slice_, SEED))
        for backend in (*native.runnable_backends(), "cuda"):
            lists = Lists(backend, like, 2, encoding, slices=slices, seed=SEED, library=emulated_cuda)
            payload = np.empty(len(expected), np.uint8)
            lists.encode([tensor.ctypes.data for tensor in tensors], payload.ctypes.data, slice_)
            assert payload.tobytes() == expected, backend


@pytest.mark.parametrize("backend", native.runnable_backends())
def test_single_arrays_follow_the_reference(backend, rng):
    """What the benchmark times: `c_api.encode` and `sum_and_encode`; a place is a position in the array."""
    x = rng.standard_normal(1000).astype(np.float32)
    encoding = stochastic(block_size=192)
    starts = range(0, x.size, 192)
    encoded, total = [], np.zeros_like(x)
    for numbers in (x, x[::-1].copy()):
        blocks = [reference.encode_block(numbers[i : i + 192], encoding, seed=SEED, place=i) for i in starts]
        encoded.append(c_api.encode(backend, numbers, encoding, seed=SEED))
        assert encoded[-1][0].tobytes() == b"".join(codes.tobytes() for codes, _ in blocks)
        total += np.concatenate([reference.decode_block(*block, encoding.data_type) for block in blocks])
    expected = [reference.encode_block(total[i : i + 192], encoding, seed=4, place=i) for i in starts]
    got, _ = c_api.sum_and_encode(backend, encoded, encoding, seed=4)
    assert got.tobytes() == b"".join(codes.tobytes() for codes, _ in expected)


def test_the_ops_follow_the_reference(rng):
    tensors = [
        rng.standard_normal(shape).astype(dtype) for shape, dtype in (((70,), np.float32), ((9, 70), np.float64))
    ]
    encoding = stochastic()
    for slices in (1, 3):
        for slice_ in range(slices):
            part = {"slices": slices, "slice_": slice_}
            payload, splits = ops.encode_list(tensors, 2, encoding, seed=SEED, **part)
            chunks = reference.encode_list(tensors, 2, encoding, slices, slice_, SEED)
            assert_same_bytes(payload, b"".join(chunks), "encode_list")
            received = tf.concat([payload[: splits[0]]] * 2, 0)
            reduced = ops.reduce_shards(received, [splits[0]] * 2, tensors, 2, 0, encoding, seed=5, **part)
            expected = reference.reduce_shards([chunks[0]] * 2, tensors, 0, encoding, slices, slice_, 5)
            assert_same_bytes(reduced, expected, "reduce_shards")


def test_a_worker_that_rounds_to_the_nearest_is_refused(rng):
    x = [rng.standard_normal(70).astype(np.float32)]
    payload, _ = ops.encode_list(x, 1, Encoding(block_size=64))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"block_size=64, this worker uses .*block_size=64, rounding=stochastic"
    ):
        ops.decode_list([payload], x, 1, stochastic())
