"""The one table of inputs and settings on which every back end must agree with the reference, bit for bit.

Without TensorFlow: tests/gpu uses it, too, where there may be none.
"""

from __future__ import annotations

import functools
from typing import Callable

import numpy as np

from hvd8bit.datatypes import DATA_TYPES, codebook
from hvd8bit.encoding import Encoding

DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16}
try:
    import ml_dtypes

    BFLOAT16 = ml_dtypes.bfloat16
    DTYPES["bfloat16"] = BFLOAT16
except ImportError:  # it comes with TensorFlow
    pass
BLOCK_SIZES = (64, 192, 1024, 65536, None)
SCALINGS = ("absmax", 1.0, 100.0)
BLOCK = 64
"""The inputs below are made for blocks of this size; with others they must agree all the same."""


def codebook_values(data_type: str) -> np.ndarray:
    """Every value that a code of `data_type` stands for, with both signs."""
    values = codebook(data_type)
    return np.concatenate([values, -values])


def middles(data_type: str) -> np.ndarray:
    """float32 [3n]: the middles between neighbours, as near as float32 comes, and 1 ulp to each side."""
    values = np.unique(codebook(data_type)).astype(np.float64)
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    return np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(2))])


def under_one(values: np.ndarray) -> np.ndarray:
    """`values` in blocks that each begin with a 1, so that 1 is their scale."""
    values = np.resize(values, (-(-len(values) // (BLOCK - 1)), BLOCK - 1))
    return np.insert(values, 0, 1, axis=1).reshape(-1).astype(np.float32)


def _random(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def _any_bits(seed: int, size: int, finite: bool) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 2**32, size, np.uint32).view(np.float32)
    return np.where(np.isfinite(values), values, np.float32(0.5)) if finite else values


def _poisoned(bad: float) -> np.ndarray:
    """A `bad` element first, last, in the middle, on both sides of a border, alone in a short last block."""
    values = _random(3, 9 * BLOCK + 1)
    values[[0, 2 * BLOCK - 1, 3 * BLOCK + 17, 5 * BLOCK, 6 * BLOCK - 1, 9 * BLOCK]] = bad
    return values


_denormal = np.float32(2**-149)

INPUTS: dict[str, Callable[[str], np.ndarray]] = {
    "codebook": lambda data_type: under_one(codebook_values(data_type)),
    "codebook at odd scales": lambda data_type: np.concatenate(
        [under_one(codebook_values(data_type)) * np.float32(scale) for scale in (0.7371, 3e-20, 1.7e38)]
    ),
    "middles": lambda data_type: under_one(np.concatenate([middles(data_type), -middles(data_type)])),
    "middles at odd scales": lambda data_type: np.concatenate(
        [under_one(middles(data_type)) * np.float32(scale) for scale in (0.7371, 3e-20, 1.7e38)]
    ),
    "normal": lambda _: _random(1, 40 * BLOCK + 7),
    "any finite bits": lambda _: _any_bits(2, 40 * BLOCK, finite=True),
    "any bits": lambda _: _any_bits(4, 40 * BLOCK, finite=False),
    "denormal": lambda _: np.concatenate(
        [_denormal * np.arange(-100, 157), np.full(BLOCK, _denormal), np.full(BLOCK, -(2.0**-127))]
    ).astype(np.float32),
    "smallest scales": lambda _: np.concatenate(
        [np.float32(2.0**exponent) * _random(5, BLOCK) for exponent in range(-149, -110, 3)]
    ),
    "huge": lambda _: (np.resize([1, -1, 0.999, 0.1, 1e-3, 0, 1e-38], 5 * BLOCK) * 3.4028234e38).astype(np.float32),
    "zeros": lambda _: np.resize(np.array([0.0, -0.0], np.float32), 3 * BLOCK + 5),
    "negative zero beside numbers": lambda _: np.resize(np.array([-0.0, 1, -1e-30, 1e-30, -3], np.float32), 3 * BLOCK),
    "constant": lambda _: np.concatenate([np.full(BLOCK, 3.7), np.full(BLOCK + 3, -3.7)]).astype(np.float32),
    "nan": lambda _: _poisoned(np.nan),
    "inf": lambda _: _poisoned(np.inf),
    "-inf": lambda _: _poisoned(-np.inf),
}
"""Name -> function of the data type that gives a float32 vector."""


def as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` in another dtype; what float64 alone can hold is put into float64."""
    with np.errstate(over="ignore", invalid="ignore"):  # signalling NaNs
        if dtype != "float64":
            return values.astype(DTYPES[dtype])
        # Not the float32 numbers themselves: rounding float64 to float32 must happen, too, as must overflow.
        wide = values.astype(np.float64) * (1 + 2.0**-25)
        return np.where(np.abs(values) > 3.4e38, wide * 10, wide)


def every_encoding() -> list[Encoding]:
    """All data types, block sizes and scalings with one another."""
    return [
        Encoding(data_type, block_size, scaling)
        for data_type in DATA_TYPES
        for block_size in BLOCK_SIZES
        for scaling in SCALINGS
    ]


def assert_same_numbers(got: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    """The same shape, dtype and bits; of NaNs only the place counts."""
    assert got.dtype == expected.dtype, what
    assert got.shape == expected.shape, what
    nan = np.isnan(got.astype(np.float64))
    assert np.array_equal(nan, np.isnan(expected.astype(np.float64))), f"{what}: NaNs at other places"
    bits = f"u{got.dtype.itemsize}"
    # Positions, not arrays: a failure should fit on a screen.
    wrong = np.flatnonzero((got.reshape(-1).view(bits) != expected.reshape(-1).view(bits)) & ~nan.reshape(-1))
    assert wrong.size == 0, (
        f"{what}: {wrong.size} of {got.size} differ, first at {wrong[0]}: "
        f"got {got.reshape(-1)[wrong[0]]}, expected {expected.reshape(-1)[wrong[0]]}"
    )


@functools.cache
def million(kind: str) -> np.ndarray:
    """A million float32: "normal", or "any exponent"."""
    if kind == "normal":
        return _random(7, 1_000_000)
    return _any_bits(8, 1_000_000, finite=True)
