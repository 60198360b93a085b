"""The two ways in which encoded tensors reach all workers, their bytes, and which one "auto" takes.

* `scatter_reduce`: an alltoall of chunks, whose owners add them and encode the sums, and an allgather of the sums. Each
  worker sends 2 (N-1)/N of a list's bytes, in two rounds; a number is rounded twice.
* `allgather`: everyone sends everything to everyone. Each worker sends (N-1) times the list's bytes, in one round; a
  number is rounded once.

Two workers send the same bytes either way. `hvd8bit bench exchange --exchanges scatter_reduce,allgather` measures both
and says which constants of the rule below fit what it saw.
"""

from __future__ import annotations

import functools

from hvd8bit.layout import Layout, ring_bytes

SCATTER_REDUCE = "scatter_reduce"
ALLGATHER = "allgather"
MODES = (SCATTER_REDUCE, ALLGATHER)
EXCHANGES = ("auto", *MODES)

ROUND_BYTES = 96 * 2**10
"""What one round less may cost: bytes that an allgather sends more than a scatter-reduce."""
MAX_ALLGATHER_ELEMENTS = 64 * 2**10
"""Larger lists are scattered: every worker would decode and add N times all of it, instead of once.

Both are where an allgather was clearly sooner with 2 and with 4 workers, see docs/performance.md; at four times as much
the two were alike.
"""


def choose(exchange: str, sizes: tuple[int | None, ...], workers: int | None, block_size: int | None) -> str:
    """The mode of one exchange. Depends on nothing that differs between workers.

    Args:
      exchange: one of `EXCHANGES`, the setting.
      sizes: elements of the tensors that travel together; None where it is not known when the graph is built.
      workers: how many; None where that may change under a graph, in an elastic job: scattered.
      block_size: of the encoding.
    """
    if exchange != "auto":
        return exchange
    known = tuple(size for size in sizes if size is not None)
    if workers is None or workers < 2 or len(known) < len(sizes):
        return SCATTER_REDUCE
    elements = sum(known)
    more = (workers - 1) * (workers - 2) / workers * elements
    if elements > MAX_ALLGATHER_ELEMENTS or more > ROUND_BYTES or not pays(known, workers, block_size, ALLGATHER):
        return SCATTER_REDUCE
    return ALLGATHER


def wire_bytes(sizes: tuple[int, ...], workers: int, block_size: int | None, mode: str = SCATTER_REDUCE) -> float:
    """What each worker sends for tensors of these sizes in one exchange, headers included: mean over the workers."""
    if mode == ALLGATHER:
        return (workers - 1) * Layout(sizes, 1, block_size).total_bytes()
    return Layout(sizes, workers, block_size).wire_bytes()


@functools.lru_cache(maxsize=4096)
def pays(sizes: tuple[int, ...], workers: int, block_size: int | None, mode: str = SCATTER_REDUCE) -> bool:
    """Whether tensors that travel together are fewer bytes on the wire in 8 bits than in float32."""
    return wire_bytes(sizes, workers, block_size, mode) < ring_bytes(sum(sizes), workers)
