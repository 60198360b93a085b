"""What passes between the workers of a split model, as functions with gradients.

They come in conjugate pairs: the backward pass of each is the forward pass of its partner (for two workers; x, y: a
value on all workers alike; x₀: worker 0's own):

                      forward                               backward

    copy              x ──────────→ x on all                dx₀ + dx₁ ←── dx₀, dx₁         all_reduce's forward
    all_reduce        x₀, x₁ ──→ x₀ + x₁ on all             dy on all ←────────── dy       copy's forward

    scatter           x ──────────→ own part x₀             [dx₀ dx₁] on all ←── dx₀, dx₁  all_gather's forward
    all_gather        x₀, x₁ ──→ [x₀ x₁] on all             own part dy₀ ←──────── dy      scatter's forward

    reduce_scatter    x₀, x₁ ──→ own part of x₀ + x₁        [dy₀ dy₁] on all ←── dy₀, dy₁  all_gather's forward
    all_gather        x₀, x₁ ──→ [x₀ x₁] on all             own part of dy₀ + dy₁ ←── dy₀, dy₁   ("sum")

In Megatron's words (Shoeybi et al. 2019, sec. 3) `copy` is f and `all_reduce` is g. After `all_reduce` and `all_gather`
all workers compute the same, so that the error signal is the same on all, and nothing of it is sent; that is what
`gradient="slice"` says. Where workers go on with different computations, each on its share of the loss, an error signal
is a part of a sum: `gradient="sum"`. No factor of the number of workers appears anywhere.

What is sent travels in 8 bits where `compression` says so and it pays, the error signals on their way back, too. The
gradient goes straight through the rounding: it is that of the exact function. Tensors with fewer than `EightBit`'s
`min_elements` elements, and integers, travel exactly. All workers end with the same bits: a worker's own part is the
decoded one, too. With one worker nothing is touched.

Every worker must make the same calls in the same order, with the same arguments; a `tf.function` may be traced on one
worker alone. One that is traced once and called twice in a step must not have both calls under way at once: a
collective's name is fixed when it is traced.
"""

from __future__ import annotations

import tensorflow as tf

from hvd8bit import activations
from hvd8bit.collectives import HorovodComm
from hvd8bit.compression import EightBit
from hvd8bit.exchange import differentiable_exchange, exchange
from hvd8bit.graphs import unordered
from hvd8bit.parallel import report
from hvd8bit.parallel.boundary import Boundary
from hvd8bit.parallel.partition import part_sizes

_GRADIENTS = ("slice", "sum")


def all_gather(x, *, axis: int = 0, compression=EightBit, process_set=None, name, gradient: str = "slice", sizes=None):
    """All workers' parts, one after another along an axis, on all workers.

        worker 0   x₀ ──┐              ┌──→ [x₀ x₁]        backward, "slice": dy ──→ own part of dy, nothing sent
        worker 1   x₁ ──┴─ allgather ──┴──→ [x₀ x₁]        backward, "sum":   as `reduce_scatter`

    Args:
      x: this worker's part, a tensor of any dtype with at least one dimension. The dtype, and the shape but for `axis`,
        must be the same on all workers. Parts may be empty.
      axis: along which the parts are stacked.
      compression: `EightBit`, a copy of it with other settings, or None: exact. The same on all workers.
      process_set: the `horovod.tensorflow.ProcessSet` of the workers that exchange; None: all.
      name: of the boundary, the same on all workers.
      gradient: "slice" where the error signal is the same on all workers; "sum" where each has its share of it.
      sizes: by rank, how many places along `axis` each worker's part takes, where all workers know it: then these sizes
        are not exchanged, and the result's static shape is known.

    Returns:
      A tensor of x's dtype, the same bits on all workers. N workers with parts of n elements send
      (N-1) · n · (1 + 4/block_size) bytes each.

    Raises:
      ValueError, TypeError: an argument is out of range; the message names it.
      tf.errors.InvalidArgumentError: workers' parts or settings differ.
    """
    boundary = Boundary(name, compression, process_set)
    if gradient not in _GRADIENTS:
        raise ValueError(f"gradient must be one of {', '.join(_GRADIENTS)}, got {gradient!r}")
    x = tf.convert_to_tensor(x)
    axis = _axis(x, axis)
    if boundary.workers == 1:
        return x
    sizes = _exchanged_sizes(boundary, x, axis) if sizes is None else _checked(sizes, boundary, x, axis)
    return _all_gather(boundary, x, axis, sizes, gradient, "forward")


