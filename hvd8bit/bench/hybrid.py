"""A training step of `HybridModel`, its computation alone, and its exchange alone: how much of the exchange is hidden.

Every worker calls `run` at the same time with the same arguments. The net is a small convolutional one below, and fully
connected layers of 4096, 4096 and 1000 units above; random images of 32×32 pixels, SGD. For each compression and number
of sub-batches take turns:

* step: as it is.
* computation: the same step, coding included, with what collectives bring put in from memory: what the step would take
  if the network were free.
* exchange: the step's collectives with as many bytes each, all enqueued at once: what they take if nothing has to be
  computed.

A step without any overlap takes the sum of computation and exchange, one with perfect overlap the longer of the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, Callable
from unittest import mock

import numpy as np
import tensorflow as tf

from hvd8bit.bench import timing

COMPRESSIONS = ("none", "eightbit")
PARTS = ("step", "computation", "exchange")
UNITS = (4096, 4096, 1000)
LOSSES_WITHIN = 0.02
"""How far the first loss in 8 bits may be from the exact one, of it, or nothing is timed."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, the same on all workers.

    Attributes:
      batch_size: images per step of all workers together; a multiple of their number.
      sub_batches: in how many parts they pass to the upper layers; several, one after another.
      units: of the fully connected layers; the last one's are the classes.
      compressions: of `COMPRESSIONS`.
      rounds, budget_s: see `timing.interleaved`.
      rate_bit_per_s: of each host's link, for the records; None where it is not known.
    """

    batch_size: int = 128
    sub_batches: tuple[int, ...] = (4,)
    units: tuple[int, ...] = UNITS
    compressions: tuple[str, ...] = COMPRESSIONS
    rounds: int = 20
    budget_s: float = 60.0
    rate_bit_per_s: float | None = None

    def __post_init__(self):
        unknown = [name for name in self.compressions if name not in COMPRESSIONS]
        if unknown or not self.compressions:
            raise ValueError(f"compressions must be of {', '.join(COMPRESSIONS)}, got {', '.join(unknown) or 'none'}")


def run(settings: Settings, progress: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Trains with each compression and number of sub-batches, verified first, then timed.

    Args:
      settings: what to measure.
      progress: called with a line of text before each part.

    Returns:
      A record for each number of sub-batches and compression, the same on all workers.

    Raises:
      ValueError: the batch cannot be shared out.
      RuntimeError: losses are no numbers, or differ with 8 bits: nothing is timed.
    """
    import horovod.tensorflow as hvd

    from hvd8bit import collectives

    if settings.batch_size % hvd.size():
        raise ValueError(f"batch_size must be a multiple of the {hvd.size()} workers, got {settings.batch_size}")
    rows = settings.batch_size // hvd.size()
    rng = np.random.default_rng(hvd.rank())
    data = (
        tf.constant(rng.standard_normal((rows, 32, 32, 3)), tf.float32),
        tf.constant(rng.integers(0, settings.units[-1], rows)),
    )
    cases: dict[tuple, Callable[[], object]] = {}
    sent, losses = {}, {}
    for case in itertools.product(settings.sub_batches, settings.compressions):
        progress(f"building the net for {case[0]} sub-batches, {case[1]}")
        model = _model(settings, *case)
        recorded = _Recorded()
        with recorded.recording():
            losses[case] = float(tf.function(model.train_step)(data)["loss"])
        step, alone = tf.function(model.train_step), tf.function(model.train_step)
        collectives.reset_sent_bytes()
        step(data)
        sent[case] = collectives.sent_bytes()
        with recorded.replaying():
            alone(data)
        functions = (lambda step=step: step(data), lambda alone=alone: alone(data), recorded.exchange())
        cases.update({(*case, part): function for part, function in zip(PARTS, functions)})
    _check(losses)
    named = {str(case): function for case, function in cases.items()}
    samples = timing.interleaved(named, settings.rounds, settings.budget_s, progress)
    workers_per_host = timing.workers_per_host()
    records = []
    for case in losses:
        of_parts = {part: samples[str((*case, part))] for part in PARTS}
        seconds = {f"{part}_s": sample.median_s for part, sample in of_parts.items()}
        both = seconds["computation_s"] + seconds["exchange_s"]
        exact = samples.get(str((case[0], "none", "step")))
        records.append(
            {
                "workers": hvd.size(),
                "batch_size": settings.batch_size,
                "sub_batches": case[0],
                "compression": case[1],
                "workers_per_host": workers_per_host,
                "rate_bit_per_s": settings.rate_bit_per_s,
                **seconds,
                "sum_s": both,
                "of_sum": seconds["step_s"] / both,
                "of_none": seconds["step_s"] / exact.median_s if exact else None,
                "spread": of_parts["step"].spread,
                "rounds": len(of_parts["step"].seconds),
                "sent_bytes_per_step": sent[case],
                **{f"interface_bytes_of_{part}": sample.bytes_sent for part, sample in of_parts.items()},
            }
        )
    return records


def _model(settings: Settings, sub_batches: int, name: str) -> Any:
    import keras

    import hvd8bit
    from hvd8bit.parallel import ColumnParallelDense, HybridModel

    keras.utils.set_random_seed(1)  # each worker makes its part of the same weights
    compression = hvd8bit.EightBit if name == "eightbit" else None
    lower = [
        keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
        keras.layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
        keras.layers.Flatten(),
    ]
    activations = ["relu"] * (len(settings.units) - 1) + ["softmax"]
    upper = [
        ColumnParallelDense(units, activation=activation, compression=compression, name=f"fc{number}")
        for number, (units, activation) in enumerate(zip(settings.units, activations), 1)
    ]
    model = HybridModel(lower, upper, sub_batches, compression=compression, gradient_compression=compression)
    model.compile(keras.optimizers.SGD(0.001), loss="sparse_categorical_crossentropy")
    return model


