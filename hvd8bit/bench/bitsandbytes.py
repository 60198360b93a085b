"""bitsandbytes' 8-bit quantizer for CPUs, where that package is installed: a neighbour to measure the codec beside.

Its C functions are called as its own Python code calls them, so that neither PyTorch nor its import is timed or needed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
from typing import Callable

import numpy as np

from hvd8bit import datatypes
from hvd8bit.bench import codec_ops

BLOCK_SIZE = 1024


def calls(x: np.ndarray) -> dict[str, Callable[[], object]]:
    """ "quantize" and "dequantize" of a float32 array on one thread; empty where bitsandbytes is not installed.

    It takes a table of 256 values, here the dynamic tree's. Some of them it never writes, zero among them.
    """
    library = _library()
    if library is None:
        return {}
    ctypes.CDLL("libgomp.so.1").omp_set_num_threads(1)  # what it shares its blocks by
    magnitudes = datatypes.codebook("dynamic_tree")
    table = np.concatenate([-magnitudes[::-1], magnitudes]).astype(np.float32)
    codes, out = codec_ops.empty(x.size, np.uint8), codec_ops.empty(x.size, np.float32)
    out.fill(np.nan)
    scales = np.empty(-(-x.size // BLOCK_SIZE), np.float32)

    def call(function, source: np.ndarray, target: np.ndarray) -> Callable[[], object]:
        arrays = (table, source, scales, target)
        arguments = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        sizes = ctypes.c_longlong(BLOCK_SIZE), ctypes.c_longlong(x.size)

        def run(arrays=arrays):  # pointers alone would not keep them
            function(*arguments, *sizes)

        return run

    quantize = call(library.cquantize_blockwise_cpu_fp32, x, codes)
    quantize()
    dequantize = call(library.cdequantize_blockwise_cpu_fp32, codes, out)
    dequantize()
    if not np.max(np.abs(out - x)) <= 0.02 * np.max(np.abs(x)):
        raise RuntimeError("bitsandbytes' quantizer does not do what is expected of it: not timed")
    return {"quantize": quantize, "dequantize": dequantize}


def _library() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("bitsandbytes")  # does not import it
    if found is None or found.origin is None:
        return None
    path = pathlib.Path(found.origin).with_name("libbitsandbytes_cpu.so")
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None
