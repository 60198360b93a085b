"""TensorFlow's ops beside the kernels that they call, on a number of threads.

How many threads an op may use is settled when TensorFlow starts: so this starts another Python, and is its program,
too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Callable

import numpy as np

from hvd8bit.encoding import Encoding

THREADS_VARIABLE = "TF_NUM_INTRAOP_THREADS"
ALIGNMENT = 64


def measure(
    elements: int, data_type: str, block_size: int | None, threads: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each run of "encode op", "decode op", their "... kernel" on one thread, and "memcpy", in turns.

    Of CPU time with one thread, so that other programs do not count; by the clock with several.

    Args:
      elements: of one float32 tensor.
      data_type, block_size: of the encoding.
      threads: that an op may use.
      repeats: runs of each.

    Raises:
      RuntimeError: the other Python failed; the message holds the end of what it wrote.
    """
    settings = json.dumps([elements, data_type, block_size, threads, repeats])
    done = subprocess.run(
        [sys.executable, "-m", "hvd8bit.bench.codec_ops", settings],
        env={**os.environ, THREADS_VARIABLE: str(threads), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"TensorFlow's ops could not be timed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def empty(elements: int, dtype) -> np.ndarray:
    """A vector that begins on a border of 64 bytes, as TensorFlow's tensors do, and NumPy's arrays do not."""
    raw = np.empty(elements * np.dtype(dtype).itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + elements * np.dtype(dtype).itemsize].view(dtype)


def numbers(elements: int) -> np.ndarray:
    """float32, standard normal, on such a border."""
    x = empty(elements, np.float32)
    x[:] = np.random.default_rng(1).standard_normal(elements)
    return x


def _measure(
    elements: int, data_type: str, block_size: int | None, threads: int, repeats: int
) -> dict[str, list[float]]:
    import tensorflow as tf

    from hvd8bit import native, ops
    from hvd8bit.c_api import Lists

    encoding = Encoding(data_type, block_size)
    source, copy = numbers(elements), empty(elements, np.float32)
    x = tf.constant(source)
    payload, _ = ops.encode_list([x], 1, encoding)
    lists = Lists(native.runnable_backends()[0], [("float32", elements)], 1, encoding)
    raw, encoded = empty(payload.shape[0], np.uint8), empty(payload.shape[0], np.uint8)
    raw[:] = payload

    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(copy, source),
        "encode kernel": lambda: lists.encode([source.ctypes.data], encoded.ctypes.data),
        "encode op": lambda: ops.encode_list([x], 1, encoding),
        "decode kernel": lambda: lists.decode([raw.ctypes.data], [raw.size], [copy.ctypes.data]),
        "decode op": lambda: ops.decode_list([payload], [x], 1, encoding),
    }
    inner = max(1, 2_000_000 // elements)  # long enough for the clock
    now = time.process_time if threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = now()
            for _ in range(inner):
                call()
            seconds[name].append((now() - start) / inner)
    if not np.array_equal(encoded, raw):
        raise RuntimeError("the op gives other bytes than the kernel")
    return seconds


if __name__ == "__main__":
    print(json.dumps(_measure(*json.loads(sys.argv[1]))))
