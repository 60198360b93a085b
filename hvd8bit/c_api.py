"""The codec through its C ABI, on the calling thread: for tests and benchmarks.

`encode`, `decode` and `sum_and_encode` are the arithmetic of the CPU back ends, on NumPy arrays. `Lists` are the three
steps of an exchange on pointers, of every back end, CUDA too. The library cannot see how long an array is: what is
not as long as the other arguments make it is refused here, with a ValueError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import numpy.typing as npt

from hvd8bit import native, wire
from hvd8bit.encoding import Encoding

Encoded = tuple[np.ndarray, np.ndarray]
"""Codes uint8 [n] and scales float32 [blocks]."""
Call = Callable[[], None]
"""A call of the library whose arguments have been made: what a benchmark repeats."""


def encode(backend: str, x: np.ndarray, encoding: Encoding, out: Encoded | None = None, seed: int = 0) -> Encoded:
    """Codes uint8 [n] and scales float32 [blocks] of a contiguous array; into the pair `out`, if given.

    `seed` is of stochastic rounding.
    """
    out = out or (np.empty(x.size, np.uint8), np.empty(blocks(x.size, encoding), np.float32))
    encoder(backend, x, encoding, out, seed)()
    return out


def encoder(backend: str, x: np.ndarray, encoding: Encoding, out: Encoded, seed: int = 0) -> Call:
    """The call that `encode` makes."""
    return _call(
        [x, out],
        native.c_library().hvd8bit_encode,
        backend.encode(),
        encoding.data_type.encode(),
        ctypes.c_int64(encoding.block_size or 0),
        ctypes.c_float(encoding.fixed_scale),
        *_rounding(encoding, seed),
        wire.DTYPE_IDS[x.dtype.name],
        _pointer("x", x, x.dtype, x.size),
        ctypes.c_int64(x.size),
        *_pointers("out's ", out, x.size, encoding),
    )


def decode(
    backend: str, codes: np.ndarray, scales: np.ndarray, encoding: Encoding, dtype="float32", stream: bool = False
) -> np.ndarray:
    """Numbers [n] of `dtype` from codes and scales."""
    out = np.empty(codes.size, dtype)
    decoder(backend, codes, scales, encoding, out, stream)()
    return out


def decoder(
    backend: str, codes: np.ndarray, scales: np.ndarray, encoding: Encoding, out: np.ndarray, stream: bool = False
) -> Call:
    """The call that `decode` makes."""
    return _call(
        [codes, scales, out],
        native.c_library().hvd8bit_decode,
        backend.encode(),
        encoding.data_type.encode(),
        ctypes.c_int64(encoding.block_size or 0),
        wire.DTYPE_IDS[out.dtype.name],
        *_pointers("", (codes, scales), codes.size, encoding),
        ctypes.c_int64(codes.size),
        int(stream),
        _pointer("out", out, out.dtype, codes.size),
    )


def sum_and_encode(backend: str, encoded: Sequence[Encoded], encoding: Encoding, seed: int = 0) -> Encoded:
    """Codes and scales of the sum of `encoded` pairs of them, added in order. A fixed scale is taken as it is."""
    out = np.empty_like(encoded[0][0]), np.empty_like(encoded[0][1])
    adder(backend, encoded, encoding, out, seed)()
    return out


def adder(backend: str, encoded: Sequence[Encoded], encoding: Encoding, out: Encoded, seed: int = 0) -> Call:
    """The call that `sum_and_encode` makes."""
    size = encoded[0][0].size
    codes, scales = zip(*(_pointers(f"encoded[{k}]'s ", pair, size, encoding) for k, pair in enumerate(encoded)))
    return _call(
        [*encoded, out],
        native.c_library().hvd8bit_sum_and_encode,
        backend.encode(),
        encoding.data_type.encode(),
        ctypes.c_int64(encoding.block_size or 0),
        ctypes.c_float(encoding.fixed_scale),
        *_rounding(encoding, seed),
        ctypes.c_int64(len(encoded)),
        (ctypes.c_void_p * len(codes))(*codes),
        (ctypes.c_void_p * len(scales))(*scales),
        ctypes.c_int64(size),
        *_pointers("out's ", out, size, encoding),
    )


def _call(arrays, function, *arguments) -> Call:
    def call(arrays=arrays):  # pointers alone would not keep them
        _check(function(*arguments))

    return call


def _rounding(encoding: Encoding, seed: int) -> tuple[int, ctypes.c_int64]:
    return int(encoding.rounding == "stochastic"), ctypes.c_int64(seed)


def blocks(elements: int, encoding: Encoding) -> int:
    """How many scales a tensor of so many elements has."""
    return -(-elements // (encoding.block_size or max(elements, 1)))


class _List(ctypes.Structure):
    """hvd8bit_list of tf_ops/codec/c_api.h."""

    _fields_ = (
        ("backend", ctypes.c_char_p),
        ("stream", ctypes.c_void_p),
        ("data_type", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("fixed_scale", ctypes.c_float),
        ("stochastic", ctypes.c_int),
        ("seed", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("dtypes", ctypes.POINTER(ctypes.c_int)),
        ("elements", ctypes.POINTER(ctypes.c_int64)),
        ("shards", ctypes.c_int64),
        ("slices", ctypes.c_int64),
        ("slice", ctypes.c_int64),
    )


class Lists:
    """Encode, reduce and decode one list of vectors, on plain pointers.

    Args:
      backend: "scalar", "avx2", "avx512" or "cuda"; for "cuda" all pointers are to memory of the current device.
      like: dtype's name and number of elements of each vector.
      shards: number of chunks.
      encoding: how.
      slices: of each chunk.
      library: of `native.open_c_library`; the op library if None.
      stream: a cudaStream_t as a number; work is queued on it, not waited for.
      seed: of stochastic rounding.

    All methods raise ValueError: with the library's message, or where addresses or sizes are not as many as the list
    has vectors, shards or slices.
    """

    def __init__(
        self,
        backend: str,
        like: Sequence[tuple[str, int]],
        shards: int,
        encoding: Encoding,
        *,
        slices=1,
        library: ctypes.CDLL | None = None,
        stream: int = 0,
        seed: int = 0,
    ):
        self._library = library or native.c_library()
        self._list = _List(
            backend=backend.encode(),
            stream=stream,
            data_type=encoding.data_type.encode(),
            block_size=encoding.block_size or 0,
            fixed_scale=encoding.fixed_scale,
            stochastic=encoding.rounding == "stochastic",
            seed=seed,
            count=len(like),
            dtypes=(ctypes.c_int * len(like))(*(wire.DTYPE_IDS[dtype] for dtype, _ in like)),
            elements=(ctypes.c_int64 * len(like))(*(elements for _, elements in like)),
            shards=shards,
            slices=slices,
            slice=0,
        )

    def chunk_bytes(self, slice_: int = 0) -> list[int]:
        """Bytes of one slice of each chunk."""
        sizes = (ctypes.c_int64 * self._list.shards)()
        self._call("list_bytes", slice_, sizes)
        return list(sizes)

    def encode(self, tensors: Sequence[int], payload: int, slice_: int = 0) -> None:
        """Encodes one slice of all chunks: from the addresses of the vectors to that of sum(chunk_bytes) bytes."""
        self._call(
            "encode_list",
            slice_,
            _entries(ctypes.c_void_p, "tensors", tensors, "vectors", self._list.count),
            ctypes.c_void_p(payload),
        )

    def reduce(self, shard: int, payload: int, sent: Sequence[int], reduced: int, slice_: int = 0) -> None:
        """Adds what the workers sent for a chunk, `sent` bytes each, and encodes the sum into chunk_bytes[shard]."""
        self._call(
            "reduce_shards",
            slice_,
            ctypes.c_int64(shard),
            ctypes.c_void_p(payload),
            ctypes.c_int64(sum(sent)),
            _entries(ctypes.c_int64, "sent", sent, "shards", self._list.shards),
            ctypes.c_void_p(reduced),
        )

    def decode(self, payloads: Sequence[int], sizes: Sequence[int], out: Sequence[int], factor: float = 1.0) -> None:
        """Decodes all slices, each payload of so many bytes, into vectors, times factor / shards."""
        self._call(
            "decode_list",
            0,
            _entries(ctypes.c_void_p, "payloads", payloads, "slices", self._list.slices),
            _entries(ctypes.c_int64, "sizes", sizes, "slices", self._list.slices),
            ctypes.c_double(factor),
            _entries(ctypes.c_void_p, "out", out, "vectors", self._list.count),
        )

    def report(self) -> str:
        """What CUDA kernels found wrong with received chunks since the last call, or ""."""
        return (self._library.hvd8bit_cuda_report() or b"").decode()

    def _call(self, name: str, slice_: int, *arguments) -> None:
        self._list.slice = slice_
        _check(getattr(self._library, f"hvd8bit_{name}")(ctypes.byref(self._list), *arguments))


def _entries(kind: Any, name: str, values: Sequence[int], of: str, count: int) -> ctypes.Array:
    if len(values) != count:
        raise ValueError(f"{name} must have one entry for each of the list's {count} {of}, got {len(values)}")
    return (kind * count)(*values)


def _pointers(whose: str, encoded: Encoded, elements: int, encoding: Encoding) -> tuple[ctypes.c_void_p, ...]:
    codes, scales = encoded
    return (
        _pointer(f"{whose}codes", codes, np.uint8, elements),
        _pointer(f"{whose}scales", scales, np.float32, blocks(elements, encoding)),
    )


def _pointer(name: str, array: np.ndarray, dtype: npt.DTypeLike, size: int) -> ctypes.c_void_p:
    if array.dtype != dtype or array.size != size:
        raise ValueError(f"{name} must be {np.dtype(dtype)} [{size}], got {array.dtype} [{array.size}]")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous; take a copy")
    return ctypes.c_void_p(array.ctypes.data)


def _check(error: bytes | None) -> None:
    if error:
        raise ValueError(error.decode())
