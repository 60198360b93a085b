"""`ErrorFeedback`: what rounding takes from a gradient goes into the next one.

Each worker keeps, for every variable, the part of its gradients that it has not sent yet: its residual. In a step it
adds the residual to the gradient, sends the sum in 8 bits, and keeps the difference. The worker that adds up a chunk
rounds once more, what it sends to all; that difference goes into its own residual. So nothing is lost, only late: to
float32's precision,

    sum of all averages so far + mean of the workers' residuals = sum of all true averages so far

(Seide et al. 2014; for both roundings Tang et al. 2019, DoubleSqueeze.) What a fixed scale cuts off is lost: kept, it
would grow from step to step as long as gradients are too large, and go on when they no longer are.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence

import tensorflow as tf

from hvd8bit.collectives import HorovodComm
from hvd8bit.logs import log_once
from hvd8bit.selection import ENCODABLE
from hvd8bit.variables import is_sharded, name_of, tf_variable


class ErrorFeedback(tf.Module):
    """A residual for each variable, for `EightBit(error_feedback=...)` in hvd8bit's optimizer and tape.

        feedback = hvd8bit.ErrorFeedback(model.trainable_variables)
        compression = hvd8bit.EightBit(error_feedback=feedback)

    A residual is a float32 variable of its variable's shape. It starts at zero, and is each worker's own. A step in
    which a reduced gradient has a NaN or an Inf leaves all as they are, so that one that loss scaling skips counts for
    nothing. With loss scaling residuals have the scale of the gradients that they were taken from.

    `tf.train.Checkpoint(model=model, optimizer=optimizer, feedback=feedback)` holds them, by their variables' names.
    Where one worker's checkpoint is to serve all, `average_over_workers` comes first; all workers must restore it.

    Args:
      variables: the trainable variables whose gradients are encoded, of TensorFlow or Keras, in any nest; None: those
        that are reduced, as they come.

    Attributes:
      residuals: by name.

    Raises:
      ValueError: there is none that could be compressed, or one has no fixed shape.
    """

    def __init__(self, variables=None, name: str | None = None):
        super().__init__(name=name or "error_feedback")
        self.residuals: dict[str, tf.Variable] = {}
        self._use = _Use()
        self._grows = variables is None
        for variable in tf.nest.flatten(variables) if variables is not None else ():
            if not isinstance(tf_variable(variable), tf.Variable):
                raise ValueError(f"variables must be variables, got {variable!r} of type {type(variable).__name__}")
            if tf_variable(variable).dtype.name in ENCODABLE and not is_sharded(variable):
                self._add(variable)
        if not self._grows and not self.residuals:
            raise ValueError(
                f"variables must hold one of {', '.join(ENCODABLE)}, got none; build the model first, and give its "
                "trainable_variables"
            )

    def residual_of(self, variable) -> tf.Variable:
        """What this worker still owes of the gradient of `variable`: float32, its shape."""
        name = self._use.name_of(tf_variable(variable))
        if name is not None:
            return self.residuals[name]
        if self._grows and isinstance(tf_variable(variable), tf.Variable):
            _warn_if_made_anew(variable)
            return self._add(variable)
        raise ValueError(
            f"error_feedback has no residual for {name_of(variable)}; make it of all variables whose gradients are "
            "encoded: hvd8bit.ErrorFeedback(model.trainable_variables)"
        )

    def average_over_workers(self, process_set=None) -> None:
        """Gives every worker the mean of all workers' residuals, exactly: together they owe what they owed.

        Then one worker's checkpoint is that of all, and a job may go on with another number of workers. All workers
        that reduce together must call it, between steps.

        Args:
          process_set: the one whose workers they are; None: the one that they have reduced in, all workers before that.
        """
        import horovod.tensorflow as hvd

        comm = HorovodComm(self._use.process_set if process_set is None else process_set)
        if not comm.includes_this_worker() or comm.size() == 1:
            return
        # A worker may still have those of a model that others have already collected as garbage.
        own = self._use.numbers()
        texts = comm.gather_text(json.dumps(sorted(own)), f"{self.name}_residuals")
        for number in sorted(set(own).intersection(*map(json.loads, texts))):
            residual = self.residuals[own[number]]
            (mean,) = comm.allreduce([residual.read_value()], f"{self.name}_mean_{number}", op=hvd.Average)
            residual.assign(mean)

    def reset(self) -> None:
        """Sets all residuals of this worker to zero."""
        for residual in self.residuals.values():
            residual.assign(tf.zeros_like(residual))

    def used_among(self, comm: HorovodComm) -> None:
        """Says among which workers gradients are reduced. Raises ValueError where they were others before."""
        before = self._use.process_set
        if before is not None and HorovodComm(before).ranks() != comm.ranks():
            raise ValueError(
                f"error_feedback must be used among the same workers, got ranks {comm.ranks()} after "
                f"{HorovodComm(before).ranks()}; make an hvd8bit.ErrorFeedback for each process set"
            )
        self._use.process_set = comm.process_set

    def _add(self, variable) -> tf.Variable:
        inner = tf_variable(variable)
        known = self._use.name_of(inner)
        if known is not None:
            return self.residuals[known]
        if not inner.shape.is_fully_defined():
            raise ValueError(f"variables must have fixed shapes, got {inner.shape} of {name_of(variable)}")
        plain = name_of(variable).partition(":")[0]
        name, number = plain, 1
        while name in self.residuals:
            residual = self.residuals[name]
            if self._use.is_free(name) and residual.shape == inner.shape:
                # Of a model that is no more, say one of many that one compression has served.
                with tf.init_scope():
                    residual.assign(tf.zeros_like(residual))
                self._use.belongs(name, inner)
                return residual
            number += 1
            name = f"{plain}#{number}"
        with tf.init_scope():
            try:
                residual = tf.Variable(tf.zeros(inner.shape), trainable=False, name="residual")
            except ValueError as error:  # TensorFlow lets a function make variables at its first call alone
                raise ValueError(
                    f"error_feedback can make no residual for {name_of(variable)} here: make EightBit(error_feedback="
                    f"hvd8bit.ErrorFeedback(model.trainable_variables)) once, outside of the step ({error})"
                ) from error
            self.residuals[name] = residual
        self._use.belongs(name, inner)
        return residual


class _Use:
    """Whose residuals they are, and among whom they are used: nothing that a checkpoint should hold."""

    def __init__(self):
        self.process_set = None
        self._begun = 0
        self._names: dict[int, str] = {}
        self._owners: dict[str, weakref.ref] = {}
        self._numbers: dict[str, int] = {}

    def name_of(self, variable: tf.Variable) -> str | None:
        name = self._names.get(id(variable))
        # An id may be that of another object by now.
        return name if name is not None and self._owners[name]() is variable else None

    def is_free(self, name: str) -> bool:
        return self._owners[name]() is None

    def belongs(self, name: str, variable: tf.Variable) -> None:
        self._names[id(variable)] = name
        self._owners[name] = weakref.ref(variable)
        self._begun += 1
        self._numbers[name] = self._begun

    def numbers(self) -> dict[int, str]:
        """The residuals' names by number, which is the same on all workers: they get variables in the same order."""
        return {number: name for name, number in self._numbers.items()}


