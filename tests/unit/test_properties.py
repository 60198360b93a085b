"""What users may rely on, whatever the numbers: the codec's properties, and its error on known data.

Tolerances are derived: half the gap between neighbouring codebook values, times the scale.
"""

from __future__ import annotations

import hypothesis
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from codec_inputs import codebook_values, middles, million, under_one
from hypothesis import strategies as st

import hvd8bit
from hvd8bit.datatypes import DATA_TYPES, codebook

SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)

data_types = st.sampled_from(DATA_TYPES)
block_sizes = st.sampled_from([64, 128, 1024, None])
finite = st.one_of(
    st.just(0.0),
    *[
        st.floats(low, high, width=32)
        for low, high in ((SMALLEST_NORMAL, 2.0**100), (-(2.0**100), -SMALLEST_NORMAL), (-8, 8))
    ],
)
vectors = hnp.arrays(np.float32, st.integers(1, 300), elements=finite, fill=st.nothing())


def rounded(x, data_type="dynamic_tree", block_size=1024, **settings) -> np.ndarray:
    """What is left of x after 8 bits."""
    return hvd8bit.decode(hvd8bit.encode(x, data_type, block_size, **settings)).numpy()


def blocks(x: np.ndarray, block_size: int | None):
    size = block_size or max(len(x), 1)
    return [x[at : at + size] for at in range(0, len(x), size)]


@hypothesis.given(vectors, data_types, block_sizes)
def test_odd_symmetry(x, data_type, block_size):
    # + 0 makes the zeros of -0: a zero has no sign.
    assert (rounded(-x, data_type, block_size) + 0.0).tobytes() == (-rounded(x, data_type, block_size) + 0.0).tobytes()


@hypothesis.given(vectors, data_types)
def test_monotone(x, data_type):
    """Within a block a larger number never decodes to a smaller one."""
    x = np.sort(x)
    assert np.all(np.diff(rounded(x, data_type, None)) >= 0)


@hypothesis.given(vectors, data_types, block_sizes)
def test_idempotent(x, data_type, block_size):
    # Below the smallest normal number decoded values lose digits, and with them their place in the codebook.
    hypothesis.assume(np.abs(x).max() >= SMALLEST_NORMAL * 2**30 or not x.any())
    x = np.where(np.abs(x) < SMALLEST_NORMAL * 2**30, np.float32(0), x)
    once = rounded(x, data_type, block_size)
    assert rounded(once, data_type, block_size).tobytes() == once.tobytes()


@hypothesis.given(vectors, data_types, block_sizes)
def test_maximum_and_zeros_are_exact(x, data_type, block_size):
    for before, after in zip(blocks(x, block_size), blocks(rounded(x, data_type, block_size), block_size)):
        most = np.abs(before).max()
        assert np.abs(after).max() == most
        at_most = np.abs(before) == most
        assert np.array_equal(after[at_most], before[at_most])
        assert np.all(after[before == 0] == 0)


@hypothesis.given(vectors, data_types, block_sizes)
def test_error_is_at_most_half_the_gap(x, data_type, block_size):
    book = np.unique(codebook(data_type)).astype(np.float64)
    for before, after in zip(blocks(x, block_size), blocks(rounded(x, data_type, block_size), block_size)):
        scale = np.abs(before).max().astype(np.float64)
        if scale == 0:
            continue
        y = np.abs(before) / scale
        above = np.clip(np.searchsorted(book, y), 1, len(book) - 1)
        half_gap = (book[above] - book[above - 1]) / 2
        # And the roundings of the quotient and of the product to float32, and of a result below 2^-126.
        slack = scale * 2.0**-23 + 2.0**-149
        assert np.all(np.abs(before.astype(np.float64) - after) <= half_gap * scale + slack)


@hypothesis.given(
    vectors, data_types, st.sampled_from([64, 128]), st.data(), st.sampled_from([np.nan, np.inf, -np.inf])
)
def test_a_bad_number_stays_in_its_block(x, data_type, block_size, data, bad):
    at = data.draw(st.integers(0, len(x) - 1))
    poisoned = x.copy()
    poisoned[at] = bad
    got, clean = rounded(poisoned, data_type, block_size), rounded(x, data_type, block_size)
    own = np.arange(len(x)) // block_size == at // block_size
    assert np.all(np.isnan(got[own]))
    assert got[~own].tobytes() == clean[~own].tobytes()