def _check(losses: dict[tuple, float]) -> None:
    """Raises RuntimeError unless all first losses are finite, and near one another: all nets start alike."""
    first = next(iter(losses.values()))
    for case, loss in losses.items():
        if not (math.isfinite(loss) and abs(loss - first) <= LOSSES_WITHIN * abs(first)):
            raise RuntimeError(
                f"the first loss with {case[0]} sub-batches, {case[1]}, is {loss}, not {first}: not timed"
            )


_ONCE = "hvd8bit_plan"
"""What the names of collectives start with that are no part of a step: workers compare what they are going to do."""


class _Recorded:
    """What a step's collectives were given and brought, so that they can be left out, or run alone.

    By their names and dtypes: a boundary has the same name in 8 bits and exactly, in two branches where the batch is
    not known.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, ...], _Call] = {}

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """A step that is traced inside keeps what its collectives are given and bring, each time it runs."""
        return _in_place_of_horovods(self._record)

    def replaying(self) -> contextlib.AbstractContextManager[None]:
        """A step that is traced inside sends nothing, and gets what was kept."""
        return _in_place_of_horovods(self._replay)

    def exchange(self) -> Callable[[], object]:
        """A function that runs the collectives that ran, all enqueued at once, with what they were given."""
        ran = {"_".join(key): call for key, call in self._calls.items() if call.ran()}

        @tf.function(autograph=False)
        def run():
            brought = [call.again(f"alone_{name}") for name, call in ran.items()]
            # Of each a number that only running it can tell: what is not needed, or known, TensorFlow leaves out.
            firsts = [tf.reshape(tensor, [-1])[:1] for tensor in tf.nest.flatten(brought)]
            return tf.add_n([tf.reduce_sum(tf.cast(first, tf.float32)) for first in firsts])

        return run

    def _record(self, real: Callable) -> Callable:
        def collective(tensors, *, name, **options):
            brought = real(tensors, name=name, **options)
            if not name.startswith(_ONCE):
                self._calls[_key(name, tensors)] = _Call(real, tensors, options, brought)
            return brought

        return collective

    def _replay(self, real: Callable) -> Callable:
        def collective(tensors, *, name, **options):
            if name.startswith(_ONCE):
                return real(tensors, name=name, **options)
            # Not before this worker has what it would have to give.
            with tf.control_dependencies(tf.nest.flatten(tensors)):
                return tf.nest.map_structure(tf.identity, self._calls[_key(name, tensors)].brought())

        return collective


def _key(name: str, tensors) -> tuple[str, ...]:
    return (name, *dict.fromkeys(tensor.dtype.name for tensor in tf.nest.flatten(tensors)))


class _Call:
    """One collective: its arguments and results when it last ran."""

    def __init__(self, real: Callable, tensors, options: dict[str, Any], brought):
        self._real = real
        self._options = {key: value for key, value in options.items() if key != "splits"}
        given = {"tensors": tensors, **{key: options[key] for key in ("splits",) if key in options}}
        self._given = tf.nest.map_structure(_Kept, given)
        self._brought = tf.nest.map_structure(_Kept, brought)

    def ran(self) -> bool:
        """False for what stands in a branch that was not taken."""
        return all(kept.is_there() for kept in tf.nest.flatten(self._brought))

    def brought(self):
        return tf.nest.map_structure(lambda kept: kept.read(), self._brought)

    def again(self, name: str):
        """Runs it under another name."""
        given = tf.nest.map_structure(lambda kept: kept.read(), self._given)
        return self._real(given.pop("tensors"), name=name, **given, **self._options)


class _Kept:
    """A tensor as it was when its graph last ran.

    In no `tf.Variable`, which tf.function would refuse when it is traced again, and by functions of their own, in which
    tf.custom_gradient does not look for one.
    """

    def __init__(self, tensor):
        self._dtype, self._shape = tensor.dtype, tensor.shape
        self._name = f"hvd8bit_bench_hybrid_{next(_numbers)}"

        @tf.function(autograph=False)
        def keep(value):
            tf.raw_ops.AssignVariableOp(resource=self._handle(), value=value)

        keep(tensor)

    def is_there(self) -> bool:
        return bool(tf.raw_ops.VarIsInitializedOp(resource=self._handle()))

    def read(self) -> tf.Tensor:
        @tf.function(autograph=False)
        def value():
            return tf.raw_ops.ReadVariableOp(resource=self._handle(), dtype=self._dtype)

        return tf.ensure_shape(value(), self._shape)

    def _handle(self) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(dtype=self._dtype, shape=tf.TensorShape(None), shared_name=self._name)


_numbers = itertools.count()


@contextlib.contextmanager
def _in_place_of_horovods(make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Inside, the collectives that hvd8bit calls are those that `make` makes of Horovod's."""
    import horovod.tensorflow as hvd

    real = {kind: getattr(hvd, kind) for kind in ("alltoall", "allgather", "allreduce", "grouped_allreduce")}
    with contextlib.ExitStack() as stack:
        for kind, function in real.items():
            stack.enter_context(mock.patch.object(hvd, kind, make(function)))
        yield
