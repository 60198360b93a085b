"""Units: bit or byte, powers of 10 or of 2 (FIELD-CASES S3)."""

from __future__ import annotations

import pytest

from hvd8bit.speedup import units


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10Gbit/s", 1.25e9),
        ("1.25GB/s", 1.25e9),
        ("1.25 GiB/s", 1.25 * 2**30),
        ("1 Gibit/s", 2**30 / 8),
        ("100Mbit/s", 12.5e6),
        ("8 bit/s", 1.0),
        ("64kbit/s", 8e3),
        ("1KiB/s", 1024.0),
        ("1e3 MB/s", 1e9),
        (" 2 TB/s ", 2e12),
    ],
)
def test_bandwidth(text, bytes_per_s):
    assert units.bandwidth(text) == pytest.approx(bytes_per_s, rel=1e-12)


def test_10_gbit_is_not_a_power_of_two():
    assert units.bandwidth("10Gbit/s") == units.bandwidth("1.25GB/s")
    assert units.bandwidth("10Gbit/s") != units.bandwidth("1.25GiB/s")
    assert units.bandwidth("1.25GiB/s") / units.bandwidth("10Gbit/s") == pytest.approx(1.0737418)


@pytest.mark.parametrize(
    "text", ["10Gb/s", "10GBps", "10Gbps", "10gbit/s", "10GBIT/s", "1 Gbit", "5 parsec/s", "1KB/s"]
)
def test_unknown_unit_is_an_error_that_lists_the_known(text):
    with pytest.raises(ValueError, match="is unknown") as raised:
        units.bandwidth(text)
    for part in ("bit/s or B/s", "10^3", "2^10", repr(text)):
        assert part in str(raised.value)


def test_missing_unit_is_an_error():
    with pytest.raises(ValueError, match="the unit is missing in '10'"):
        units.bandwidth("10")


@pytest.mark.parametrize(
    "text", ["", "fast", "Gbit/s", "1.2.3Gbit/s", "-1Gbit/s", "0Gbit/s", "1e999Gbit/s", "nanGbit/s"]
)
def test_no_number_or_not_above_zero_is_an_error(text):
    with pytest.raises(ValueError, match="a bandwidth must be"):
        units.bandwidth(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("180ms", 0.18), ("30us", 3e-5), ("30 µs", 3e-5), ("1.5s", 1.5), ("2min", 120.0), ("0.5ns", 5e-10)],
)
def test_seconds(text, seconds):
    assert units.seconds(text) == pytest.approx(seconds, rel=1e-12)


def test_zero_seconds_only_where_allowed():
    assert units.seconds("0us", zero=True) == 0
    with pytest.raises(ValueError, match="above 0"):
        units.seconds("0us")


@pytest.mark.parametrize("text", ["30", "30 sec", "1h", "1MS"])
def test_unknown_time_unit_is_an_error(text):
    with pytest.raises(ValueError, match="a time must be in ns, us, ms, s or min"):
        units.seconds(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.25e9, "10 Gbit/s = 1.25 GB/s"),
        (12.5e6, "100 Mbit/s = 12.5 MB/s"),
        (125.0, "1 kbit/s = 125 B/s"),
        (2**30, "8.59 Gbit/s = 1.07 GB/s"),
    ],
)
def test_bandwidth_is_shown_in_bits_and_bytes(value, text):
    assert units.show_bandwidth(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.18, "180 ms"),
        (3e-5, "30 us"),
        (1.234567, "1.23 s"),
        (0.99999, "1 s"),
        (5e-10, "0.5 ns"),
        (724, "724 s"),
    ],
)
def test_seconds_are_shown(value, text):
    assert units.show_seconds(value) == text


@pytest.mark.parametrize("text", ["1e300Gbit/s", "2e15B/s", "1e308GB/s", "1e-300bit/s", "1e-16B/s", "1e-999B/s"])
def test_a_bandwidth_beyond_all_bounds_is_an_error(text):
    with pytest.raises(ValueError, match=r"a bandwidth must be (at (most|least)|above 0)") as raised:
        units.bandwidth(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("text", ["1e308s", "1e308min", "2e9s", "1e-300s", "1e-7ns"])
@pytest.mark.parametrize("zero", [True, False])
def test_a_time_beyond_all_bounds_is_an_error(text, zero):
    with pytest.raises(ValueError, match=r"a time must be (0, or )?at (most|least)") as raised:
        units.seconds(text, zero=zero)
    assert repr(text) in str(raised.value)


def test_the_bounds_themselves_are_allowed():
    assert units.bandwidth("1e15B/s") == units.MOST
    assert units.bandwidth("1e-15B/s") == 1 / units.MOST
    assert units.seconds("1e9s") == units.LONGEST_S
    assert units.seconds("0s", zero=True) == 0
