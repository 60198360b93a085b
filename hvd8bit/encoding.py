"""What an encoding consists of: data type, block size, scaling, rounding; checked, with the defaults."""

from __future__ import annotations

import dataclasses
import math
import numbers

from hvd8bit import datatypes

MIN_BLOCK_SIZE = 64
MAX_BLOCK_SIZE = 65536
BLOCK_SIZE_STEP = 64
ROUNDINGS = ("nearest", "stochastic")


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How numbers become 8-bit codes. Must be the same on all workers; it travels in every chunk header.

    Attributes:
      data_type: one of `hvd8bit.datatypes.DATA_TYPES`.
      block_size: how many consecutive elements share a scale: a multiple of 64 in [64, 65536], or None for
        the paper's own scaling, one scale for each tensor's part of a chunk.
      scaling: "absmax" scales a block by its absolute maximum. A power of ten, e.g. `100.0`, is the paper's
        exponent offset: a fixed scale; larger values saturate.
      rounding: "nearest"; in the middle between two code values the smaller magnitude is taken. Or "stochastic":
        to the code value below or above, at random, so that the mean is the number; larger errors, but no bias.
      seed: of stochastic rounding, an integer in [0, 2^63): what is drawn at random follows from it
        (`hvd8bit.dither`). None: from TensorFlow's generator. Not for "nearest".

    Raises:
      ValueError or TypeError: an argument is outside the above; the message names it.
    """

    data_type: str = "dynamic_tree"
    block_size: int | None = 1024
    scaling: str | float = "absmax"
    rounding: str = "nearest"
    seed: int | None = None

    def __post_init__(self):
        datatypes.data_type_id(self.data_type)
        _check_block_size(self.block_size)
        _check_scaling(self.scaling, self.data_type)
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {self.rounding!r}")
        _check_seed(self.seed)
        # Equal settings look equal, too: workers compare them as text.
        if self.block_size is not None:
            object.__setattr__(self, "block_size", int(self.block_size))
        if self.scaling != "absmax":
            object.__setattr__(self, "scaling", float(self.scaling))
        if self.seed is not None:
            object.__setattr__(self, "seed", int(self.seed))

    @property
    def fixed_scale(self) -> float:
        """The float32 scale of every block, or 0.0 where each block has its own (absmax)."""
        if self.scaling == "absmax":
            return 0.0
        return datatypes.offset_scale(self.data_type, float(self.scaling))


def _check_block_size(block_size) -> None:
    if block_size is None:
        return
    rule = f"block_size must be a multiple of {BLOCK_SIZE_STEP} in [{MIN_BLOCK_SIZE}, {MAX_BLOCK_SIZE}], or None"
    if isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral):
        raise TypeError(f"{rule}, got {block_size!r} of type {type(block_size).__name__}")
    if not MIN_BLOCK_SIZE <= int(block_size) <= MAX_BLOCK_SIZE or int(block_size) % BLOCK_SIZE_STEP:
        raise ValueError(f"{rule}, got {block_size}")


def _check_scaling(scaling, data_type: str) -> None:
    if isinstance(scaling, str) and scaling == "absmax":
        return
    rule = 'scaling must be "absmax" or a power of ten within [1e-30, 1e30], the paper\'s exponent offset'
    if isinstance(scaling, (str, bool)) or not isinstance(scaling, numbers.Real):
        raise TypeError(f"{rule}, got {scaling!r}")
    try:
        value = float(scaling)
    except OverflowError:  # an integer beyond float's range
        value = math.inf
    exponent = round(math.log10(value)) if 0 < value < math.inf else None
    if exponent is None or abs(exponent) > 30 or value != float(f"1e{exponent}"):
        raise ValueError(f"{rule}, got {scaling!r}")


def _check_seed(seed) -> None:
    rule = "seed must be an integer in [0, 2^63), or None"
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"{rule}, got {seed!r}")
    if not 0 <= int(seed) < 2**63:
        raise ValueError(f"{rule}, got {seed}")
