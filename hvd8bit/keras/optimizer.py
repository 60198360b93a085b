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

import collections
import contextlib
import functools
import numbers
import sys
import threading
from typing import TYPE_CHECKING

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvd8bit import collectives, reduction
from hvd8bit.compression import EightBit, check_compression
from hvd8bit.variables import is_sharded, name_of, unique

if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _KerasOptimizer
else:
    _KerasOptimizer = object

_do_not_convert = tf.autograph.experimental.do_not_convert


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
      process_set: the Horovod process set that trains together; default all workers.
      name: prefix of the names of this optimizer's collectives, the same on all workers.

    Returns:
      A new optimizer of a subclass of `type(optimizer)`, with the same name; for a LossScaleOptimizer a new
      one around such an optimizer.

    Raises:
      TypeError: `optimizer` is no Keras optimizer, or `compression` no compressor.
      ValueError: it is distributed already, or an argument does not fit; the message says what helps.
    """
    if not _is_keras3(optimizer) and not _is_keras2(optimizer):
        raise TypeError(
            f"optimizer must be a Keras optimizer object, got {optimizer!r} of {type(optimizer)}; "
            "for a name use keras.optimizers.get(name)"
        )
    check_compression(compression)
    _check_passes(backward_passes_per_step)
    return (_wrap_keras3 if _is_keras3(optimizer) else _wrap_keras2)(
        optimizer,
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
        process_set=process_set,
        name=name,
    )


def is_distributed(optimizer) -> bool:
    """Whether the optimizer, or one inside it, reduces gradients through hvd8bit (Keras 3)."""
    if isinstance(optimizer, _Reducing):
        return True
    inner = [getattr(optimizer, "inner_optimizer", None), *_parts(optimizer)]
    return any(is_distributed(part) for part in inner if part is not None)


def _check_passes(passes) -> None:
    if isinstance(passes, bool) or not isinstance(passes, numbers.Integral) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an integer of at least 1, got {passes!r}")


# ---- the exchange, as one optimizer uses it ----


class _Reduction:
    """How one optimizer's gradients are reduced, and whether those at hand are reduced already.

    It belongs to the class that `_distributed_class` makes, not to an instance: Keras saves and tracks what
    it finds on instances, and an optimizer that is made anew with `from_config` must reduce as well.
    """

    def __init__(self, *, scope: str, process_set, passes_factor: int, **arguments):
        self.scope = scope
        self.process_set = process_set
        self.passes_factor = passes_factor
        self._arguments = arguments
        self._thread = threading.local()  # a trace in another thread has its own gradients at hand

    def reduce(self, gradients, variables) -> list:
        """The gradients of all workers, reduced. None stays None, IndexedSlices stay IndexedSlices.

        Of a variable of which each worker has a part of its own (`hvd8bit.parallel`) the gradient stays as it is.
        """
        gradients, variables = list(gradients), list(variables)
        if len(gradients) != len(variables):
            raise ValueError(
                f"gradients and variables must be pairs, got {len(gradients)} and {len(variables)}; "
                "pass None for a variable without a gradient"
            )
        _refuse_replicas()
        self._refuse_xla()
        shared = [number for number, variable in enumerate(variables) if not is_sharded(variable)]
        reduced = reduction.reduce_gradients(
            [gradients[number] for number in shared],
            unique(name_of(variables[number]) for number in shared),
            process_set=self.process_set,
            scope=self.scope,
            **self._arguments,
        )
        for number, gradient in zip(shared, reduced):
            gradients[number] = gradient
        return gradients

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
    def at_boundary(self, variables):
        """Inside, `reduce_pending` reduces gradients of these variables. Yields a list of its calls."""
        calls: list[int] = []
        self._thread.pending = (list(variables), calls)
        try:
            yield calls
        finally:
            self._thread.pending = None

    def reduce_pending(self, gradients) -> list:
        """Accumulated gradients, reduced, inside `at_boundary`; anywhere else as they are."""
        pending = getattr(self._thread, "pending", None)
        if pending is None:
            return gradients
        variables, calls = pending
        calls.append(len(gradients))
        reduced = self.reduce(gradients, variables)
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


# ---- Keras 3 ----


class _Reducing(_KerasOptimizer):
    """Mixed in before a Keras 3 optimizer's class: reduces what comes in, see the module's text."""

    _hvd8bit: _Reduction

    def build(self, variables):
        super().build(variables)
        for part in _parts(self):
            if isinstance(part, _Reducing):
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

    @_do_not_convert
    def apply(self, grads, trainable_variables=None):
        gradients, variables = _listed(self, grads, trainable_variables)
        if gradients and variables and not self.gradient_accumulation_steps and not self._hvd8bit.done:
            gradients = self._hvd8bit.reduce(gradients, variables)
        return super().apply(gradients, variables)

    def _backend_apply_gradients(self, grads, trainable_variables):
        steps = self.gradient_accumulation_steps
        if not steps:
            return super()._backend_apply_gradients(grads, trainable_variables)
        with self._hvd8bit.at_boundary(trainable_variables) as calls:
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
        copied = _rebuild(self, type(self))
        _carry_state(self, copied)
        return copied

    def __deepcopy__(self, memo):
        return self.__copy__()

    def __reduce__(self):
        raise TypeError(
            f"optimizer {self.name!r} is distributed and cannot be pickled; pickle the plain optimizer, and "
            "wrap it on each worker"
        )


def _listed(optimizer, gradients, variables) -> tuple:
    """Both as lists: they may be iterators. Without variables those the optimizer is built for, if any."""
    if variables is not None:
        variables = list(variables)
    elif optimizer.built:
        variables = list(optimizer._trainable_variables)
    return list(gradients), variables


def _parts(optimizer) -> list:
    """The optimizers inside a MultiOptimizer, as far as they are known; none for other optimizers."""
    return list(optimizer.optimizers) if _is_multi_optimizer(optimizer) else []


def _is_keras3(optimizer) -> bool:
    return int(keras.__version__.split(".")[0]) >= 3 and isinstance(optimizer, keras.optimizers.Optimizer)


def _wrap_keras3(optimizer, *, groups, name, **arguments):
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
    _teach_loss_scale_optimizer()
    _teach_auto_jit_compile()

    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        config = {key: value for key, value in optimizer.get_config().items() if key != "inner_optimizer"}
        inner = _distribute(optimizer.inner_optimizer, name, **arguments)
        distributed = type(optimizer)(inner, **config)
        if not optimizer.built:
            _carry_state(optimizer.inner_optimizer, inner)
    else:
        distributed = _distribute(optimizer, name, **arguments)
    _carry_state(optimizer, distributed)
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
    exchange = _Reduction(
        scope=_scope(name or f"Distributed{type(optimizer).__name__}"),
        process_set=process_set,
        passes_factor=1 if average_aggregated_gradients else int(backward_passes_per_step),
        **arguments,
    )
    distributed = _rebuild(optimizer, _distributed_class(type(optimizer), exchange))
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
    if optimizer.built or _is_multi_optimizer(optimizer):
        what = "is built already" if optimizer.built else "is a MultiOptimizer"
        raise ValueError(
            f"backward_passes_per_step must be 1 where the optimizer {what}, got {passes}; "
            f"make the optimizer with gradient_accumulation_steps={passes} instead"
        )
    distributed.gradient_accumulation_steps = passes


def _distributed_class(base: type, exchange: _Reduction) -> type:
    """A subclass of `base` that reduces, under the name by which Keras saves and finds `base` itself."""
    public = getattr(keras.optimizers, base.__name__, None) is base
    members = {
        "__module__": "keras.optimizers" if public else base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_hvd8bit": exchange,
    }
    cls = type(base.__name__, (_Reducing, base), members)
    package, registered, name = keras.saving.get_registered_name(base).rpartition(">")
    if registered:
        # Save under the registered name, but load the plain class by it.
        for saved_as in (cls, base):
            keras.saving.register_keras_serializable(package, name)(saved_as)
    return cls


def _rebuild(optimizer, cls: type):
    """A new object of `cls`, a subclass of the optimizer's class, with the optimizer's settings."""
    if _is_multi_optimizer(optimizer):
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


def _carry_state(old, new) -> None:
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


def _is_multi_optimizer(optimizer) -> bool:
    multi = getattr(keras.optimizers, "MultiOptimizer", None)  # newer than Keras 3.0
    return multi is not None and isinstance(optimizer, multi)


_scopes: collections.Counter[str] = collections.Counter()


def _scope(name: str) -> str:
    """`name`, or the next of its kind: two optimizers of a process may have collectives under way at once."""
    _scopes[name] += 1
    return name if _scopes[name] == 1 else f"{name}_{_scopes[name] - 1}"


def _teach_loss_scale_optimizer() -> None:
    """Makes LossScaleOptimizer judge what all workers have, where its inner optimizer is ours."""
    cls = keras.optimizers.LossScaleOptimizer
    plain_apply, plain_check_finite = cls.apply, cls.check_finite
    if hasattr(plain_apply, "_hvd8bit"):
        return

    @functools.wraps(plain_apply)
    @_do_not_convert
    def apply(self, grads, trainable_variables=None):
        inner = self.inner_optimizer
        if not isinstance(inner, _Reducing):
            if is_distributed(inner):
                raise ValueError(
                    f"optimizer {inner.name!r} inside a LossScaleOptimizer holds distributed ones, and "
                    "workers would fall out of step; wrap the MultiOptimizer itself in DistributedOptimizer"
                )
            return plain_apply(self, grads, trainable_variables)
        if inner.gradient_accumulation_steps:
            return plain_apply(self, grads, trainable_variables)
        gradients, variables = _listed(self, grads, trainable_variables)
        if gradients and variables:
            gradients = inner._hvd8bit.reduce(gradients, variables)
        with inner._hvd8bit.already_done():
            return plain_apply(self, gradients, variables)

    @functools.wraps(plain_check_finite)
    @_do_not_convert
    def check_finite(self, grads):
        finite = plain_check_finite(self, grads)
        inner = self.inner_optimizer
        if isinstance(inner, _Reducing) and inner.gradient_accumulation_steps:
            finite = inner._hvd8bit.agree(finite)
        return finite

    apply._hvd8bit = True  # type: ignore[attr-defined]
    cls.apply, cls.check_finite = apply, check_finite


def _teach_auto_jit_compile() -> None:
    """Makes jit_compile="auto" of `Model.compile` mean False for our optimizers, as for tf.distribute.

    On machines with a GPU Keras would turn XLA on, which cannot compile collectives. Should a Keras decide by
    another method, `_Reduction._refuse_xla` still says what to do.
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


# ---- Keras 2 ----


def _is_keras2(optimizer) -> bool:
    for module_name in ("keras", "tf_keras"):
        module = sys.modules.get(module_name)
        if module is None or not getattr(module, "__version__", "3").startswith("2."):
            continue
        optimizers = module.optimizers
        if isinstance(optimizer, (optimizers.Optimizer, optimizers.legacy.Optimizer)):
            return True
    return False


def _wrap_keras2(optimizer, *, groups, process_set, **arguments):
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
    distributed = hvd_keras.DistributedOptimizer(optimizer, groups=groups, **arguments)
    if groups is None and tf.executing_eagerly():
        scope = _scope(arguments["name"] or f"Distributed{type(optimizer).__name__}")
        taken = ("compression", "op", "gradient_predivide_factor", "sparse_as_dense")
        kept = {key: arguments[key] for key in taken}
        exchange = _Reduction(scope=scope, process_set=process_set, passes_factor=1, **kept)
        distributed._allreduce_grads = exchange.reduce
        if distributed._agg_helper is not None:
            distributed._agg_helper.allreduce_grads = exchange.reduce
    return distributed