def all_reduce(x, *, compression=EightBit, process_set=None, name):
    """The sum of all workers' tensors, on all workers. Megatron's g.

        worker 0   x₀ ──┐                                ┌──→ x₀ + x₁        backward: dy ──→ dy, nothing sent
        worker 1   x₁ ──┴─ alltoall, add, allgather ─────┴──→ x₀ + x₁

    Args:
      x: a tensor; shape and dtype must be the same on all workers.
      compression, process_set, name: as in `all_gather`.

    Returns:
      A tensor like x, the same bits on all workers. Each of N workers sends 2 (N-1)/N · (1 + 4/block_size) bytes per
      element.

    Raises:
      As `all_gather`.
    """
    boundary = Boundary(name, compression, process_set)
    x = tf.convert_to_tensor(x)
    return x if boundary.workers == 1 else _all_reduce(boundary, x, "forward")


def copy(x, *, compression=EightBit, process_set=None, name):
    """A tensor that all workers have, at the entrance to what each computes apart. Megatron's f.

        forward: x ──→ x, nothing sent        backward:   worker 0   dx₀ ──┐                              ┌──→ dx₀ + dx₁
                                                          worker 1   dx₁ ──┴─ alltoall, add, allgather ───┴──→ dx₀ + dx₁

    Args:
      x: a tensor, the same on all workers.
      compression, process_set, name: as in `all_gather`.

    Returns:
      x. The error signal is that of all workers together.

    Raises:
      As `all_gather`; for tensors that differ in shape not before the backward pass.
    """
    boundary = Boundary(name, compression, process_set)
    x = tf.convert_to_tensor(x)
    return x if boundary.workers == 1 else _copy(boundary, x, "forward")


def reduce_scatter(x, *, axis: int = 0, compression=EightBit, process_set=None, name, sizes=None):
    """This worker's part of the sum of all workers' tensors.

        worker 0   x₀ ──┐                   ┌──→ (x₀ + x₁), first part        backward: as `all_gather`
        worker 1   x₁ ──┴─ alltoall, add ───┴──→ (x₀ + x₁), second part

    Args:
      x: a tensor; shape and dtype must be the same on all workers.
      axis: along which the sum is cut.
      compression, process_set, name: as in `all_gather`.
      sizes: by rank, how many places along `axis` each worker gets; None: nearly the same, the first ones one more
        (`part_sizes`).

    Returns:
      A tensor of x's dtype. Each of N workers sends (N-1)/N · (1 + 4/block_size) bytes per element.

    Raises:
      As `all_gather`.
    """
    boundary = Boundary(name, compression, process_set)
    x = tf.convert_to_tensor(x)
    axis = _axis(x, axis)
    if boundary.workers == 1:
        return x
    return _reduce_scatter(boundary, x, axis, _cut(boundary, x, axis, sizes), "forward")


def scatter(x, *, axis: int = 0, compression=EightBit, process_set=None, name, sizes=None):
    """This worker's part of a tensor that all workers have.

        forward: x ──→ own part of x, nothing sent        backward:   worker 0   dx₀ ──┐              ┌──→ [dx₀ dx₁]
                                                                      worker 1   dx₁ ──┴─ allgather ──┴──→ [dx₀ dx₁]

    Args:
      x: a tensor, the same on all workers.
      axis: along which it is cut.
      compression, process_set, name: as in `all_gather`.
      sizes: as in `reduce_scatter`.

    Returns:
      A tensor of x's dtype. The error signal is that of all workers together.

    Raises:
      As `all_gather`; for tensors that differ in shape not before the backward pass.
    """
    boundary = Boundary(name, compression, process_set)
    x = tf.convert_to_tensor(x)
    axis = _axis(x, axis)
    if boundary.workers == 1:
        return x
    return _scatter(boundary, x, axis, _cut(boundary, x, axis, sizes), "forward")


