"""Who holds which part of a dimension: the one rule, for activations, error signals and weights."""

from __future__ import annotations


def part_sizes(total, parts: int) -> list:
    """How many of `total` places each of `parts` workers holds: nearly the same, the first ones one more.

    Args:
      total: an integer, or an int scalar tensor.
      parts: number of workers.

    Returns:
      A list of integers or of int scalars, by rank; their sum is `total`.
    """
    return [(total + parts - 1 - part) // parts for part in range(parts)]


def part_range(total: int, parts: int, part: int) -> tuple[int, int]:
    """The places that one worker holds: [start, stop)."""
    sizes = part_sizes(total, parts)
    start = sum(sizes[:part])
    return start, start + sizes[part]
