"""One step of a pipeline as a graph: what a stage computes, in which order, and what crosses its boundaries.

The whole step is one graph. Transfers are in it from the start and run when their sender is ready, beside whatever is
computed. The order of the schedule is kept by control dependencies between what is computed alone: the input of an
action waits for the action before it. So a stage never holds more activations than the schedule says, and a received
activation may lie ready before it is its turn.

Micro-batches are cut so that any batch will do: their sizes differ by one row at most, and each counts for its share of
the rows. Of a batch with fewer rows than micro-batches some repeat a row, and count for nothing; a layer never sees an
empty micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd8bit.parallel import transfer
from hvd8bit.parallel.boundary import Boundary
from hvd8bit.parallel.neighbours import send
from hvd8bit.parallel.schedule import Action


class Boundaries:
    """A stage's ends of all boundaries of its pipeline. Boundary b lies between the stages b and b + 1.

    Every worker of the pipeline takes part in each transfer (`hvd8bit.parallel.transfer`); `send` and `receive` are for
    the two at its ends, and `stand_by` for the others.

    Args:
      comm: of the pipeline's workers; rank is stage.
      compressions: one for each boundary.
      scope: prefix of the transfers' names.
    """

    def __init__(self, comm, compressions: Sequence, scope: str):
        self.comm = comm
        self.stage = comm.rank()
        self.scope = scope
        self.boundaries = [Boundary(f"{scope}/boundary_{b}", given, comm) for b, given in enumerate(compressions)]
        self.unfinished: list[tf.Tensor] = []
        """What a step's results must wait for: the ends of transfers that bring this stage nothing."""

    def send(self, tensor, boundary: int, backward: bool, micro_batch: int) -> None:
        direction = "backward" if backward else "forward"
        name = self._name(boundary, backward, micro_batch)
        self.unfinished.append(
            send(self.boundaries[boundary], tensor, *self._ends(boundary, backward), direction, name)
        )

    def receive(self, boundary: int, backward: bool, micro_batch: int, row_shape, dtype) -> tf.Tensor:
        payload = self._take_part(boundary, backward, micro_batch)
        return transfer.unpack(payload, row_shape, dtype, self.boundaries[boundary].compression)

    def stand_by(self, micro_batches: int, both_ways: bool) -> None:
        """This stage's part in the transfers at boundaries that are not its own."""
        for boundary in range(len(self.boundaries)):
            if self.stage not in (boundary, boundary + 1):
                for micro_batch in range(micro_batches):
                    for backward in (False, True) if both_ways else (False,):
                        self.unfinished.append(self._take_part(boundary, backward, micro_batch))

    def _take_part(self, boundary: int, backward: bool, micro_batch: int) -> tf.Tensor:
        name = self._name(boundary, backward, micro_batch)
        return transfer.carry(None, *self._ends(boundary, backward), self.comm, name)

    def _name(self, boundary: int, backward: bool, micro_batch: int) -> str:
        return f"{self.scope}_boundary_{boundary}_{'error_signal' if backward else 'activation'}_{micro_batch}"

    @staticmethod
    def _ends(boundary: int, backward: bool) -> tuple[int, int]:
        return (boundary + 1, boundary) if backward else (boundary, boundary + 1)


@dataclasses.dataclass(frozen=True)
class Part:
    """Where a micro-batch lies in its batch: int64 and float64 scalars.

    Attributes:
      start, stop: its rows; at least one.
      own: how many of them are its own; 0 where it repeats a row that belongs to another.
      share: own rows / rows of the batch, float64.
    """

    start: tf.Tensor
    stop: tf.Tensor
    own: tf.Tensor
    share: tf.Tensor


