"""The CUDA back end against the scalar one of the same library, byte for byte, on the table of all back ends.

The same cases run on a GPU (check.py) and on emulated CUDA (tests/unit/test_cuda.py).
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
from codec_inputs import DTYPES, INPUTS, as_dtype
from memory import GUARD

from hvd8bit.c_api import Lists
from hvd8bit.datatypes import DATA_TYPES
from hvd8bit.encoding import Encoding
from hvd8bit.layout import HEADER_BYTES

BLOCK_SIZES = (64, 192, 1024, 4096, 4160, 65536, None)
"""A unit, not a power of two, the default, a tile, just longer than one, the longest, a whole tensor."""


class Device:
    """The CUDA back end of a library, over a memory; calls compare with the library's back end `against`."""

    def __init__(self, library: ctypes.CDLL, memory: Any, against: str = "scalar"):
        self.library, self.memory, self.against = library, memory, against

    def both(self, like, shards: int, encoding: Encoding, slices: int = 1) -> tuple[Lists, Lists]:
        settings = {"slices": slices, "library": self.library, "seed": 2**63 - 5}
        return (
            Lists("cuda", like, shards, encoding, stream=self.memory.stream, **settings),
            Lists(self.against, like, shards, encoding, **settings),
        )

    def encode(self, tensors: Sequence[np.ndarray], shards, encoding, slices=1, slice_=0, shift=0) -> np.ndarray:
        """One slice's payload, after a comparison. `shift`: how many bytes off tensors start, and the payload."""
        ours, theirs = self.both(_like(tensors), shards, encoding, slices)
        size = sum(ours.chunk_bytes(slice_))
        held = [_Shifted(self.memory, tensor, shift) for tensor in tensors]
        payload = _Shifted(self.memory, np.full(size, 0xA5, np.uint8), shift)
        ours.encode([buffer.address for buffer in held], payload.address, slice_)
        expected = np.empty(size, np.uint8)
        contiguous = [np.ascontiguousarray(tensor) for tensor in tensors]
        theirs.encode([tensor.ctypes.data for tensor in contiguous], expected.ctypes.data, slice_)
        _same(payload.get(), expected, f"encode, {encoding}, {shards} shards")
        for buffer, tensor in zip(held, contiguous):
            assert np.array_equal(buffer.get(), _bytes(tensor)), "encode changed its input"
        return expected

    def reduce(self, like, shard: int, chunks: Sequence[np.ndarray], encoding, slices=1, slice_=0, shift=0):
        """The encoded sum of what workers sent, after a comparison."""
        ours, theirs = self.both(like, len(chunks), encoding, slices)
        sent = np.concatenate(chunks)
        sizes = [len(chunk) for chunk in chunks]
        payload = _Shifted(self.memory, sent, shift)
        reduced = _Shifted(self.memory, np.full(sizes[0], 0xA5, np.uint8), 0)
        ours.reduce(shard, payload.address, sizes, reduced.address, slice_)
        expected = np.empty(sizes[0], np.uint8)
        theirs.reduce(shard, sent.ctypes.data, sizes, expected.ctypes.data, slice_)
        _same(reduced.get(), expected, f"reduce, {encoding}, {len(chunks)} shards")
        return expected

    def decode(self, like, payloads: Sequence[np.ndarray], shards: int, encoding, factor=1.0, shift=0) -> None:
        """Decodes all slices, and compares."""
        ours, theirs = self.both(like, shards, encoding, len(payloads))
        held = [_Shifted(self.memory, payload, shift) for payload in payloads]
        out = [
            _Shifted(self.memory, np.full(count * np.dtype(DTYPES[dtype]).itemsize, 0xA5, np.uint8), shift)
            for dtype, count in like
        ]
        sizes = [len(payload) for payload in payloads]
        ours.decode([payload.address for payload in held], sizes, [buffer.address for buffer in out], factor)
        expected = [np.empty(count, DTYPES[dtype]) for dtype, count in like]
        contiguous = [np.ascontiguousarray(payload) for payload in payloads]
        theirs.decode(
            [payload.ctypes.data for payload in contiguous], sizes, [array.ctypes.data for array in expected], factor
        )
        for buffer, right in zip(out, expected):
            got = buffer.get().view(right.dtype)
            nan = np.isnan(right.astype(np.float32))
            assert np.array_equal(nan, np.isnan(got.astype(np.float32))), f"decode, {encoding}: NaNs at other places"
            bits = f"u{right.itemsize}"
            _same(_bytes(got.view(bits)[~nan]), _bytes(right.view(bits)[~nan]), f"decode, {encoding}")
        assert ours.report() == ""

    def exchange(self, workers: Sequence[Sequence[np.ndarray]], encoding: Encoding, slices=1, factor=1.0) -> None:
        """All three steps for all workers' tensors, each compared."""
        shards, like = len(workers), _like(workers[0])
        payloads = []
        for slice_ in range(slices):
            sent = [self.encode(tensors, shards, encoding, slices, slice_) for tensors in workers]
            sizes = self.both(like, shards, encoding, slices)[0].chunk_bytes(slice_)
            ends = np.cumsum(sizes)
            reduced = [
                self.reduce(like, k, [p[ends[k] - sizes[k] : ends[k]] for p in sent], encoding, slices, slice_)
                for k in range(shards)
            ]
            payloads.append(np.concatenate(reduced))
        self.decode(like, payloads, shards, encoding, factor)


