"""DistributedOptimizer: Keras optimizers that reduce gradients over the workers, once per update.

Keras 3 has one public place that every update passes, whatever calls it (`fit`, `apply_gradients`, a loop of
one's own): `Optimizer.apply`. A subclass made at run time reduces there and hands the result to the
optimizer's own `apply`, so that clipping, weight decay, the moving average and the update itself see reduced
gradients only. Two things do not fit into that place:

* Gradient accumulation happens further inside, and a gradient must travel only when an update is due. Keras
  calls `_clip_gradients` once per update, with the accumulated gradients and before anything is done with
  them: the subclass reduces there instead.
* Loss scaling. `Model.compile` puts its own LossScaleOptimizer *around* the optimizer it is given, and that
  looks for NaN and Inf in the gradients of its own worker before it calls the inner `apply`: one worker skips
  a step, the others wait for it. No object that we could return is right in every order: when the user wraps,
  nobody knows yet what compile will do (the policy may be set later, or belong to one model). So
  LossScaleOptimizer itself learns, once, to ask an inner optimizer of ours: `apply` reduces before it looks,
  and with accumulation, where nothing has travelled yet, `check_finite` answers what all workers agree on.
  `DistributedOptimizer(LossScaleOptimizer(o))` becomes `LossScaleOptimizer(DistributedOptimizer(o))`, so that
  there is one case.
"""

from __future__ import annotations

import numbers

import horovod.tensorflow as hvd

from hvd8bit.compression import EightBit, check_compression
from hvd8bit.keras.keras2 import is_keras2, wrap_keras2
from hvd8bit.keras.keras3 import is_keras3, wrap_keras3


def DistributedOptimizer(
    optimizer,
    *,
    compression=EightBit,
    op=hvd.Average,
    gradient_predivide_factor=1.0,
    backward_passes_per_step=1,
    average_aggregated_gradients=False,
    sparse_as_dense=False,
    groups=None,
    process_set=None,
    local_layers=(),
    scale_local_gradients=True,
    name=None,
):
    """An optimizer like the given one that averages the gradients of all workers before it uses them.

    Wrap first, then compile, on every worker in the same order. A model that is saved (or pickled, or copied)
    holds the plain optimizer and loads without hvd8bit; to go on, wrap the loaded model's optimizer again and
    compile. With one worker nothing changes.

    Args:
      optimizer: a Keras 3 optimizer (LossScaleOptimizer and MultiOptimizer included) or a Keras 2 one. It
        stays as it is; its settings and, where it is built, its variables' values are carried over.
      compression: `hvd8bit.EightBit`, a configured copy of it, or any of `hvd.Compression`.
      op: `hvd.Average` or `hvd.Sum`.
      gradient_predivide_factor: the part of the division by the number of workers that comes before the sum.
      backward_passes_per_step: gradients of so many steps are added up, then exchanged and used once.
      average_aggregated_gradients: divide the sum by backward_passes_per_step.
      sparse_as_dense: make IndexedSlices dense, and compress them; otherwise they travel as they are.
      groups: Keras 2 only: Horovod's own grouping. By default gradients are fused into buckets.
      process_set: the Horovod process set that trains together; default all workers. The compression need not name it.
      local_layers: a Keras layer or several whose variables' gradients each worker keeps to itself, not reduced.
        With Keras 2 the layers must be built. `register_local_var` of what is returned does the same for a variable.
      scale_local_gradients: divide the gradients of local variables by the number of workers.
      name: prefix of the names of this optimizer's collectives, the same on all workers.

    Returns:
      A new optimizer of a subclass of `type(optimizer)`, with the same name; for a LossScaleOptimizer a new
      one around such an optimizer.

    Raises:
      TypeError: `optimizer` is no Keras optimizer, or `compression` no compressor.
      ValueError: it is distributed already, its variables cannot be carried over, or an argument does not fit; the
        message says what helps.
    """
    local_layers = list(local_layers) if isinstance(local_layers, (list, tuple)) else [local_layers]
    for layer in local_layers:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers must be Keras layers, got {layer!r} of type {type(layer).__name__}")
    if not is_keras3(optimizer) and not is_keras2(optimizer):
        raise TypeError(
            f"optimizer must be a Keras optimizer object, got {optimizer!r} of {type(optimizer)}; "
            "for a name use keras.optimizers.get(name); an optimizer of TensorFlow 1 goes into "
            "horovod.tensorflow.DistributedOptimizer(optimizer, compression=hvd8bit.EightBit)"
        )
    check_compression(compression)
    _check_passes(backward_passes_per_step)
    return (wrap_keras3 if is_keras3(optimizer) else wrap_keras2)(
        optimizer,
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        local_layers=local_layers,
        name=name,
    )


def PartialDistributedOptimizer(optimizer, *, local_layers, **arguments):
    """A `DistributedOptimizer` that leaves the gradients of some layers to each worker itself: Horovod's name for it.

    Args:
      optimizer, local_layers, **arguments: see `DistributedOptimizer`.
    """
    return DistributedOptimizer(optimizer, local_layers=local_layers, **arguments)


def _check_passes(passes) -> None:
    if isinstance(passes, bool) or not isinstance(passes, numbers.Integral) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an integer of at least 1, got {passes!r}")
