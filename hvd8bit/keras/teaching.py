"""What Keras 3 itself has to learn, once, to go with optimizers of ours; other optimizers notice nothing."""

from __future__ import annotations

import copy
import functools

import keras

from hvd8bit.keras.keras3_class import Reducing, carry_state, do_not_convert, is_distributed, listed


def teach_loss_scale_optimizer() -> None:
    """Makes LossScaleOptimizer judge what all workers have, where its inner optimizer is ours; copies reduce, too."""
    cls = keras.optimizers.LossScaleOptimizer
    plain_apply, plain_check_finite, plain_reduce = cls.apply, cls.check_finite, cls.__reduce__
    if hasattr(plain_apply, "_hvd8bit"):
        return

    @functools.wraps(plain_apply)
    @do_not_convert
    def apply(self, grads, trainable_variables=None):
        inner = self.inner_optimizer
        if not isinstance(inner, Reducing):
            if is_distributed(inner):
                raise ValueError(
                    f"optimizer {inner.name!r} inside a LossScaleOptimizer holds distributed ones, and "
                    "workers would fall out of step; wrap the MultiOptimizer itself in DistributedOptimizer"
                )
            return plain_apply(self, grads, trainable_variables)
        if inner.gradient_accumulation_steps:
            return plain_apply(self, grads, trainable_variables)
        gradients, variables = listed(self, grads, trainable_variables)
        if gradients and variables:
            gradients = inner._hvd8bit.reduce(gradients, variables, inner._iterations)
        with inner._hvd8bit.already_done():
            return plain_apply(self, gradients, variables)

    @functools.wraps(plain_check_finite)
    @do_not_convert
    def check_finite(self, grads):
        finite = plain_check_finite(self, grads)
        inner = self.inner_optimizer
        if isinstance(inner, Reducing) and inner.gradient_accumulation_steps:
            finite = inner._hvd8bit.agree(finite)
        return finite

    @functools.wraps(plain_reduce)
    def reduce(self):
        inner = self.inner_optimizer
        return inner.__reduce__() if isinstance(inner, Reducing) else plain_reduce(self)

    def copied(self, memo=None):
        inner = self.inner_optimizer
        if not isinstance(inner, Reducing):
            make, arguments = plain_reduce(self)[:2]
            return make(*arguments)
        new = type(self)(**{**self.get_config(), "inner_optimizer": copy.copy(inner)})
        carry_state(self, new)
        return new

    apply._hvd8bit = True  # type: ignore[attr-defined]
    cls.apply, cls.check_finite = apply, check_finite
    cls.__reduce__, cls.__copy__, cls.__deepcopy__ = reduce, copied, copied


def teach_auto_jit_compile() -> None:
    """Makes jit_compile="auto" of `Model.compile` mean False for our optimizers, as for tf.distribute.

    On machines with a GPU Keras would turn XLA on, which cannot compile collectives. Should a Keras decide by
    another method, `Reduction._refuse_xla` still says what to do.
    """
    for cls in keras.Model.__mro__:
        plain = cls.__dict__.get("_resolve_auto_jit_compile")
        if plain is None or hasattr(plain, "_hvd8bit"):
            continue

        @functools.wraps(plain)
        def resolve(self, plain=plain):
            return False if is_distributed(getattr(self, "optimizer", None)) else plain(self)

        resolve._hvd8bit = True  # type: ignore[attr-defined]
        cls._resolve_auto_jit_compile = resolve