# Each with its partner as gradient.


def _all_gather(boundary, x, axis, sizes, gradient, direction):
    @tf.custom_gradient
    def run(x):
        def grad(upstream):
            if gradient == "slice":
                return _scatter(boundary, upstream, axis, sizes, "backward")
            return _reduce_scatter(boundary, upstream, axis, sizes, "backward")

        return _send_gather(boundary, x, axis, sizes, direction), grad

    return run(x)


def _scatter(boundary, x, axis, sizes, direction):
    @tf.custom_gradient
    def run(x):
        def grad(upstream):
            return _all_gather(boundary, upstream, axis, sizes, "slice", "backward")

        return _own_part(boundary, x, axis, sizes), grad

    return run(x)


def _reduce_scatter(boundary, x, axis, sizes, direction):
    @tf.custom_gradient
    def run(x):
        def grad(upstream):
            return _all_gather(boundary, upstream, axis, sizes, "sum", "backward")

        return _send_scatter_sum(boundary, x, axis, sizes, direction), grad

    return run(x)


def _all_reduce(boundary, x, direction):
    @tf.custom_gradient
    def run(x):
        return _send_sum(boundary, x, direction), lambda upstream: _copy(boundary, upstream, "backward")

    return run(x)


def _copy(boundary, x, direction):
    @tf.custom_gradient
    def run(x):
        return tf.identity(x), lambda upstream: _all_reduce(boundary, upstream, "backward")

    return run(x)


# What is sent: in 8 bits or exactly.


def _send_gather(boundary: Boundary, part, axis: int, sizes, direction: str):
    comm, name = boundary.comm, boundary.collective(direction)
    shapes = [activations.shape_of_part(part, axis, size) for size in sizes]

    def coded():
        return activations.gather(part, axis, sizes, boundary.encoding, comm, name=name)

    def exact():
        # The stacked axis first: Horovod compares the others on all workers.
        order = [axis, *(dimension for dimension in range(part.shape.rank) if dimension != axis)]
        rows = comm.gather_rows(tf.transpose(part, order) if axis else part, f"{name}_allgather")
        return tf.transpose(rows, [order.index(dimension) for dimension in range(len(order))]) if axis else rows

    with report.of(boundary, direction, part, encoded=boundary.encodes_parts(shapes, part.dtype)) as encoded:
        result = _either(encoded, coded, exact)
    return tf.ensure_shape(result, _with(part.shape, axis, _total(sizes)))


def _send_scatter_sum(boundary: Boundary, tensor, axis: int, sizes, direction: str):
    comm, name = boundary.comm, boundary.collective(direction)
    shapes = [activations.shape_of_part(tensor, axis, size) for size in sizes]

    def coded():
        return activations.scatter_sum(tensor, axis, sizes, boundary.encoding, comm, name=name)

    def exact():
        order = [axis, *(dimension for dimension in range(tensor.shape.rank) if dimension != axis)]
        rows = tf.transpose(tensor, order) if axis else tensor
        boolean = rows.dtype == tf.bool
        rows = tf.cast(rows, tf.int32) if boolean else rows
        received, splits = comm.swap_rows(rows, tf.cast(tf.stack(sizes), tf.int32), f"{name}_alltoall")
        total = tf.cast(tf.add_n(tf.split(received, splits, num=boundary.workers)), tensor.dtype)
        return tf.transpose(total, [order.index(dimension) for dimension in range(len(order))]) if axis else total

    with report.of(boundary, direction, tensor, encoded=boundary.encodes_parts(shapes, tensor.dtype)) as encoded:
        result = _either(encoded, coded, exact)
    return tf.ensure_shape(result, _with(tensor.shape, axis, sizes[boundary.rank]))


