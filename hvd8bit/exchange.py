"""The path of a gradient: compressed scatter-reduce, compressed allgather; or an allgather of everything.

Codes cannot be added, so there is no allreduce of them. Worker i decodes and adds everyone's chunk i, encodes the
sum, and sends it to all. Every worker, the chunk's owner too, decodes the same bytes: replicas stay bit-identical.
Where lists are small, or workers two, everyone sends everything to everyone instead, and all add the same bytes in
the same order (`hvd8bit.modes`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import tensorflow as tf

from hvd8bit import dither, ops
from hvd8bit.collectives import HorovodComm, one_when_run
from hvd8bit.encoding import Encoding
from hvd8bit.gathered import check_headers
from hvd8bit.modes import ALLGATHER, SCATTER_REDUCE

ELEMENTS_PER_SLICE = 2 * 2**20
"""Bytes that a slice brings through the alltoall: the transport is at its best with a few MB or less."""
MAX_SLICES = 16
SEEDS = 2
"""Of an exchange: for the codes and for the sum. All slices have the same: a number's place tells them apart."""


def exchange(
    tensors: Sequence[tf.Tensor],
    encoding: Encoding,
    comm,
    *,
    factor,
    name: str,
    mode: str = SCATTER_REDUCE,
    slices: int | None = None,
    seeds: Sequence | None = None,
    trail: Trail | None = None,
) -> list[tf.Tensor]:
    """The sum of all workers' tensors, in 8 bits on the wire, times factor / number of workers.

    Args:
      tensors: float32, float64, float16 or bfloat16, any shapes. Number, order, shapes and dtypes must be the same on
        all workers.
      encoding: must be the same on all workers.
      comm: a `HorovodComm` or `LoopbackComm`.
      factor: float64 scalar: what the reduction makes of a 1 that every worker puts in; 1 for the mean, the number of
        workers for the sum.
      name: of the collectives, the same on all workers and unique among those in flight.
      mode: one of `hvd8bit.modes.MODES`, the same on all workers.
      slices: how many, the same on all workers; None: `number_of_slices`.
      seeds: this worker's own, two int64 scalars: how stochastic rounding goes; None draws them.
      trail: is filled, for `exchange_with_errors`.

    Returns:
      Tensors like `tensors`, bit-identical on all workers. Each worker sends 2 (N-1)/N · (1 + 4/block_size) bytes per
      element; with an allgather N-1 times (1 + 4/block_size).

    Raises:
      tf.errors.InvalidArgumentError: workers' tensors or settings differ.
    """
    slices = number_of_slices(tensors) if slices is None else slices
    way = _all_to_all_workers if mode == ALLGATHER else _scatter_reduce
    seeds = dither.seeds(encoding, SEEDS, comm=comm, name=name) if seeds is None else seeds
    return way(tensors, encoding, comm, factor, name, slices, seeds, trail)


@dataclasses.dataclass
class Trail:
    """What an exchange leaves behind: what this worker has not sent; of its chunk, slice by slice, sum and place."""

    errors: list[tf.Tensor] = dataclasses.field(default_factory=list)
    sums: list[tuple[tf.Tensor, tf.Tensor]] = dataclasses.field(default_factory=list)


