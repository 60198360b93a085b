"""`send_recv`: a tensor from one worker to another, and the error signal the same way back."""

from __future__ import annotations

import re

import tensorflow as tf

from hvd8bit import activations
from hvd8bit.compression import EightBit
from hvd8bit.parallel import report, transfer
from hvd8bit.parallel.boundary import Boundary


def send_recv(
    tensor, source: int, destination: int, *, compression=EightBit, process_set=None, name="hvd8bit_send_recv"
):
    """Moves a tensor from one worker to another; its gradient moves back the same way.

        forward     source ── activation ──▶ destination
        backward    source ◀─ error signal ── destination

    All rows leave the source and arrive at the destination. So what the source gets back is a tensor without rows; let
    it count for the source's loss, `loss = tf.reduce_sum(result)`, and the error signal finds its way back.

    Args:
      tensor: on the source what is to be sent: any dtype but string, [rows, ...], where only the number of rows may be
        unknown when the graph is built. On the others a tensor of the same dtype and row shape; its rows do not count,
        and it may have none.
      source, destination: global ranks of two workers, the same on all workers.
      compression: `EightBit` for 8 bits in both directions (straight-through: the rounding's own gradient is 1), or
        None: as it is. Integers, and tensors of fewer than its min_elements elements, always travel as they are.
      process_set: the Horovod process set whose workers call this, all of them; None: all workers.
      name: of the transfer, the same on all workers and unique among those in flight.

    Returns:
      On the destination the tensor that came, [rows, ...]; on the others a tensor of no rows. Differentiable for float
      dtypes: on the source with what came back, on the others with zeros.

    Raises:
      TypeError or ValueError: an argument is not one of the above; the message names it.
      tf.errors.InvalidArgumentError: source and destination differ in dtype, row shape or settings.
    """
    boundary = Boundary(name, compression, process_set)
    ranks = boundary.comm.ranks()
    for argument, rank in (("source", source), ("destination", destination)):
        if rank not in ranks:
            raise ValueError(
                f"{argument} must be the global rank of a worker that takes part, one of {ranks}; got {rank}"
            )
    if source == destination:
        raise ValueError(f"source and destination must be two workers, got {source} for both")
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank is None or tensor.shape.rank == 0 or None in tensor.shape[1:]:
        raise ValueError(
            f"tensor must be [rows, ...] with only the number of rows unknown, got shape {tensor.shape}; reshape it, "
            "or "
            "give it its shape with tf.ensure_shape"
        )
    return differentiable_move(boundary, tensor, ranks.index(source), ranks.index(destination), "forward")


def differentiable_move(boundary: Boundary, tensor, source: int, destination: int, direction: str):
    """`send_recv` between two ranks of a boundary's workers."""

    @tf.custom_gradient
    def run(x):
        def grad(error):
            came = differentiable_move(boundary, error, destination, source, "backward")
            if boundary.rank == source:
                return tf.ensure_shape(came, x.shape)
            return transfer.tied(tf.zeros_like(x), [came])

        # Not `boundary.collective`, which takes a number at the end for one of Keras': here it may be the user's.
        name = "hvd8bit_" + re.sub("[^a-zA-Z0-9_]", "_", boundary.name) + ("_grad" if direction == "backward" else "")
        return move(boundary, x, source, destination, direction, name), grad

    return run(tensor)


def move(boundary: Boundary, tensor, source: int, destination: int, direction: str, name: str) -> tf.Tensor:
    """The source's tensor on the destination; on the others no rows, which depend on the transfer all the same."""
    if boundary.rank == source:
        received = send(boundary, tensor, source, destination, direction, name)
    else:
        received = transfer.carry(None, source, destination, boundary.comm, name)
    row_shape = tensor.shape[1:].as_list()
    if boundary.rank == destination:
        return transfer.unpack(received, row_shape, tensor.dtype, boundary.compression)
    return tf.cast(tf.reshape(received, [-1, *row_shape] if 0 not in row_shape else [0, *row_shape]), tensor.dtype)


def send(boundary: Boundary, tensor, source: int, destination: int, direction: str, name: str) -> tf.Tensor:
    """The sender's part in a transfer; returns its empty end."""
    encoded = boundary.encodes_parts([activations.shape_of_part(tensor, None, None)], tensor.dtype)
    with report.of(boundary, direction, tensor, encoded=encoded) as encoded:
        payload = transfer.pack(tensor, boundary.compression, encoded, comm=boundary.comm, name=name)
        return transfer.carry(payload, source, destination, boundary.comm, name)
