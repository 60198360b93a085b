"""What the exchange of gradients costs and gives, step by step, for TensorBoard.

While a `TelemetryCallback` is at work the traced step has a few ops more; without one it is the same as ever.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from typing import Any

import tensorflow as tf

from hvd8bit import collectives, modes, planning
from hvd8bit.compression import EightBitCompressor
from hvd8bit.counting import counting
from hvd8bit.keras.base import Callback
from hvd8bit.keras.keras3_class import reduction_of
from hvd8bit.layout import ring_bytes


class TelemetryCallback(Callback):
    """Logs the exchange of gradients to TensorBoard: bytes, time, and per layer what rounding does.

    For models whose optimizer is `hvd8bit.keras.DistributedOptimizer`. Give it to `fit` on all workers, with the same
    arguments, or on none; rank 0 writes. Not in elastic jobs. A `fit` that an exception has ended leaves it at work:
    call its `on_train_end()`. In each step (with steps_per_execution, the mean of an execution's) it logs

    * hvd8bit/bytes_sent: what this worker sent, headers and uncompressed gradients included;
    * hvd8bit/bytes_saved: how much more it would have sent had no gradient been encoded;
    * hvd8bit/exchange_seconds: from the last gradient's being made to the last one's being reduced: what the step
      waited for; what is sent while gradients are still being made does not count;
    * hvd8bit/exchange_share: the same over the time of the step;

    and at every `errors_every`-th exchange

    * hvd8bit/relative_error/VARIABLE: |8-bit result - exact result| / |exact result| in the Euclidean norm, of each
      encoded gradient. To know it, these are reduced exactly, too, which takes its time in this step; those bytes are
      not counted above.

    Args:
      log_dir: where TensorBoard looks.
      errors_every: every how many exchanges errors are taken; 0: never.

    Raises:
      ImportError: there is no TensorBoard; TensorFlow 2.21 does not bring it along.
    """

    def __init__(self, log_dir: str, errors_every: int = 100):
        super().__init__()
        if isinstance(errors_every, bool) or not isinstance(errors_every, int) or errors_every < 0:
            raise ValueError(f"errors_every must be an integer of at least 0, got {errors_every!r}")
        # On every worker: were rank 0 alone to miss it, at the end of a step, the others would wait for it.
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError(
                "TelemetryCallback writes for TensorBoard, which is not installed: pip install tensorboard"
            )
        self.log_dir = log_dir
        self.errors_every = errors_every
        if collectives.elastic():
            raise ValueError(
                "TelemetryCallback cannot look on in an elastic job, where workers that join have not built its step; "
                "leave it out there"
            )
        self._writer: Any = None
        self._step = 0

    def set_model(self, model):
        """Called by Keras before it builds the step."""
        super().set_model(model)
        self._reduction: Any = reduction_of(model.optimizer)
        if self._reduction is None:
            raise ValueError(
                "TelemetryCallback needs a model whose optimizer is hvd8bit.keras.DistributedOptimizer (without "
                f"groups), got {type(model.optimizer).__name__}"
            )
        self._observer = Observer(self.errors_every)
        self._reduction.observer = self._observer
        model.train_function = None  # built anew, with the ops that observe

    def on_train_begin(self, logs=None):
        if collectives.running_rank() == 0:
            self._writer = tf.summary.create_file_writer(self.log_dir)
        self._seen = self._observer.totals()
        self._step = max(self._step, int(self.model.optimizer.iterations))
        self._first, self._began = 0, time.perf_counter()

    def on_train_batch_begin(self, batch, logs=None):
        self._first, self._began = batch, time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        before, self._seen = self._seen, self._observer.totals()
        took = time.perf_counter() - self._began
        steps = batch - self._first + 1  # of an execution
        self._step += steps
        if self._writer is None:
            return
        with self._writer.as_default(step=self._step):
            seconds = self._seen.seconds - before.seconds
            tf.summary.scalar("hvd8bit/bytes_sent", (self._seen.sent_bytes - before.sent_bytes) / steps)
            tf.summary.scalar("hvd8bit/bytes_saved", (self._seen.saved_bytes - before.saved_bytes) / steps)
            tf.summary.scalar("hvd8bit/exchange_seconds", seconds / steps)
            tf.summary.scalar("hvd8bit/exchange_share", seconds / took)
            if self._seen.samples > before.samples:
                for name, error in self._observer.errors().items():
                    tf.summary.scalar(f"hvd8bit/relative_error/{name}", error)

    def on_train_end(self, logs=None):
        self._reduction.observer = None
        self.model.train_function = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@dataclasses.dataclass(frozen=True)
class Totals:
    """Since the observer was made; `samples` is how often errors were taken."""

    sent_bytes: int
    saved_bytes: float
    seconds: float
    samples: int


class Observer:
    """Looks on at `reduce_gradients`. The same on all workers.

    Args:
      errors_every: every how many exchanges errors are taken; 0: never.
    """

    def __init__(self, errors_every: int):
        self._errors_every = errors_every
        self._names: list[str] = []
        self._errors: Any = None
        with tf.init_scope(), tf.device("CPU:0"):
            self._seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self._saved = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self._own_bytes = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._exchanges = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._samples = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._sent_before = collectives.sent_bytes()

    def __str__(self):
        return f"telemetry with errors_every={self._errors_every}"  # workers compare it

    def totals(self) -> Totals:
        sent = collectives.sent_bytes() - self._sent_before - int(self._own_bytes)
        return Totals(sent, float(self._saved), float(self._seconds), int(self._samples))

    def errors(self) -> dict[str, float]:
        """The last ones taken, by name of the variable."""
        return {} if self._errors is None else dict(zip(self._names, map(float, self._errors.numpy())))

    def begin(self, plan):
        """The time when all gradients are there."""
        with tf.control_dependencies(_tensors([gradient.tensor for gradient in plan])):
            return tf.timestamp()

    def observe(self, plan, results, began, on, exact, compression, comm) -> None:
        """Notes what was seen of one exchange.

        Args:
          plan, results: what was to be done, and what came of it.
          began: from `begin`.
          on: whether gradients were encoded, a bool or a bool scalar.
          exact: reduces a plan exactly.
          compression, comm: the compressor and the workers.
        """
        with tf.control_dependencies(_tensors(results)):
            self._seconds.assign_add(tf.timestamp() - began)
        if not isinstance(compression, EightBitCompressor):
            return
        self._saved.assign_add(tf.where(on, tf.constant(_saved_bytes(plan, compression, comm), tf.float64), 0.0))
        encoded = [gradient for gradient in plan if gradient.treatment == planning.ENCODE]
        if not self._errors_every or not encoded:
            return
        names = [gradient.name for gradient in encoded]
        if names != self._names:
            with tf.init_scope(), tf.device("CPU:0"):
                self._names, self._errors = names, tf.Variable(tf.zeros(len(names)), trainable=False)

        def sample():
            with counting(self._own_bytes):
                right = exact([dataclasses.replace(g.exactly(), position=i) for i, g in enumerate(encoded)])
            ours = [results[gradient.position] for gradient in encoded]
            self._errors.assign(tf.stack([_relative_error(*pair) for pair in zip(ours, right)]))
            self._samples.assign_add(1)
            return tf.constant(True)

        due = self._exchanges % self._errors_every == 0
        sampled = tf.cond(due, sample, lambda: tf.constant(False))
        with tf.control_dependencies([sampled]):
            self._exchanges.assign_add(1)


def _tensors(values) -> list[tf.Tensor]:
    return tf.nest.flatten([value for value in values if value is not None], expand_composites=True)


def _relative_error(result, exact) -> tf.Tensor:
    result, exact = (tf.cast(x, tf.float32) for x in (result, exact))
    return tf.math.divide_no_nan(tf.norm(result - exact), tf.norm(exact))


def _saved_bytes(plan, compression: EightBitCompressor, comm) -> float:
    """What one exchange saves, as far as sizes are known when the graph is built."""
    workers, saved = comm.size(), 0.0
    judge_by, choose_by = collectives.workers_to_judge_by(comm), collectives.workers_to_choose_by(comm)
    for bucket in planning.encoded_buckets(plan, compression, judge_by, choose_by):
        sizes = tuple(gradient.elements or 0 for gradient in bucket.gradients)
        if bucket.mode is None or any(gradient.elements is None for gradient in bucket.gradients):
            continue
        plain = sum(ring_bytes(size, workers, g.tensor.dtype.size) for size, g in zip(sizes, bucket.gradients))
        saved += plain - modes.wire_bytes(sizes, workers, bucket.encoding.block_size, bucket.mode)
    return saved
