"""How fast the CUDA back end is: one tensor of float32, beside a copy within the device's memory."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
from cases import Device

from hvd8bit.c_api import Lists
from hvd8bit.encoding import Encoding

WORKERS = 4
"""How many chunks the sum adds."""


def measure(device: Device, elements: int, repeats: int = 20) -> list[dict[str, Any]]:
    """Median times, in turns, of encode, decode, a sum and a copy.

    Args:
      elements: float32 numbers; the sum works on a quarter of them from each of 4 workers.
      repeats: runs of each.

    Returns:
      Records of kernel, elements, seconds, spread ((90th - 10th percentile) / median), ns_per_element, gb_per_s (bytes
      read and written, 10^9), of_copy (that over the copy's).
    """
    memory = device.memory
    encoding = Encoding()
    like = [("float32", elements)]
    one, four = (
        Lists("cuda", like, shards, encoding, library=device.library, stream=memory.stream) for shards in (1, WORKERS)
    )
    # A million normal numbers over and over: the codec's work does not depend on where they come from.
    normal = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    tensor = memory.put(np.resize(normal, elements).view(np.uint8))
    out, copied = memory.empty(4 * elements), memory.empty(4 * elements)
    (size,), chunk = one.chunk_bytes(), four.chunk_bytes()[0]
    payload, sent, reduced = memory.empty(size), memory.empty(WORKERS * chunk), memory.empty(chunk)
    address = memory.address

    one.encode([address(tensor)], address(payload))
    four.encode([address(tensor)], address(sent))
    # What the first worker sends for chunk 0, from all four.
    first = memory.get(sent)[:chunk]
    sent = memory.put(np.tile(first, WORKERS))

    per_chunk = elements / WORKERS
    work = {
        "copy": (8 * elements, elements, lambda: memory.copy(copied, tensor)),
        "encode": (5 * elements, elements, lambda: one.encode([address(tensor)], address(payload))),
        "decode": (5 * elements, elements, lambda: one.decode([address(payload)], [size], [address(out)])),
        f"sum of {WORKERS} and re-encode": (
            (WORKERS + 1) * per_chunk,
            per_chunk,
            lambda: four.reduce(0, address(sent), [chunk] * WORKERS, address(reduced)),
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 2):
        for name, (_, _, run) in work.items():
            seconds = memory.seconds(run)
            if turn >= 2:  # the first ones warm up
                times[name].append(seconds)
    if one.report() or four.report():
        raise RuntimeError("a kernel refused what it was measured on")
    records = []
    for name, (moved, count, _) in work.items():
        median = statistics.median(times[name])
        low, high = np.percentile(times[name], [10, 90])
        records.append(
            {
                "kernel": name,
                "elements": int(count),
                "seconds": median,
                "spread": float(high - low) / median,
                "ns_per_element": median / count * 1e9,
                "gb_per_s": moved / median / 1e9,
            }
        )
    for record in records:
        record["of_copy"] = record["gb_per_s"] / records[0]["gb_per_s"]
    return records
