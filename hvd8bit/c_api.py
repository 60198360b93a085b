"""The codec's CPU back ends on NumPy arrays, one by one, on the calling thread: for tests and benchmarks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from hvd8bit import native, wire
from hvd8bit.encoding import Encoding


def encode(backend: str, x: np.ndarray, encoding: Encoding, out=None) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [n] and scales float32 [blocks] of a contiguous array; into the pair `out`, if given."""
    codes, scales = out or (np.empty(x.size, np.uint8), np.empty(blocks(x.size, encoding), np.float32))
    _check(
        native.c_library().hvd8bit_encode(
            backend.encode(),
            encoding.data_type.encode(),
            ctypes.c_int64(encoding.block_size or 0),
            ctypes.c_float(encoding.fixed_scale),
            wire.DTYPE_IDS[x.dtype.name],
            _pointer(x),
            ctypes.c_int64(x.size),
            _pointer(codes),
            _pointer(scales),
        )
    )
    return codes, scales


def decode(
    backend: str,
    codes: np.ndarray,
    scales: np.ndarray,
    encoding: Encoding,
    dtype="float32",
    stream: bool = False,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Numbers [n] of `dtype` from codes and scales."""
    out = np.empty(codes.size, dtype) if out is None else out
    _check(
        native.c_library().hvd8bit_decode(
            backend.encode(),
            encoding.data_type.encode(),
            ctypes.c_int64(encoding.block_size or 0),
            wire.DTYPE_IDS[out.dtype.name],
            _pointer(codes),
            _pointer(scales),
            ctypes.c_int64(codes.size),
            int(stream),
            _pointer(out),
        )
    )
    return out


def sum_and_encode(
    backend: str, encoded: Sequence[tuple[np.ndarray, np.ndarray]], encoding: Encoding, out=None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of the sum of `encoded` pairs of them, added in order. A fixed scale is taken as it is."""
    n = encoded[0][0].size
    codes, scales = out or (np.empty(n, np.uint8), np.empty(blocks(n, encoding), np.float32))
    pointers = ctypes.c_void_p * len(encoded)
    _check(
        native.c_library().hvd8bit_sum_and_encode(
            backend.encode(),
            encoding.data_type.encode(),
            ctypes.c_int64(encoding.block_size or 0),
            ctypes.c_float(encoding.fixed_scale),
            ctypes.c_int64(len(encoded)),
            pointers(*(pair[0].ctypes.data for pair in encoded)),
            pointers(*(pair[1].ctypes.data for pair in encoded)),
            ctypes.c_int64(n),
            _pointer(codes),
            _pointer(scales),
        )
    )
    return codes, scales


def blocks(elements: int, encoding: Encoding) -> int:
    """How many scales a tensor of so many elements has."""
    return -(-elements // (encoding.block_size or max(elements, 1)))


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    if not array.flags.c_contiguous:
        raise ValueError("arrays must be contiguous; take a copy")
    return ctypes.c_void_p(array.ctypes.data)


def _check(error: bytes | None) -> None:
    if error:
        raise ValueError(error.decode())