@hypothesis.given(vectors, data_types, st.sampled_from([1.0, 10.0, 1e-3]))
def test_a_fixed_scale_saturates(x, data_type, scaling):
    limit = np.float32(15 * scaling if data_type == "mantissa" else scaling)
    after = rounded(x, data_type, scaling=scaling)
    assert np.all(np.abs(after) <= limit)
    assert np.array_equal(after[np.abs(x) >= limit], np.sign(x[np.abs(x) >= limit]) * limit)
    assert np.all(after[x == 0] == 0)


@pytest.mark.parametrize("scale", [1.0, 0.7371, 3e-20, 1.7e38])
@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_codebook_values_are_fixed_points(data_type, scale):
    x = under_one(codebook_values(data_type)) * np.float32(scale)
    assert np.array_equal(rounded(x, data_type, 64), x)


@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_every_code_but_one_can_be_written(data_type):
    """An encoder that never reaches a code has another data type."""
    codes = set(hvd8bit.encode(under_one(codebook_values(data_type)), data_type, 64).codes.numpy().tolist())
    _, first = np.unique(codebook(data_type), return_index=True)
    assert codes == {int(i) for i in first} | {int(i) | 0x80 for i in first if i}


@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_the_middles_separate_neighbours(data_type):
    """Just below a middle the lower neighbour, just above it the upper one; both signs."""
    book = np.unique(codebook(data_type))
    steps = len(book) - 1
    exact = (book[1:].astype(np.float64) + book[:-1]) / 2
    near = middles(data_type)
    for sign in (1, -1):
        x = under_one(sign * near)
        got = rounded(x, data_type, 64).reshape(-1, 64)[:, 1:].reshape(-1)[: 3 * steps].reshape(3, steps)
        for got_row, y in zip(got, near.reshape(3, steps).astype(np.float64)):
            assert np.array_equal(sign * got_row, np.where(y > exact, book[1:], book[:-1]))


@pytest.mark.parametrize(
    ("x", "expected"), [(0.2345678, 0.23671875), (0.0000234, 0.00001875), (-0.2345678, -0.23671875)]
)
def test_the_papers_examples(x, expected):
    assert rounded([1.0, x])[1] == np.float32(expected)


# What people reported about neighbouring software: errors that jump with the block size, a lopsided codebook.

NORMAL_ERRORS = {
    256: (0.0097, 1.33),
    1024: (0.0104, 1.39),
    2048: (0.0107, 1.42),
    4096: (0.0110, 1.45),
    None: (0.0133, 1.63),
}
"""dynamic_tree on N(0, 1): block size -> RMS error over RMS value, mean relative error in %."""


def test_error_rises_smoothly_with_the_block_size(rng):
    x = rng.standard_normal(2**20).astype(np.float32)
    rms = {}
    for block_size in (64, 128, 256, 512, 1024, 2048, 4096, None):
        error = np.abs(rounded(x, block_size=block_size).astype(np.float64) - x)
        rms[block_size] = np.sqrt(np.mean(error**2) / np.mean(x.astype(np.float64) ** 2))
        if block_size in NORMAL_ERRORS:
            most_rms, most_relative = NORMAL_ERRORS[block_size]
            assert rms[block_size] <= 1.05 * most_rms, block_size
            assert 100 * np.mean(error / np.abs(x)) <= 1.05 * most_relative, block_size
    steps = np.array(list(rms.values()))
    assert np.all(steps[1:] >= 0.99 * steps[:-1])
    # From 4096 to the whole are eight doublings, each step before is one.
    assert np.all(steps[1:-1] / steps[:-2] < 1.1)
    assert steps[-1] / steps[-2] < 1.3


@pytest.mark.parametrize("data_type", ["dynamic_tree", "linear"])
def test_a_constant_does_not_shrink(data_type):
    for value in (-1.0, 1.0, -0.3, 7e-12):
        x = np.full(1000, value, np.float32)
        assert np.array_equal(rounded(x, data_type), x)


@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_odd_symmetry_on_a_million_normals(data_type):
    x = million("normal")
    assert np.array_equal(rounded(-x, data_type), -rounded(x, data_type))


def test_no_bias():
    x = million("normal")
    assert abs(np.mean(rounded(x).astype(np.float64) - x)) < 1e-4
