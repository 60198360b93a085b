"""What moves bytes: Horovod, or `LoopbackComm`, a stand-in that plays N workers in one process.

On a gradient's path this is the only file that calls Horovod. Both offer the same: `size`, `size_tensor`,
`rank_tensor`, `alltoall`, `allgather`, and for numbers that travel as they are `gather_rows`, `swap_rows`, `add_up`.
Sizes are read when the step runs, not when its graph is built, since an elastic job changes them. Model parallelism,
whose graphs are made for one number of workers, reads `size` and `rank` when they are built.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvd8bit.counting import count, reset_sent_bytes, sent_bytes
from hvd8bit.graphs import unordered
from hvd8bit.loopback import LoopbackComm
from hvd8bit.stall import watched

__all__ = [
    "HorovodComm",
    "LoopbackComm",
    "elastic",
    "process_set_of",
    "reset_sent_bytes",
    "running_rank",
    "running_workers",
    "sent_bytes",
    "workers_to_choose_by",
    "workers_to_judge_by",
]


def checked_process_set(process_set):
    """The process set as it is, or None. Raises TypeError for anything else."""
    from horovod.common.process_sets import ProcessSet

    if process_set is not None and not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"process_set must be a horovod.tensorflow.ProcessSet or None, got {process_set!r} of type "
            f"{type(process_set).__name__}; hvd.add_process_set(ranks) makes one"
        )
    return process_set


class HorovodComm:
    """The workers of a Horovod process set.

    Args:
      process_set: a `horovod.tensorflow.ProcessSet`, or None: all workers.
      ignore_name_scope: whether collectives meet under their bare names. Without, the name scopes and function calls
        around them count, too, as in Horovod.
    """

    def __init__(self, process_set=None, ignore_name_scope: bool = True):
        import horovod.tensorflow as hvd

        self._hvd = hvd
        self._ignore_name_scope = ignore_name_scope
        self.process_set = hvd.global_process_set if process_set is None else checked_process_set(process_set)

    def __eq__(self, other):
        return isinstance(other, HorovodComm) and other._key() == self._key()

    def __hash__(self):
        return hash(self._key())

    def _key(self) -> tuple:
        # A number alone may be that of a set which was removed.
        return (self.process_set_id, tuple(self.ranks()), self._ignore_name_scope)

    @property
    def process_set_id(self) -> int:
        return self.process_set.process_set_id

    def size(self) -> int:
        """Number of workers now. Raises ValueError for a process set that Horovod does not know."""
        size = self.process_set.size()
        if size is None:
            raise ValueError(
                f"process_set must be known to Horovod, got {self.process_set}: hvd.init(process_sets=[...]) or "
                "hvd.add_process_set(...) comes first, and hvd.remove_process_set or hvd.shutdown ends it"
            )
        return size

    def rank(self) -> int:
        """This worker's rank within the process set, now."""
        return self._hvd.rank() if self.process_set_id == 0 else self.process_set.rank()

    def includes_this_worker(self) -> bool:
        return self.process_set_id == 0 or self.process_set.included()

    def ranks(self) -> list[int]:
        """Global ranks of the workers, in order."""
        return list(range(self.size())) if self.process_set_id == 0 else list(self.process_set.ranks)

    def global_rank(self) -> int:
        """This worker's rank among all workers now."""
        return self._hvd.rank()

    def size_tensor(self) -> tf.Tensor:
        """int32 scalar, read when the step runs."""
        with tf.device("CPU:0"), unordered():
            return self._hvd.size_op(process_set_id=self.process_set_id)

    def global_rank_tensor(self) -> tf.Tensor:
        """int32 scalar: this worker's rank among all workers, read when the step runs."""
        with tf.device("CPU:0"), unordered():
            return self._hvd.rank_op()

    def rank_tensor(self) -> tf.Tensor:
        """int32 scalar: this worker's rank within the process set."""
        if self.process_set_id == 0:
            return self.global_rank_tensor()
        with tf.device("CPU:0"):
            if not elastic():
                return tf.math.count_nonzero(tf.less(self.ranks(), self.global_rank_tensor()), dtype=tf.int32)
            # Asked when the step runs: after an elastic reset the set may have other ranks.
            rank = tf.numpy_function(lambda: np.int32(self.process_set.rank()), [], tf.int32)
        rank.set_shape([])
        return rank

    def alltoall(self, payload, splits, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[i]` elements of `payload` to worker i; returns what came, and how much from each."""
        sizes = tf.cast(splits, tf.int64)  # together they may exceed 32 bits
        count(tf.reduce_sum(sizes) - sizes[self.rank_tensor()])
        return self._hvd.alltoall(
            payload,
            splits=splits,
            name=self._called(name),
            ignore_name_scope=self._ignore_name_scope,
            process_set=self.process_set,
        )

    def allgather(self, chunk, name: str) -> tf.Tensor:
        """All workers' chunks, one after another, in order of rank."""
        gathered = self._hvd.allgather(
            chunk, name=self._called(name), ignore_name_scope=self._ignore_name_scope, process_set=self.process_set
        )
        brought = tf.size(gathered, out_type=tf.int64) - tf.size(chunk, out_type=tf.int64)
        count(chunk.dtype.size * brought)
        return gathered

    def allreduce(
        self, tensors, name: str, *, op, prescale_factor=1.0, postscale_factor=1.0, compression=None
    ) -> list[tf.Tensor]:
        """Horovod's own allreduce of tensors of one dtype, as one group; not through hvd8bit's codec."""
        compression = compression or self._hvd.Compression.none
        halved = compression is self._hvd.Compression.fp16 and tensors[0].dtype.is_floating
        width = 2 if halved else tensors[0].dtype.size
        self.count_ring(tensors, width)
        settings = {
            "op": op,
            "prescale_factor": prescale_factor,
            "postscale_factor": postscale_factor,
            "compression": compression,
            "name": self._called(name),
            "ignore_name_scope": True,
            "process_set": self.process_set,
        }
        given = self._when_they_run(tensors)
        # In a group the names would be others: a worker that does something else under this one would not be found.
        return (
            [self._hvd.allreduce(*given, **settings)]
            if len(given) == 1
            else self._hvd.grouped_allreduce(given, **settings)
        )

    def _when_it_runs(self, tensor) -> tf.Tensor:
        return self._when_they_run([tensor])[0]

    def _when_they_run(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The same tensors, but no constants.

        Horovod's ops are not stateful: with constant input TensorFlow's optimizer would run them once, when it likes,
        and keep what came of it.
        """
        if tf.executing_eagerly():
            return list(tensors)
        zero = tf.minimum(self.size_tensor(), 0)

        def from_zero(tensor):
            if not tensor.shape.rank:
                return tf.reshape(tf.reshape(tensor, [-1])[zero:], tf.shape(tensor))
            same = tensor[zero:]  # no copy
            same.set_shape(tensor.shape)
            return same

        return [from_zero(tensor) for tensor in tensors]

    def _called(self, name: str) -> str:
        """The name of a collective. `hvd.elastic.run` knows by this word in an error that a worker was lost."""
        return f"HorovodAllreduce_{name}" if elastic() else name

    def count_ring(self, tensors, element_bytes: int) -> None:
        """Counts what a ring allreduce of the tensors makes this worker send: for what Horovod itself reduces."""
        known = [tensor.shape.num_elements() for tensor in tensors]
        sizes = [tf.size(t, out_type=tf.int64) if n is None else n for t, n in zip(tensors, known)]
        # One number for the graph, but in elastic jobs: there are steps with hundreds of small gradients.
        size = tf.cast(self.size_tensor(), tf.int64) if elastic() else self.size()
        count(2 * (size - 1) * element_bytes * sum(sizes) // size)

    def gather_rows(self, rows, name: str) -> tf.Tensor:
        """All workers' rows, exactly, in order of rank; any dtype, [rows, ...] with the same [...] on all workers."""
        carried = self._when_it_runs(_carried(rows))
        return _uncarried(self._gather_exact(carried, name), rows.dtype)

    def swap_rows(self, rows, splits, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[i]` rows to worker i, exactly; returns the rows that came, and how many from each."""
        carried = self._when_it_runs(_carried(rows))
        others = tf.shape(carried, tf.int64)[0] - tf.cast(splits[self.rank()], tf.int64)
        count(others * tf.reduce_prod(tf.shape(carried, tf.int64)[1:]) * carried.dtype.size)
        received, received_splits = self._hvd.alltoall(
            carried, splits=splits, name=self._called(name), ignore_name_scope=True, process_set=self.process_set
        )
        return _uncarried(received, rows.dtype), received_splits

    def add_up(self, tensor, name: str) -> tf.Tensor:
        """The sum of all workers' tensors, exactly, in its dtype; the same bits on all workers."""
        # Not Horovod's: bfloat16, nor most integers.
        wide = {tf.bfloat16: tf.float32, tf.int16: tf.int32, tf.uint16: tf.int32, tf.bool: tf.int32}.get(tensor.dtype)
        summed = self._when_it_runs(tensor if wide is None else tf.cast(tensor, wide))
        (total,) = self.allreduce([summed], name, op=self._hvd.Sum)
        return tf.cast(total, tensor.dtype)

    def gather_slices(self, slices: tf.IndexedSlices, name: str, *, average: bool) -> tf.IndexedSlices:
        """Everyone's rows of a sparse gradient, exactly; divided by the number of workers for the average."""
        dtype = slices.values.dtype
        # bfloat16 is none of Horovod's dtypes.
        wide = tf.cast(slices.values, tf.float32) if dtype == tf.bfloat16 else slices.values
        values = self._gather_exact(wide, f"{name}_values")
        indices = self._gather_exact(slices.indices, f"{name}_indices")
        if average:
            size = tf.cast(self.size_tensor(), values.dtype)
            values = values // size if dtype.is_integer else values / size
        return tf.IndexedSlices(tf.cast(values, dtype), indices, dense_shape=slices.dense_shape)

    def _gather_exact(self, tensor, name: str) -> tf.Tensor:
        tensor = self._when_it_runs(tensor)
        gathered = self._hvd.allgather(
            tensor, name=self._called(name), ignore_name_scope=True, process_set=self.process_set
        )
        width = tensor.dtype.size
        count(width * (tf.size(gathered, out_type=tf.int64) - tf.size(tensor, out_type=tf.int64)))
        return gathered

    def gather_text(self, text: str, name: str, in_steps: Sequence[str] = ()) -> list[str]:
        """Every worker's text, in order of rank. Eager; control traffic, not counted.

        Args:
          text: this worker's.
          name: of the collectives.
          in_steps: of collectives in which workers wait that go on instead of coming here; see `stall.watched`.

        Raises:
          RuntimeError: a worker goes on, or has not come here within `stall_timeout_s()`. Horovod has been shut down
            then, so that the others' next collective fails, too.
        """
        raw = tf.constant(list(text.encode()), tf.uint8)
        with watched(self, name, in_steps):
            # Sizes first: an empty or shorter text must not shift the others.
            sizes = self.gather_size(len(raw), f"{name}_sizes")
            everything = _gather(self, name)(raw)
        return [bytes(part.numpy()).decode() for part in tf.split(everything, sizes)]

    def gather_size(self, size: int, name: str) -> tf.Tensor:
        """Every worker's number, in order of rank. Eager; not counted. There must be few different names."""
        return _gather(self, name)(tf.constant([size]))

    def end_job(self) -> None:
        """Makes every collective that waits raise, on all workers; no other can be started."""
        self._hvd.shutdown()


@functools.lru_cache(maxsize=64)
def _gather(comm: HorovodComm, name: str):
    """An allgather in a graph: eager collectives have no names of their own."""

    @tf.function(autograph=False, reduce_retracing=True)
    def gather(own):
        return comm._hvd.allgather(own, name=name, ignore_name_scope=True, process_set=comm.process_set)

    return gather


def one_when_run(comm) -> tf.Tensor:
    """int32 scalar 1: the number of chunks, say, of a list that goes to all workers as a whole.

    Known when the step runs, and not before: TensorFlow's optimizer evaluates what has constant inputs, Horovod's
    collectives included, once and for all.
    """
    return tf.minimum(comm.size_tensor(), 1)


def process_set_of(ranks: Sequence[int]):
    """The Horovod process set of these workers: one that exists, or a new one. All workers must ask in the same order.

    Raises:
      ValueError: there is none, and Horovod was not told that there will be; the message says what to do.
    """
    import horovod.tensorflow as hvd

    ranks = sorted(ranks)
    found = known_process_set(ranks)
    if found is not None:
        return found
    try:
        return hvd.add_process_set(ranks)
    except ValueError as error:
        if "HOROVOD_DYNAMIC_PROCESS_SETS" not in str(error):
            raise
        raise ValueError(
            f"a process set of ranks {ranks} is needed, and Horovod was started without: call "
            'hvd.init(process_sets="dynamic"), or set HOROVOD_DYNAMIC_PROCESS_SETS=1 for all workers'
        ) from error


def known_process_set(ranks: Sequence[int]):
    """The Horovod process set of these workers as it is now, or None."""
    import horovod.tensorflow as hvd
    from horovod.common import process_sets

    ranks = sorted(ranks)
    if ranks == list(range(hvd.size())):
        return hvd.global_process_set
    # Horovod has no public way to ask for a set that was made elsewhere.
    for known_id, known in process_sets._basics._get_process_set_ids_and_ranks().items():
        if sorted(known) == ranks:
            found = hvd.ProcessSet(ranks)
            found.process_set_id = known_id
            return found
    return None


def running_workers() -> int:
    """How many workers Horovod runs in this process's job; 1 where it does not run."""
    import horovod.tensorflow as hvd

    return hvd.size() if hvd.is_initialized() else 1


def running_rank() -> int:
    """This process's rank; 0 where Horovod does not run."""
    import horovod.tensorflow as hvd

    return hvd.rank() if hvd.is_initialized() else 0


def workers_to_judge_by(comm) -> int:
    """The number of workers by which is decided what to encode: all must decide alike.

    In an elastic job some keep a graph that was built for another number; there it is always 2.
    """
    return 2 if elastic() else max(comm.size(), 2)


def workers_to_choose_by(comm) -> int | None:
    """The number of workers by which the mode of an exchange is chosen; None in an elastic job, where it changes."""
    return None if elastic() else comm.size()


def elastic() -> bool:
    """Whether this is an elastic job, whose number of workers may change under a graph that was built."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", 0)))


_CARRIERS = {tf.bfloat16: tf.int16, tf.uint32: tf.int32, tf.uint64: tf.int64}
"""Dtypes that Horovod does not move, and what carries their bits."""


def _carried(tensor) -> tf.Tensor:
    carrier = _CARRIERS.get(tensor.dtype)
    return tensor if carrier is None else tf.bitcast(tensor, carrier)


def _uncarried(tensor, dtype) -> tf.Tensor:
    return tensor if tensor.dtype == dtype else tf.bitcast(tensor, dtype)
