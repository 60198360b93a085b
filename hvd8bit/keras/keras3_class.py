"""The class of Keras 3 optimizers that reduce, and how one is made from a plain one. See `hvd8bit.keras.optimizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from hvd8bit.keras.reducing import Reduction

if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _KerasOptimizer
else:
    _KerasOptimizer = object

do_not_convert = tf.autograph.experimental.do_not_convert


class Reducing(_KerasOptimizer):
    """Mixed in before a Keras 3 optimizer's class: reduces what comes in, see the module's text."""

    _hvd8bit: Reduction

    def build(self, variables):
        super().build(variables)
        for part in parts(self):
            if isinstance(part, Reducing):
                raise ValueError(
                    f"optimizer {part.name!r} inside {self.name!r} is distributed already, so its gradients "
                    "would be reduced twice; wrap the outer optimizer only"
                )
            if part.gradient_accumulation_steps:
                raise ValueError(
                    f"gradient_accumulation_steps={part.gradient_accumulation_steps} of {part.name!r} inside "
                    f"{self.name!r} is not supported; leave it out"
                )
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ValueError(
                    f"variable {variable.path!r} is overwritten with its gradient (float8 training), of "
                    "which workers have no average; train with mixed_bfloat16 or mixed_float16 instead"
                )

    def register_local_var(self, var) -> None:
        """Leaves this variable's gradient to the worker itself: it is not reduced, only divided by their number."""
        self._hvd8bit.register_local_var(var)

    @do_not_convert
    def apply(self, grads, trainable_variables=None):
        gradients, variables = listed(self, grads, trainable_variables)
        if gradients and variables and not self.gradient_accumulation_steps and not self._hvd8bit.done:
            gradients = self._hvd8bit.reduce(gradients, variables, self._iterations)
        return super().apply(gradients, variables)

    def _backend_apply_gradients(self, grads, trainable_variables):
        steps = self.gradient_accumulation_steps
        if not steps:
            return super()._backend_apply_gradients(grads, trainable_variables)
        with self._hvd8bit.at_boundary(trainable_variables, self._iterations, passes=steps) as calls:
            super()._backend_apply_gradients(grads, trainable_variables)
        # In a graph both branches are traced. Should a Keras work otherwise, stop here.
        if len(calls) != 1 and (tf.inside_function() or (int(self._iterations) + 1) % steps == 0):
            raise RuntimeError(
                f"optimizer {self.name!r} of Keras {keras.__version__} accumulates gradients in a way that "
                f"hvd8bit does not know: {len(calls)} reductions in an update; leave out "
                "gradient_accumulation_steps"
            )
        return None

    def _clip_gradients(self, grads):
        return super()._clip_gradients(self._hvd8bit.reduce_pending(grads))

    # Keras copies by way of pickle, and pickles by way of saving: what comes out would reduce nothing.

    def __copy__(self):
        copied = rebuild(self, type(self))
        carry_state(self, copied)
        return copied

    def __deepcopy__(self, memo):
        return self.__copy__()

    def __reduce__(self):
        raise TypeError(
            f"optimizer {self.name!r} is distributed and cannot be pickled; pickle the plain optimizer, and "
            "wrap it on each worker"
        )


def listed(optimizer, gradients, variables) -> tuple:
    """Both as lists: they may be iterators. Without variables those the optimizer is built for, if any."""
    if variables is not None:
        variables = list(variables)
    elif optimizer.built:
        variables = list(optimizer._trainable_variables)
    return list(gradients), variables


def parts(optimizer) -> list:
    """The optimizers inside a MultiOptimizer, as far as they are known; none for other optimizers."""
    return list(optimizer.optimizers) if is_multi_optimizer(optimizer) else []


def is_distributed(optimizer) -> bool:
    """Whether the optimizer, or one inside it, reduces gradients through hvd8bit (Keras 3)."""
    if isinstance(optimizer, Reducing):
        return True
    inner = [getattr(optimizer, "inner_optimizer", None), *parts(optimizer)]
    return any(is_distributed(part) for part in inner if part is not None)


def rebuild(optimizer, cls: type):
    """A new object of `cls`, a subclass of the optimizer's class, with the optimizer's settings."""
    if is_multi_optimizer(optimizer):
        # Its map may be a function, which has no config; so the optimizers inside are those of the given one.
        scale = optimizer.loss_scale_factor
        return cls(optimizer._optimizer_map, loss_scale_factor=scale, name=optimizer.name)
    config = optimizer.get_config()
    if callable(optimizer._learning_rate):  # a schedule or a function: it need not have a config
        config["learning_rate"] = optimizer._learning_rate
    new = cls.from_config(config)  # type: ignore[attr-defined]
    for key, value in vars(optimizer).items():
        # What get_config leaves out: an own setting of a custom class, and the exclusions from weight decay.
        plain = not key.startswith("_") and isinstance(value, (bool, int, float, str))
        if (plain and key != "built") or key.startswith("_exclude_from_weight_decay"):
            setattr(new, key, value)
    return new


def carry_state(old, new) -> None:
    """Gives `new` the values of the variables of `old`; builds it where `old` is built."""
    # Keras builds an optimizer that it loads from HDF5 for no variables at all.
    if old.built and old._trainable_variables and not new.built:
        new.build(list(old._trainable_variables))
    sources, targets = old.variables, new.variables
    if len(sources) != len(targets):
        raise ValueError(
            f"optimizer {old.name!r} of class {type(old).__name__} has {len(sources)} variables, but "
            f"{len(targets)} when made from its get_config(); make get_config() complete, or wrap before the "
            "first step"
        )
    for source, target in zip(sources, targets):
        target.assign(source.value)


def is_multi_optimizer(optimizer) -> bool:
    multi = getattr(keras.optimizers, "MultiOptimizer", None)  # newer than Keras 3.0
    return multi is not None and isinstance(optimizer, multi)


def reduction_of(optimizer) -> Reduction | None:
    """How an optimizer of either Keras, or the one inside it, reduces; None if hvd8bit does not reduce for it."""
    while optimizer is not None:
        found = getattr(optimizer, "_hvd8bit", None) or getattr(
            getattr(optimizer, "_allreduce_grads", None), "reduction", None
        )
        if found is not None:
            return found
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None
