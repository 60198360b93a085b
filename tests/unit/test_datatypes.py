"""The codebooks against the paper's description (Dettmers 2016, sec. 3.1), built here in another way."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import hvd8bit
from hvd8bit import datatypes
from hvd8bit.datatypes import DATA_TYPES, codebook


def nearest(data_type: str, value: float) -> np.float32:
    book = codebook(data_type)
    return book[np.argmin(np.abs(book.astype(np.float64) - value))]


def tree_leaf(path: str) -> Fraction:
    """The leaf that a string of bits leads to, by walking down the tree over (0.1, 1)."""
    low, high = Fraction(1, 10), Fraction(1)
    for depth, bit in enumerate(path):
        split = Fraction(45, 100) if depth == 0 else (low + high) / 2
        low, high = (split, high) if bit == "1" else (low, split)
    return (low + high) / 2


def as_float32(exact: Fraction) -> np.float32:
    return np.float32(float(exact))


def test_names_and_numbers_on_the_wire():
    assert DATA_TYPES == ("dynamic_tree", "static_tree", "mantissa", "linear")
    assert [datatypes.data_type_id(name) for name in DATA_TYPES] == [1, 2, 3, 4]


@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_codebook_is_128_ascending_float32_from_0_to_1(data_type):
    book = codebook(data_type)
    assert book.dtype == np.float32
    assert book.shape == (128,)
    assert np.all(np.diff(book) >= 0)
    assert book[0] == 0
    assert book[-1] == 1
    assert hvd8bit.codebook(data_type).tobytes() == book.tobytes()


@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_a_caller_cannot_change_the_codebook(data_type):
    codebook(data_type)[:] = 7
    assert codebook(data_type)[-1] == 1


def test_dynamic_tree_index_is_the_bit_pattern_minus_one():
    book = codebook("dynamic_tree")
    for pattern in range(2, 128):  # 1 is the paper's 10^-6, which gives way to the exact 1
        zeros, _, path = f"{pattern:07b}".partition("1")
        assert book[pattern - 1] == as_float32(tree_leaf(path) / 10 ** len(zeros)), f"{pattern:07b}"


def test_dynamic_tree_ends_and_leaves_per_decade():
    book = codebook("dynamic_tree").astype(np.float64)
    assert book[1] == pytest.approx(2.75e-6, rel=1e-7)
    assert book[126] == np.float32(0.99140625)
    inner = book[1:-1]
    leaves = [int(np.sum((inner > 10.0 ** (-n - 1)) & (inner < 10.0**-n))) for n in range(6)]
    assert leaves == [64, 32, 16, 8, 4, 2]


@pytest.mark.parametrize(
    ("data_type", "value", "expected"),
    [
        ("dynamic_tree", 0.2345678, 0.23671875),
        ("dynamic_tree", 0.0000234, 0.00001875),
        ("mantissa", 0.2345678, 4 / 15),
    ],
)
def test_the_papers_examples(data_type, value, expected):
    assert nearest(data_type, value) == np.float32(expected)


def test_the_papers_mantissa_example_at_its_own_scale():
    scale = datatypes.offset_scale("mantissa", 1.0)
    assert nearest("mantissa", 0.2345678 / scale) * scale == pytest.approx(0.2, rel=1e-7)


def test_a_decade_is_two_runs_of_equal_bins():
    inner = codebook("dynamic_tree").astype(np.float64)[63:127]
    assert np.allclose(np.diff(inner[:32]), 0.35 / 32, rtol=1e-5)
    assert np.allclose(np.diff(inner[32:]), 0.55 / 32, rtol=1e-5)
    assert inner[0] - 0.1 == pytest.approx(0.35 / 64, rel=1e-5)
    assert 1 - inner[-1] == pytest.approx(0.55 / 64, rel=1e-5)


def test_static_tree_has_16_leaves_in_each_of_8_decades():
    leaves = sorted(tree_leaf(f"{path:04b}") / 10**decade for decade in range(8) for path in range(16))
    expected = [0, *(as_float32(leaf) for leaf in leaves[1:-1]), 1]
    assert codebook("static_tree").tolist() == expected


def test_mantissa_is_m_times_a_power_of_ten_over_15():
    book = codebook("mantissa")
    expected = sorted(Fraction(m, 15) / 10**e for m in range(16) for e in range(8))
    assert book.tolist() == [as_float32(value) for value in expected]
    assert len(np.unique(book)) == 114


def test_linear_is_a_uniform_grid():
    assert codebook("linear").tolist() == [as_float32(Fraction(k, 127)) for k in range(128)]


@pytest.mark.parametrize("function", [codebook, datatypes.data_type_id, lambda name: datatypes.offset_scale(name, 1.0)])
@pytest.mark.parametrize("name", ["float8", "", "LINEAR", None, 1])
def test_unknown_data_type(function, name):
    with pytest.raises(ValueError, match="data_type must be one of dynamic_tree, static_tree, mantissa, linear, got"):
        function(name)


def test_offset_scale():
    assert datatypes.offset_scale("static_tree", 100.0) == 100
    assert datatypes.offset_scale("mantissa", 100.0) == 1500
    assert datatypes.offset_scale("linear", 0.1) == float(np.float32(0.1))
