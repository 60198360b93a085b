"""The oracle itself: the reference against exact fractions, and numbers that can be checked by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from codec_inputs import middles

from hvd8bit import reference
from hvd8bit.datatypes import DATA_TYPES, codebook
from hvd8bit.encoding import Encoding


def exact_index(book: list[Fraction], y: np.float32) -> int:
    """The first index of the nearest value; of two equally near ones that of the smaller."""
    exact = Fraction(float(y))
    return min(range(len(book)), key=lambda i: (abs(book[i] - exact), i))


@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_index_is_that_of_the_nearest_value(data_type, rng):
    book = [Fraction(float(value)) for value in codebook(data_type)]
    y = np.concatenate([codebook(data_type), middles(data_type), rng.random(300), 10.0 ** rng.uniform(-9, 0, 300)])
    y = np.minimum(y.astype(np.float32), np.float32(1))
    codes, scale = reference.encode_block(np.concatenate([[np.float32(1)], y]), Encoding(data_type))
    assert scale == 1
    assert codes[1:].tolist() == [exact_index(book, value) for value in y]


def test_the_middle_goes_to_the_smaller_magnitude():
    """Two middles that float32 holds exactly."""
    book = codebook("dynamic_tree").astype(np.float64)
    middle = (book[:-1] + book[1:]) / 2
    exact = np.flatnonzero(middle.astype(np.float32) == middle)
    assert len(exact) >= 2
    for low in exact:
        for sign in (1, -1):
            x = np.array([1, sign * middle[low]], np.float32)
            codes, _ = reference.encode_block(x, Encoding())
            assert codes[1] & 0x7F == low


def test_by_hand():
    codes, scale = reference.encode_block(np.array([-2.0, 0.0, 1.0, -0.0, 2.0]), Encoding("linear"))
    assert scale == 2
    assert codes.tolist() == [0x80 | 127, 0, 63, 0, 127]  # 0.5 lies in the middle of 63/127 and 64/127
    assert reference.decode_block(codes, scale, "linear").tolist() == [-2, 0, 2 * np.float32(63 / 127), 0, 2]


def test_no_negative_zero_is_written():
    codes, _ = reference.encode_block(np.array([1.0, -0.0, -1e-9], np.float32), Encoding())
    assert codes.tolist() == [127, 0, 0]


def test_code_0x80_reads_as_zero():
    assert reference.decode_block(np.array([0x80], np.uint8), np.float32(3), "linear").tobytes() == bytes(4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_non_finite_number(bad):
    codes, scale = reference.encode_block(np.array([1, bad, 3], np.float32), Encoding())
    assert codes.tolist() == [0, 0, 0]
    assert scale.tobytes() == bytes.fromhex("0000c07f")


def test_a_fixed_scale_saturates_and_grows_with_the_number_of_terms():
    x = np.array([50, -100, 250, 0], np.float32)
    codes, scale = reference.encode_block(x, Encoding("linear", scaling=100.0))
    assert scale == 100
    assert reference.decode_block(codes, scale, "linear").tolist() == [
        np.float32(63 / 127) * np.float32(100),
        -100,
        100,
        0,
    ]
    codes, scale = reference.encode_block(x, Encoding("linear", scaling=100.0), terms=3)
    assert scale == 300
    assert codes[2] == round(250 / 300 * 127)


def test_a_fixed_scale_stays_with_zeros():
    assert reference.encode_block(np.zeros(3, np.float32), Encoding(scaling=10.0))[1] == 10


def test_a_sum_adds_in_the_order_of_the_workers():
    """1e8 - 1e8 + 1 in float32; another order gives 0."""
    encoding = Encoding("linear", 64)
    workers = [[np.full(64, value, np.float32)] for value in (1e8, -1e8, 1.0)]
    chunks = [reference.encode_list(tensors, 3, encoding)[2] for tensors in workers]
    reduced = reference.reduce_shards(chunks, workers[0], 2, encoding)
    assert np.frombuffer(reduced[-4:], "<f4") == 1
    reduced = reference.reduce_shards([chunks[0], chunks[2], chunks[1]], workers[0], 2, encoding)
    assert np.frombuffer(reduced[-4:], "<f4") == 0


def test_a_sum_beyond_float32_is_nan():
    encoding = Encoding(block_size=64)
    workers = [[np.full(64, 3e38, np.float32)]] * 2
    chunks = [reference.encode_list(tensors, 2, encoding)[1] for tensors in workers]
    reduced = reference.reduce_shards(chunks, workers[0], 1, encoding)
    assert np.isnan(np.frombuffer(reduced[-4:], "<f4"))
