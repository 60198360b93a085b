"""What moves bytes: Horovod, or a stand-in that plays N workers in one process.

On a gradient's path this is the only file that calls Horovod. Both classes offer the same: `size`, `size_tensor`,
`rank_tensor`, `alltoall`, `allgather`, and for numbers that travel as they are `gather_rows`, `swap_rows`, `add_up`.
Sizes are read when the step runs, not when its graph is built, since an elastic job changes them. Model parallelism,
whose graphs are made for one number of workers, reads `size` and `rank` when they are built.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

_log = logging.getLogger("hvd8bit")


def sent_bytes() -> int:
    """Bytes that this process handed to Horovod for other workers: codes, scales, headers, and what passed through.

    A ring passes on what it receives, so what an allgather brings counts as sent. Control traffic is not counted.
    """
    return int(tf.raw_ops.ReadVariableOp(resource=_counter(), dtype=tf.int64))


def reset_sent_bytes() -> None:
    """Starts the count of `sent_bytes` anew."""
    tf.raw_ops.AssignVariableOp(resource=_counter(), value=tf.constant(0, tf.int64))


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
            # Asked when the step runs: after an elastic reset the set may have other ranks.
            rank = tf.numpy_function(lambda: np.int32(self.process_set.rank()), [], tf.int32)
        rank.set_shape([])
        return rank

    def alltoall(self, payload, splits, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[i]` elements of `payload` to worker i; returns what came, and how much from each."""
        sizes = tf.cast(splits, tf.int64)  # together they may exceed 32 bits
        _count(tf.reduce_sum(sizes) - sizes[self.rank_tensor()])
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
        _count(chunk.dtype.size * brought)
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
            [self._when_it_runs(tensor) for tensor in tensors],
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            compression=compression,
            name=self._called(name),
            ignore_name_scope=True,
            process_set=self.process_set,
        )

    def _when_it_runs(self, tensor) -> tf.Tensor:
        """The same tensor, but no constant.

        Horovod's ops are not stateful: with constant input TensorFlow's optimizer would run them once, when it likes,
        and keep what came of it.
        """
        if tf.executing_eagerly():
            return tensor
        zero = tf.minimum(self.size_tensor(), 0)
        if not tensor.shape.rank:
            return tf.reshape(tf.reshape(tensor, [-1])[zero:], tf.shape(tensor))
        same = tensor[zero:]  # no copy
        same.set_shape(tensor.shape)
        return same

    def _called(self, name: str) -> str:
        """The name of a collective. `hvd.elastic.run` knows by this word in an error that a worker was lost."""
        return f"HorovodAllreduce_{name}" if elastic() else name

    def count_ring(self, tensor, element_bytes: int) -> None:
        """Counts what a ring allreduce of the tensor makes this worker send: for what Horovod itself reduces."""
        size = tf.cast(self.size_tensor(), tf.int64)
        _count(2 * (size - 1) * element_bytes * tf.size(tensor, out_type=tf.int64) // size)

    def gather_rows(self, rows, name: str) -> tf.Tensor:
        """All workers' rows, exactly, in order of rank; any dtype, [rows, ...] with the same [...] on all workers."""
        carried = self._when_it_runs(_carried(rows))
        return _uncarried(self._gather_exact(carried, name), rows.dtype)

    def swap_rows(self, rows, splits, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[i]` rows to worker i, exactly; returns the rows that came, and how many from each."""
        carried = self._when_it_runs(_carried(rows))
        others = tf.shape(carried, tf.int64)[0] - tf.cast(splits[self.rank()], tf.int64)
        _count(others * tf.reduce_prod(tf.shape(carried, tf.int64)[1:]) * carried.dtype.size)
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
        _count(width * (tf.size(gathered, out_type=tf.int64) - tf.size(tensor, out_type=tf.int64)))
        return gathered

    def gather_text(self, text: str, name: str, in_steps: Sequence[str] = ()) -> list[str]:
        """Every worker's text, in order of rank. Eager; control traffic, not counted.

        Args:
          text: this worker's.
          name: of the collectives.
          in_steps: names of collectives in which workers wait that go on instead of coming here; see `_watched`.

        Raises:
          RuntimeError: a worker goes on, or has not come here within `stall_timeout_s()`. Horovod has been shut down
            then, so that the others' next collective fails, too.
        """
        raw = tf.constant(list(text.encode()), tf.uint8)
        with _watched(self, name, in_steps):
            # Sizes first: an empty or shorter text must not shift the others.
            sizes = self.gather_size(len(raw), f"{name}_sizes")
            everything = self._hvd.allgather(raw, name=name, process_set=self.process_set)
        return [bytes(part.numpy()).decode() for part in tf.split(everything, sizes)]

    def gather_size(self, size: int, name: str) -> tf.Tensor:
        """Every worker's number, in order of rank. Eager; not counted."""

        @tf.function(autograph=False)  # eager collectives have no names of their own
        def gather(own):
            return self._hvd.allgather(own, name=name, ignore_name_scope=True, process_set=self.process_set)

        return gather(tf.constant([size]))

    def end_job(self) -> None:
        """Makes every collective that waits raise, on all workers; no other can be started."""
        self._hvd.shutdown()


STALL_VARIABLE = "HVD8BIT_STALL_TIMEOUT_SECONDS"
STALL_TIMEOUT_S = 600.0
STALL_WARNING_S = 30.0


def stall_timeout_s() -> float:
    """How long a worker waits for the others to compare a new plan: `HVD8BIT_STALL_TIMEOUT_SECONDS`; 0: for ever.

    Raises:
      ValueError: the variable holds no number of at least 0.
    """
    text = os.environ.get(STALL_VARIABLE)
    if not text:
        return STALL_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{STALL_VARIABLE} must be a number of seconds, 0 to wait for ever, got {text!r}")
    return seconds


@contextlib.contextmanager
def _watched(comm: HorovodComm, name: str, in_steps: Sequence[str]) -> Iterator[None]:
    """Inside, a worker that the others leave alone notices, says so, and ends the job instead of waiting for ever.

    Horovod's own check of stalled tensors never fires with Gloo. So this worker also starts collectives with the names
    of those in which workers wait that go on with what was compared before, but of another dtype. If they do wait
    there, Horovod finds that the dtypes differ. If they come here, they start the same ones. A worker that does
    something else altogether is left to the clock: `stall_timeout_s()`.
    """
    limit = stall_timeout_s()
    done, cause = threading.Event(), []
    waits = f"rank {comm.global_rank()} has a new list of gradients, new settings or new metrics ({name})"
    remedy = "let all workers run the same steps"

    def end(reason: str) -> None:
        cause.append(f"{waits}, and {reason}; {remedy}. Horovod has been shut down")
        _log.error("hvd8bit: %s", cause[0])
        comm.end_job()

    def watch() -> None:
        warn_after = min(STALL_WARNING_S, limit / 2) if limit else STALL_WARNING_S
        if done.wait(warn_after):
            return
        _log.warning(
            "hvd8bit: %s and waits %.0f s for the others to compare it. Unless they are merely slow, %s",
            *(waits, warn_after, remedy),
        )
        if limit and not done.wait(limit - warn_after):
            end(f"the others have not come to compare it for {limit:.0f} s ({STALL_VARIABLE}; 0: wait for ever)")

    def meet(in_step: str) -> None:
        try:
            comm.gather_size(0, in_step)
        except Exception as error:
            if "Mismatched" in str(error):
                end("others go on with an older one instead of comparing it")

    threads = [threading.Thread(target=meet, args=(in_step,), daemon=True) for in_step in in_steps]
    watcher = threading.Thread(target=watch, daemon=True)
    for thread in [watcher, *threads]:
        thread.start()
    try:
        yield
        for thread in threads:
            thread.join()
    except Exception as error:
        for thread in threads:
            thread.join(STALL_WARNING_S)
        if cause:
            raise RuntimeError(cause[0]) from error
        raise
    finally:
        done.set()
        watcher.join()
    if cause:
        raise RuntimeError(cause[0])


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


class _Also(threading.local):
    """Counters beside the one of all bytes, of this thread."""

    counters: tuple[tf.Variable, ...] = ()


_also = _Also()
_counter_lock = threading.Lock()
_counter_made = False


def _counter() -> tf.Tensor:
    """The handle of a variable that counts, so that a traced step counts each time it runs.

    Known by its name instead of being captured: a function that counts can then be exported.
    """
    global _counter_made
    with tf.device("CPU:0"):
        with _counter_lock:
            if not _counter_made:
                with tf.init_scope():
                    tf.raw_ops.AssignVariableOp(resource=_counter_handle(), value=tf.constant(0, tf.int64))
                _counter_made = True
        return _counter_handle()


def _counter_handle() -> tf.Tensor:
    return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name="hvd8bit_sent_bytes")


def _count(sent: tf.Tensor) -> None:
    with tf.device("CPU:0"), unordered():
        sent = tf.cast(sent, tf.int64)
        for counter in _also.counters:
            counter.assign_add(sent)
        if tf.executing_eagerly():
            tf.raw_ops.AssignAddVariableOp(resource=_counter(), value=sent)
        elif tf.compat.v1.get_default_graph().building_function:  # a graph of TensorFlow 1 has variables of its own
            _counting_function()(sent)


@functools.lru_cache(maxsize=1)
def _counting_function():
    """Counts in a graph. Traced once: a step may count for hundreds of small gradients."""
    with tf.init_scope():  # leaves nothing in the graph that happens to count first
        _counter()

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
    def count(sent):
        with tf.device("CPU:0"):
            handle = _counter_handle()
            # In a process that loads an exported function nobody has made the variable.
            tf.cond(
                tf.raw_ops.VarIsInitializedOp(resource=handle),
                lambda: tf.group(tf.raw_ops.AssignAddVariableOp(resource=handle, value=sent)),
                tf.no_op,
            )

    return count
