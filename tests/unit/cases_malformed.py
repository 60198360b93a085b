"""Run by test_malformed.py: whatever arrives, an InvalidArgumentError or what the reference gives."""

from __future__ import annotations

import functools
import struct

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from codec_cases import assert_same_bytes, to_tensor
from codec_inputs import DTYPES, assert_same_numbers
from hypothesis import strategies as st
from test_wire import FIELDS

from hvd8bit import ops, reference
from hvd8bit.encoding import Encoding
from hvd8bit.layout import HEADER_BYTES, Layout

SHARDS = 3
ENCODING = Encoding("linear", 64)
_rng = np.random.default_rng(21)
TENSORS = [_rng.standard_normal(70).astype(np.float32), _rng.standard_normal((5, 13)).astype(np.float16)]
OTHERS = [tensor * 3 for tensor in TENSORS]


def sent_to(shard: int, workers=(TENSORS, OTHERS, TENSORS), encoding=ENCODING, **part) -> list[bytes]:
    """What the workers sent for one chunk."""
    return [reference.encode_list(tensors, SHARDS, encoding, *part.values())[shard] for tensors in workers]


def reduced_chunks() -> list[bytes]:
    return [reference.reduce_shards(sent_to(shard), TENSORS, shard, ENCODING) for shard in range(SHARDS)]


def reduce(payload: bytes, splits, shard=0, like=TENSORS, shards=SHARDS, encoding=ENCODING, **part):
    return ops.reduce_shards(to_tensor([payload]), splits, like, shards, shard, encoding, **part)


def decode(*payloads: bytes, like=TENSORS, shards=SHARDS, encoding=ENCODING):
    return ops.decode_list([to_tensor([payload]) for payload in payloads], like, shards, encoding)


def refused(run, *args, match=None, **settings) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=match):
        run(*args, **settings)


def test_the_payloads_are_good_to_begin_with():
    chunks = sent_to(1)
    assert_same_bytes(reduce(b"".join(chunks), [len(c) for c in chunks], 1), reduced_chunks()[1], "reduce")
    decode(b"".join(reduced_chunks()))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_truncated_at_every_length(shard):
    chunks = sent_to(shard)
    whole, lengths = b"".join(chunks), [len(c) for c in chunks]
    for length in range(len(whole)):
        refused(reduce, whole[:length], lengths, shard)  # the splits promise more than there is
        # Splits that fit what there is.
        left, honest = length, []
        for size in lengths:
            honest.append(min(size, left))
            left -= honest[-1]
        refused(
            reduce,
            whole[:length],
            honest,
            shard,
            match="chunk from worker .* is truncated|truncated or oversized",
        )


def test_decode_truncated_at_every_length():
    whole = b"".join(reduced_chunks())
    for length in range(len(whole)):
        refused(decode, whole[:length])


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 4, b"\0" * 64, b"H8BT" + b"\0" * 60, bytes(range(256)) * 20])
def test_oversized(extra):
    chunks = sent_to(0)
    lengths = [len(c) for c in chunks]
    refused(reduce, b"".join(chunks) + extra, lengths, match="oversized")
    refused(
        reduce,
        b"".join(chunks) + extra,
        [*lengths[:2], lengths[2] + len(extra)],
        match="worker 2 .* oversized",
    )
    refused(
        reduce,
        chunks[0] + extra + chunks[1] + chunks[2],
        [lengths[0] + len(extra), *lengths[1:]],
        match="worker 0",
    )
    whole = b"".join(reduced_chunks())
    refused(decode, whole + extra, match="oversized")
    refused(decode, extra + whole)


@pytest.mark.parametrize(
    "splits",
    [[], [1], [1, 1], [0, 0, 0], [-1, 0, 0], [2**31 - 1] * 3, [-(2**31)] * 3, [64, 64, 64], [0, 0, 10**6]],
    ids=str,
)
def test_splits_that_lie(splits):
    whole = b"".join(sent_to(0))
    refused(reduce, whole, splits)


def test_splits_that_lie_in_plausible_ways():
    chunks = sent_to(0)
    whole, lengths = b"".join(chunks), [len(c) for c in chunks]
    total = len(whole)
    refused(reduce, whole, [*lengths, 0], match="chunks of 4 workers were received where 3 were expected")
    refused(reduce, whole, lengths[:2], match="chunks of 2 workers were received where 3 were expected")
    refused(reduce, whole, [total, 0, 0], match="worker 0 is truncated or oversized")
    refused(reduce, whole, [0, total, 0], match="worker 0 is truncated: 0 bytes")
    refused(reduce, whole, [lengths[0] + 4, lengths[1] - 4, lengths[2]])
    refused(reduce, whole, [lengths[0], lengths[1], lengths[2] - 4])
    refused(reduce, whole, [lengths[0], lengths[1], lengths[2] + 4], match="the payload is truncated")
    refused(reduce, whole, [total, -lengths[1], lengths[1]])


