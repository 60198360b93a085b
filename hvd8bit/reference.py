"""Encode, reduce and decode in NumPy: slow and obvious, the oracle of every test.

The arithmetic that all back ends follow bit for bit (docs/wire-format.md says it in words):

* A number is rounded to float32 first (nearest, ties to even).
* A block's scale is the largest magnitude in it, or the fixed scale; NaN if the block holds a NaN or an Inf.
* y = |x| / scale, in float32, at most 1. The index is that of the codebook value nearest to y; in the middle the
  smaller one; of equal codebook values the first. The code is the index, with 0x80 for x < 0 unless it is 0.
* With stochastic rounding a y between two codebook values gets the upper one's index if random * (upper - lower) <
  y - lower, each in float32; random is a function of the seed and of the element's place in the row.
* A code decodes to codebook[index] * scale, in float32, with the sign.
* A sum adds decoded float32 values in the order of the workers and is encoded again; a fixed scale then
  counts once per worker, since it is the mean that it was chosen for.
* The last decoding takes float32(scale * factor / shards), computed in float64, as its scale.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from hvd8bit import datatypes, wire
from hvd8bit.encoding import Encoding
from hvd8bit.layout import ALIGNMENT, HEADER_BYTES, SCALE_BYTES, Layout

QUIET_NAN = np.array([0x7FC00000], np.uint32).view(np.float32)[0]


@functools.cache
def _search_tables(data_type: str) -> tuple[np.ndarray, np.ndarray]:
    """Distinct magnitudes' first indices, and the thresholds between them as float32.

    y belongs above threshold t if y > t. The middle between two values is rounded down to float32, which
    changes no comparison with a float32.
    """
    values, first = np.unique(datatypes.codebook(data_type), return_index=True)
    middles = (values[1:].astype(np.float64) + values[:-1].astype(np.float64)) / 2
    thresholds = middles.astype(np.float32)
    too_high = thresholds.astype(np.float64) > middles
    thresholds[too_high] = np.nextafter(thresholds[too_high], np.float32(0))
    return first.astype(np.uint8), thresholds


def encode_block(
    x: np.ndarray, encoding: Encoding, terms: int = 1, seed: int = 0, place: int = 0
) -> tuple[np.ndarray, np.float32]:
    """Codes and scale of one block.

    Args:
      x: float array [n].
      terms: how many workers' values the elements are sums of; only a fixed scale looks at it.
      seed: of stochastic rounding.
      place: of the first element in the row of all tensors.

    Returns:
      uint8 [n] and a float32.
    """
    with np.errstate(over="ignore", divide="ignore", under="ignore"):
        x = np.asarray(x).astype(np.float32)
        magnitude = np.abs(x)
        if not np.all(np.isfinite(magnitude)):
            return np.zeros(x.shape, np.uint8), QUIET_NAN
        scale = np.float32(encoding.fixed_scale) * np.float32(terms) or magnitude.max(initial=np.float32(0))
        if scale == 0:
            return np.zeros(x.shape, np.uint8), np.float32(0)
        y = np.minimum(magnitude / scale, np.float32(1))
    first, thresholds = _search_tables(encoding.data_type)
    if encoding.rounding == "stochastic":
        codes = _stochastic_indices(y, encoding.data_type, random_numbers(seed, place, y.size).reshape(y.shape))
    else:
        codes = first[np.searchsorted(thresholds, y, side="left")]
    return np.where((x < 0) & (codes > 0), codes | 0x80, codes).astype(np.uint8), scale


def _stochastic_indices(y: np.ndarray, data_type: str, random: np.ndarray) -> np.ndarray:
    """Indices of the codebook values at, below or above y."""
    values, first = np.unique(datatypes.codebook(data_type), return_index=True)
    low = np.searchsorted(values, y, side="right") - 1
    high = np.minimum(low + 1, len(values) - 1)
    up = random * (values[high] - values[low]) < y - values[low]
    return first[np.where(up, high, low)].astype(np.uint8)


def random_numbers(seed: int, place: int, count: int) -> np.ndarray:
    """float32 [count] in [0, 1), multiples of 2^-24: what stochastic rounding takes at `place` and after it.

    SplitMix64's finaliser of key + place * golden ratio, its upper 24 bits; the key is that of seed + golden ratio.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)

    def mix(z):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    places = np.arange(place, place + count, dtype=np.uint64)
    keys = mix(np.array([seed % 2**64], np.uint64) + golden)
    return (mix(keys + places * golden) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def decode_block(codes: np.ndarray, scale: np.float32, data_type: str) -> np.ndarray:
    """float32 [n] from uint8 codes [n] and their scale."""
    values = datatypes.codebook(data_type)[codes & 0x7F]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        decoded = values * np.float32(scale)
    return np.where((codes & 0x80 > 0) & (codes & 0x7F > 0), -decoded, decoded).astype(np.float32)


def encode_list(
    tensors: Sequence[np.ndarray], shards: int, encoding: Encoding, slices=1, slice_=0, seed=0
) -> list[bytes]:
    """One slice of every chunk of `tensors`."""
    layout = _layout(tensors, shards, encoding, slices)
    flat = [np.ascontiguousarray(tensor).reshape(-1) for tensor in tensors]
    return [
        _pack(
            layout,
            tensors,
            encoding,
            shard,
            slice_,
            lambda piece, lo, hi: encode_block(
                flat[piece.tensor][lo:hi], encoding, seed=seed, place=piece.row + lo - piece.start
            ),
        )
        for shard in range(shards)
    ]


def reduce_shards(
    chunks: Sequence[bytes], tensors: Sequence[np.ndarray], shard: int, encoding: Encoding, slices=1, slice_=0, seed=0
) -> bytes:
    """The encoded sum of all workers' slices of chunk `shard`, added in the order given."""
    layout = _layout(tensors, len(chunks), encoding, slices)
    blocks = [_unpack(layout, chunk, shard, slice_) for chunk in chunks]

    def encoded_sum(piece, lo, hi):
        with np.errstate(over="ignore", invalid="ignore"):
            codes_and_scales = [worker[piece.tensor, lo, hi] for worker in blocks]
            total = functools.reduce(
                np.add, [decode_block(codes, scale, encoding.data_type) for codes, scale in codes_and_scales]
            )
        place = piece.row + lo - piece.start
        return encode_block(total, encoding, terms=len(chunks), seed=seed, place=place)

    return _pack(layout, tensors, encoding, shard, slice_, encoded_sum)


def decode_list(
    slices_of_chunks: Sequence[Sequence[bytes]],
    tensors: Sequence[np.ndarray],
    encoding: Encoding,
    factor: float = 1.0,
    shards: int | None = None,
) -> list[np.ndarray]:
    """Arrays like `tensors` from `slices_of_chunks[slice][shard]`: the decoded sum times factor / shards."""
    count = len(slices_of_chunks[0])
    layout = _layout(tensors, count, encoding, len(slices_of_chunks))
    out = [np.zeros(tensor.size, tensor.dtype) for tensor in tensors]
    for slice_, chunks in enumerate(slices_of_chunks):
        for shard, chunk in enumerate(chunks):
            for (tensor, lo, hi), (codes, scale) in _unpack(layout, chunk, shard, slice_).items():
                with np.errstate(over="ignore"):
                    final = np.float32(np.float64(scale) * factor / (shards or count))
                    out[tensor][lo:hi] = decode_block(codes, final, encoding.data_type)
    return [flat.reshape(tensor.shape) for flat, tensor in zip(out, tensors)]


def _layout(tensors, shards, encoding, slices) -> Layout:
    return Layout([tensor.size for tensor in tensors], shards, encoding.block_size, slices)


def _blocks(layout: Layout, piece):
    size = layout.block_size or piece.stop - piece.start
    for index in range(piece.blocks):
        lo = piece.start + index * size
        yield piece.first_block + index, lo, min(lo + size, piece.stop)


def _pack(layout: Layout, tensors, encoding: Encoding, shard: int, slice_: int, encode) -> bytes:
    pieces = list(layout.pieces(shard, slice_))
    code_bytes = pieces[-1].codes_offset + pieces[-1].stop - pieces[-1].start if pieces else 0
    blocks = pieces[-1].first_block + pieces[-1].blocks if pieces else 0
    codes = np.zeros(-(-code_bytes // SCALE_BYTES) * SCALE_BYTES, np.uint8)
    scales = np.zeros(blocks, "<f4")
    for piece in pieces:
        for block, lo, hi in _blocks(layout, piece):
            at = piece.codes_offset + lo - piece.start
            codes[at : at + hi - lo], scales[block] = encode(piece, lo, hi)
    head = wire.header(
        encoding,
        [str(tensor.dtype) for tensor in tensors],
        [tensor.shape for tensor in tensors],
        shards=layout.shards,
        shard=shard,
        slices=layout.slices,
        slice_=slice_,
        elements=layout.elements,
        blocks=blocks,
        code_bytes=code_bytes,
    )
    return head + codes.tobytes() + scales.tobytes()


def _unpack(layout: Layout, chunk: bytes, shard: int, slice_: int) -> dict:
    """{(tensor, start, stop): (codes, scale)} of every block in a chunk."""
    raw = np.frombuffer(chunk, np.uint8)
    pieces = list(layout.pieces(shard, slice_))
    count = pieces[-1].first_block + pieces[-1].blocks if pieces else 0
    scales = raw[len(raw) - SCALE_BYTES * count :].view("<f4")
    codes = raw[HEADER_BYTES:]
    return {
        (piece.tensor, lo, hi): (codes[piece.codes_offset + lo - piece.start :][: hi - lo], scales[block])
        for piece in pieces
        for block, lo, hi in _blocks(layout, piece)
    }


assert HEADER_BYTES % ALIGNMENT == 0, "codes start aligned"
