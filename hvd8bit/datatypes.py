"""The four 8-bit data types: 128 magnitudes each, by formula (Dettmers 2016, sec. 3.1).

A code is a sign bit (0x80) and a 7-bit index into the codebook, in ascending order of magnitude. This
file is the only owner of the values: the C++ tables are generated from it when the library is built.
"""

from __future__ import annotations

import functools
from fractions import Fraction

import numpy as np

DATA_TYPES = ("dynamic_tree", "static_tree", "mantissa", "linear")
"""Names of the data types. A type's number on the wire is its position here plus one."""

CODEBOOK_SIZE = 128


def data_type_id(data_type: str) -> int:
    """The number that stands for `data_type` in a chunk header: 1 to 4. Raises ValueError for others."""
    if data_type not in DATA_TYPES:
        raise ValueError(f"data_type must be one of {', '.join(DATA_TYPES)}, got {data_type!r}")
    return DATA_TYPES.index(data_type) + 1


def codebook(data_type: str) -> np.ndarray:
    """The magnitudes of `data_type`: float32 [128], ascending, in [0, 1].

    Index 0 is exactly 0 and index 127 exactly 1. `mantissa` holds 114 distinct values; where values repeat,
    an encoder writes the lowest index.

    Raises:
      ValueError: `data_type` is none of `DATA_TYPES`.
    """
    data_type_id(data_type)
    return _codebook(data_type).copy()


def offset_scale(data_type: str, power_of_ten: float) -> float:
    """The fixed scale that the paper's exponent offset `power_of_ten` (a number 10**k) stands for.

    The `mantissa` codebook is divided by 15 here so that it ends at 1; its scale makes up for that.
    """
    data_type_id(data_type)
    return float(np.float32(15 * power_of_ten if data_type == "mantissa" else power_of_ten))


@functools.cache
def _codebook(data_type: str) -> np.ndarray:
    exact = {
        "dynamic_tree": _dynamic_tree,
        "static_tree": _static_tree,
        "mantissa": _mantissa,
        "linear": _linear,
    }[data_type]()
    return np.array([float(value) for value in sorted(exact)], dtype=np.float32)


def _bisection_leaves(bits: int) -> list[Fraction]:
    """The 2**bits leaves of the reference implementation's bisection tree over (0.1, 1).

    Its first split is at 0.45, every later one in the middle, and a leaf stands for the middle of its
    interval: two runs of equal bins.
    """
    low, split, high = Fraction(1, 10), Fraction(45, 100), Fraction(1)
    bins = 2 ** (bits - 1)
    return [
        start + (end - start) * Fraction(2 * k + 1, 2 * bins)
        for start, end in ((low, split), (split, high))
        for k in range(bins)
    ]


def _decade(n: int) -> Fraction:
    return Fraction(1, 10**n)


def _dynamic_tree() -> list[Fraction]:
    # n leading zero bits select the decade 10^-n and leave 6-n bits for the path. The paper's smallest code
    # gives way to the exact 1, so that a block's maximum survives.
    leaves = [_decade(n) * leaf for n in range(6) for leaf in _bisection_leaves(6 - n)]
    return [Fraction(0), *leaves, Fraction(1)]


def _static_tree() -> list[Fraction]:
    leaves = sorted(_decade(n) * leaf for n in range(8) for leaf in _bisection_leaves(4))
    return [Fraction(0), *leaves[1:-1], Fraction(1)]


def _mantissa() -> list[Fraction]:
    return [_decade(e) * Fraction(m, 15) for e in range(8) for m in range(16)]


def _linear() -> list[Fraction]:
    return [Fraction(k, CODEBOOK_SIZE - 1) for k in range(CODEBOOK_SIZE)]
