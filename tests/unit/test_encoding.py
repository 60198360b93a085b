"""What an `Encoding` accepts, and how it refuses the rest."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import hvd8bit
from hvd8bit.encoding import Encoding


def test_defaults():
    assert Encoding() == Encoding("dynamic_tree", 1024, "absmax", "nearest")
    assert Encoding().fixed_scale == 0


@pytest.mark.parametrize("block_size", [64, 128, 1024, 65536, None, np.int64(256)])
def test_block_sizes_that_are_fine(block_size):
    assert Encoding(block_size=block_size).block_size == block_size


@pytest.mark.parametrize("block_size", [0, -1, -64, 1, 63, 65, 1000, 65537, 65600, 2**31, 2**64, 2**64 + 1024])
def test_block_size_out_of_range(block_size):
    with pytest.raises(
        ValueError, match=rf"block_size must be a multiple of 64 in \[64, 65536\], or None, got {block_size}"
    ):
        Encoding(block_size=block_size)


@pytest.mark.parametrize("block_size", [1.5, 64.0, "x", "64", True, [64], np.float32(64)])
def test_block_size_of_another_type(block_size):
    with pytest.raises(
        TypeError, match=r"block_size must be a multiple of 64 in \[64, 65536\], or None, got .* of type"
    ):
        Encoding(block_size=block_size)


@pytest.mark.parametrize("block_size", [0, -1, 2**64, 1.5, "x"])
@pytest.mark.parametrize("where", [hvd8bit.EightBit, lambda **settings: hvd8bit.encode([1.0], **settings)])
def test_the_public_names_refuse_absurd_block_sizes_too(where, block_size):
    with pytest.raises((ValueError, TypeError), match="block_size must be a multiple of 64"):
        where(block_size=block_size)


@pytest.mark.parametrize(
    ("scaling", "data_type", "fixed_scale"),
    [
        (1.0, "linear", 1),
        (100, "static_tree", 100),
        (1e30, "linear", np.float32(1e30)),
        (1e-30, "linear", np.float32(1e-30)),
        (10.0, "mantissa", 150),
        (0.001, "dynamic_tree", np.float32(0.001)),
    ],
)
def test_powers_of_ten_as_scaling(scaling, data_type, fixed_scale):
    assert Encoding(data_type, scaling=scaling).fixed_scale == fixed_scale


@pytest.mark.parametrize("scaling", [0, -1.0, 2.0, 5, 99.999, 1e31, 1e-31, float("nan"), float("inf"), 10**400, 1 / 3])
def test_scaling_out_of_range(scaling):
    with pytest.raises(ValueError, match='scaling must be "absmax" or a power of ten within'):
        Encoding(scaling=scaling)


@pytest.mark.parametrize("scaling", ["absmin", "", "100", None, True, 1j, [10.0]])
def test_scaling_of_another_type(scaling):
    with pytest.raises(TypeError, match='scaling must be "absmax" or a power of ten within'):
        Encoding(scaling=scaling)


@pytest.mark.parametrize("rounding", ["up", "", None, "Stochastic"])
def test_rounding(rounding):
    with pytest.raises(ValueError, match="rounding must be one of nearest, stochastic, got"):
        Encoding(rounding=rounding)


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (2**63, ValueError), (1.5, TypeError), (True, TypeError), ("1", TypeError)]
)
def test_seed(seed, error):
    with pytest.raises(error, match=r"seed must be an integer in \[0, 2\^63\), or None, got"):
        Encoding(rounding="stochastic", seed=seed)
    assert Encoding(seed=np.int64(7)) == Encoding(seed=7)
    assert repr(Encoding(seed=np.int64(7))) == repr(Encoding(seed=7))


def test_data_type():
    with pytest.raises(
        ValueError, match="data_type must be one of dynamic_tree, static_tree, mantissa, linear, got 'int8'"
    ):
        Encoding("int8")


def test_settings_cannot_change_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Encoding().block_size = 64


def test_equality_and_hash_follow_the_settings():
    assert Encoding(scaling=10) == Encoding(scaling=10.0)
    assert hash(Encoding(scaling=10)) == hash(Encoding(scaling=10.0))
    assert Encoding(block_size=512) != Encoding(block_size=1024)
    assert len({Encoding(), Encoding("linear"), Encoding(block_size=None), Encoding(block_size=1024)}) == 3