_grown: dict[int, weakref.ref] = {}


def _warn_if_made_anew(variable) -> None:
    inner = tf_variable(variable)
    before = _grown.get(id(inner))
    if before is not None and before() is inner:
        log_once(
            f"error feedback begins anew for {name_of(variable)}: EightBit(error_feedback=True) holds what is owed, so "
            "make it once, outside of the step"
        )
    _grown[id(inner)] = weakref.ref(inner)


def feedback_of(value) -> ErrorFeedback | None:
    """What `error_feedback=value` means. Raises TypeError for other than False, True and an `ErrorFeedback`."""
    if isinstance(value, ErrorFeedback):
        return value
    if isinstance(value, bool):
        return ErrorFeedback() if value else None
    raise TypeError(
        "error_feedback must be True, False, or an hvd8bit.ErrorFeedback(model.trainable_variables), got "
        f"{value!r} of type {type(value).__name__}"
    )


def with_residual(gradient: tf.Tensor, residual: tf.Variable) -> tuple[tf.Tensor, tf.Tensor]:
    """Their sum in the gradient's dtype, and what that dtype leaves of the residual: nothing but for halves."""
    wide = tf.float64 if gradient.dtype == tf.float64 else tf.float32
    corrected = tf.cast(gradient, wide) + tf.cast(residual, wide)
    result = tf.cast(corrected, gradient.dtype)
    return result, tf.cast(corrected - tf.cast(result, wide), tf.float32)


def keep(errors: Sequence[tuple[tf.Variable, tf.Tensor]], results: Sequence) -> None:
    """Assigns residuals unless one of the step's results, which all workers have alike, is not finite."""
    values = [result.values if isinstance(result, tf.IndexedSlices) else result for result in results]
    finite = [tf.reduce_all(tf.math.is_finite(x)) for x in values if x is not None and x.dtype.is_floating]
    all_finite = tf.reduce_all(tf.stack(finite))

    def assign():
        for residual, error in errors:
            residual.assign(error)

    tf.cond(all_finite, assign, lambda: None)
