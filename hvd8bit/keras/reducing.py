"""How the gradients of one Keras optimizer are reduced: what the wrappers of Keras 2 and Keras 3 share."""

from __future__ import annotations

import collections
import contextlib
import threading
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd8bit import collectives, reduction
from hvd8bit.variables import divided, is_sharded, name_of, tf_variable, unique


class Reduction:
    """How one optimizer's gradients are reduced, and whether those at hand are reduced already.

    It belongs to the class that `_distributed_class` makes, not to an instance: Keras saves and tracks what
    it finds on instances, and an optimizer that is made anew with `from_config` must reduce as well.
    """

    def __init__(
        self, *, scope: str, process_set, passes_factor: int, local_layers=(), scale_local_gradients=True, **arguments
    ):
        self.scope = scope
        self.process_set = process_set
        self.passes_factor = passes_factor
        self.observer: Any = None
        self._local_layers = list(local_layers)
        self._local_variables: list = []
        self._scale_local_gradients = scale_local_gradients
        self._arguments = arguments
        self._thread = threading.local()  # a trace in another thread has its own gradients at hand

    def register_local_var(self, variable) -> None:
        """Leaves this variable's gradient to the worker itself."""
        if not hasattr(variable, "assign"):
            raise ValueError(f"local variables must be variables, got {variable!r} of type {type(variable).__name__}")
        self._local_variables.append(variable)

    def reduce(self, gradients, variables, step, passes: int = 1) -> list:
        """The gradients of all workers, reduced. None stays None, IndexedSlices stay IndexedSlices.

        Of a variable of which each worker has a part of its own (`hvd8bit.parallel`) the gradient stays as it is.
        `step` is the optimizer's count of steps, or of so many passes for each.
        """
        gradients, variables = list(gradients), list(variables)
        if len(gradients) != len(variables):
            raise ValueError(
                f"gradients and variables must be pairs, got {len(gradients)} and {len(variables)}; "
                "pass None for a variable without a gradient"
            )
        _refuse_replicas()
        self._refuse_xla()
        local = self._local_ids()
        whole = [i for i, variable in enumerate(variables) if not is_sharded(variable)]
        shared = [i for i in whole if id(tf_variable(variables[i])) not in local]
        reduced = reduction.reduce_gradients(
            [gradients[i] for i in shared],
            unique(name_of(variables[i]) for i in shared),
            process_set=self.process_set,
            scope=self.scope,
            variables=[variables[i] for i in shared],
            step=step,
            passes=passes,
            observer=self.observer,
            **self._arguments,
        )
        if len(shared) < len(whole) and self._scale_local_gradients:
            size = collectives.HorovodComm(self.process_set).size_tensor()
            for i in set(whole) - set(shared):
                gradients[i] = divided(gradients[i], size)
        for i, gradient in zip(shared, reduced):
            gradients[i] = gradient
        return gradients

    def _local_ids(self) -> set[int]:
        of_layers = [variable for layer in self._local_layers for variable in layer.trainable_weights]
        return {id(tf_variable(variable)) for variable in [*self._local_variables, *of_layers]}

    def agree(self, finite) -> tf.Tensor:
        """True on all workers where `finite` is true on each: one exact sum of zeros and ones."""
        objections = tf.cast(tf.logical_not(tf.convert_to_tensor(finite)), tf.float32)
        [total] = reduction.reduce_gradients(
            [objections],
            ["not_finite"],
            compression=hvd.Compression.none,
            op=hvd.Sum,
            process_set=self.process_set,
            scope=f"{self.scope}.finite",
        )
        return tf.equal(total, 0.0)

    @property
    def done(self) -> bool:
        return getattr(self._thread, "done", False)

    @contextlib.contextmanager
    def already_done(self):
        """Inside, gradients come in reduced."""
        before, self._thread.done = self.done, True
        try:
            yield
        finally:
            self._thread.done = before

    @contextlib.contextmanager
    def at_boundary(self, variables, step, passes: int):
        """Inside, `reduce_pending` reduces gradients of these variables. Yields a list of its calls."""
        calls: list[int] = []
        self._thread.pending = (list(variables), step, passes, calls)
        try:
            yield calls
        finally:
            self._thread.pending = None

    def reduce_pending(self, gradients) -> list:
        """Accumulated gradients, reduced, inside `at_boundary`; anywhere else as they are."""
        pending = getattr(self._thread, "pending", None)
        if pending is None:
            return gradients
        variables, step, passes, calls = pending
        calls.append(len(gradients))
        reduced = self.reduce(gradients, variables, step, passes)
        if self.passes_factor == 1:
            return reduced
        # Keras has divided by the number of passes; Horovod's default is their sum.
        return [gradient * self.passes_factor for gradient in reduced]

    def _refuse_xla(self) -> None:
        if _inside_xla() and collectives.HorovodComm(self.process_set).size() > 1:
            raise ValueError(
                "jit_compile must be False where gradients are reduced, got True: XLA cannot compile the "
                "collectives; use model.compile(..., jit_compile=False), or tf.function without jit_compile"
            )


def _inside_xla() -> bool:
    if tf.executing_eagerly():
        return False
    from tensorflow.python.ops import control_flow_util  # TensorFlow has no public way to ask

    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def _refuse_replicas() -> None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            f"a tf.distribute strategy with {replicas} replicas cannot be combined with Horovod; start one "
            "worker per device and use no strategy"
        )


_scopes: collections.Counter[str] = collections.Counter()


def scope_of(name: str | None, optimizer) -> str:
    """`name`, or where there is none, one for each optimizer of its kind.

    In an elastic job the same for all of them: there a worker that joins has not made those that others have made.
    """
    if name:
        return name
    kind = f"Distributed{type(optimizer).__name__}"
    if collectives.elastic():
        return kind
    _scopes[kind] += 1
    return kind if _scopes[kind] == 1 else f"{kind}_{_scopes[kind] - 1}"
