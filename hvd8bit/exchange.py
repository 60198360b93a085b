"""The path of a gradient: compressed scatter-reduce, compressed allgather.

Codes cannot be added, so there is no allreduce of them. Worker i decodes and adds everyone's chunk i, encodes the
sum, and sends it to all. Every worker, the chunk's owner too, decodes the same bytes: replicas stay bit-identical.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from hvd8bit import ops
from hvd8bit.collectives import HorovodComm
from hvd8bit.encoding import Encoding

ELEMENTS_PER_SLICE = 2 * 2**20
"""Bytes that a slice brings through the alltoall: the transport is at its best with a few MB or less."""
MAX_SLICES = 16


def exchange(tensors: Sequence[tf.Tensor], encoding: Encoding, comm, *, factor, name: str) -> list[tf.Tensor]:
    """The sum of all workers' tensors, in 8 bits on the wire, times factor / number of workers.

    Args:
      tensors: float32, float64, float16 or bfloat16, any shapes. Number, order, shapes and dtypes must be the same on
        all workers.
      encoding: must be the same on all workers.
      comm: a `HorovodComm` or `LoopbackComm`.
      factor: float64 scalar: what the reduction makes of a 1 that every worker puts in; 1 for the mean, the number of
        workers for the sum.
      name: of the collectives, the same on all workers and unique among those in flight.

    Returns:
      Tensors like `tensors`, bit-identical on all workers. Each worker sends 2 (N-1)/N · (1 + 4/block_size) bytes per
      element.

    Raises:
      tf.errors.InvalidArgumentError: workers' tensors or settings differ.
    """
    shards, shard = comm.size_tensor(), comm.rank_tensor()
    slices = number_of_slices(tensors)
    seed = ops.draw_seed(encoding, shard)
    gathered = []
    encoded: list[tf.Tensor] = []
    checked: list[tf.Tensor] = []
    for slice_ in range(slices):
        # One slice is encoded after another, so that the first can leave at once.
        with tf.control_dependencies(encoded):
            payload, splits = ops.encode_list(tensors, shards, encoding, slices=slices, slice_=slice_, seed=seed)
        encoded = [payload]
        # The other slices leave when the first has shown that all workers have the same tensors and settings. Workers
        # that differ would else wait for slices that nobody sends.
        with tf.control_dependencies(checked):
            received, sent = comm.alltoall(payload, splits, f"{name}_alltoall_{slice_}")
        mine = ops.reduce_shards(received, sent, tensors, shards, shard, encoding, slices=slices, slice_=slice_)
        checked = checked or [mine]
        gathered.append(comm.allgather(mine, f"{name}_allgather_{slice_}"))
    return ops.decode_list(gathered, tensors, shards, encoding, factor=factor)


def number_of_slices(tensors: Sequence[tf.Tensor]) -> int:
    """How many slices the tensors travel in; 1 if their size is not known when the graph is built.

    It depends on nothing that may differ between workers, the number of workers included.
    """
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    if any(size is None for size in sizes):
        return 1
    return max(1, min(sum(sizes) // ELEMENTS_PER_SLICE, MAX_SLICES))


def differentiable_exchange(
    tensors: Sequence[tf.Tensor], encoding: Encoding, comm: HorovodComm, *, factor, name: str
) -> list[tf.Tensor]:
    """`exchange` over Horovod, with the gradient of Horovod's own allreduce: the same exchange of the gradient."""

    @tf.custom_gradient
    def run(*inputs):
        outputs = _traced_exchange(inputs, encoding, comm, factor, name)

        def grad(*upstream):
            return differentiable_exchange(upstream, encoding, comm, factor=factor, name=f"{name}_grad")

        return outputs, grad

    return list(run(*tensors))


def _traced_exchange(tensors, encoding: Encoding, comm: HorovodComm, factor, name: str) -> list[tf.Tensor]:
    if not tf.executing_eagerly():
        return exchange(tensors, encoding, comm, factor=factor, name=name)
    # Op by op, eager execution would wait for each slice; a graph has them all under way.
    return _graph_of_exchange(encoding, comm, name)(list(tensors), factor)


@functools.lru_cache(maxsize=256)
def _graph_of_exchange(encoding: Encoding, comm: HorovodComm, name: str):
    @tf.function(autograph=False)
    def run(tensors, factor):
        return exchange(tensors, encoding, comm, factor=factor, name=name)

    return run
