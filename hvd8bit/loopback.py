"""A stand-in for Horovod that plays N workers in one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import tensorflow as tf


class LoopbackComm:
    """One of N workers that live in the threads of one process. Eager only.

    `LoopbackComm.run(N, fn)` calls `fn(comm)` in N threads and returns their results.
    """

    def __init__(self, rank: int, shared: _Loopback):
        self._rank = rank
        self._shared = shared

    @staticmethod
    def run(workers: int, fn, timeout_s: float = 120.0) -> list:
        """Results of `fn(LoopbackComm)` in `workers` threads, by rank. Raises what the first of them raised."""
        shared = _Loopback(workers, timeout_s)
        results: list = [None] * workers
        errors: list = [None] * workers

        def work(rank):
            try:
                results[rank] = fn(LoopbackComm(rank, shared))
            except BaseException as error:
                errors[rank] = error
                shared.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raised = [error for error in errors if error is not None]
        if raised:
            # A worker that found the others gone tells less than the one that went first.
            raise next((e for e in raised if not isinstance(e, threading.BrokenBarrierError)), raised[0])
        return results

    def size(self) -> int:
        return self._shared.workers

    def rank(self) -> int:
        return self._rank

    def includes_this_worker(self) -> bool:
        return True

    def size_tensor(self) -> tf.Tensor:
        return tf.constant(self._shared.workers)

    def rank_tensor(self) -> tf.Tensor:
        return tf.constant(self._rank)

    def global_rank_tensor(self) -> tf.Tensor:
        return self.rank_tensor()

    def alltoall(self, payload, splits, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        parts = self._shared.swap(self._rank, tf.split(payload, splits))
        mine = [parts[sender][self._rank] for sender in range(self.size())]
        return tf.concat(mine, 0), tf.constant([part.shape[0] for part in mine])

    def allgather(self, chunk, name: str) -> tf.Tensor:
        return tf.concat(self._shared.swap(self._rank, chunk), 0)

    def gather_rows(self, rows, name: str) -> tf.Tensor:
        return self.allgather(rows, name)

    def swap_rows(self, rows, splits, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        return self.alltoall(rows, splits, name)

    def add_up(self, tensor, name: str) -> tf.Tensor:
        return tf.add_n(self._shared.swap(self._rank, tensor))


class _Loopback:
    """A mailbox for each worker and a barrier."""

    def __init__(self, workers: int, timeout_s: float):
        self.workers = workers
        self.barrier = threading.Barrier(workers, timeout=timeout_s)
        self._mail: list = [None] * workers

    def swap(self, rank: int, item) -> Sequence:
        self._mail[rank] = item
        self.barrier.wait()
        everything = list(self._mail)
        self.barrier.wait()
        return everything