MESSAGES = {
    "magic": "is no hvd8bit chunk: its first four bytes are not 'H8BT'",
    "version": r"has format version \d+, this worker reads version 1; install the same hvd8bit",
    "data_type": "was encoded with other settings: data_type=",
    "rounding": "was encoded with other settings",
    "block_size": "was encoded with other settings: data_type=linear, block_size=",
    "settings_hash": "was encoded with other settings",
    "shards": r"was cut for \d+ workers, this worker counts 3",
    "shard": r"is part 0 of shard \d+ where part 0 of shard 0 was expected",
    "slice": r"is part \d+ of shard 0 where part 0 of shard 0 was expected",
    "slices": "holds other tensors",
    "elements": r"holds other tensors: \d+ elements in 2 tensor\(s\), this worker has 135 elements in 2: ",
    "tensors": r"holds other tensors: 135 elements in \d+ tensor\(s\), .*float32\[70\], float16\[5,13\]",
    "layout_hash": "holds other tensors",
    "blocks": "is truncated or oversized",
    "code_bytes": "is truncated or oversized",
}


@pytest.mark.parametrize("field", FIELDS)
def test_every_header_field_corrupted(field):
    offset, form = FIELDS[field]
    size = struct.calcsize(form)

    def damaged(chunk):
        good = chunk[offset : offset + size]
        flips = [
            bytes([b ^ (flip if i == at else 0) for i, b in enumerate(good)]) for at in range(size) for flip in (1, 128)
        ]
        for bad in {*flips, bytes(size), b"\xff" * size} - {good}:
            yield chunk[:offset] + bad + chunk[offset + size :]

    first, second, third = sent_to(0)
    for bad in damaged(second):
        match = "the chunk from worker 1 " + MESSAGES[field]
        refused(reduce, first + bad + third, [len(first), len(bad), len(third)], match=match)
    first, second, third = reduced_chunks()
    for bad in damaged(third):
        refused(decode, first + second + bad, match="the chunk from worker 2 ")


def test_every_single_bit_of_the_header_counts():
    reduced = reduced_chunks()
    for shard in range(SHARDS):
        for bit in range(8 * HEADER_BYTES):
            corrupt = bytearray(reduced[shard])
            corrupt[bit // 8] ^= 1 << bit % 8
            refused(decode, b"".join([*reduced[:shard], bytes(corrupt), *reduced[shard + 1 :]]))


OTHER_ENCODINGS = [
    Encoding("dynamic_tree", 64),
    Encoding("linear", 128),
    Encoding("linear", None),
    Encoding("linear", 64, 1.0),
    Encoding("linear", 64, 10.0),
]


@pytest.mark.parametrize("other", OTHER_ENCODINGS, ids=str)
def test_a_worker_with_other_settings(other):
    chunks = [sent_to(0)[0], sent_to(0, encoding=other)[1], sent_to(0)[2]]
    match = "chunk from worker 1 was encoded with other settings: data_type=.* this worker uses data_type=linear"
    refused(reduce, b"".join(chunks), [len(c) for c in chunks], match=match)
    refused(decode, b"".join(reduced_chunks()), encoding=other, match="was encoded with other settings")


OTHER_LISTS = {
    "shape": [TENSORS[0].reshape(7, 10), TENSORS[1]],
    "dtype": [TENSORS[0], TENSORS[1].astype(np.float32)],
    "order": [TENSORS[1], TENSORS[0]],
    "one more": [*TENSORS, TENSORS[0]],
    "one less": TENSORS[:1],
    "an empty one more": [*TENSORS, np.zeros(0, np.float32)],
    "longer": [np.resize(TENSORS[0], 71), TENSORS[1]],
}


@pytest.mark.parametrize("case", OTHER_LISTS)
def test_a_worker_with_other_tensors(case):
    other = OTHER_LISTS[case]
    chunks = sent_to(0, workers=(TENSORS, TENSORS, other))
    match = r"the chunk from worker 2 holds other tensors: .* this worker has 135 elements in 2: float32\[70\]"
    refused(reduce, b"".join(chunks), [len(c) for c in chunks], match=match)
    refused(decode, b"".join(reduced_chunks()), like=other)


def test_chunks_in_another_order_or_of_another_slice():
    reduced = reduced_chunks()
    refused(
        decode,
        reduced[1] + reduced[0] + reduced[2],
        match="part 0 of shard 1 where part 0 of shard 0 was expected",
    )
    chunks = sent_to(1)
    refused(
        reduce,
        b"".join(chunks),
        [len(c) for c in chunks],
        0,
        match="of shard 1 where part 0 of shard 0 was expected",
    )
    parts = [sent_to(0, slices=2, slice_=k) for k in range(2)]
    lengths = [[len(c) for c in part] for part in parts]
    reduce(b"".join(parts[1]), lengths[1], slices=2, slice_=1)
    refused(reduce, b"".join(parts[1]), lengths[1], slices=2, slice_=0)
    refused(reduce, b"".join(parts[0]), lengths[0], slices=1, slice_=0, match="holds other tensors")
    whole = [b"".join(reference.encode_list(TENSORS, SHARDS, ENCODING, 2, k)) for k in range(2)]
    decode(*whole)
    refused(decode, whole[1], whole[0])
    refused(decode, whole[0], whole[0])
    refused(decode, whole[0])


def test_another_number_of_workers():
    reduced = reduced_chunks()
    for shards in (1, 2, 4, 1000, 2**20):
        refused(decode, b"".join(reduced), shards=shards, match="was cut for 3 workers|is truncated")
    chunks = sent_to(0)
    refused(reduce, b"".join(chunks[:2]), [len(c) for c in chunks[:2]], shards=2, match="was cut for 3 workers")


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.binary(max_size=900), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5))
def test_random_bytes(payload, splits):
    refused(reduce, payload, tf.constant(splits, tf.int32))
    refused(decode, payload)


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    edits=st.lists(
        st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255)),
        min_size=1,
        max_size=4,
        unique_by=lambda e: e[0],
    ),
    worker=st.integers(0, SHARDS - 1),
)
def test_random_damage_to_a_header(edits, worker):
    chunks, reduced = sent_to(0), reduced_chunks()
    for list_ in (chunks, reduced):
        damaged = bytearray(list_[worker])
        for at, flip in edits:
            damaged[at] ^= flip
        list_[worker] = bytes(damaged)
    refused(reduce, b"".join(chunks), [len(c) for c in chunks])
    refused(decode, b"".join(reduced))


