"""Wraps a Keras 2 optimizer: Horovod's own, with gradients fused into buckets."""

from __future__ import annotations

import sys

import tensorflow as tf

from hvd8bit.compression import EightBitCompressor
from hvd8bit.keras.reducing import Reduction, scope_of
from hvd8bit.variables import weights_of_local


def is_keras2(optimizer) -> bool:
    for module_name in ("keras", "tf_keras"):
        module = sys.modules.get(module_name)
        if module is None or not getattr(module, "__version__", "3").startswith("2."):
            continue
        optimizers = module.optimizers
        if isinstance(optimizer, (optimizers.Optimizer, optimizers.legacy.Optimizer)):
            return True
    return False


def wrap_keras2(optimizer, *, groups, process_set, local_layers, **arguments):
    """Horovod's own optimizer, but with gradients fused into buckets unless `groups` asks otherwise.

    Without groups Horovod reduces each gradient in a graph of its own, where nothing can be fused; with
    groups it fails where a dense and a sparse gradient meet. `reduce_gradients` takes both, and takes that
    place.
    """
    import horovod.tensorflow.keras as hvd_keras

    if hasattr(optimizer, "_allreduce_grads"):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} is distributed already, so its gradients would be reduced "
            "twice; wrap the plain optimizer, once"
        )
    if process_set is not None:
        arguments["process_set"] = process_set
        compression = arguments["compression"]
        if isinstance(compression, EightBitCompressor) and compression.process_set is None:
            arguments["compression"] = compression(process_set=process_set)
    distributed = hvd_keras.DistributedOptimizer(optimizer, groups=groups, **arguments)
    if groups is None and tf.executing_eagerly():
        scope = scope_of(arguments["name"], optimizer)
        taken = ("compression", "op", "gradient_predivide_factor", "sparse_as_dense")
        kept = {key: arguments[key] for key in taken}
        exchange = Reduction(scope=scope, process_set=process_set, passes_factor=1, **kept)

        def reduce(gradients, variables):
            return exchange.reduce(gradients, variables, distributed.iterations)

        reduce.reduction = exchange  # type: ignore[attr-defined]
        distributed._allreduce_grads = reduce
        if distributed._agg_helper is not None:
            distributed._agg_helper.allreduce_grads = reduce
    _reduce_where_nobody_has(type(distributed))
    # Horovod itself keeps local variables out of what it hands on.
    for variable in [variable for layer in local_layers for variable in weights_of_local(layer)]:
        distributed.register_local_var(variable)
    return distributed


def _reduce_where_nobody_has(cls) -> None:
    """Lets `apply_gradients` reduce what a loop of the user's own brings, as with Keras 3.

    Horovod reduces where gradients are computed, in `fit`, `minimize` and `compute_gradients`; what goes to
    `apply_gradients` from elsewhere, each of its workers would use alone.

    Args:
      cls: the class that Horovod has made for one optimizer.
    """
    apply_gradients = cls.apply_gradients

    def reduce_and_apply(self, grads_and_vars, *args, **kwargs):
        grads_and_vars = list(grads_and_vars)
        # Horovod sets this where it reduces, in the graph that is being traced or just now.
        reduced, self._aggregated_gradients = self._aggregated_gradients, False
        if grads_and_vars and not reduced:
            if self._agg_helper is not None:
                raise ValueError(
                    f"apply_gradients of optimizer {self.name!r} with backward_passes_per_step > 1 needs gradients "
                    "that it has accumulated itself; use fit or minimize, or backward_passes_per_step=1"
                )
            gradients, variables = zip(*grads_and_vars)
            grads_and_vars = list(zip(self._allreduce(gradients, variables), variables))
            self._aggregated_gradients = False
        return apply_gradients(self, grads_and_vars, *args, **kwargs)

    cls.apply_gradients = reduce_and_apply
