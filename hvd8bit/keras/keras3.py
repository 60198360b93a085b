"""Wraps a Keras 3 optimizer: a subclass of its class, made at run time, that reduces. See `hvd8bit.keras.optimizer`."""

from __future__ import annotations

import keras

from hvd8bit.keras.keras3_class import Reducing, carry_state, is_distributed, is_multi_optimizer, rebuild
from hvd8bit.keras.reducing import Reduction, scope_of
from hvd8bit.keras.teaching import teach_auto_jit_compile, teach_loss_scale_optimizer


def is_keras3(optimizer) -> bool:
    return int(keras.__version__.split(".")[0]) >= 3 and isinstance(optimizer, keras.optimizers.Optimizer)


def wrap_keras3(optimizer, *, groups, name, **arguments):
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"hvd8bit.keras needs Keras on TensorFlow, got backend {keras.backend.backend()!r}; set "
            "KERAS_BACKEND=tensorflow before Keras is imported"
        )
    if is_distributed(optimizer):
        raise ValueError(
            f"optimizer {optimizer.name!r} is distributed already, so its gradients would be reduced twice; "
            "wrap the plain optimizer, once"
        )
    if groups is not None:
        raise ValueError(
            f"groups must be None for a Keras 3 optimizer, got {groups!r}: gradients are fused into buckets "
            "anyway; leave it out"
        )
    teach_loss_scale_optimizer()
    teach_auto_jit_compile()

    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        config = {key: value for key, value in optimizer.get_config().items() if key != "inner_optimizer"}
        inner = _distribute(optimizer.inner_optimizer, name, **arguments)
        distributed = type(optimizer)(inner, **config)
        if not optimizer.built:
            carry_state(optimizer.inner_optimizer, inner)
    else:
        distributed = _distribute(optimizer, name, **arguments)
    carry_state(optimizer, distributed)
    return distributed


def _distribute(
    optimizer,
    name,
    *,
    backward_passes_per_step,
    average_aggregated_gradients,
    process_set,
    **arguments,
):
    """A distributed optimizer with the settings of `optimizer`, not built yet."""
    exchange = Reduction(
        scope=scope_of(name, optimizer),
        process_set=process_set,
        passes_factor=1 if average_aggregated_gradients else int(backward_passes_per_step),
        **arguments,
    )
    distributed = rebuild(optimizer, _distributed_class(type(optimizer), exchange))
    if backward_passes_per_step > 1:
        _set_passes(optimizer, distributed, int(backward_passes_per_step))
    return distributed


def _set_passes(optimizer, distributed, passes: int) -> None:
    steps = optimizer.gradient_accumulation_steps
    if steps == passes:
        return
    if steps:
        raise ValueError(
            f"backward_passes_per_step={passes} and the optimizer's gradient_accumulation_steps={steps} must "
            "be the same; give only one of them"
        )
    if optimizer.built or is_multi_optimizer(optimizer):
        what = "is built already" if optimizer.built else "is a MultiOptimizer"
        raise ValueError(
            f"backward_passes_per_step must be 1 where the optimizer {what}, got {passes}; "
            f"make the optimizer with gradient_accumulation_steps={passes} instead"
        )
    distributed.gradient_accumulation_steps = passes


def _distributed_class(base: type, exchange: Reduction) -> type:
    """A subclass of `base` that reduces, under the name by which Keras saves and finds `base` itself."""
    public = getattr(keras.optimizers, base.__name__, None) is base
    members = {
        "__module__": "keras.optimizers" if public else base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_hvd8bit": exchange,
    }
    cls = type(base.__name__, (Reducing, base), members)
    package, registered, name = keras.saving.get_registered_name(base).rpartition(">")
    if registered:
        # Save under the registered name, but load the plain class by it.
        for saved_as in (cls, base):
            keras.saving.register_keras_serializable(package, name)(saved_as)
    return cls
