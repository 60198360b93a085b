"""What moves bytes: Horovod, or a stand-in that plays N workers in one process.

On a gradient's path this is the only file that calls Horovod. Both classes offer the same: `size`, `size_tensor`,
`rank_tensor`, `alltoall`, `allgather`. Sizes are read when the step runs, not when its graph is built, since an elastic
job changes them.
"""

from __future__ import annotations

import os
import threading
from typing import Sequence

import tensorflow as tf


def sent_bytes() -> int:
    """Bytes that this process handed to Horovod for other workers: codes, scales, headers, and what passed through.

    A ring passes on what it receives, so what an allgather brings counts as sent. Control traffic is not counted.
    """
    return int(_counter().numpy())


def reset_sent_bytes() -> None:
    """Starts the count of `sent_bytes` anew."""
    _counter().assign(0)


class HorovodComm:
    """The workers of a Horovod process set.

    Args:
      process_set: a `horovod.tensorflow.ProcessSet`, or None: all workers.
    """

    def __init__(self, process_set=None):
        import horovod.tensorflow as hvd

        self._hvd = hvd
        self.process_set = hvd.global_process_set if process_set is None else process_set

    def __eq__(self, other):
        return isinstance(other, HorovodComm) and other.process_set_id == self.process_set_id

    def __hash__(self):
        return hash(self.process_set_id)

    @property
    def process_set_id(self) -> int:
        return self.process_set.process_set_id

    def size(self) -> int:
        """Number of workers now."""
        return self.process_set.size()

    def ranks(self) -> list[int]:
        """Global ranks of the workers, in order."""
        return list(range(self.size())) if self.process_set_id == 0 else list(self.process_set.ranks)

    def size_tensor(self) -> tf.Tensor:
        """int32 scalar, read when the step runs."""
        with tf.device("CPU:0"):
            return self._hvd.size_op(process_set_id=self.process_set_id)

    def global_rank_tensor(self) -> tf.Tensor:
        """int32 scalar: this worker's rank among all workers, read when the step runs."""
        with tf.device("CPU:0"):
            return self._hvd.rank_op()

    def rank_tensor(self) -> tf.Tensor:
        """int32 scalar: this worker's rank within the process set."""
        rank = self.global_rank_tensor()
        if self.process_set_id == 0:
            return rank
        return tf.cast(tf.reduce_sum(tf.cast(tf.constant(self.ranks()) < rank, tf.int32)), tf.int32)

    def alltoall(self, payload, splits, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[i]` elements of `payload` to worker i; returns what came, and how much from each."""
        _count(tf.reduce_sum(splits) - splits[self.rank_tensor()])
        return self._hvd.alltoall(
            payload, splits=splits, name=name, ignore_name_scope=True, process_set=self.process_set
        )

    def allgather(self, chunk, name: str) -> tf.Tensor:
        """All workers' chunks, one after another, in order of rank."""
        gathered = self._hvd.allgather(chunk, name=name, ignore_name_scope=True, process_set=self.process_set)
        _count(tf.size(gathered) - tf.size(chunk))
        return gathered


class LoopbackComm:
    """One of N workers that live in the threads of one process. Eager only.

    `LoopbackComm.run(N, fn)` calls `fn(comm)` in N threads and returns their results.
    """

    def __init__(self, rank: int, shared: "_Loopback"):
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

    def size_tensor(self) -> tf.Tensor:
        return tf.constant(self._shared.workers)

    def rank_tensor(self) -> tf.Tensor:
        return tf.constant(self._rank)

    def alltoall(self, payload, splits, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        parts = self._shared.swap(self._rank, tf.split(payload, splits))
        mine = [parts[sender][self._rank] for sender in range(self.size())]
        return tf.concat(mine, 0), tf.constant([part.shape[0] for part in mine])

    def allgather(self, chunk, name: str) -> tf.Tensor:
        return tf.concat(self._shared.swap(self._rank, chunk), 0)


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


def elastic() -> bool:
    """Whether this is an elastic job, whose number of workers may change under a graph that was built."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", 0)))


_counter_lock = threading.Lock()
_counter_variable: tf.Variable | None = None


def _counter() -> tf.Variable:
    global _counter_variable
    with _counter_lock:
        if _counter_variable is None:
            # A variable, so that a traced step counts each time it runs.
            with tf.init_scope(), tf.device("CPU:0"):
                _counter_variable = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvd8bit_sent_bytes")
        return _counter_variable


def _count(elements_of_one_byte: tf.Tensor) -> None:
    with tf.device("CPU:0"):
        _counter().assign_add(tf.cast(elements_of_one_byte, tf.int64))
