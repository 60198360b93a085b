"""How the stages of a pipeline fit together: which worker has which, and what passes between them.

Only a stage's own worker builds it. So the workers tell one another, before the first step, what their stages give: in
turn, for a stage may get the shape of its weights from what comes in. What does not fit is an error on all of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a worker stands: consecutive workers hold consecutive stages, replica after replica.

    Attributes:
      stages, replicas: how many there are; together stages · replicas workers.
      rank: the worker's rank among all.
    """

    stages: int
    replicas: int
    rank: int

    @property
    def stage(self) -> int:
        return self.rank % self.stages

    @property
    def replica(self) -> int:
        return self.rank // self.stages

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def pipeline_ranks(self, replica: int) -> list[int]:
        """The workers of one replica, by stage."""
        return [replica * self.stages + stage for stage in range(self.stages)]

    def stage_ranks(self, stage: int) -> list[int]:
        """The workers that hold one stage, by replica."""
        return [replica * self.stages + stage for replica in range(self.replicas)]

    def describe(self) -> str:
        replica = f", replica {self.replica} of {self.replicas}" if self.replicas > 1 else ""
        return f"stage {self.stage} of {self.stages} (rank {self.rank}{replica})"


def check_place(stages: int, replicas: int, rank: int, workers: int) -> Place:
    """The worker's place. Raises ValueError unless the stages take up all workers."""
    if stages < 1:
        raise ValueError("stages must have at least one stage, got none")
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"replicas must be an integer of at least 1, got {replicas!r}")
    if workers != stages * replicas:
        hint = (
            f"give replicas={workers // stages}, or start"
            if workers % stages == 0
            else f"{workers} is no multiple of the number of stages; start"
        )
        raise ValueError(
            f"{stages} stages in {replicas} replica(s) need {stages * replicas} workers, got {workers}; {hint} with "
            f"horovodrun -np {stages * replicas}"
        )
    return Place(stages, replicas, rank)


def check_apart(stages: Sequence) -> None:
    """Raises ValueError where two stages hold the same layer: each would train weights of its own."""
    holder: dict[int, int] = {}
    for number, given in enumerate(stages):
        parts = given if isinstance(given, (list, tuple)) else [given]
        layers = [layer for part in parts if isinstance(part, keras.layers.Layer) for layer in part._flatten_layers()]
        for layer in layers:
            other = holder.setdefault(id(layer), number)
            if other != number and not isinstance(layer, keras.layers.InputLayer):
                raise ValueError(
                    f"stages must have layers of their own, got {layer.name!r} in stages[{other}] and "
                    f"stages[{number}], whose copies would drift apart; put what shares weights in one stage"
                )


def built_stage(given, number: int):
    """The Keras layer or model that a stage is: as it is, a list of layers as a Sequential, or what a function "
    "makes."""
    if callable(given) and not isinstance(given, keras.layers.Layer):
        given = given()
    if isinstance(given, (list, tuple)) and given and all(isinstance(layer, keras.layers.Layer) for layer in given):
        return keras.Sequential(given, name=f"stage_{number}")
    if not isinstance(given, keras.layers.Layer):
        raise TypeError(
            f"stages[{number}] must be a Keras model or layer, a list of layers, or a function that makes one of "
            "these, "
            f"got {given!r} of type {type(given).__name__}"
        )
    return given


@dataclasses.dataclass(frozen=True)
class Rows:
    """What passes a boundary: rows of this shape and dtype."""

    shape: tuple[int, ...]
    dtype: tf.DType

    def symbol(self):
        return keras.KerasTensor((None, *self.shape), dtype=self.dtype.name)

    def describe(self) -> str:
        return f"{self.dtype.name} rows of shape {list(self.shape)}"


def rows_of(stage, inputs, place: Place, came: Rows | None) -> Rows:
    """What a stage gives for what comes in. Builds the stage where it is not.

    Raises:
      ValueError: it does not take this, or gives something that cannot be passed on; the message names the stage.
    """
    which = f"stages[{place.stage}] ({stage.name}, on rank {place.rank})"
    try:
        output = stage(inputs)
    except Exception as error:
        what = "its input" if came is None else f"the output of stages[{place.stage - 1}], {came.describe()}"
        raise ValueError(
            f"{which} does not take {what}: {_short(error)}; make the shapes of the stages chain"
        ) from error
    if not isinstance(output, keras.KerasTensor):
        raise ValueError(f"{which} must give one tensor, got {output!r}; put the boundary where one tensor passes")
    if _masks(stage, inputs):
        raise ValueError(
            f"{which} must give a tensor without a Keras mask, got one with: masks do not pass to the next stage, and "
            "masked losses of micro-batches do not add up; end the stage behind the layer that uses the mask, or make "
            "it without (mask_zero=False)"
        )
    dtype = tf.as_dtype(keras.backend.standardize_dtype(output.dtype))
    if not place.last and not dtype.is_floating:
        raise ValueError(
            f"{which} must give a float tensor for the next stage, got {dtype.name}: no error signal passes through "
            "other numbers; put the boundary elsewhere"
        )
    if output.shape[0] is not None or None in output.shape[1:]:
        raise ValueError(
            f"{which} must give rows of known shape, as many as come in, got {output.shape}; put the boundary "
            "elsewhere, or "
            "give the input a fixed size"
        )
    return Rows(tuple(output.shape[1:]), dtype)


def _masks(stage, inputs) -> bool:
    """Whether what a built stage gives has a Keras mask. Symbols do not tell, but of single layers."""
    if all(type(layer).compute_mask is keras.Layer.compute_mask for layer in stage._flatten_layers()):
        return False
    masks = []

    @tf.function(autograph=False)
    def call(given):
        masks.append(getattr(stage(given), "_keras_mask", None))

    def specification(symbol):
        return tf.TensorSpec((None, *symbol.shape[1:]), keras.backend.standardize_dtype(symbol.dtype))

    call.get_concrete_function(keras.tree.map_structure(specification, inputs))
    return masks[-1] is not None


def chain(stage, inputs, place: Place, comm) -> list[Rows]:
    """What each stage of this worker's pipeline gives.

    Args:
      stage: this worker's.
      inputs: symbols of what comes into the first stage; counts there alone.
      place: this worker's.
      comm: of all workers, which must all call.

    Raises:
      ValueError: a stage of any worker does not fit; the same on all.
    """
    found: list[Rows] = []
    for number in range(place.stages):
        answer = {}
        if place.stage == number:
            came = found[-1] if found else None
            try:
                rows = rows_of(stage, inputs if came is None else came.symbol(), place, came)
                answer = {"shape": rows.shape, "dtype": rows.dtype.name}
            except ValueError as error:
                answer = {"error": str(error)}
        answers = [json.loads(text) for text in comm.gather_text(json.dumps(answer), "hvd8bit_split_model_rows")]
        errors = [each["error"] for each in answers if "error" in each]
        if errors:
            raise ValueError(errors[0])
        mine = answers[place.pipeline_ranks(place.replica)[number]]
        found.append(Rows(tuple(mine["shape"]), tf.as_dtype(mine["dtype"])))
    return found


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500]
