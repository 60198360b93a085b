"""What moves bytes: Horovod, or a stand-in that plays N workers in one process.

On a gradient's path this is the only file that calls Horovod. Both classes offer the same: `size`, `size_tensor`,
`rank_tensor`, `alltoall`, `allgather`, and for numbers that travel as they are `gather_rows`, `swap_rows`, `add_up`.
Sizes are read when the step runs, not when its graph is built, since an elastic job changes them. Model parallelism,
whose graphs are made for one number of workers, reads `size` and `rank` when they are built.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf


def sent_bytes() -> int:
    """Bytes that this process handed to Horovod for other workers: codes, scales, headers, and what passed through.

    A ring passes on what it receives, so what an allgather brings counts as sent. Control traffic is not counted.
    """
    return int(_counter().numpy())


def reset_sent_bytes() -> None:
    """Starts the count of `sent_bytes` anew."""
    _counter().assign(0)


@contextlib.contextmanager
def counting(counter: tf.Variable) -> Iterator[None]:
    """Adds to `counter`, an int64 variable, what the collectives inside send; traced ones each time they run."""
    _also.counters = (*_also.counters, counter)
    try:
        yield
    finally:
        _also.counters = _also.counters[:-1]


@contextlib.contextmanager
def unordered() -> Iterator[None]:
    """What is built inside runs as soon as its inputs are there, not in the order in which it is written.

    In a `tf.function` TensorFlow runs ops that have a state one after another, in the order of the program: those that
    read rank and size, assertions, and branches with one of these in them. So an exchange would wait for what an
    earlier one brings, though it needs nothing of it: exchanges would not overlap, and workers that send each other
    something in different orders would wait for ever. For code without side effects but assertions and counters.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    manager = getattr(graph, "experimental_acd_manager", None)
    before = 0 if graph is None or manager is None else graph.num_operations()
    yield
    if graph is not None and manager is not None:
        for op in graph.get_operations()[before:]:
            if op._is_stateful and op.type not in ("ReadVariableOp", "ResourceGather"):
                manager.run_independently(op)


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
        self.process_set = hvd.global_process_set if process_set is None else process_set

    def __eq__(self, other):
        return isinstance(other, HorovodComm) and other._key() == self._key()

    def __hash__(self):
        return hash(self._key())

    def _key(self) -> tuple:
        return (self.process_set_id, self._ignore_name_scope)

    @property
    def process_set_id(self) -> int:
        return self.process_set.process_set_id

    def size(self) -> int:
        """Number of workers now."""
        return self.process_set.size()

    def rank(self) -> int:
        """This worker's rank within the process set, now."""
        return self._hvd.rank() if self.process_set_id == 0 else self.process_set.rank()

    def includes_this_worker(self) -> bool:
        return self.process_set_id == 0 or self.process_set.included()

    def ranks(self) -> list[int]:
        """Global ranks of the workers, in order."""
        return list(range(self.size())) if self.process_set_id == 0 else list(self.process_set.ranks)

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
        rank = self.global_rank_tensor()
        if self.process_set_id == 0:
            return rank
        return tf.cast(tf.reduce_sum(tf.cast(tf.constant(self.ranks()) < rank, tf.int32)), tf.int32)

    def alltoall(self, payload, splits, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[i]` elements of `payload` to worker i; returns what came, and how much from each."""
        sizes = tf.cast(splits, tf.int64)  # together they may exceed 32 bits
        _count(tf.reduce_sum(sizes) - sizes[self.rank_tensor()])
        return self._hvd.alltoall(
            payload,
            splits=splits,
            name=name,
            ignore_name_scope=self._ignore_name_scope,
            process_set=self.process_set,
        )

    def allgather(self, chunk, name: str) -> tf.Tensor:
        """All workers' chunks, one after another, in order of rank."""
        gathered = self._hvd.allgather(
            chunk, name=name, ignore_name_scope=self._ignore_name_scope, process_set=self.process_set
        )
        _count(tf.size(gathered, out_type=tf.int64) - tf.size(chunk, out_type=tf.int64))
        return gathered

    def allreduce(
        self, tensors, name: str, *, op, prescale_factor=1.0, postscale_factor=1.0, compression=None
    ) -> list[tf.Tensor]:
        """Horovod's own allreduce of tensors of one dtype, as one group; not through hvd8bit's codec."""
        compression = compression or self._hvd.Compression.none
        width = 2 if compression is self._hvd.Compression.fp16 else tensors[0].dtype.size
        for tensor in tensors:
            self.count_ring(tensor, width)
        return self._hvd.grouped_allreduce(
            tensors,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            compression=compression,
            name=name,
            ignore_name_scope=True,
            process_set=self.process_set,
        )

    def count_ring(self, tensor, element_bytes: int) -> None:
        """Counts what a ring allreduce of the tensor makes this worker send: for what Horovod itself reduces."""
        size = tf.cast(self.size_tensor(), tf.int64)
        _count(2 * (size - 1) * element_bytes * tf.size(tensor, out_type=tf.int64) // size)

    def gather_rows(self, rows, name: str) -> tf.Tensor:
        """All workers' rows, exactly, in order of rank; any dtype, [rows, ...] with the same [...] on all workers."""
        carried = self._unfoldable(_carried(rows))
        return _uncarried(self._gather_exact(carried, name), rows.dtype)

    def swap_rows(self, rows, splits, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[i]` rows to worker i, exactly; returns the rows that came, and how many from each."""
        carried = self._unfoldable(_carried(rows))
        others = tf.shape(carried, tf.int64)[0] - tf.cast(splits[self.rank()], tf.int64)
        _count(others * tf.reduce_prod(tf.shape(carried, tf.int64)[1:]) * carried.dtype.size)
        received, received_splits = self._hvd.alltoall(
            carried, splits=splits, name=name, ignore_name_scope=True, process_set=self.process_set
        )
        return _uncarried(received, rows.dtype), received_splits

    def add_up(self, tensor, name: str) -> tf.Tensor:
        """The sum of all workers' tensors, exactly, in its dtype; the same bits on all workers."""
        # Not Horovod's: bfloat16, nor most integers.
        wide = {tf.bfloat16: tf.float32, tf.int16: tf.int32, tf.uint16: tf.int32, tf.bool: tf.int32}.get(tensor.dtype)
        summed = self._unfoldable(tensor if wide is None else tf.cast(tensor, wide))
        (total,) = self.allreduce([summed], name, op=self._hvd.Sum)
        return tf.cast(total, tensor.dtype)

    def _unfoldable(self, tensor) -> tf.Tensor:
        """The tensor, but for TensorFlow's optimizer no constant.

        Horovod's ops are not stateful: with constant input the optimizer would run them once, when it likes, and keep
        the result.
        """
        if tf.executing_eagerly():
            return tensor
        same = tf.reshape(tensor, tf.shape(tensor) * tf.minimum(self.size_tensor(), 1))
        same.set_shape(tensor.shape)  # an ensure_shape would let the optimizer see through it
        return same

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
        gathered = self._hvd.allgather(tensor, name=name, ignore_name_scope=True, process_set=self.process_set)
        width = tensor.dtype.size
        _count(width * (tf.size(gathered, out_type=tf.int64) - tf.size(tensor, out_type=tf.int64)))
        return gathered

    def gather_text(self, text: str, name: str) -> list[str]:
        """Every worker's text, in order of rank. Eager; control traffic, not counted."""
        raw = tf.constant(list(text.encode()), tf.uint8)
        # Sizes first: an empty or shorter text must not shift the others.
        sizes = self._hvd.allgather(tf.constant([len(raw)]), name=f"{name}_sizes", process_set=self.process_set)
        everything = self._hvd.allgather(raw, name=name, process_set=self.process_set)
        return [bytes(part.numpy()).decode() for part in tf.split(everything, sizes)]


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


def process_set_of(ranks: Sequence[int]):
    """The Horovod process set of these workers: one that exists, or a new one. All workers must ask in the same order.

    Raises:
      ValueError: there is none, and Horovod was not told that there will be; the message says what to do.
    """
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
    try:
        return hvd.add_process_set(ranks)
    except ValueError as error:
        if "HOROVOD_DYNAMIC_PROCESS_SETS" not in str(error):
            raise
        raise ValueError(
            f"a process set of ranks {ranks} is needed, and Horovod was started without: call "
            'hvd.init(process_sets="dynamic"), or set HOROVOD_DYNAMIC_PROCESS_SETS=1 for all workers'
        ) from error


def workers_to_judge_by(comm) -> int:
    """The number of workers by which is decided what to encode: all must decide alike.

    In an elastic job some keep a graph that was built for another number; there it is always 2.
    """
    return 2 if elastic() else max(comm.size(), 2)


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


class _Also(threading.local):
    """Counters beside the one of all bytes, of this thread."""

    counters: tuple[tf.Variable, ...] = ()


_also = _Also()
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


def _count(sent: tf.Tensor) -> None:
    with tf.device("CPU:0"), unordered():
        for counter in (_counter(), *_also.counters):
            counter.assign_add(tf.cast(sent, tf.int64))
