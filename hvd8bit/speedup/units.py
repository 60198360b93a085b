"""Quantities with units, parsed and printed: bit or byte, powers of 10 or of 2, never guessed.

k, M, G, T are 10^3, 10^6, 10^9, 10^12; Ki, Mi, Gi, Ti are 2^10, 2^20, 2^30, 2^40. `bit` is a bit and `B` a
byte of 8 bits, so 10 Gbit/s = 1.25 GB/s, and 1.25 GiB/s is something else.
"""

from __future__ import annotations

import math
import re

_PREFIXES = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_SIZES = {"bit": 0.125, "B": 1.0}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}

BANDWIDTH_UNITS = "bit/s or B/s with k, M, G, T (10^3 …) or Ki, Mi, Gi, Ti (2^10 …) before it, such as 10Gbit/s"
MOST = 1e15
"""In bytes per second, and one over the least: beyond all that there is, and products of them are still numbers."""
LONGEST_S = 1e9
"""Thirty years."""

TIME_UNITS = "ns, us, ms, s or min, such as 30us"


def bandwidth(text: str) -> float:
    """Bytes per second from text such as `10Gbit/s`, `1.25 GB/s` or `1GiB/s`.

    Raises:
      ValueError: no number above 0, one out of all bounds, or an unknown unit; says which units there are.
    """
    units = {
        f"{prefix}{unit}/s": factor * size for prefix, factor in _PREFIXES.items() for unit, size in _SIZES.items()
    }
    return _parse(text, units, "a bandwidth", BANDWIDTH_UNITS, most=MOST, most_text="1 PB/s")


def seconds(text: str, *, zero: bool = False) -> float:
    """Seconds from text such as `30us` or `180 ms`. Raises as `bandwidth`; `zero` allows 0."""
    return _parse(text, _TIMES, "a time", TIME_UNITS, zero=zero, most=LONGEST_S, most_text="10^9 s")


def _parse(
    text: str, units: dict[str, float], what: str, known: str, *, most: float, most_text: str, zero: bool = False
) -> float:
    match = re.fullmatch(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(.*?)\s*", text)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or math.isnan(number):
        raise ValueError(f"{what} must be a number and a unit, {known}, got {text!r}")
    if match[2] not in units:
        unit = f"the unit {match[2]!r} is unknown" if match[2] else "the unit is missing"
        raise ValueError(f"{what} must be in {known}; {unit} in {text!r}")
    if not (number > 0 or (zero and number == 0)):
        raise ValueError(f"{what} must be {'0 or ' if zero else ''}above 0, got {text!r}")
    value = number * units[match[2]]
    if value > most:
        raise ValueError(f"{what} must be at most {most_text}, got {text!r}")
    if value < 1 / MOST and not (zero and value == 0):
        unit = next(unit for unit in ("s", "B/s") if unit in units)
        raise ValueError(f"{what} must be {'0, or ' if zero else ''}at least {1 / MOST:g} {unit}, got {text!r}")
    return value


def show_bandwidth(bytes_per_s: float) -> str:
    """In bits and in bytes, powers of 10: `10 Gbit/s = 1.25 GB/s`."""
    return f"{_show(8 * bytes_per_s, 'bit/s')} = {_show(bytes_per_s, 'B/s')}"


def show_bits_per_s(bytes_per_s: float) -> str:
    """`10 Gbit/s`."""
    return _show(8 * bytes_per_s, "bit/s")


def show_bytes(count: float) -> str:
    """`102 MB`, powers of 10."""
    return _show(count, "B")


def show_seconds(value: float) -> str:
    """Three digits in the unit that fits: `180 ms`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= 0.9995 * factor:
            return f"{_digits(value / factor)} {unit}"
    return f"{_digits(value / 1e-9)} ns" if value else "0 s"


def _show(value: float, unit: str) -> str:
    for prefix in ("T", "G", "M", "k"):
        if abs(value) >= 0.9995 * _PREFIXES[prefix]:
            return f"{_digits(value / _PREFIXES[prefix])} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent and without trailing zeros after the point."""
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