def exchange_with_errors(
    tensors: Sequence[tf.Tensor], encoding: Encoding, comm, *, factor, mode: str = SCATTER_REDUCE, **settings
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """`exchange`, and what roundings made this worker withhold from its outputs.

    Args:
      tensors: float32. The others as for `exchange`.

    Returns:
      outputs: as of `exchange`, the same bits.
      errors: tensors like `tensors`, this worker's own: what it has not sent of them, and in the chunk that it adds up
        for all what it has not sent of the sum. Outputs plus factor / workers times all workers' errors are what an
        exact exchange would have given, to float32's precision, but for what a fixed scale cuts off.
    """
    trail = Trail()
    outputs = exchange(tensors, encoding, comm, factor=factor, mode=mode, trail=trail, **settings)
    if mode == ALLGATHER:
        return outputs, trail.errors
    workers = comm.size_tensor()
    scale = tf.cast(workers, tf.float64) / tf.cast(factor, tf.float64)
    return outputs, with_errors_of_sum(trail.errors, trail.sums, outputs, encoding, workers=workers, scale=scale)


def not_sent(
    tensors: Sequence[tf.Tensor], payloads: Sequence[tf.Tensor], shards, encoding: Encoding
) -> list[tf.Tensor]:
    """Tensors less what was made of them: `payloads`, slice by slice, each of so many chunks."""
    sent = ops.decode_list(payloads, tensors, shards, encoding, factor=tf.cast(shards, tf.float64))
    return [_within(encoding.fixed_scale, tensor) - rounded for tensor, rounded in zip(tensors, sent)]


def with_errors_of_sum(
    errors, sums, outputs: Sequence[tf.Tensor], encoding: Encoding, *, workers, scale
) -> list[tf.Tensor]:
    """`errors` of one worker, and in the chunk that it has added up, what its sum has lost.

    Args:
      errors: from `not_sent`.
      sums: slice by slice, what `ops.sum_shards` made of what it received: (sum, first).
      outputs: what came of the exchange.
      workers: how many.
      scale: float64 scalar: outputs times it are sums.
    """
    sizes = [tf.size(output, tf.int64) for output in outputs]
    starts = tf.cumsum(tf.stack(sizes), exclusive=True)
    counts = [tf.size(total, tf.int64) for total, _ in sums]
    # Of a slice without elements the place says nothing.
    firsts = [tf.where(n > 0, first, starts[-1] + sizes[-1]) for n, (_, first) in zip(counts, sums)]
    first = tf.reduce_min(tf.stack(firsts))
    total = _within(encoding.fixed_scale, tf.concat([total for total, _ in sums], 0), workers)
    results = []
    for i, (error, output, size) in enumerate(zip(errors, outputs, sizes)):
        # The part of this tensor that is in the chunk.
        begin = tf.clip_by_value(first - starts[i], 0, size)
        end = tf.clip_by_value(first + tf.add_n(counts) - starts[i], 0, size)
        in_chunk = starts[i] - first + begin
        rounded = tf.cast(scale, tf.float32) * tf.reshape(output, [-1])[begin:end]
        part = tf.pad(total[in_chunk : in_chunk + end - begin] - rounded, [[begin, size - end]])
        results.append(error + tf.reshape(part, tf.shape(error)))
    return results


def _within(fixed_scale: float, tensor: tf.Tensor, times=1) -> tf.Tensor:
    """What a fixed scale can hold of so many tensors' sum; all of it with a scale for each block."""
    limit = tf.cast(times, tf.float32) * fixed_scale
    return tf.clip_by_value(tensor, -limit, limit) if fixed_scale else tensor


def _scatter_reduce(tensors, encoding: Encoding, comm, factor, name: str, slices: int, seeds, trail) -> list[tf.Tensor]:
    shards, shard = comm.size_tensor(), comm.rank_tensor()
    gathered = []
    encoded: list[tf.Tensor] = []
    checked: list[tf.Tensor] = []
    payloads = []
    for slice_ in range(slices):
        # One slice is encoded after another, so that the first can leave at once.
        with tf.control_dependencies(encoded):
            payload, splits = ops.encode_list(tensors, shards, encoding, slices=slices, slice_=slice_, seed=seeds[0])
        encoded = [payload]
        payloads.append(payload)
        # The other slices leave when the first has shown that all workers have the same tensors and settings. Workers
        # that differ would else wait for slices that nobody sends.
        with tf.control_dependencies(checked):
            received, sent = comm.alltoall(payload, splits, f"{name}_out_{slice_}")
        mine = ops.reduce_shards(
            received, sent, tensors, shards, shard, encoding, slices=slices, slice_=slice_, seed=seeds[1]
        )
        checked = checked or [mine]
        if trail is not None:
            with tf.control_dependencies([mine]):  # others wait for that
                sums = ops.sum_shards(received, sent, tensors, shards, shard, encoding, slices=slices, slice_=slice_)
            trail.sums.append(sums)
        gathered.append(comm.allgather(mine, f"{name}_back_{slice_}"))
    if trail is not None:
        trail.errors = not_sent(tensors, payloads, shards, encoding)
    # The results may then take the tensors' place.
    with tf.control_dependencies([] if trail is None else trail.errors):
        return ops.decode_list(gathered, tensors, shards, encoding, factor=factor)


def _all_to_all_workers(
    tensors, encoding: Encoding, comm, factor, name: str, slices: int, seeds, trail
) -> list[tf.Tensor]:
    """Each worker's share is decoded to the tensors' dtypes; they are added in float32, in the order of the workers."""
    workers = tf.cast(comm.size_tensor(), tf.int64)  # sizes of everyone's bytes may exceed 32 bits
    sizes, gathered = [], []
    encoded: list[tf.Tensor] = []
    checked: list[tf.Tensor] = []
    payloads = []
    for slice_ in range(slices):
        with tf.control_dependencies(encoded):
            payload, _ = ops.encode_list(
                tensors, one_when_run(comm), encoding, slices=slices, slice_=slice_, seed=seeds[0]
            )
        encoded = [payload]
        payloads.append(payload)
        # The name of the other mode's first round: should workers choose differently, Horovod says so at once.
        with tf.control_dependencies(checked):
            everyones = comm.allgather(payload, f"{name}_out_{slice_}")
        everyones = check_headers(everyones, payload, workers)
        checked = checked or [everyones]
        sizes.append(tf.size(payload, out_type=tf.int64))
        gathered.append(everyones)
    if trail is not None:
        trail.errors = not_sent(tensors, payloads, one_when_run(comm), encoding)

    def share_of(worker):
        chunks = [chunks[worker * size : (worker + 1) * size] for chunks, size in zip(gathered, sizes)]
        return [tf.cast(x, tf.float32) for x in ops.decode_list(chunks, tensors, 1, encoding)]

    def add(worker, *totals):
        return [worker + 1, *(total + share for total, share in zip(totals, share_of(worker)))]

    _, *totals = tf.while_loop(
        lambda worker, *_: worker < workers, add, [tf.constant(1, tf.int64), *share_of(0)], parallel_iterations=1
    )
    # In float64, so that N times a number, divided by N, is that number for every N.
    scale = tf.cast(factor, tf.float64), tf.cast(workers, tf.float64)
    return [
        tf.cast(tf.cast(total, tf.float64) * scale[0] / scale[1], tensor.dtype)
        for total, tensor in zip(totals, tensors)
    ]


def exchange_slices(
    slices: tf.IndexedSlices, encoding: Encoding, comm, *, average: bool, name: str
) -> tf.IndexedSlices:
    """Everyone's rows of a sparse gradient, in the order of the workers: values in 8 bits, indices exactly.

    Args:
      slices: float32, float64, float16 or bfloat16 values [rows, ...]; the number of rows, zero included, may differ
        between workers, all else must be the same.
      encoding, comm, name: see `exchange`.
      average: divide by the number of workers.

    Returns:
      IndexedSlices with the rows of all workers, bit-identical on all.

    Raises:
      tf.errors.InvalidArgumentError: workers' settings, dtypes or rows' shapes differ.
    """
    workers, values, indices = comm.size_tensor(), slices.values, slices.indices
    (seed,) = dither.seeds(encoding, comm=comm, name=name)
    payload, _ = ops.encode_list([values], one_when_run(comm), encoding, seed=seed)
    # What a worker's part holds goes before its indices: rows, and bytes of the values.
    size = tf.reshape(tf.bitcast(tf.size(payload, tf.int64), indices.dtype), [-1])  # of all, may exceed 32 bits
    head = tf.concat([[tf.size(indices, indices.dtype)], size], 0)
    everyones_indices = comm.allgather(tf.concat([head, indices], 0), f"{name}_indices")
    everyones_values = comm.allgather(payload, f"{name}_values")

    def part_of(worker, at, start, rows_of, indices_of):
        first = at + tf.size(head, indices.dtype)
        rows, size = everyones_indices[at], _int64(everyones_indices[at + 1 : first])
        shape = tf.concat([[tf.cast(rows, tf.int32)], tf.shape(values)[1:]], 0)
        like = tf.raw_ops.Empty(shape=shape, dtype=values.dtype)
        (decoded,) = ops.decode_list([everyones_values[start : start + size]], [like], 1, encoding)
        indices_of = indices_of.write(worker, everyones_indices[first : first + rows])
        return worker + 1, first + rows, start + size, rows_of.write(worker, decoded), indices_of

    def array(dtype, shape):
        return tf.TensorArray(dtype, workers, element_shape=shape, infer_shape=False)

    zero = tf.zeros((), indices.dtype)
    rows_shape = tf.TensorShape([None]).concatenate(values.shape[1:])
    *_, rows_of, indices_of = tf.while_loop(
        lambda worker, *_: worker < workers,
        part_of,
        [tf.constant(0), zero, tf.constant(0, tf.int64), array(values.dtype, rows_shape), array(indices.dtype, [None])],
        parallel_iterations=1,
    )
    rows = rows_of.concat()
    rows.set_shape(rows_shape)
    if average:
        rows = rows / tf.cast(workers, rows.dtype)
    return tf.IndexedSlices(rows, indices_of.concat(), dense_shape=slices.dense_shape)


def _int64(words: tf.Tensor) -> tf.Tensor:
    """The number that one int64 or two int32 hold."""
    return tf.reshape(tf.bitcast(words, tf.int64), [])


def number_of_slices(tensors: Sequence[tf.Tensor]) -> int:
    """How many slices the tensors travel in; 1 if their size is not known when the graph is built.

    It depends on nothing that may differ between workers, the number of workers included.
    """
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    if any(size is None for size in sizes):
        return 1
    return max(1, min(sum(sizes) // ELEMENTS_PER_SLICE, MAX_SLICES))


def differentiable_exchange(
    tensors: Sequence[tf.Tensor],
    encoding: Encoding,
    comm: HorovodComm,
    *,
    factor,
    name: str,
    mode: str = SCATTER_REDUCE,
) -> list[tf.Tensor]:
    """`exchange` over Horovod, with the gradient of Horovod's own allreduce: the same exchange of the gradient."""
    # Its gradient may be asked for twice in one graph, of two losses say.
    numbers = itertools.count()

    @tf.custom_gradient
    def run(*inputs):
        outputs = _traced_exchange(inputs, encoding, comm, factor, name, mode)

        def grad(*upstream):
            # Eager calls wait for one another.
            number = 0 if tf.executing_eagerly() else next(numbers)
            inner = f"{name}_grad" if number == 0 else f"{name}_grad_{number}"
            dense = [tf.convert_to_tensor(gradient) for gradient in upstream]  # of a gather it is sparse
            return differentiable_exchange(dense, encoding, comm, factor=factor, name=inner, mode=mode)

        return outputs, grad

    return list(run(*tensors))


def correcting_exchange(
    tensors: Sequence[tf.Tensor],
    residuals: Sequence[tf.Variable],
    encoding: Encoding,
    comm: HorovodComm,
    *,
    factor,
    name: str,
    mode: str = SCATTER_REDUCE,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """`exchange` over Horovod of tensors plus residuals, and what the residuals are to be after it.

    Args:
      tensors: see `exchange`.
      residuals: float32, of the tensors' shapes; this worker's own. They stay as they are.

    Returns:
      outputs: tensors like `tensors`, bit-identical on all workers. They have no gradient.
      errors: float32. Outputs plus factor / workers times all workers' errors are what an exact exchange of tensors and
        residuals would have given, to float32's precision, but for what a fixed scale cuts off.
    """
    corrected = [tf.cast(tensor, tf.float32) + residual for tensor, residual in zip(tensors, residuals)]
    wide, errors = _traced_exchange(corrected, encoding, comm, factor, name, mode, with_errors=True)
    outputs = [_without_gradient(tf.cast(x, tensor.dtype)) for x, tensor in zip(wide, tensors)]
    return outputs, [
        error if output.dtype.size >= 4 else error + (x - tf.cast(output, tf.float32)) / tf.cast(factor, tf.float32)
        for error, output, x in zip(errors, outputs, wide)
    ]


@tf.custom_gradient
def _without_gradient(x):
    def grad(_):
        raise ValueError(
            "error_feedback must be False where gradients of reduced gradients are taken, got True: they would lack "
            "what is owed; if nobody wants them, stop the outer tape's recording around the reduction"
        )

    return tf.identity(x), grad


def _traced_exchange(
    tensors, encoding: Encoding, comm: HorovodComm, factor, name: str, mode: str, with_errors: bool = False
):
    way = exchange_with_errors if with_errors else exchange
    if not tf.executing_eagerly():
        return way(tensors, encoding, comm, factor=factor, name=name, mode=mode)
    # Op by op, eager execution would wait for each slice; a graph has them all under way.
    graph = _graph_of_exchange(way, encoding, comm, name, mode, number_of_slices(tensors))
    try:
        # Drawn here, one after another: graphs for other shapes would each begin with the same ones.
        stochastic = encoding.rounding == "stochastic"
        seeds = dither.seeds(encoding, SEEDS, comm=comm, name=name) if stochastic else None
        return graph(list(tensors), factor, seeds)
    except tf.errors.OpError as error:
        if "Mismatched operations" not in error.message:
            raise
        # Horovod's words for workers that chose different modes.
        shapes = ", ".join(str(tensor.shape) for tensor in tensors)
        message = (
            f"workers exchange in different ways, this one by {mode}, so that another one holds other tensors or has "
            f"other settings; here are {shapes}: number, order, shapes, dtypes and settings must be the same on all "
            "workers"
        )
        raise tf.errors.InvalidArgumentError(None, None, f"hvd8bit: {message} ({error.message})") from error


@functools.lru_cache(maxsize=256)
def _graph_of_exchange(way, encoding: Encoding, comm: HorovodComm, name: str, mode: str, slices: int):
    # After a few shapes, TensorFlow traces one graph for all of them. The slices do not depend on what is known of
    # shapes: workers need not have come to the same graph.
    @tf.function(autograph=False, reduce_retracing=True)
    def run(tensors, factor, seeds):
        return way(tensors, encoding, comm, factor=factor, name=name, mode=mode, slices=slices, seeds=seeds)

    return run
