"""Wraps a Keras 2 optimizer: Horovod's own, with gradients fused into buckets."""

from __future__ import annotations

import copy
import sys
import threading

import tensorflow as tf

from hvd8bit.compression import EightBitCompressor
from hvd8bit.keras.reducing import Reduction, scope_of
from hvd8bit.variables import loss_scale_variables, optimizer_variables, weights_of_local


def is_keras2(optimizer) -> bool:
    return _keras_of(optimizer) is not None


def _keras_of(optimizer):
    """The Keras 2 that an optimizer is of: TensorFlow's own or tf_keras; None if it is of neither."""
    for module_name in ("keras", "tf_keras"):
        module = sys.modules.get(module_name)
        if module is None or not getattr(module, "__version__", "3").startswith("2."):
            continue
        optimizers = module.optimizers
        if isinstance(optimizer, (optimizers.Optimizer, optimizers.legacy.Optimizer)):
            return module
    return None


def wrap_keras2(optimizer, **arguments):
    """See `DistributedOptimizer`. A LossScaleOptimizer comes back around a distributed optimizer, as with Keras 3."""
    if not hasattr(optimizer, "inner_optimizer"):
        return _distribute(optimizer, **arguments)
    config = {key: value for key, value in optimizer.get_config().items() if key != "inner_optimizer"}
    distributed = type(optimizer)(_distribute(optimizer.inner_optimizer, **arguments), **config)
    for source, target in zip(loss_scale_variables(optimizer), loss_scale_variables(distributed)):
        target.assign(source)
    return distributed


def _distribute(optimizer, *, groups, process_set, local_layers, **arguments):
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
    _save_as(type(distributed), type(optimizer), _keras_of(optimizer))
    _carry(optimizer, distributed)
    # Horovod itself keeps local variables out of what it hands on.
    for variable in [variable for layer in local_layers for variable in weights_of_local(layer)]:
        distributed.register_local_var(variable)
    return distributed


def _reduce_where_nobody_has(cls) -> None:
    """Lets the optimizer reduce what a loop of the user's own brings, as with Keras 3.

    Horovod reduces where gradients are computed, in `fit`, `minimize` and `compute_gradients`; what goes to
    `apply_gradients` from elsewhere, each of its workers would use alone. A LossScaleOptimizer around it decides by
    what `aggregate_gradients` gives whether to call `apply_gradients` at all: there the gradients must be reduced
    before, or the workers decide differently.

    Args:
      cls: the class that Horovod has made for one optimizer.
    """
    apply_gradients = cls.apply_gradients
    aggregate = "aggregate_gradients" if hasattr(cls, "aggregate_gradients") else "_aggregate_gradients"  # legacy
    aggregate_gradients = getattr(cls, aggregate)
    at_hand = threading.local()  # .aggregated: gradients that are reduced; .applying: inside apply_gradients

    def reduced(self, grads_and_vars) -> list:
        # Horovod sets this where it reduces, in the graph that is being traced or just now.
        done, self._aggregated_gradients = self._aggregated_gradients, False
        if done or not grads_and_vars:
            return grads_and_vars
        if self._agg_helper is not None:
            raise ValueError(
                f"apply_gradients of optimizer {cls.__name__} with backward_passes_per_step > 1 needs gradients "
                "that it has accumulated itself; use fit or minimize, or backward_passes_per_step=1"
            )
        gradients, variables = zip(*grads_and_vars)
        grads_and_vars = list(zip(self._allreduce(gradients, variables), variables))
        self._aggregated_gradients = False
        return grads_and_vars

    def reduce_and_aggregate(self, grads_and_vars):
        grads_and_vars = list(grads_and_vars)
        if not getattr(at_hand, "applying", False):
            grads_and_vars = reduced(self, grads_and_vars)
        grads_and_vars = list(aggregate_gradients(self, grads_and_vars))
        at_hand.aggregated = [gradient for gradient, _ in grads_and_vars]
        return grads_and_vars

    def reduce_and_apply(self, grads_and_vars, *args, **kwargs):
        grads_and_vars = list(grads_and_vars)
        aggregated = {id(gradient) for gradient in getattr(at_hand, "aggregated", ())}
        if not all(id(gradient) in aggregated for gradient, _ in grads_and_vars):
            if _is_judged_already(self, kwargs):
                raise ValueError(
                    "gradients must be aggregated in apply_gradients of a LossScaleOptimizer around the distributed "
                    f"{cls.__name__}, got {kwargs}: each worker would look for overflows in its own gradients; leave "
                    "that argument out, or wrap the plain optimizer and reduce by hvd8bit.DistributedGradientTape"
                )
            grads_and_vars = reduced(self, grads_and_vars)
        at_hand.applying = True
        try:
            return apply_gradients(self, grads_and_vars, *args, **kwargs)
        finally:
            at_hand.applying, at_hand.aggregated = False, []

    cls.apply_gradients = reduce_and_apply
    setattr(cls, aggregate, reduce_and_aggregate)


