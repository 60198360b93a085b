"""The layout's invariants for any list of tensors, and the same layout in C++."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from hvd8bit import ops
from hvd8bit.encoding import Encoding
from hvd8bit.layout import ALIGNMENT, HEADER_BYTES, Layout

BLOCK_SIZES = (64, 128, 192, 1024, None)

layouts = st.builds(
    Layout,
    sizes=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 700)), min_size=1, max_size=8),
    shards=st.integers(1, 12),
    block_size=st.sampled_from(BLOCK_SIZES),
    slices=st.integers(1, 6),
)


def blocks_of(layout: Layout, shard: int, slice_: int):
    """(tensor, start, stop, place of the first code, number of the scale) of each block."""
    for piece in layout.pieces(shard, slice_):
        size = layout.block_size or piece.stop - piece.start
        for index in range(piece.blocks):
            start = piece.start + index * size
            stop = min(start + size, piece.stop)
            yield piece.tensor, start, stop, piece.codes_offset + index * size, piece.first_block + index


def every_part(layout: Layout):
    return [(shard, slice_) for shard in range(layout.shards) for slice_ in range(layout.slices)]


@hypothesis.given(layouts)
def test_every_element_is_in_exactly_one_block(layout):
    seen = [np.zeros(size, int) for size in layout.sizes]
    for shard, slice_ in every_part(layout):
        for tensor, start, stop, _, _ in blocks_of(layout, shard, slice_):
            assert 0 <= start < stop <= layout.sizes[tensor]  # of one tensor, not empty
            seen[tensor][start:stop] += 1
    for counts in seen:
        assert np.all(counts == 1)


@hypothesis.given(layouts)
def test_slices_do_not_change_blocks(layout):
    whole = Layout(layout.sizes, layout.shards, layout.block_size)
    for shard in range(layout.shards):
        cut = [b[:3] for slice_ in range(layout.slices) for b in blocks_of(layout, shard, slice_)]
        assert cut == [b[:3] for b in blocks_of(whole, shard, 0)]


@hypothesis.given(layouts)
def test_blocks_are_full_but_for_the_last_of_a_tensors_part(layout):
    for shard in range(layout.shards):
        begin, end = layout.chunk_range(shard)
        blocks = [b[:3] for slice_ in range(layout.slices) for b in blocks_of(layout, shard, slice_)]
        origin = 0
        for tensor, size in enumerate(layout.sizes):
            # This tensor's part of the chunk, found here by walking the row.
            first, last = max(begin - origin, 0), min(end - origin, size)
            step = layout.block_size or max(last - first, 1)
            expected = [(tensor, start, min(start + step, last)) for start in range(first, last, step)]
            assert [b for b in blocks if b[0] == tensor] == expected
            origin += -(-size // ALIGNMENT) * ALIGNMENT


@hypothesis.given(layouts)
def test_codes_and_scales_lie_in_order_without_overlap_and_aligned(layout):
    for shard, slice_ in every_part(layout):
        end_of_codes = scales = 0
        for _, start, stop, codes, scale in blocks_of(layout, shard, slice_):
            assert codes % ALIGNMENT == 0
            assert end_of_codes <= codes < end_of_codes + ALIGNMENT
            assert scale == scales
            end_of_codes = codes + stop - start
            scales += 1
        aligned = -(-end_of_codes // 4) * 4
        assert layout.chunk_bytes(shard, slice_) == HEADER_BYTES + aligned + 4 * scales


@hypothesis.given(layouts)
def test_chunks_tile_the_row_evenly(layout):
    ranges = [layout.chunk_range(shard) for shard in range(layout.shards)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == sum(-(-size // ALIGNMENT) * ALIGNMENT for size in layout.sizes)
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:]))
    lengths = [end - begin for begin, end in ranges]
    assert all(length % ALIGNMENT == 0 for length in lengths)
    assert max(lengths) - min(lengths) <= ALIGNMENT


@hypothesis.settings(max_examples=150)
@hypothesis.given(layouts)
def test_the_ops_cut_the_same(layout):
    tensors = [tf.zeros([size]) for size in layout.sizes]
    for slice_ in range(layout.slices):
        _, splits = ops.encode_list(
            tensors,
            layout.shards,
            Encoding(block_size=layout.block_size),
            slices=layout.slices,
            slice_=slice_,
        )
        assert splits.numpy().tolist() == [layout.chunk_bytes(shard, slice_) for shard in range(layout.shards)]


def test_the_documented_example():
    layout = Layout([300, 1024, 5], 2, 1024)
    assert [layout.chunk_range(shard) for shard in range(2)] == [(0, 704), (704, 1408)]
    assert [(p.tensor, p.start, p.stop, p.codes_offset) for p in layout.pieces(0)] == [
        (0, 0, 300, 0),
        (1, 0, 384, 320),
    ]
    assert [(p.tensor, p.start, p.stop, p.codes_offset) for p in layout.pieces(1)] == [
        (1, 384, 1024, 0),
        (2, 0, 5, 640),
    ]
    assert layout.total_bytes() == 64 + 704 + 8 + 64 + 648 + 8
    assert layout.wire_bytes() == layout.total_bytes()  # N = 2: 2 · 1/2
    assert layout.elements == 1329


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_nothing_is_a_header_for_each_shard(sizes):
    layout = Layout(sizes, 3, 1024, slices=2)
    assert layout.total_bytes() == 3 * 2 * HEADER_BYTES


def test_more_workers_than_places():
    """One place of 64 elements among three workers: two chunks are empty."""
    layout = Layout([65], 3, 64)
    assert sorted(layout.chunk_bytes(shard) - HEADER_BYTES for shard in range(3)) == [0, 4 + 4, 64 + 4]


def test_a_list_beyond_32_bits():
    layout = Layout([2**33, 2**33 + 1], 5, 65536, slices=7)
    parts = [b[:3] for shard in range(5) for b in _first_and_last(layout, shard)]
    assert parts[0] == (0, 0, 65536)
    tensor, start, stop = parts[-1]
    assert (tensor, stop) == (1, 2**33 + 1)
    assert 0 < stop - start <= 65536


def _first_and_last(layout, shard):
    for slice_ in (0, layout.slices - 1):
        pieces = list(layout.pieces(shard, slice_))
        for piece in (pieces[0], pieces[-1]):
            last = piece.start + (piece.blocks - 1) * layout.block_size
            for start in (piece.start, last):
                yield piece.tensor, start, min(start + layout.block_size, piece.stop)
