"""Callbacks for training on several Horovod workers, with the names and arguments of Horovod's own; and telemetry.

They serve models of Keras 3, which Horovod's own do not, and of Keras 2 alike. What they send is exact:
broadcasts move bytes, and metrics are averaged in float64, whatever compression the optimizer uses.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvd8bit import api, collectives, reduction
from hvd8bit.keras.base import Callback, is_keras3, steps_per_execution
from hvd8bit.keras.telemetry import TelemetryCallback
from hvd8bit.variables import is_sharded, name_of, optimizer_variables, tf_variable

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "TelemetryCallback",
]


class BroadcastGlobalVariablesCallback(Callback):
    """Gives all workers the weights and the optimizer's state of one worker when training starts.

    That state is its slots, counters, learning rate and loss scale. With Keras 3 they are given before the first step;
    with Keras 2, whose optimizer makes its state in that step, after it, as Horovod does. The states of metrics and
    random generators (dropout) stay each worker's own, and so do a worker's own parts of weights (`hvd8bit.parallel`)
    with the optimizer's state for them.

    Args:
      root_rank: global rank of the worker whose values all take over.
      device: where to broadcast; default: where the variables are.
      local_variables: a variable or a list of variables that each worker keeps as they are.
      process_set: the Horovod process set that trains together; default all workers.
    """

    def __init__(self, root_rank=0, device="", local_variables=None, process_set=None):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.process_set = process_set
        self.broadcast_done = False
        self._local_variables: list = []
        if local_variables is not None:
            several = isinstance(local_variables, (list, tuple, set))
            for variable in local_variables if several else [local_variables]:
                self.register_local_var(variable)

    def register_local_var(self, var):
        """Each worker keeps this variable as it is."""
        if not hasattr(var, "assign"):
            raise ValueError(f"local_variables must be variables, got {var!r} of type {type(var).__name__}")
        self._local_variables.append(var)

    def set_model(self, model):
        if model is not self.model:
            self.broadcast_done = False
        super().set_model(model)

    def on_train_begin(self, logs=None):
        if not self.broadcast_done and is_keras3(self.model) and self.model.built:
            optimizer = self.model.optimizer
            if optimizer is not None and not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch, logs=None):
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self):
        variables = [*self.model.weights, *_shared_variables(self.model.optimizer, self.model.weights)]
        local = {id(tf_variable(variable)) for variable in self._local_variables}
        shared = [variable for variable in variables if id(tf_variable(variable)) not in local]
        with tf.device(self.device or None):
            api.broadcast_variables(shared, root_rank=self.root_rank, process_set=self.process_set)
        self.broadcast_done = True


class MetricAverageCallback(Callback):
    """Replaces the epoch's metrics by their mean over the workers, for the callbacks that come after it.

    Put it before ReduceLROnPlateau, EarlyStopping, ModelCheckpoint and the like, which must decide alike on
    all workers. Every worker needs the same metrics; a difference is an error that names it. What is no
    number stays as it is.

    Args:
      device: where to reduce; default: TensorFlow's choice.
      process_set: the Horovod process set that trains together; default all workers.
    """

    def __init__(self, device="", process_set=None):
        super().__init__()
        self.device = device
        self.process_set = process_set

    def on_epoch_end(self, epoch, logs=None):
        comm = collectives.HorovodComm(self.process_set)
        workers = comm.size()
        if workers == 1 or not comm.includes_this_worker():
            return
        arrays = {name: np.asarray(value) for name, value in sorted((logs or {}).items())}
        numbers = {name: array.astype(np.float64) for name, array in arrays.items() if array.dtype.kind in "biuf"}
        from horovod.tensorflow import Compression

        with tf.device(self.device or None):
            sums = reduction.reduce_gradients(
                [tf.constant(array) for array in numbers.values()],
                list(numbers),
                compression=Compression.none,
                op=api.Sum,
                process_set=self.process_set,
                scope="hvd8bit.metrics",
            )
        for name, total in zip(numbers, sums):
            mean = total.numpy() / workers
            logs[name] = float(mean) if np.ndim(mean) == 0 else mean


class LearningRateWarmupCallback(Callback):
    """Raises the learning rate from `initial_lr / N` to `initial_lr` over the first epochs, batch by batch.

    After Goyal et al., "Accurate, Large Minibatch SGD", section 2.2: in batch b of epoch e the rate is
    initial_lr / N · (1 + (N − 1) · (e + (b + 1) / steps_per_epoch) / warmup_epochs), with N workers. With
    steps_per_execution the steps of an execution have the rate of its last one.

    Args:
      initial_lr: the learning rate after the warm-up, usually scaled by the number of workers.
      warmup_epochs: how many epochs it takes.
      momentum_correction: also correct the momentum for one step when the rate changes (section 3, remark 2).
        Needs an optimizer that keeps its momentum in a variable, as only the legacy optimizers of Keras 2 do;
        by default it is done there.
      steps_per_epoch: batches per epoch, where Keras does not know.
      verbose: 1: rank 0 says when the warm-up ends.
      process_set: the Horovod process set that trains together; default all workers.
    """

    def __init__(
        self,
        initial_lr,
        warmup_epochs=5,
        momentum_correction=None,
        steps_per_epoch=None,
        verbose=0,
        process_set=None,
    ):
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr must be a number, got None; give the learning rate after the warm-up")
        self.initial_lr = initial_lr
        self.warmup_epochs = warmup_epochs
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.verbose = verbose
        self.process_set = process_set
        self.current_epoch = 0
        self._steps = None
        self._restore_momentum = None

    def on_train_begin(self, logs=None):
        optimizer = self.model.optimizer
        try:
            optimizer.learning_rate = float(optimizer.learning_rate)
        except (AttributeError, TypeError) as error:
            raise ValueError(
                "LearningRateWarmupCallback needs an optimizer whose learning_rate is a number, got "
                f"{type(optimizer).__name__} with a schedule or several rates; put the warm-up into the "
                "schedule"
            ) from error
        if self.momentum_correction and _momentum(optimizer) and not hasattr(_momentum(optimizer), "assign"):
            raise ValueError(
                f"momentum_correction must be False or None for {type(optimizer).__name__}, got "
                f"{self.momentum_correction}: its momentum is a constant of the compiled step; leave it out"
            )
        self._steps = self.steps_per_epoch or self.params.get("steps")
        if not self._steps:
            raise ValueError(
                "steps_per_epoch must be a number, got None, where Keras does not know how many batches the "
                "data has; give it to LearningRateWarmupCallback"
            )

    def on_epoch_begin(self, epoch, logs=None):
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self.current_epoch >= self.warmup_epochs:
            return
        workers = collectives.HorovodComm(self.process_set).size()
        # Keras calls once for all steps of an execution, with the first one's number.
        done = max(batch + 1, min(batch + steps_per_execution(self.model), self._steps))
        progress = (self.current_epoch + done / self._steps) / self.warmup_epochs
        self._set(self.initial_lr / workers * (1 + (workers - 1) * progress))

    def _set(self, learning_rate):
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        optimizer.learning_rate = learning_rate
        momentum = _momentum(optimizer)
        if self.momentum_correction is not False and before and hasattr(momentum, "assign"):
            self._restore_momentum = float(momentum)
            momentum.assign(self._restore_momentum * learning_rate / before)

    def on_train_batch_end(self, batch, logs=None):
        if self._restore_momentum is not None:
            _momentum(self.model.optimizer).assign(self._restore_momentum)
            self._restore_momentum = None

    def on_epoch_end(self, epoch, logs=None):
        rate = float(self.model.optimizer.learning_rate)
        if logs is not None:
            logs["learning_rate"] = rate
        if self.verbose and epoch == self.warmup_epochs - 1:
            import horovod.tensorflow as hvd

            if hvd.rank() == 0:
                print(f"\nEpoch {epoch + 1}: the learning rate's warm-up has ended at {rate:g}.")


def _shared_variables(optimizer, weights) -> list:
    """The optimizer's variables, but for those that it keeps for a worker's own part of a weight."""
    names = [(_plain_name(weight), is_sharded(weight)) for weight in weights]

    def is_of_a_part(variable) -> bool:
        own = [(len(name), sharded) for name, sharded in names if _is_named_after(_plain_name(variable), name)]
        longest = max(own, default=(0, False))[0]
        return (longest, True) in own

    return [variable for variable in optimizer_variables(optimizer) if not is_of_a_part(variable)]


def _is_named_after(variable: str, weight: str) -> bool:
    """Whether an optimizer's variable has a weight's whole name in its own.

        optimizer/layer_kernel_slot     Keras 3
        slot/layer/kernel               Keras 2, also behind the optimizer's name
        optimizer/layer/kernel/slot     its legacy optimizers

    That may be so for several weights; then it is the one with the longest name.
    """
    last = variable.rpartition("/")[2]
    return f"{last}_".startswith(weight.replace("/", "_") + "_") or f"/{weight}/" in f"/{variable}/"


def _plain_name(variable) -> str:
    return name_of(variable).partition(":")[0]


def _momentum(optimizer):
    """The optimizer's momentum: a number, a variable or None."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(optimizer, "momentum", None)
