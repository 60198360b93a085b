"""Which tensors travel in 8 bits, and which as they are."""

from __future__ import annotations

import dataclasses
import functools
import numbers

from hvd8bit.encoding import Encoding
from hvd8bit.layout import Layout, ring_bytes

ENCODABLE = ("float32", "float64", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Selection:
    """Rules that select the tensors to encode. Must be the same on all workers.

    Attributes:
      min_elements: smaller tensors travel as they are; they gain little and biases and norms lose most. A
        threshold above 0 also rises to where 8 bits, with headers and scales, are fewer bytes than float32 for the
        number of workers. 0 encodes every float tensor, even where float32 would be smaller.
    """

    min_elements: int = 1024

    def __post_init__(self):
        if isinstance(self.min_elements, bool) or not isinstance(self.min_elements, numbers.Integral):
            raise TypeError(f"min_elements must be an integer, got {self.min_elements!r}")
        if self.min_elements < 0:
            raise ValueError(f"min_elements must be at least 0, got {self.min_elements}; 0 encodes every float tensor")
        object.__setattr__(self, "min_elements", int(self.min_elements))  # workers compare settings as text

    def reason_to_pass(self, dtype: str, elements: int | None, workers: int | None, encoding: Encoding) -> str | None:
        """Why a tensor is not encoded, or None if it is.

        Args:
          dtype: name of the tensor's dtype.
          elements: number of elements, or None where it is not known when the graph is built: encoded.
          workers: how many workers exchange it alone; None where it travels with others: `bucket_pays` judges those.
          encoding: how it would be encoded.
        """
        if dtype not in ENCODABLE:
            return f"{dtype}: only {', '.join(ENCODABLE)} are compressed"
        if elements is None or self.min_elements == 0:
            return None
        if elements < self.min_elements:
            return f"fewer than min_elements={self.min_elements} elements"
        if workers is not None and not pays((elements,), workers, encoding.block_size):
            return f"no fewer bytes in 8 bits than in float32 with {workers} workers"
        return None

    def bucket_pays(self, sizes: tuple[int | None, ...], encoding: Encoding, workers: int) -> bool:
        """Whether tensors of these sizes, which travel together, are to be encoded."""
        known = tuple(size for size in sizes if size is not None)
        return self.min_elements == 0 or len(known) < len(sizes) or pays(known, workers, encoding.block_size)


@functools.lru_cache(maxsize=4096)
def pays(sizes: tuple[int, ...], workers: int, block_size: int | None) -> bool:
    """Whether tensors that travel together are fewer bytes on the wire in 8 bits than in float32."""
    layout = Layout(sizes, workers, block_size)
    return layout.wire_bytes() < ring_bytes(layout.elements, workers)
