"""TensorFlow's and Keras' variables under one roof."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import tensorflow as tf


def tf_variable(variable):
    """The TensorFlow variable inside a Keras 3 variable; anything else as it is."""
    # Not tf.is_tensor: a Keras variable counts as a tensor there.
    if isinstance(variable, (tf.Variable, tf.Tensor)):
        return variable
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def name_of(variable) -> str:
    """A name that is the same on all workers: a Keras variable's path, else the name, else the shape."""
    if isinstance(variable, tf.Tensor):
        dimensions = "unknown" if variable.shape.rank is None else "x".join(map(str, variable.shape))
        return f"tensor_{dimensions}"
    return getattr(variable, "path", None) or variable.name


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