class _Shifted:
    """Bytes in a memory at `shift` behind where an allocation begins, with a guard behind them."""

    def __init__(self, memory, array: np.ndarray, shift: int):
        self._memory, self._shift = memory, shift
        data = _bytes(array)
        self._size = data.size
        self._buffer = memory.put(np.concatenate([np.full(shift, 0x5A, np.uint8), data, _guard()]))
        self.address = memory.address(self._buffer) + shift

    def get(self) -> np.ndarray:
        data = self._memory.get(self._buffer)
        end = self._shift + self._size
        assert np.array_equal(data[end:], _guard()), "bytes behind a buffer were written"
        assert np.all(data[: self._shift] == 0x5A), "bytes before a buffer were written"
        return data[self._shift : end].copy()


def _guard() -> np.ndarray:
    return np.arange(GUARD, dtype=np.uint8)


def _like(tensors: Sequence[np.ndarray]) -> list[tuple[str, int]]:
    return [(tensor.dtype.name, tensor.size) for tensor in tensors]


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _same(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    wrong = np.flatnonzero(got != expected)
    assert wrong.size == 0, (
        f"{what}: {wrong.size} of {expected.size} bytes differ, first at {wrong[0]}: "
        f"got {got[wrong[0]]}, expected {expected[wrong[0]]}"
    )


def _pointers(arrays: Sequence[np.ndarray]) -> list[int]:
    return [array.ctypes.data for array in arrays]


def _refusal(call: Callable[..., None], *arguments) -> str:
    """The message of the ValueError, or ""."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return ""


# ------------------------------------------------------------------------------------------------------- the cases


def table(device: Device, block_sizes=BLOCK_SIZES) -> None:
    """Every input of the table, in every dtype, all in one list; alone and as a sum."""
    for data_type in DATA_TYPES:
        tensors = [as_dtype(case(data_type), dtype) for case in INPUTS.values() for dtype in DTYPES]
        for block_size in block_sizes:
            device.exchange([tensors], Encoding(data_type, block_size))
        others = [[np.roll(tensor, 100) for tensor in tensors], [tensor[::-1].copy() for tensor in tensors]]
        device.exchange([tensors, *others], Encoding(data_type, 64), slices=3, factor=3.0)
        device.exchange([tensors, *others], Encoding(data_type, None, 1.0), factor=1 / 3)
        device.exchange([tensors, *others], Encoding(data_type, 1024, 100.0))


def every_length(device: Device) -> None:
    """0 to 3 blocks and 1."""
    random = np.random.default_rng(1)
    for dtype in DTYPES:
        tensors = [as_dtype(random.standard_normal(n).astype(np.float32), dtype) for n in range(3 * 64 + 2)]
        device.exchange([tensors, tensors], Encoding(block_size=64))
    lengths = (0, 1, 4095, 4096, 4097, 8191, 8192, 8193, 3 * 4096 + 1)
    tensors = [random.standard_normal(n).astype(np.float32) for n in lengths]
    for block_size in (4096, 4160, None):
        device.exchange([tensors], Encoding(block_size=block_size))


def every_misalignment(device: Device) -> None:
    """Tensors and payloads at every offset from a multiple of 16 bytes."""
    random = np.random.default_rng(2)
    for shift in range(16):
        tensors = [as_dtype(random.standard_normal(700).astype(np.float32), dtype) for dtype in DTYPES]
        encoding = Encoding(block_size=128)
        payload = device.encode(tensors, 1, encoding, shift=shift)
        device.reduce(_like(tensors), 0, [payload], encoding, shift=shift)
        device.decode(_like(tensors), [payload], 1, encoding, shift=shift)


def every_place_of_a_bad_number(device: Device) -> None:
    """NaN, Inf and -Inf in each place of a block, between good blocks."""
    for bad in (np.nan, np.inf, -np.inf):
        x = np.random.default_rng(3).standard_normal((2 * 64, 64)).astype(np.float32)
        x[range(0, 128, 2), range(64)] = bad
        for block_size in (64, 128):
            payload = device.encode([x.reshape(-1)], 1, Encoding(block_size=block_size))
        scales = payload[-4 * 64 :].view(np.float32)  # of blocks of 128: each has one bad number
        assert np.all(np.isnan(scales))
    x = np.ones(3 * 5000, np.float32)
    x[[4999, 5000]] = np.nan
    device.encode([x], 1, Encoding(block_size=4160))


def all_mantissas(device: Device, step: int = 1) -> None:
    """The 2^23 float32 of [0.5, 1), or every `step`-th, under the scale 1 (15 for mantissa)."""
    for data_type in DATA_TYPES:
        encoding = Encoding(data_type, None, 1.0)
        y = np.arange(0x3F000000, 0x3F800000, step, dtype=np.uint32).view(np.float32)
        device.encode([y * np.float32(encoding.fixed_scale)], 1, encoding)


def random_floats(device: Device, count: int, at_once: int = 1 << 22) -> None:
    """Random bits as float32, over all exponents, where they are finite; by turns for the data types."""
    for number, start in enumerate(range(0, count, at_once)):
        bits = np.random.default_rng(number).integers(0, 2**32, min(at_once, count - start), np.uint32)
        x = bits.view(np.float32)
        x = np.where(np.isfinite(x), x, np.float32(1))
        encoding = Encoding(DATA_TYPES[number % len(DATA_TYPES)], 64 << number % 7)
        payload = device.encode([x], 1, encoding)
        if number % 4 == 0:
            device.decode(_like([x]), [payload], 1, encoding)


def long_lists(device: Device) -> None:
    """More tensors and more chunks than one launch takes."""
    random = np.random.default_rng(5)
    tensors = [random.standard_normal(size).astype(np.float32) for size in random.integers(0, 300, 300)]
    device.exchange([tensors, tensors], Encoding(block_size=64), slices=2)
    device.encode(tensors, 70, Encoding())


def chunks_that_do_not_fit(device: Device) -> None:
    """A header that differs makes NaN of the chunk, and the host hears of it."""
    x = np.ones(10_000, np.float32)
    like = _like([x])
    for block_size in (1024, None):
        encoding = Encoding(block_size=block_size)
        payload = device.encode([x], 2, encoding)
        ours, _ = device.both(like, 2, encoding)
        first, second = ours.chunk_bytes()
        for byte in range(0, HEADER_BYTES, 5):
            damaged = payload.copy()
            damaged[first + byte] ^= 4
            out = device.memory.put(np.zeros(4 * x.size, np.uint8))
            held = device.memory.put(damaged)
            ours.decode([device.memory.address(held)], [len(damaged)], [device.memory.address(out)], 2.0)
            decoded = device.memory.get(out).view(np.float32)
            assert np.all(decoded[:4992] == 1)
            assert np.all(np.isnan(decoded[4992:]))
            assert "decode_list: the chunk from worker 1 " in ours.report()

            received = np.concatenate([payload[first:], damaged[first:]])
            held, reduced = device.memory.put(received), device.memory.put(np.zeros(second, np.uint8))
            ours.reduce(1, device.memory.address(held), [second] * 2, device.memory.address(reduced))
            sum_ = device.memory.get(reduced)
            blocks = -(-5008 // block_size) if block_size else 1
            assert np.all(np.isnan(sum_[-4 * blocks :].view(np.float32)))
            assert np.array_equal(sum_[:HEADER_BYTES], payload[first : first + HEADER_BYTES])
            assert "reduce_shards: the chunk from worker 1 " in ours.report()
    refusal = _refusal(ours.decode, [device.memory.address(held)], [first + second - 1], [device.memory.address(out)])
    assert "payload is truncated or oversized" in refusal, f"a truncated payload was decoded: {refusal}"


def owners_of_chunks_that_do_not_fit(device: Device) -> None:
    """The host hears of a reduced chunk in the scalar back end's words: of the worker that it had to come from,
    whichever slice, launch or dtype it is in, and whatever it says of itself.
    """
    for like, shards, slices in (
        ([("float32", 8192)], 2, 2),
        ([("float32", 6400)], 50, 1),  # more chunks than one launch takes
        ([("float32", 4096), ("float64", 4096)], 4, 1),  # some chunks are in one dtype's launch alone
        ([("float16", 3200), ("float32", 0), ("bfloat16", 3200)], 50, 3),
        ([("float64", 100)], 5, 2),  # empty chunks
    ):
        encoding = Encoding(block_size=64)
        ours, theirs = device.both(like, shards, encoding, slices)
        tensors = [np.ones(count, DTYPES[dtype]) for dtype, count in like]
        payloads = [device.encode(tensors, shards, encoding, slices, slice_) for slice_ in range(slices)]
        sizes = [len(payload) for payload in payloads]
        out = [device.memory.put(_bytes(tensor)) for tensor in tensors]
        for slice_, worker in itertools.product(range(slices), {0, 1, shards // 2, shards - 1}):
            for byte in (6, 16, 20, 36):  # data type, shard, slice, blocks
                damaged = [payload.copy() for payload in payloads]
                damaged[slice_][sum(theirs.chunk_bytes(slice_)[:worker]) + byte] ^= 1
                expected = _refusal(theirs.decode, _pointers(damaged), sizes, _pointers(tensors))
                held = [device.memory.put(payload) for payload in damaged]
                ours.decode(list(map(device.memory.address, held)), sizes, list(map(device.memory.address, out)))
                device.memory.get(out[0])  # when the work is done
                told = ours.report()
                assert expected.startswith(f"the chunk from worker {worker} ")
                assert told.startswith(f"decode_list: {expected} (found by the GPU"), f"{told!r} is not {expected!r}"


def stochastic_rounding(device: Device) -> None:
    """The table of inputs, and blocks longer than a tile, with random numbers that depend on the place."""
    for data_type in DATA_TYPES:
        tensors = [as_dtype(case(data_type), dtype) for case in INPUTS.values() for dtype in DTYPES]
        device.exchange([tensors, tensors], Encoding(data_type, 192, rounding="stochastic"), slices=2)
    x = np.random.default_rng(6).standard_normal(30_000).astype(np.float32)
    for block_size in (1024, 8192, None):
        device.exchange([[x, x[:100]], [x, x[:100]]], Encoding("linear", block_size, rounding="stochastic"))


def cases(random_count: int, mantissa_step: int = 1) -> Iterator[tuple[str, Callable[[Device], None]]]:
    """(name, function of a device); a function raises AssertionError where the bytes differ."""
    yield "the table of inputs", table
    yield "every length", every_length
    yield "every misalignment", every_misalignment
    yield "NaN and Inf in every place", every_place_of_a_bad_number
    yield "all mantissas of an octave", lambda device: all_mantissas(device, mantissa_step)
    yield "stochastic rounding", stochastic_rounding
    yield "long lists, many chunks", long_lists
    yield "chunks that do not fit", chunks_that_do_not_fit
    yield "owners of chunks that do not fit", owners_of_chunks_that_do_not_fit
    yield f"{random_count:,} random floats", lambda device: random_floats(device, random_count)
