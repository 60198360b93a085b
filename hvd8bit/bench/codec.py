"""How fast the codec's CPU back ends are, kernel by kernel: verified first, then timed, beside memcpy.

One thread. A figure is the median of several runs; the back ends and memcpy take turns, so that a busy machine slows
all of them alike and their ratios stay.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Callable

import numpy as np

from hvd8bit import c_api, native, reference
from hvd8bit.encoding import Encoding

SHARDS = 4
"""How many encoded buffers the sum adds."""

FLOOR_BYTES = {
    "encode": 5,
    "decode": 5,
    "sum of 4 and re-encode": 5,
    "memcpy": 8,
    "cast to float16 and back": 8,
}
"""Bytes per element that a kernel has to read and write: 4 of float32 and 1 of code; or 4 codes read, 1 written."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """One kernel's time.

    Attributes:
      kernel: which; backend: "avx512", "avx2", "scalar", or "" for what is none of ours.
      data_type: of the encoding, or "".
      elements: how many; placement: "in cache" or "out of cache".
      ns_per_element: median; spread: (90th - 10th percentile) / median.
      gb_per_s: bytes of the floor over time, 10^9 bytes.
      of_memcpy: time over memcpy's, of the same elements in the same run.
    """

    kernel: str
    backend: str
    data_type: str
    elements: int
    placement: str
    ns_per_element: float
    spread: float
    gb_per_s: float
    of_memcpy: float


def run(
    sizes: dict[str, int],
    data_types: tuple[str, ...],
    block_size: int | None,
    repeats: int,
    progress=lambda text: None,
) -> list[Timing]:
    """Verifies and times all kernels.

    Args:
      sizes: placement -> number of float32 elements.
      data_types: which to time.
      block_size: of the encoding.
      repeats: measurements of each kernel.
      progress: called with a line of text before each part.

    Raises:
      RuntimeError: a back end's bytes are not the reference's: nothing is timed.
    """
    for data_type in data_types:
        progress(f"verifying {data_type}")
        _verify(Encoding(data_type, block_size))
    timings: list[Timing] = []
    for placement, elements in sizes.items():
        progress(f"timing {elements:,} elements, {placement}")
        timings += _time_all(placement, elements, data_types, block_size, repeats)
    return timings


def _verify(encoding: Encoding) -> None:
    x = np.random.default_rng(0).standard_normal(40_000).astype(np.float32)
    size = encoding.block_size or x.size
    blocks = [reference.encode_block(x[i : i + size], encoding) for i in range(0, x.size, size)]
    codes = np.concatenate([codes for codes, _ in blocks])
    numbers = np.concatenate([reference.decode_block(c, scale, encoding.data_type) for c, scale in blocks])
    for backend in native.runnable_backends():
        got, scales = c_api.encode(backend, x, encoding)
        decoded = c_api.decode(backend, got, scales, encoding)
        if not (np.array_equal(got, codes) and np.array_equal(decoded, numbers)):
            raise RuntimeError(f"back end {backend} gives other bytes than the reference for {encoding}")


def _time_all(placement, elements, data_types, block_size, repeats) -> Iterator[Timing]:
    x = np.random.default_rng(1).standard_normal(elements).astype(np.float32)
    out = np.empty_like(x)
    half = np.empty(elements, np.float16)
    kernels: dict[tuple[str, str, str], Callable[[], object]] = {("memcpy", "", ""): lambda: np.copyto(out, x)}

    def cast():
        np.copyto(half, x, casting="same_kind")
        np.copyto(out, half)

    kernels["cast to float16 and back", "numpy", ""] = cast
    for data_type in data_types:
        encoding = Encoding(data_type, block_size)
        for backend in native.runnable_backends():
            kernels.update(_kernels(backend, encoding, x, out, stream=placement == "out of cache"))
    times = _interleaved(list(kernels.values()), elements, repeats)
    memcpy = statistics.median(times[0])
    for (kernel, backend, data_type), seconds in zip(kernels, times):
        median = statistics.median(seconds)
        low, high = np.percentile(seconds, [10, 90])
        yield Timing(
            kernel=kernel,
            backend=backend,
            data_type=data_type,
            elements=elements,
            placement=placement,
            ns_per_element=median / elements * 1e9,
            spread=float(high - low) / median,
            gb_per_s=FLOOR_BYTES[kernel] * elements / median / 1e9,
            of_memcpy=median / memcpy,
        )


def _kernels(backend: str, encoding: Encoding, x: np.ndarray, out: np.ndarray, stream: bool) -> dict:
    codes, scales = c_api.encode(backend, x, encoding)
    encoded, total = (
        (np.empty_like(codes), np.empty_like(scales)),
        (np.empty_like(codes), np.empty_like(scales)),
    )
    copies = [(codes.copy(), scales) for _ in range(SHARDS)]
    name = encoding.data_type
    return {
        ("encode", backend, name): lambda: c_api.encode(backend, x, encoding, out=encoded),
        ("decode", backend, name): lambda: c_api.decode(backend, codes, scales, encoding, stream=stream, out=out),
        ("sum of 4 and re-encode", backend, name): lambda: c_api.sum_and_encode(backend, copies, encoding, out=total),
    }


def _interleaved(kernels: list[Callable[[], object]], elements: int, repeats: int) -> list[list[float]]:
    """CPU seconds of each kernel's runs: waiting for other processes does not count. The kernels take turns."""
    inner = max(1, 2_000_000 // elements)  # long enough for the clock
    times: list[list[float]] = [[] for _ in kernels]
    for kernel in kernels:
        kernel()
    for _ in range(repeats):
        for kernel, seconds in zip(kernels, times):
            start = time.thread_time()
            for _ in range(inner):
                kernel()
            seconds.append((time.thread_time() - start) / inner)
    return times
