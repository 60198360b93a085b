"""TensorFlow's and Keras' variables under one roof."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def tf_variable(variable):
    """The TensorFlow variable inside a Keras 3 variable; anything else as it is."""
    # Not tf.is_tensor: a Keras variable counts as a tensor there.
    if isinstance(variable, (tf.Variable, tf.Tensor)):
        return variable
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def optimizer_variables(optimizer) -> list:
    """All that a Keras optimizer keeps: slots, counters, learning rate, loss scale; none of None.

    Keras 3 lists it all. Keras 2 leaves out the learning rate (all hyperparameters of its legacy optimizers) and the
    loss scale, which come last here.
    """
    if optimizer is None:
        return []
    variables = optimizer.variables  # a method of the legacy optimizers of Keras 2
    listed = list(variables() if callable(variables) else variables)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rates = [getattr(inner, name, None) for name in ("_learning_rate", "_current_learning_rate")]
    unlisted = [*rates, *getattr(inner, "_hyper", {}).values(), *loss_scale_variables(optimizer)]
    known = {id(variable) for variable in listed}
    return listed + [
        variable for variable in unlisted if isinstance(variable, tf.Variable) and id(variable) not in known
    ]


def loss_scale_variables(optimizer) -> list:
    """Loss scale and count of steps of a LossScaleOptimizer of Keras 2; none where it has no such variables."""
    state: Any = getattr(optimizer, "_loss_scale", None)
    return [state.current_loss_scale, state.counter] if hasattr(state, "current_loss_scale") else []


def name_of(variable) -> str:
    """A name that is the same on all workers: a Keras variable's path, else the name, else the shape."""
    if isinstance(variable, tf.Tensor):
        dimensions = "unknown" if variable.shape.rank is None else "x".join(map(str, variable.shape))
        return f"tensor_{dimensions}"
    return getattr(variable, "path", None) or variable.name


def weights_of_local(layer) -> list:
    """A local layer's trainable weights. Raises ValueError for one without weights yet: they would be shared."""
    if not hasattr(layer, "trainable_weights"):
        raise ValueError(f"local_layers must be Keras layers, got {layer!r} of type {type(layer).__name__}")
    if not getattr(layer, "built", True):
        raise ValueError(
            f"local_layers must be built, got {layer.name!r} of type {type(layer).__name__}, which has no weights yet; "
            "call it, or its model, on an input first"
        )
    return list(layer.trainable_weights)


def mark_sharded(variable) -> None:
    """Says that each worker has a part of its own of a variable: no gradient of it is averaged, nor is it broadcast."""
    variable._hvd8bit_sharded = True
    inner = tf_variable(variable)
    if inner is not variable:
        inner._hvd8bit_sharded = True


def is_sharded(variable) -> bool:
    """Whether `mark_sharded` was said of a variable."""
    return getattr(variable, "_hvd8bit_sharded", False)


def unique(names: Iterable[str]) -> list[str]:
    """The names, with a number appended where one repeats: a, a#2, a#3."""
    seen: collections.Counter[str] = collections.Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def divided(gradient, size):
    """A gradient over a number: a tensor, IndexedSlices or None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(divided(gradient.values, size), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)
