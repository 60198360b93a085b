"""One training: an experiment, an arm and a seed, in one process that plays the workers or as one of them.

What a step computes is the same in both: worker k takes the k-th part of the batch, with the dropout masks of worker
k. Whoever plays the workers computes all parts in turn and calls `experiments.rounding`; a real worker computes its own
and lets `hvd8bit.keras.DistributedOptimizer` exchange. Optimizer and weights are the same Keras objects.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from experiments import models, rounding
from experiments.configuration import Arm, Experiment, parse_arm
from experiments.data import Data

TEST_BATCH = 1000


@dataclasses.dataclass(frozen=True)
class Worker:
    """A real worker: which of how many."""

    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What an epoch came to.

    Attributes:
      error_percent: of the test data, what part is named wrongly.
      loss: mean of the training's.
      seconds, training_seconds: with and without the test.
      merged_error_percent: with a model that real workers share: the error of what `hvd8bit.parallel.merge` makes of
        it, in one process, with nothing rounded.
    """

    error_percent: float
    loss: float
    seconds: float
    training_seconds: float
    merged_error_percent: float | None = None


class Training:
    """A training under way.

    Args:
      experiment, arm, seed: what to train.
      data: what on; all workers have all of it.
      worker: with `exchange: real` which one this is, else None.
    """

    def __init__(self, experiment: Experiment, arm: str, seed: int, data: Data, worker: Worker | None = None):
        if worker is not None and experiment.mode == "hybrid":
            raise ValueError(f"{experiment.id}: real workers have modes data and model, got hybrid")
        if (experiment.exchange == "real") != (worker is not None):
            raise ValueError(
                f"{experiment.id}: exchange {experiment.exchange} does not go with {worker or 'no worker'}"
            )
        if worker is not None and worker.size != experiment.workers:
            raise ValueError(f"{experiment.id} needs {experiment.workers} workers, got {worker.size}")
        self.experiment, self.arm, self.seed, self.data, self.worker = experiment, parse_arm(arm), seed, data, worker
        self.steps = len(data.train_images) // experiment.batch_size
        if not self.steps:
            raise ValueError(
                f"{experiment.id}: batch_size must be at most the {len(data.train_images)} examples, "
                f"got {experiment.batch_size}"
            )
        self._clock = models.Clock(seed)
        self.net = models.build(experiment, self.arm, self._clock, data.train_images.shape[1:])
        self.variables = [variable for model in self._models() for variable in model.trainable_variables]
        optimizer = keras.optimizers.get(
            {"class_name": experiment.optimizer, "config": {"learning_rate": experiment.learning_rate}}
        )
        # In mode "model" each real worker's weights are its own, and so are their gradients.
        exchanged = worker is not None and experiment.mode == "data"
        self.optimizer = _distributed(optimizer, experiment, self.arm) if exchanged else optimizer
        self.optimizer.build(self.variables)
        played = experiment.workers if self.arm.feedback and not exchanged else 0
        self._residuals = [[tf.Variable(tf.zeros(v.shape)) for v in self.variables] for _ in range(played)] or None
        self._images, self._labels = tf.constant(data.train_images), tf.constant(data.train_labels)
        self._many_steps = tf.function(self._run_steps, autograph=True)
        self._one_step = tf.function(self._step, autograph=False)
        self._evaluate = tf.function(self._errors, autograph=False)

    def epochs(self) -> Iterator[Epoch]:
        """Trains, epoch by epoch."""
        for number in range(self.experiment.epochs):
            started = time.perf_counter()
            order = np.random.default_rng([self.seed, number]).permutation(len(self.data.train_images))
            order = order[: self.steps * self.experiment.batch_size].reshape(self.steps, -1)
            loss = self._train(tf.constant(order, tf.int32), number * self.steps)
            trained = time.perf_counter()
            error = self.error_percent()
            merged = self.merged_error_percent() if self.worker and self.experiment.mode == "model" else None
            yield Epoch(error, loss, time.perf_counter() - started, trained - started, merged)

    def error_percent(self) -> float:
        """Of the test data, what part is named wrongly."""
        return self._percent(self._evaluate)

    def merged_error_percent(self) -> float:
        """The same of the plain model that the workers' parts make together. All workers must call it."""
        from hvd8bit import parallel

        plain = parallel.merge(self.net.upper)
        return self._percent(lambda images, labels: self._errors(images, labels, [plain]))

    def _percent(self, errors_of) -> float:
        images, labels = self.data.test_images, self.data.test_labels
        wrong = sum(
            int(errors_of(tf.constant(images[at : at + TEST_BATCH]), tf.constant(labels[at : at + TEST_BATCH])))
            for at in range(0, len(images), TEST_BATCH)
        )
        return 100.0 * wrong / len(images)

    def digest(self) -> str:
        """SHA-256 of the weights, of all workers' where each has its own: then all workers must call it."""
        weights = [variable.numpy() for variable in self.variables]
        if self.worker is not None and self.experiment.mode == "model":
            import horovod.tensorflow as hvd

            of_workers = hvd.allgather_object(weights, name="experiments_weights")
            # Layer by layer (kernel and bias), worker by worker, as played ones are kept.
            layers = range(0, len(weights), 2)
            weights = [part for at in layers for own in of_workers for part in own[at : at + 2]]
        return hashlib.sha256(b"".join(part.tobytes() for part in weights)).hexdigest()

    def _models(self) -> list[keras.Model]:
        return [model for model in (self.net.lower, self.net.upper) if model is not None]

    def _train(self, batches: tf.Tensor, first_step: int) -> float:
        if self.worker is None:
            return float(self._many_steps(batches, tf.constant(first_step)))
        # One call for each step: collectives of two steps must not be under way at once.
        losses = [self._one_step(batches[i], tf.constant(first_step + i)) for i in range(len(batches))]
        return float(tf.reduce_mean(tf.stack(losses)))

    def _run_steps(self, batches, first_step):
        total = tf.constant(0.0)
        for i in tf.range(tf.shape(batches)[0]):
            total += self._step(batches[i], first_step + i)
        return total / tf.cast(tf.shape(batches)[0], tf.float32)

    def _step(self, batch, step):
        batch = tf.ensure_shape(batch, [self.experiment.batch_size])
        if self.worker is not None and self.experiment.mode == "data":
            # Not yet exchanged: the optimizer does that.
            own = tf.split(batch, self.worker.size)[self.worker.rank]
            loss, gradients = self._worker_gradients(self.worker.rank, own, step)
        else:
            loss, gradients = {"data": self._data, "model": self._model, "hybrid": self._hybrid}[self.experiment.mode](
                batch, step
            )
        self.optimizer.apply(gradients, self.variables)
        return loss

    def _data(self, batch, step):
        parts = tf.split(batch, self.experiment.workers)
        of_workers = [self._worker_gradients(worker, part, step) for worker, part in enumerate(parts)]
        losses, gradients = zip(*of_workers)
        return tf.reduce_mean(losses), self._exchanged(gradients)

    def _model(self, batch, step):
        self._clock.set(step, 0, self.experiment.workers)
        images, labels = self._batch(batch)
        with tf.GradientTape() as tape:
            loss = _loss(self.net.upper(images, training=True), labels)
        return loss, tape.gradient(loss, self.variables)

    def _hybrid(self, batch, step):
        workers, lower, upper = self.experiment.workers, self.net.lower, self.net.upper
        images, labels = self._batch(batch)
        features, tapes = [], []
        for worker, part in enumerate(tf.split(images, workers)):
            self._clock.set(step, worker, workers)
            with tf.GradientTape() as tape:
                features.append(lower(part, training=True))
            tapes.append(tape)
        # Everyone gets everyone's features; the error signals are added up and cut into the workers' shares.
        with tf.GradientTape() as tape:
            gathered = rounding.gather(features, self.arm, axis=0)
            tape.watch(gathered)
            loss = _loss(upper(gathered, training=True), labels)
        signal, *above = tape.gradient(loss, [gathered, *upper.trainable_variables])
        signals = tf.split(signal, workers)
        below = [t.gradient(f, lower.trainable_variables, s) for t, f, s in zip(tapes, features, signals)]
        # The loss is the mean over everyone's batch already: the sum is wanted, not the mean.
        return loss, [gradient * float(workers) for gradient in self._exchanged(below)] + above

    def _exchanged(self, of_workers):
        return rounding.reduce_gradients(of_workers, self.arm, self.experiment.min_elements, self._residuals)

    def _worker_gradients(self, worker: int, part, step):
        self._clock.set(step, worker, self.experiment.workers)
        images, labels = self._batch(part)
        with tf.GradientTape() as tape:
            loss = _loss(self.net.lower(images, training=True), labels)
        return loss, tape.gradient(loss, self.variables)

    def _batch(self, indices):
        return self._scaled(tf.gather(self._images, indices)), tf.gather(self._labels, indices)

    def _scaled(self, images):
        return tf.cast(images, tf.float32) * (1.0 / self.data.brightest)

    def _errors(self, images, labels, parts=None):
        x = self._scaled(images)
        for model in parts or self._models():
            x = model(x, training=False)
        return tf.reduce_sum(tf.cast(tf.argmax(x, 1, tf.int32) != labels, tf.int32))


def mean_error(errors_percent: list[float], last_epochs: int) -> float:
    """A run's error: the mean over its last epochs; NaN if it was stopped before, as one is whose loss is no number."""
    return math.fsum(errors_percent[-last_epochs:]) / last_epochs if len(errors_percent) >= last_epochs else math.nan


def _loss(logits, labels):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def _distributed(optimizer, experiment: Experiment, arm: Arm):
    import horovod.tensorflow as hvd

    import hvd8bit.keras

    compression = models.compression_of(arm, experiment.min_elements) or getattr(hvd.Compression, arm.text)
    return hvd8bit.keras.DistributedOptimizer(optimizer, compression=compression, name="experiments")
