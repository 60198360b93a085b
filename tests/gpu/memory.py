"""Where tensors and payloads lie when the CUDA back end is called through its C ABI: a GPU's memory, held by PyTorch
or CuPy; or the host's, for the emulated back end of tests/cc/cuda_emulation.

All three offer the same: `put` bytes, `empty` space, `get` bytes back, an `address`, a `stream`, and `seconds` of work.
"""

from __future__ import annotations

import importlib
import time
from typing import Any, Callable

import numpy as np

GUARD = 64
"""Bytes behind every buffer that must not change."""


class HostMemory:
    """NumPy arrays, for emulated CUDA."""

    name = "the host's memory, CUDA emulated"
    stream = 0

    def put(self, data: np.ndarray) -> Any:
        """A copy of uint8 [n]."""
        return data.copy()

    def empty(self, size: int) -> Any:
        return np.empty(size, np.uint8)

    def get(self, buffer: Any) -> np.ndarray:
        """uint8 [n], when all work so far is done."""
        return buffer

    def address(self, buffer: Any) -> int:
        return buffer.ctypes.data

    def copy(self, to: Any, buffer: Any) -> None:
        """Copies a whole buffer within the memory."""
        np.copyto(to, buffer)

    def seconds(self, work: Callable[[], None]) -> float:
        """What the device takes for `work`."""
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


class TorchMemory:
    """PyTorch's CUDA tensors, on a stream that is not the default one."""

    def __init__(self):
        self._torch = importlib.import_module("torch")
        if not self._torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no GPU")
        self._stream = self._torch.cuda.Stream()
        self._torch.cuda.set_stream(self._stream)
        self.stream = self._stream.cuda_stream
        self.name = f"{self._torch.cuda.get_device_name()}, PyTorch {self._torch.__version__}"

    def put(self, data: np.ndarray) -> Any:
        return self._torch.from_numpy(data.copy()).cuda()

    def empty(self, size: int) -> Any:
        return self._torch.empty(size, dtype=self._torch.uint8, device="cuda")

    def get(self, buffer: Any) -> np.ndarray:
        self._stream.synchronize()
        return buffer.cpu().numpy()

    def address(self, buffer: Any) -> int:
        return buffer.data_ptr()

    def copy(self, to: Any, buffer: Any) -> None:
        to.copy_(buffer)

    def seconds(self, work: Callable[[], None]) -> float:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class CupyMemory:
    """CuPy's arrays, on a stream that is not the default one."""

    def __init__(self):
        self._cupy = importlib.import_module("cupy")
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._stream.use()
        self.stream = self._stream.ptr
        properties = self._cupy.cuda.runtime.getDeviceProperties(self._cupy.cuda.Device().id)
        self.name = f"{properties['name'].decode()}, CuPy {self._cupy.__version__}"

    def put(self, data: np.ndarray) -> Any:
        return self._cupy.asarray(data)

    def empty(self, size: int) -> Any:
        return self._cupy.empty(size, self._cupy.uint8)

    def get(self, buffer: Any) -> np.ndarray:
        self._stream.synchronize()
        return self._cupy.asnumpy(buffer)

    def address(self, buffer: Any) -> int:
        return buffer.data.ptr

    def copy(self, to: Any, buffer: Any) -> None:
        to.data.copy_from_device_async(buffer.data, buffer.nbytes, self._stream)

    def seconds(self, work: Callable[[], None]) -> float:
        start, end = (self._cupy.cuda.Event() for _ in range(2))
        start.record(self._stream)
        work()
        end.record(self._stream)
        end.synchronize()
        return self._cupy.cuda.get_elapsed_time(start, end) / 1e3


def open_memory(kind: str = "auto"):
    """The memory of a kind: host, torch, cupy, or auto: PyTorch's or CuPy's, whichever sees a GPU.

    Raises:
      RuntimeError: there is none; the message says why.
    """
    kinds = {"host": HostMemory, "torch": TorchMemory, "cupy": CupyMemory}
    if kind != "auto":
        return kinds[kind]()
    reasons = []
    for name in ("torch", "cupy"):
        try:
            return kinds[name]()
        except Exception as error:  # whatever an installation that does not fit raises
            reasons.append(f"{name}: {error}")
    raise RuntimeError("neither PyTorch nor CuPy gives access to a GPU (" + "; ".join(reasons) + ")")