def cut(rows, micro_batches: int) -> list[Part]:
    """The parts of a batch of `rows` rows, int64 scalar and at least 1."""
    parts = []
    for number in range(micro_batches):
        start = rows * number // micro_batches
        stop = rows * (number + 1) // micro_batches
        own = stop - start
        share = tf.cast(own, tf.float64) / tf.cast(rows, tf.float64)
        parts.append(Part(start, tf.maximum(stop, start + 1), own, share))
    return parts


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a pipeline needs to know of this worker's stage.

    Attributes:
      call: (input, training) -> output.
      penalties: () -> the sum of the regularisation losses of the last call, a scalar, or None.
      variables: whose gradients are wanted.
      input_rows: row shape and dtype of what comes from the stage before; None for the first stage.
      output_rows: the same of what goes to the next stage; None for the last one.
      inputs: for the first stage: micro-batch number -> its input.
      objective: for the last stage: (micro-batch number, output) -> its part of the batch's loss, a scalar.
    """

    call: Callable
    penalties: Callable[[], Any]
    variables: Sequence[tf.Variable]
    input_rows: Any
    output_rows: Any
    inputs: Callable[[int], Any] | None
    objective: Callable[[int, Any], tf.Tensor] | None


@dataclasses.dataclass
class Outcome:
    """What a step gives a stage.

    Attributes:
      outputs: the last stage's output for each micro-batch; empty on the others.
      loss: the last stage's loss of the batch without regularisation, float64 scalar; zero on the others.
      penalty: regularisation losses of this stage, float64 scalar.
      gradients: for each variable a tensor, IndexedSlices or None.
    """

    outputs: list
    loss: tf.Tensor
    penalty: tf.Tensor
    gradients: list


def forward(stage: Stage, boundaries: Boundaries, parts: Sequence[Part]) -> Outcome:
    """One forward pass, without gradients."""
    inputs = _expected_inputs(stage, boundaries, parts)
    boundaries.stand_by(len(parts), both_ways=False)
    outputs, penalties = [], []
    for number, part in enumerate(parts):
        output = stage.call(inputs(number), training=False)
        penalties.append(_scaled(stage.penalties(), part.share))
        if stage.output_rows is None:
            outputs.append(output)
        else:
            boundaries.send(output, boundaries.stage, False, number)
    return Outcome(outputs, tf.zeros((), tf.float64), _total(penalties), [])


def forward_and_backward(
    stage: Stage, boundaries: Boundaries, parts: Sequence[Part], actions: Sequence[Action]
) -> Outcome:
    """One forward and backward pass in the order of `actions`."""
    inputs = _expected_inputs(stage, boundaries, parts)
    errors: Any = None
    if stage.output_rows is not None:
        came = [boundaries.receive(boundaries.stage, True, number, *stage.output_rows) for number in range(len(parts))]
        errors = came.__getitem__
    boundaries.stand_by(len(parts), both_ways=True)

    result = Outcome(
        [None] * len(parts) if stage.output_rows is None else [], None, None, [None] * len(stage.variables)
    )
    losses, penalties = [], []
    in_flight: dict[int, tuple] = {}
    before: list = []  # what the action before has computed
    for action in actions:
        number = action.micro_batch
        share = parts[number].share
        if not action.backward:
            x = tf.nest.map_structure(lambda tensor, before=before: after(before, tensor), inputs(number))
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(stage.variables)
                if stage.input_rows is not None:
                    tape.watch(x)
                output = stage.call(x, training=True)
                penalty = _scaled(stage.penalties(), share)
                target = output if stage.objective is None else stage.objective(number, output)
            penalties.append(penalty)
            if stage.output_rows is None:
                result.outputs[number] = output
                losses.append(target)
            else:
                boundaries.send(output, boundaries.stage, False, number)
            in_flight[number] = (tape, x, target, penalty)
            before = [target]
        else:
            tape, x, target, penalty = in_flight.pop(number)
            error = tf.ones_like(target) if errors is None else errors(number)
            targets, seeds = [target], [after(before, error)]
            if penalty is not None:
                targets, seeds = [*targets, penalty], [*seeds, tf.ones_like(penalty)]
            sources = [*stage.variables] if stage.input_rows is None else [*stage.variables, x]
            gradients = tape.gradient(targets, sources, output_gradients=seeds)
            del tape
            if stage.input_rows is not None:
                signal = gradients.pop()
                signal = tf.zeros_like(x) if signal is None else signal
                boundaries.send(signal, boundaries.stage - 1, True, number)
                before = [signal]
            else:
                before = []
            result.gradients = [add(total, part) for total, part in zip(result.gradients, gradients)]
            before += [part for part in result.gradients if part is not None]
    result.loss = _total(losses)
    result.penalty = _total(penalties)
    return result


def _expected_inputs(stage: Stage, boundaries: Boundaries, parts: Sequence[Part]) -> Callable[[int], Any]:
    if stage.inputs is not None:
        return stage.inputs
    came = [boundaries.receive(boundaries.stage - 1, False, n, *stage.input_rows) for n in range(len(parts))]
    return came.__getitem__


def after(before: Sequence, tensor):
    """The tensor, once what is in `before` has been computed."""
    with tf.control_dependencies([getattr(value, "values", value) for value in before]):
        return tf.identity(tensor)


def _scaled(penalty, share):
    return None if penalty is None else penalty * tf.cast(share, penalty.dtype)


def _total(scalars: Sequence) -> tf.Tensor:
    known = [tf.cast(scalar, tf.float64) for scalar in scalars if scalar is not None]
    return tf.add_n(known) if known else tf.zeros((), tf.float64)


def add(total, part):
    """The sum of two gradients, either of which may be None; sparse ones stay sparse."""
    if total is None or part is None:
        return part if total is None else total
    if isinstance(total, tf.IndexedSlices) and isinstance(part, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([total.values, part.values], 0),
            tf.concat([total.indices, part.indices], 0),
            dense_shape=total.dense_shape,
        )
    return tf.convert_to_tensor(total) + tf.convert_to_tensor(part)
