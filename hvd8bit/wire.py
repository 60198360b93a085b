"""The chunk header: 64 bytes that say what a chunk holds. The Python side of the format's bookkeeping.

docs/wire-format.md describes the fields; `tf_ops/codec/format.h` is the same in C++.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hvd8bit import datatypes
from hvd8bit.encoding import ROUNDINGS, Encoding

MAGIC = b"H8BT"
VERSION = 1
DTYPE_IDS = {"float32": 1, "float64": 2, "float16": 3, "bfloat16": 4}
"""What tells the dtypes of tensors apart in the layout's hash."""

_HEADER = struct.Struct("<4sHBBIIIHHQIIQQQ")
ELEMENTS_OFFSET = struct.calcsize("<4sHBBIIIHH")
"""Where the header tells the number of elements: an int64."""


def settings_hash(encoding: Encoding) -> int:
    """64-bit hash of the settings that must be the same on all workers."""
    (scale_bits,) = struct.unpack("<I", struct.pack("<f", encoding.fixed_scale))
    return fnv1a(
        [
            datatypes.data_type_id(encoding.data_type),
            encoding.block_size or 0,
            scale_bits,
            ROUNDINGS.index(encoding.rounding),
        ]
    )


def layout_hash(dtypes: Sequence[str], shapes: Sequence[Sequence[int]], shards: int, slices: int) -> int:
    """64-bit hash of the list of tensors (dtypes and shapes) and how it is cut."""
    words = [shards, slices, len(shapes)]
    for dtype, shape in zip(dtypes, shapes):
        words += [DTYPE_IDS[dtype], len(shape), *shape]
    return fnv1a(words)


def fnv1a(words: Sequence[int]) -> int:
    """FNV-1a over unsigned 64-bit little-endian words."""
    value = 0xCBF29CE484222325
    for word in words:
        for byte in struct.pack("<Q", word):
            value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def header(
    encoding: Encoding,
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    *,
    shards: int,
    shard: int,
    slices: int,
    slice_: int,
    elements: int,
    blocks: int,
    code_bytes: int,
) -> bytes:
    """The 64 bytes in front of one slice of one chunk."""
    return _HEADER.pack(
        MAGIC,
        VERSION,
        datatypes.data_type_id(encoding.data_type),
        ROUNDINGS.index(encoding.rounding),
        encoding.block_size or 0,
        shards,
        shard,
        slice_,
        slices,
        elements,
        len(shapes),
        blocks,
        code_bytes,
        layout_hash(dtypes, shapes, shards, slices),
        settings_hash(encoding),
    )
