"""What a `SplitModel` knows of the other workers, and how it tells of an exchange that failed."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any

from hvd8bit import collectives
from hvd8bit.collectives import HorovodComm
from hvd8bit.parallel import keras_step, pipeline

_log = logging.getLogger("hvd8bit")


class Wiring:
    """What a SplitModel knows of the other workers. Not a Keras object, so that Keras tracks none of it."""

    def __init__(self, place, stages, micro_batches, ahead, scope, compressions, gradient_compression, everyone):
        import horovod.tensorflow as hvd

        self.place = place
        self.stages = stages
        self.micro_batches = micro_batches
        self.ahead = ahead
        self.scope = scope
        self.compressions = compressions
        self.gradient_compression = hvd.Compression.none if gradient_compression is None else gradient_compression
        self.everyone = everyone
        self.mean_loss = True
        self.rows: Any = None  # a list of `plans.Rows`, once the stages are built
        self.first_inputs = None
        self.metric_names: list[str] | None = None
        self.stage_set = None
        self.comm = everyone  # of the pipeline
        if place.replicas > 1:
            # All workers make all sets, in the same order.
            if place.stages > 1:
                pipelines = [collectives.process_set_of(place.pipeline_ranks(r)) for r in range(place.replicas)]
                self.comm = HorovodComm(pipelines[place.replica])
            stage_sets = [collectives.process_set_of(place.stage_ranks(s)) for s in range(place.stages)]
            self.stage_set = stage_sets[place.stage]

    def connect(self) -> None:
        """Compares what all workers must have alike."""
        settings = f"{self.micro_batches} micro-batches, ahead={self.ahead}, compression={self.compressions}"
        texts = self.everyone.gather_text(settings, "hvd8bit_split_model_settings")
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise ValueError(
                    f"workers differ in the settings of their SplitModel: rank 0 has {texts[0]}, rank {rank} has "
                    f"{text}; "
                    "they must be the same on all workers"
                )

    def boundaries(self) -> pipeline.Boundaries:
        return pipeline.Boundaries(self.comm, self.compressions if self.place.stages > 1 else [], self.scope)

    @contextlib.contextmanager
    def naming_failures(self):
        """Makes an exchange that fails tell stage and boundary."""
        try:
            yield
        except Exception as error:
            if not keras_step.is_failure_of_exchange(error):
                raise
            text = self._failure(str(error))
            _log.error("hvd8bit: %s", text)
            raise RuntimeError(text) from error

    def _failure(self, text: str) -> str:
        found = re.search(rf"{self.scope}_boundary_(\d+)_(activation|error_signal)_(\d+)", text)
        own = [b for b in (self.place.stage - 1, self.place.stage) if 0 <= b < self.place.stages - 1]
        where = " or ".join(f"boundary {b} (stage {b} to {b + 1})" for b in own) or "no boundary"
        if found and int(found[1]) in own:
            what = f"{found[2].replace('_', ' ')} of micro-batch {found[3]}"
            where = f"boundary {found[1]} (stage {found[1]} to {int(found[1]) + 1}), {what}"
        said = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("File ")]
        reason = next((line for line in said if "Horovod has" in line or "onnection" in line), said[0] if said else "")
        who = self.place.describe()
        return f"{who}: the exchange at {where} failed; has a neighbour ended? Horovod says: {reason[:500]}"