def _is_judged_already(optimizer, settings) -> bool:
    """Whether a LossScaleOptimizer calls `apply_gradients` of the optimizer inside it."""
    skips = settings.get("skip_gradients_aggregation") or not settings.get("experimental_aggregate_gradients", True)
    return skips and getattr(optimizer, "_is_wrapped_by_loss_scale_optimizer", False)


def _save_as(cls, base, keras) -> None:
    """Gives Horovod's class the names by which Keras saves and finds the class that it is made of."""
    cls.__module__, cls.__qualname__ = base.__module__, base.__qualname__
    if "_keras_api_names" in vars(base):
        cls._keras_api_names = base._keras_api_names
    package, registered, name = keras.utils.get_registered_name(base).rpartition(">")
    if registered:
        # Save under the registered name, but load the plain class by it.
        for saved_as in (cls, base):
            keras.utils.register_keras_serializable(package, name)(saved_as)


def _carry(old, new) -> None:
    """Gives `new`, made from the configuration of `old`, its variables' values and what get_config() leaves out.

    An optimizer does not know its model's variables, so `new` cannot be built for them; it takes copies of what the
    other one has.
    """
    if not tf.executing_eagerly():
        if getattr(old, "_built", False) or getattr(old, "_weights", None):
            raise ValueError(
                f"optimizer {type(old).__name__} must not be built where TensorFlow does not execute eagerly: its "
                "variables' values would be lost; wrap it before its first step"
            )
        return
    if _awaits_checkpoint(old):
        raise ValueError(
            f"optimizer {type(old).__name__} must not wait for values of a checkpoint, which it takes over at its "
            "first step: they would be lost; wrap it first, and restore the checkpoint into what is returned"
        )
    # Keras names legacy optimizers by this, which Horovod has set.
    kept = ("_name", "_is_wrapped_by_loss_scale_optimizer", "_coalesced_children")
    own = optimizer_variables(old)
    copies = {id(variable): copy.deepcopy(variable) for variable in own}

    def can_go(leaf) -> bool:
        # Variables that are not its own (a model's) stay the same ones.
        plain = leaf is None or isinstance(leaf, (bool, int, float, str, tf.Variable))
        return plain or (callable(leaf) and getattr(leaf, "__self__", None) is not old)

    for key, value in vars(old).items():
        if key not in kept and not key.startswith("_self_") and all(map(can_go, tf.nest.flatten(value))):
            setattr(new, key, tf.nest.map_structure(lambda leaf: copies.get(id(leaf), leaf), value))
    for name, child in old._trackable_children().items():
        if id(child) in copies:
            new._track_trackable(copies[id(child)], name, overwrite=True)
    targets = optimizer_variables(new)
    if [target.shape for target in targets] != [source.shape for source in own]:
        raise ValueError(
            f"optimizer {type(old).__name__} has {len(own)} variables, but {len(targets)} or of other shapes when made "
            "from its get_config() and attributes; wrap it before its first step"
        )
    for source, target in zip(own, targets):
        target.assign(source)


def _awaits_checkpoint(optimizer) -> bool:
    values = vars(optimizer).get("_self_unconditional_deferred_dependencies") or {}
    slots = vars(optimizer).get("_deferred_slot_restorations")  # of legacy optimizers
    return bool(slots or (any(values.values()) and not getattr(optimizer, "_built", False)))
