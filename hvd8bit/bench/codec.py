"""How fast the codec's CPU back ends are, kernel by kernel: verified first, then timed, beside memcpy.

One thread, and at the end TensorFlow's ops on one thread and on all (`codec_ops`). A figure is the median of several
runs; the back ends and memcpy take turns, so that a busy machine slows all of them alike and their ratios stay.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Iterator
from typing import Callable

import numpy as np

from hvd8bit import c_api, native, reference
from hvd8bit.bench import bitsandbytes, codec_ops
from hvd8bit.encoding import Encoding

SHARDS = 4
"""How many encoded buffers the sum adds."""

FLOOR_BYTES = {
    "encode": 5,
    "encode stochastically": 5,
    "decode": 5,
    "sum of 4 and re-encode": 5,
    "quantize": 5,
    "dequantize": 5,
    "encode op": 5,
    "decode op": 5,
    "memcpy": 8,
    "cast to float16 and back": 8,
}
"""Bytes per element that a kernel has to read and write: 4 of float32 and 1 of code; or 4 codes read, 1 written."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """One kernel's time.

    Attributes:
      kernel: which; backend: "avx512", "avx2", "scalar", "tensorflow" for an op, or another library's name, or "".
      data_type: of the encoding, or "".
      elements: how many; placement: "in cache" or "out of cache".
      threads: how many worked on it.
      ns_per_element: median, of CPU time with one thread, by the clock with several; spread: (90th - 10th percentile) /
        median.
      gb_per_s: bytes of the floor over time, 10^9 bytes.
      of_memcpy: time over memcpy's, of the same elements in the same run.
      share_of_floor: how long memcpy takes for the floor's bytes, over time.
      of_kernel: an op's time over that of the bare kernel beside it, on one thread; else None.
    """

    kernel: str
    backend: str
    data_type: str
    elements: int
    placement: str
    threads: int
    ns_per_element: float
    spread: float
    gb_per_s: float
    of_memcpy: float
    share_of_floor: float
    of_kernel: float | None = None


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
        for threads in dict.fromkeys((1, os.cpu_count() or 1)):
            progress(f"timing TensorFlow's ops, {elements:,} elements, {threads} thread(s)")
            timings += _time_ops(placement, elements, data_types[0], block_size, threads, repeats)
    return timings


def _verify(encoding: Encoding) -> None:
    """Compares with the reference what is timed, kernel by kernel."""
    x = codec_ops.numbers(40_000)
    right = _right(x, encoding)
    for backend in native.runnable_backends():
        for stream in (False, True):
            out = codec_ops.empty(x.size, np.float32)
            for kernel, (call, results) in _kernels(backend, encoding, x, out, stream).items():
                for result in results:
                    result.view(np.uint8)[:] = 0xA5  # a call that writes nothing must not find the right bytes here
                call()
                if not all(np.array_equal(got, wanted) for got, wanted in zip(results, right[kernel])):
                    raise RuntimeError(
                        f"{kernel}: back end {backend} gives other bytes than the reference for {encoding}, "
                        f"stream={stream}"
                    )


def _right(x: np.ndarray, encoding: Encoding) -> dict[str, tuple[np.ndarray, ...]]:
    """By kernel of `_kernels` what the reference writes."""
    size = encoding.block_size or x.size
    starts = range(0, x.size, size)

    def encoded(x, encoding):
        pairs = [reference.encode_block(x[i : i + size], encoding, place=i) for i in starts]
        return np.concatenate([codes for codes, _ in pairs]), np.array([scale for _, scale in pairs], np.float32)

    def decoded(codes, scales):
        blocks = [reference.decode_block(codes[i : i + size], s, encoding.data_type) for i, s in zip(starts, scales)]
        return np.concatenate(blocks)

    codes, scales = encoded(x, encoding)
    total = functools.reduce(np.add, [decoded(*shard) for shard in _shards(codes, scales)])
    return {
        "encode": (codes, scales),
        "encode stochastically": encoded(x, dataclasses.replace(encoding, rounding="stochastic")),
        "decode": (decoded(codes, scales),),
        "sum of 4 and re-encode": encoded(total, encoding),
    }


def _shards(codes: np.ndarray, scales: np.ndarray) -> list[c_api.Encoded]:
    """What the sum adds: other numbers in each."""
    return [(np.roll(codes, shard), scales) for shard in range(SHARDS)]


def _time_all(placement, elements, data_types, block_size, repeats) -> Iterator[Timing]:
    x, out = codec_ops.numbers(elements), codec_ops.empty(elements, np.float32)
    half = codec_ops.empty(elements, np.float16)
    kernels: dict[tuple[str, str, str], Callable[[], object]] = {("memcpy", "", ""): lambda: np.copyto(out, x)}

    def cast():
        np.copyto(half, x, casting="same_kind")
        np.copyto(out, half)

    kernels["cast to float16 and back", "numpy", ""] = cast
    for data_type in data_types:
        encoding = Encoding(data_type, block_size)
        for backend in native.runnable_backends():
            found = _kernels(backend, encoding, x, out, stream=placement == "out of cache")
            kernels.update({(kernel, backend, data_type): call for kernel, (call, _) in found.items()})
    kernels.update({(kernel, "bitsandbytes", ""): call for kernel, call in bitsandbytes.calls(x).items()})
    times = _interleaved(list(kernels.values()), elements, repeats)
    memcpy = statistics.median(times[0])
    for (kernel, backend, data_type), seconds in zip(kernels, times):
        yield _timing(kernel, backend, data_type, elements, placement, 1, seconds, memcpy)


def _time_ops(placement, elements, data_type, block_size, threads, repeats) -> Iterator[Timing]:
    seconds = codec_ops.measure(elements, data_type, block_size, threads, repeats)
    memcpy = statistics.median(seconds["memcpy"])
    for name in ("encode", "decode"):
        kernel = statistics.median(seconds[f"{name} kernel"]) if threads == 1 else None
        yield _timing(
            f"{name} op", "tensorflow", data_type, elements, placement, threads, seconds[f"{name} op"], memcpy, kernel
        )


def _timing(kernel, backend, data_type, elements, placement, threads, seconds, memcpy, bare=None) -> Timing:
    median = statistics.median(seconds)
    low, high = np.percentile(seconds, [10, 90])
    floor_bytes = FLOOR_BYTES[kernel]
    return Timing(
        kernel=kernel,
        backend=backend,
        data_type=data_type,
        elements=elements,
        placement=placement,
        threads=threads,
        ns_per_element=median / elements * 1e9,
        spread=float(high - low) / median,
        gb_per_s=floor_bytes * elements / median / 1e9,
        of_memcpy=median / memcpy,
        share_of_floor=memcpy * floor_bytes / FLOOR_BYTES["memcpy"] / median,
        of_kernel=None if bare is None else median / bare,
    )


def _kernels(
    backend: str, encoding: Encoding, x: np.ndarray, out: np.ndarray, stream: bool
) -> dict[str, tuple[c_api.Call, tuple[np.ndarray, ...]]]:
    """By kernel the call, and the arrays that it writes."""
    codes, scales = c_api.encode(backend, x, encoding)
    encoded, total, rounded = ((codec_ops.empty(codes.size, np.uint8), np.empty_like(scales)) for _ in range(3))
    random = dataclasses.replace(encoding, rounding="stochastic")
    return {
        "encode": (c_api.encoder(backend, x, encoding, encoded), encoded),
        "encode stochastically": (c_api.encoder(backend, x, random, rounded), rounded),
        "decode": (c_api.decoder(backend, codes, scales, encoding, out, stream), (out,)),
        "sum of 4 and re-encode": (c_api.adder(backend, _shards(codes, scales), encoding, total), total),
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