@hypothesis.settings(max_examples=150)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([64, 1024, None]), st.sampled_from(["absmax", 1.0]))
def test_any_codes_and_scales_decode_as_the_reference_says(seed, block_size, scaling):
    """Behind an intact header any bits may come: codes that are never written; negative, NaN, Inf scales."""
    rng = np.random.default_rng(seed)
    encoding = Encoding("mantissa", block_size, scaling)
    like = [np.zeros(size, dtype) for size, dtype in zip((300, 0, 65, 1), DTYPES.values())]
    layout = Layout([t.size for t in like], SHARDS, block_size)

    def noise(shard):
        header = reference.encode_list(like, SHARDS, encoding)[shard][:HEADER_BYTES]
        body = rng.integers(0, 256, layout.chunk_bytes(shard) - HEADER_BYTES, np.uint8)
        if seed % 3 == 0:  # scales of a usual size, mostly
            scales = layout.chunk_bytes(shard) - HEADER_BYTES - 4 * sum(p.blocks for p in layout.pieces(shard))
            body[scales:].view(np.float32)[:] = rng.choice(
                [-2, 1e-44, 3, 1e38, np.inf, np.nan, 0], len(body[scales:]) // 4
            )
        return header + body.tobytes()

    for shard in range(SHARDS):
        chunks = [noise(shard) for _ in range(SHARDS)]
        got = reduce(b"".join(chunks), [len(c) for c in chunks], shard, like, encoding=encoding)
        assert_same_bytes(got, reference.reduce_shards(chunks, like, shard, encoding), "reduce_shards")
    chunks = [noise(shard) for shard in range(SHARDS)]
    for got, expected in zip(
        decode(b"".join(chunks), like=like, encoding=encoding),
        reference.decode_list([chunks], like, encoding),
    ):
        assert_same_numbers(got.numpy(), expected, "decode_list")


SHARDS_OUT_OF_RANGE = (0, -1, -5, -(2**31), 2**20 + 1, 2**31 - 1)


@pytest.mark.parametrize("how", ["eager", "constant in a graph", "input of a graph"])
@pytest.mark.parametrize("shards", SHARDS_OUT_OF_RANGE)
def test_shards_out_of_range(shards, how):
    """A constant is seen by the shape functions, too: no dimension may be made of it."""
    chunk = tf.constant(np.frombuffer(reduced_chunks()[0], np.uint8))
    calls = [
        lambda shards: ops.encode_list(TENSORS, shards, ENCODING)[0],
        lambda shards: ops.reduce_shards(chunk, [len(chunk)], TENSORS, shards, 0, ENCODING),
        lambda shards: ops.sum_shards(chunk, [len(chunk)], TENSORS, shards, 0, ENCODING)[0],
        lambda shards: ops.decode_list([chunk], TENSORS, shards, ENCODING)[0],
    ]
    for call in calls:
        if how == "constant in a graph":
            run = functools.partial(tf.function(lambda call=call: call(shards), autograph=False))
        else:
            call = tf.function(call, autograph=False) if how == "input of a graph" else call
            run = functools.partial(call, tf.constant(shards))
        refused(run, match=r"shards must be a scalar in \[1, 1048576\], got")
