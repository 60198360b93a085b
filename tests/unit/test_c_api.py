"""Every CPU back end that this machine runs against the reference, bit for bit, through the C ABI."""

from __future__ import annotations

import re

import numpy as np
import pytest
from codec_inputs import BLOCK_SIZES, DTYPES, INPUTS, SCALINGS, as_dtype, assert_same_numbers, million

from hvd8bit import c_api, native, reference
from hvd8bit.datatypes import DATA_TYPES
from hvd8bit.encoding import ROUNDINGS, Encoding

BACKENDS = native.runnable_backends()


def reference_blocks(values: np.ndarray, encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
    size = encoding.block_size or max(values.size, 1)
    blocks = [reference.encode_block(values[i : i + size], encoding) for i in range(0, values.size, size)]
    codes = np.concatenate([codes for codes, _ in blocks]) if blocks else np.zeros(0, np.uint8)
    return codes, np.array([scale for _, scale in blocks], np.float32)


def decoded(codes: np.ndarray, scales: np.ndarray, encoding: Encoding) -> np.ndarray:
    size = encoding.block_size or max(codes.size, 1)
    parts = [
        reference.decode_block(codes[i * size : (i + 1) * size], scale, encoding.data_type)
        for i, scale in enumerate(scales)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def assert_matches(backend: str, values: np.ndarray, encoding: Encoding) -> None:
    codes, scales = c_api.encode(backend, values, encoding)
    right_codes, right_scales = reference_blocks(values, encoding)
    np.testing.assert_array_equal(codes, right_codes)
    np.testing.assert_array_equal(scales.view(np.uint32), right_scales.view(np.uint32))
    numbers = decoded(codes, scales, encoding)
    with np.errstate(over="ignore"):
        expected = numbers.astype(values.dtype)
    for stream in (False, True):
        got = c_api.decode(backend, codes, scales, encoding, values.dtype, stream)
        assert_same_numbers(got, expected, f"{backend}, stream={stream}, {encoding}")
    total, total_scales = c_api.sum_and_encode(backend, [(codes, scales)] * 3, encoding)
    with np.errstate(over="ignore", invalid="ignore"):
        right_total, right_total_scales = reference_blocks((numbers + numbers) + numbers, encoding)
    np.testing.assert_array_equal(total, right_total)
    np.testing.assert_array_equal(total_scales.view(np.uint32), right_total_scales.view(np.uint32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_edge_inputs(backend, dtype, data_type):
    for case in INPUTS.values():
        values = as_dtype(case(data_type), dtype)
        for block_size in BLOCK_SIZES:
            for scaling in SCALINGS:
                assert_matches(backend, values, Encoding(data_type, block_size, scaling))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["normal", "any exponent"])
def test_a_million_random_numbers(backend, kind):
    for data_type in DATA_TYPES:
        assert_matches(backend, million(kind), Encoding(data_type))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_length_and_every_misalignment(backend, rng):
    values = rng.standard_normal(1024).astype(np.float32)
    for length in range(3 * 64 + 2):
        assert_matches(backend, values[:length], Encoding(block_size=64))
    for shift in range(16):
        raw = np.zeros(4 * 700 + 64, np.uint8)
        unaligned = raw[shift : shift + 4 * 700].view(np.float32)
        unaligned[:] = values[:700]
        assert_matches(backend, unaligned, Encoding(block_size=128))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_mantissas_of_one_octave(backend):
    """2^23 neighbouring numbers, so that every threshold in [0.5, 1) is met exactly."""
    values = np.arange(0x3F000000, 0x3F800000, dtype=np.uint32).view(np.float32)
    for data_type in DATA_TYPES:
        encoding = Encoding(data_type, None, 1.0)
        scale = encoding.fixed_scale
        codes, _ = c_api.encode(backend, values * np.float32(scale), encoding)
        assert np.all(np.diff(codes.astype(np.int16)) >= 0)
        right, _ = reference.encode_block(values * np.float32(scale), encoding)
        np.testing.assert_array_equal(codes, right)


@pytest.mark.soak
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "scalar"])
def test_a_hundred_million_random_floats(backend, rounding, record_soak):
    """Any bits, and numbers of every magnitude below a block's largest one."""
    for seed in range(100):
        bits = np.random.default_rng(seed).integers(0, 2**32, 1_000_000, np.uint32).view(np.float32)
        bits = np.where(np.isfinite(bits), bits, np.float32(1))
        values = bits if seed % 2 else np.ldexp(np.frexp(bits)[0], -(np.arange(bits.size) % 40)).astype(np.float32)
        for data_type in DATA_TYPES:
            encoding = Encoding(data_type, rounding=rounding)
            codes, scales = c_api.encode(backend, values, encoding, seed=seed)
            right_codes, right_scales = c_api.encode("scalar", values, encoding, seed=seed)
            np.testing.assert_array_equal(codes, right_codes)
            np.testing.assert_array_equal(scales, right_scales)
    found = {"back_end": backend, "against": "scalar", "rounding": rounding, "floats": 100_000_000, "differ": 0}
    record_soak("random_floats", found)


def test_wrong_arguments_are_named():
    x = np.ones(4, np.float32)
    with pytest.raises(ValueError, match=r"backend must be one of .*scalar, got 'sse9'"):
        c_api.encode("sse9", x, Encoding())
    with pytest.raises(ValueError, match="contiguous"):
        c_api.encode("scalar", np.ones(8, np.float32)[::2], Encoding())


LIKE = [("float32", 500), ("float64", 100)]


@pytest.mark.parametrize(
    ("step", "argument", "wrong", "message"),
    [
        ("encode", "tensors", (1, 3), "tensors must have one entry for each of the list's 2 vectors, got "),
        ("reduce", "sent", (2, 4), "sent must have one entry for each of the list's 3 shards, got "),
        ("decode", "payloads", (3, 5), "payloads must have one entry for each of the list's 4 slices, got "),
        ("decode", "sizes", (3, 5), "sizes must have one entry for each of the list's 4 slices, got "),
        ("decode", "out", (1, 3), "out must have one entry for each of the list's 2 vectors, got "),
    ],
)
def test_lists_refuse_other_lengths_than_their_own(step, argument, wrong, message):
    """The library would read behind the arrays of addresses and sizes."""
    lists = c_api.Lists("scalar", LIKE, 3, Encoding(block_size=64), slices=4)
    tensors = [np.ones(count, dtype) for dtype, count in LIKE]
    addresses = [tensor.ctypes.data for tensor in tensors]
    payloads = []
    for slice_ in range(4):
        payloads.append(np.empty(sum(lists.chunk_bytes(slice_)), np.uint8))
        lists.encode(addresses, payloads[-1].ctypes.data, slice_)
    size = lists.chunk_bytes()[0]
    sent, reduced = np.concatenate([payloads[0][:size]] * 4), np.empty(size, np.uint8)
    good = {
        "encode": {"tensors": addresses, "payload": payloads[0].ctypes.data},
        "reduce": {"shard": 0, "payload": sent.ctypes.data, "sent": [size] * 3, "reduced": reduced.ctypes.data},
        "decode": {
            "payloads": [payload.ctypes.data for payload in payloads],
            "sizes": [payload.size for payload in payloads],
            "out": addresses,
        },
    }[step]
    getattr(lists, step)(**good)
    for length in wrong:
        with pytest.raises(ValueError, match=re.escape(f"{message}{length}")):
            getattr(lists, step)(**{**good, argument: (good[argument] * 2)[:length]})


def test_arrays_of_other_sizes_are_refused():
    encoding, x = Encoding(block_size=64), np.ones(200, np.float32)
    codes, scales = good = c_api.encode("scalar", x, encoding)
    few_codes, few_scales = (codes[1:], scales), (codes, scales[1:])
    for call, arguments, message in (
        (c_api.encode, (x, encoding, few_codes), "out's codes must be uint8 [200], got uint8 [199]"),
        (c_api.encode, (x, encoding, few_scales), "out's scales must be float32 [4], got float32 [3]"),
        (c_api.decode, (*few_scales, encoding), "scales must be float32 [4], got float32 [3]"),
        (c_api.decode, (x, scales, encoding), "codes must be uint8 [200], got float32 [200]"),
        (c_api.decoder, (*good, encoding, x[1:]), "out must be float32 [200], got float32 [199]"),
        (
            c_api.sum_and_encode,
            ([good, few_codes], encoding),
            "encoded[1]'s codes must be uint8 [200], got uint8 [199]",
        ),
        (
            c_api.sum_and_encode,
            ([good, few_scales], encoding),
            "encoded[1]'s scales must be float32 [4], got float32 [3]",
        ),
        (c_api.sum_and_encode, ([(codes.repeat(2)[::2], scales)], encoding), "encoded[0]'s codes must be contiguous"),
        (c_api.adder, ([good], encoding, few_scales), "out's scales must be float32 [4], got float32 [3]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call("scalar", *arguments)