def _send_sum(boundary: Boundary, tensor, direction: str):
    comm, name = boundary.comm, boundary.collective(direction)

    def coded():
        total = tf.cast(comm.size_tensor(), tf.float64)
        run = differentiable_exchange if isinstance(comm, HorovodComm) and not report.active() else exchange
        return run([tensor], boundary.encoding, comm, factor=total, name=name)[0]

    def exact():
        return comm.add_up(tensor, f"{name}_out_0")

    with report.of(boundary, direction, tensor, encoded=boundary.encodes_sum(tensor)) as encoded:
        result = _either(encoded, coded, exact)
    result.set_shape(tensor.shape)
    return result


def _own_part(boundary: Boundary, tensor, axis: int, sizes):
    rank = boundary.rank
    begin, size = [0] * tensor.shape.rank, [-1] * tensor.shape.rank
    begin[axis], size[axis] = sum(sizes[:rank]), sizes[rank]
    part = tf.slice(tensor, tf.stack(begin), tf.stack(size))
    part.set_shape(_with(tensor.shape, axis, sizes[rank]))
    return part


def _either(encoded, coded, exact):
    # Several exchanges of a step may be under way at once: none waits for what another one brings.
    with unordered():
        if isinstance(encoded, bool):
            return coded() if encoded else exact()
        return tf.cond(encoded, coded, exact)


# Sizes.


def _axis(x, axis) -> int:
    rank = x.shape.rank
    if rank is None:
        raise ValueError("x must have a known number of dimensions, got one of unknown rank; use tf.ensure_shape")
    if isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank:
        raise ValueError(f"axis must be an integer in [{-rank}, {rank}) for x of shape {x.shape}, got {axis!r}")
    return axis % rank


def _checked(sizes, boundary: Boundary, x, axis: int) -> list:
    sizes = [size if tf.is_tensor(size) else int(size) for size in sizes]
    own = x.shape[axis]
    if len(sizes) != boundary.workers:
        raise ValueError(f"sizes must be as many as workers, {boundary.workers}, got {sizes}")
    if own is not None and isinstance(sizes[boundary.rank], int) and sizes[boundary.rank] != own:
        raise ValueError(
            f"sizes must hold this worker's size along axis {axis}, {own}, at place {boundary.rank}, got {sizes}"
        )
    return sizes


def _cut(boundary: Boundary, x, axis: int, sizes) -> list:
    total = x.shape[axis]
    if sizes is None:
        return part_sizes(tf.shape(x)[axis] if total is None else total, boundary.workers)
    sizes = [size if tf.is_tensor(size) else int(size) for size in sizes]
    if len(sizes) != boundary.workers:
        raise ValueError(f"sizes must be as many as workers, {boundary.workers}, got {sizes}")
    if total is not None and _total(sizes) not in (None, total):
        raise ValueError(f"sizes must add up to {total}, x's size along axis {axis}, got {sizes}")
    return sizes


def _exchanged_sizes(boundary: Boundary, x, axis: int) -> list:
    """The parts' sizes, from all workers; the other dimensions are compared."""
    shape = tf.shape(x)
    shapes = boundary.comm.gather_rows(shape[None], f"{boundary.collective('forward')}_sizes")
    with unordered():
        same = tf.debugging.assert_equal(
            tf.concat([shapes[:, :axis], shapes[:, axis + 1 :]], 1),
            tf.tile(tf.concat([shape[:axis], shape[axis + 1 :]], 0)[None], [boundary.workers, 1]),
            message=(
                f"boundary {boundary.name!r}: parts must have the same shape on all workers but for axis {axis}; x and "
                "y are the other dimensions on all workers and here"
            ),
        )
    with tf.control_dependencies([] if same is None else [same]):
        return tf.unstack(tf.identity(shapes[:, axis]), num=boundary.workers)


def _total(sizes):
    return sum(sizes) if all(isinstance(size, int) for size in sizes) else None


def _with(shape, axis: int, size):
    dimensions = shape.as_list()
    dimensions[axis] = size if isinstance(size, int) else None
    return dimensions
