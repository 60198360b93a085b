"""The packed layout: which block of which tensor lies where in which chunk. The wire format's geometry.

docs/wire-format.md describes it; `tf_ops/codec/layout.*` is the same in C++, and the unit tests compare both.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

ALIGNMENT = 64
"""Tensors and chunks start on multiples of this many elements."""
HEADER_BYTES = 64
SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive whole blocks of one tensor in a chunk.

    Attributes:
      tensor: position of the tensor in the list.
      start, stop: elements of the (flattened) tensor.
      codes_offset: where the codes start, in bytes from the chunk's first code.
      first_block: number of the first block, counted from the chunk's first block.
      blocks: how many blocks; the last one may be short.
      row: place of the first element in the row of all tensors.
    """

    tensor: int
    start: int
    stop: int
    codes_offset: int
    first_block: int
    blocks: int
    row: int


class Layout:
    """Where the elements of a list of tensors lie in the chunks that the workers exchange.

    The tensors stand one after another in a row, each starting on a multiple of 64 elements. The row is cut
    into `shards` chunks of nearly the same size on multiples of 64; worker i reduces chunk i. A block has
    `block_size` elements and ends early at its tensor's or chunk's end. A chunk travels in `slices` parts
    that hold whole blocks, so the number of slices does not change any block.

    Args:
      sizes: elements of each tensor.
      shards: number of chunks, N.
      block_size: elements of a block, or None: a tensor's whole part of a chunk is one block.
      slices: parts of each chunk that travel one by one.
    """

    def __init__(self, sizes: Sequence[int], shards: int, block_size: int | None, slices: int = 1):
        self.sizes = tuple(int(size) for size in sizes)
        self.shards = shards
        self.block_size = block_size
        self.slices = slices
        padded = (_round_up(size, ALIGNMENT) for size in self.sizes)
        self._starts = [0, *itertools.accumulate(padded)]

    @property
    def elements(self) -> int:
        return sum(self.sizes)

    def chunk_range(self, shard: int) -> tuple[int, int]:
        """The chunk's place in the row of all tensors: [start, stop)."""
        units = self._starts[-1] // ALIGNMENT
        return (
            ALIGNMENT * (units * shard // self.shards),
            ALIGNMENT * (units * (shard + 1) // self.shards),
        )

    def pieces(self, shard: int, slice_: int = 0) -> Iterator[Piece]:
        """The pieces of one slice of one chunk, in order."""
        parts = list(self._parts(shard))
        blocks = sum(self._blocks(stop - start) for _, start, stop in parts)
        first, last = blocks * slice_ // self.slices, blocks * (slice_ + 1) // self.slices
        block = 0
        origin = None
        for tensor, start, stop in parts:
            count = self._blocks(stop - start)
            lo, hi = max(first, block) - block, min(last, block + count) - block
            if lo < hi:
                size = self.block_size or stop - start
                begin, end = start + lo * size, min(start + hi * size, stop)
                row = self._starts[tensor] + begin
                origin = row if origin is None else origin
                yield Piece(tensor, begin, end, row - origin, block + lo - first, hi - lo, row)
            block += count

    def chunk_bytes(self, shard: int, slice_: int = 0) -> int:
        """Size of one slice of one chunk on the wire, header included."""
        codes = blocks = 0
        for piece in self.pieces(shard, slice_):
            codes = piece.codes_offset + piece.stop - piece.start
            blocks = piece.first_block + piece.blocks
        return HEADER_BYTES + _round_up(codes, SCALE_BYTES) + SCALE_BYTES * blocks

    def total_bytes(self) -> int:
        """Size of all chunks and slices together: what one worker's encoded list takes."""
        return sum(self.chunk_bytes(k, s) for k in range(self.shards) for s in range(self.slices))

    def wire_bytes(self) -> float:
        """What each of the `shards` workers sends in one exchange: mean over the workers, own share excluded."""
        return 2 * (self.shards - 1) / self.shards * self.total_bytes()

    def _parts(self, shard: int) -> Iterator[tuple[int, int, int]]:
        """Each tensor's part of a chunk: tensor, first and last+1 element."""
        begin, end = self.chunk_range(shard)
        tensor = max(bisect.bisect_right(self._starts, begin) - 1, 0)
        while tensor < len(self.sizes) and self._starts[tensor] < end:
            origin = self._starts[tensor]
            start, stop = max(begin - origin, 0), min(end - origin, self.sizes[tensor])
            if start < stop:
                yield tensor, start, stop
            tensor += 1

    def _blocks(self, elements: int) -> int:
        return 1 if self.block_size is None else -(-elements // self.block_size)


def ring_bytes(elements: int, workers: int, element_bytes: int = 4) -> float:
    """What each worker sends in a ring allreduce of uncompressed numbers."""
    return 2 * (workers - 1) / workers * elements * element_bytes


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
