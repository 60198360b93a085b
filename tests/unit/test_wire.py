"""The chunk's bytes against docs/wire-format.md: offsets written down anew, and a chunk kept for good."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import tensorflow as tf

from hvd8bit import layout, ops, reference, wire
from hvd8bit.encoding import Encoding

FIELDS = {
    "magic": (0, "4s"),
    "version": (4, "H"),
    "data_type": (6, "B"),
    "rounding": (7, "B"),
    "block_size": (8, "I"),
    "shards": (12, "I"),
    "shard": (16, "I"),
    "slice": (20, "H"),
    "slices": (22, "H"),
    "elements": (24, "Q"),
    "tensors": (32, "I"),
    "blocks": (36, "I"),
    "code_bytes": (40, "Q"),
    "layout_hash": (48, "Q"),
    "settings_hash": (56, "Q"),
}
"""Field -> offset and format: the table of docs/wire-format.md."""


def read_header(chunk: bytes) -> dict:
    return {name: struct.unpack_from("<" + form, chunk, offset)[0] for name, (offset, form) in FIELDS.items()}


def both(tensors, shards, encoding, **part):
    """One slice of all chunks, by the reference; the op must agree."""
    chunks = reference.encode_list(tensors, shards, encoding, *part.values())
    payload, _ = ops.encode_list([tf.constant(t) for t in tensors], shards, encoding, **part)
    assert payload.numpy().tobytes() == b"".join(chunks)
    return chunks


def test_the_fields_fill_the_header():
    end = 0
    for offset, form in FIELDS.values():
        assert offset == end
        end = offset + struct.calcsize("<" + form)
    assert end == layout.HEADER_BYTES == 64


def test_header_of_the_documented_example():
    """The figure of docs/wire-format.md: 300, 1024 and 5 elements for two workers."""
    tensors = [np.ones((3, 100), np.float32), np.ones(1024, np.float16), np.ones(5, np.float64)]
    encoding = Encoding("mantissa", 192, scaling=10.0)
    first, second = both(tensors, 2, encoding)
    assert read_header(first) == {
        "magic": b"H8BT",
        "version": 1,
        "data_type": 3,
        "rounding": 0,
        "block_size": 192,
        "shards": 2,
        "shard": 0,
        "slice": 0,
        "slices": 1,
        "elements": 1329,
        "tensors": 3,
        "blocks": 4,  # 192 + 108 of the first tensor, 2 · 192 of the second
        "code_bytes": 704,
        "layout_hash": wire.fnv1a([2, 1, 3, 1, 2, 3, 100, 3, 1, 1024, 2, 1, 5]),
        "settings_hash": wire.fnv1a([3, 192, struct.unpack("<I", struct.pack("<f", 150))[0], 0]),
    }
    assert read_header(second)["blocks"] == 5  # 3 · 192 + 64, and 5 of the last tensor
    assert read_header(second)["code_bytes"] == 1349 - 704
    assert len(first) == 64 + 704 + 4 * 4
    assert len(second) == 64 + 648 + 5 * 4  # 645 codes and 3 zeros


def test_padding_is_zero():
    tensors = [np.ones(300, np.float32), np.ones(1024, np.float32), np.ones(5, np.float32)]
    first, second = both(tensors, 2, Encoding())
    assert set(first[64 + 300 : 64 + 320]) == {0}
    assert set(first[64 : 64 + 300] + first[64 + 320 : 64 + 704]) == {127}
    assert second[64 + 645 : 64 + 648] == bytes(3)


def test_a_block_size_of_none_is_0_on_the_wire():
    (chunk,) = both([np.ones(100_000, np.float32)], 1, Encoding(block_size=None))
    assert read_header(chunk)["block_size"] == 0
    assert read_header(chunk)["blocks"] == 1


def test_slices_hold_whole_blocks():
    tensors = [np.arange(64 * 5, dtype=np.float32)]
    parts = [both(tensors, 1, Encoding(block_size=64), slices=2, slice_=k)[0] for k in range(2)]
    assert [read_header(part)["blocks"] for part in parts] == [2, 3]
    assert [read_header(part)["slice"] for part in parts] == [0, 1]
    whole = both(tensors, 1, Encoding(block_size=64))[0]
    assert parts[0][64:192] + parts[1][64:256] == whole[64 : 64 + 320]
    assert parts[0][192:] + parts[1][256:] == whole[64 + 320 :]


def test_fnv1a_by_its_definition():
    assert wire.fnv1a([]) == 0xCBF29CE484222325
    words = [int.from_bytes(b"eight by", "little"), int.from_bytes(b"tes each", "little")]
    value = 0xCBF29CE484222325
    for byte in b"eight bytes each":
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    assert wire.fnv1a(words) == value


@pytest.mark.parametrize(
    "change",
    [
        {"dtypes": ["float32", "float16"]},
        {"shapes": [[2, 3], [8]]},
        {"shapes": [[3, 2], [7]]},
        {"shapes": [[6], [7]]},
        {"shapes": [[2, 3, 1], [7]]},
        {"shards": 3},
        {"slices": 2},
    ],
)
def test_layout_hash_tells_lists_apart(change):
    base = {"dtypes": ["float32", "float32"], "shapes": [[2, 3], [7]], "shards": 2, "slices": 1}
    assert wire.layout_hash(**base) != wire.layout_hash(**{**base, **change})


def test_settings_hash_tells_settings_apart():
    hashes = {
        wire.settings_hash(Encoding(*settings))
        for settings in [
            ("dynamic_tree",),
            ("linear",),
            ("linear", 512),
            ("linear", None),
            ("linear", 512, 1.0),
            ("linear", 512, 10.0),
        ]
    }
    assert len(hashes) == 6


GOLDEN = (
    "483842540100010000040000010000000000000000000100050000000000000002000000020000004100000000000000"
    "e32339525699e2a1b86e84ecec8117234ce17f0000000000000000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000000000000000000000000000000ff0000000000004082a8fb37"
)


def test_a_chunk_kept_for_good():
    """A change of this text is a new format: raise wire.VERSION and kFormatVersion."""
    tensors = [np.array([[0.5, -1, 2, 0]], np.float32), np.array(-3e-5, np.float64)]
    (chunk,) = both(tensors, 1, Encoding())
    assert chunk.hex() == GOLDEN
