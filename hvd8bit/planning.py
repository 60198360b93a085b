"""What will be done with each gradient of a list, decided from what is the same on all workers.

`reduce_gradients` follows such a plan and compares it with the other workers'; `hvd8bit.summary` shows it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvd8bit import modes
from hvd8bit.compression import EightBitCompressor
from hvd8bit.encoding import Encoding
from hvd8bit.logs import log_once
from hvd8bit.selection import ENCODABLE
from hvd8bit.variables import name_of

BUCKET_ELEMENTS = 8 * 2**20
"""32 MB of float32: large against headers, small enough that the first one leaves early in the backward pass."""

ENCODE = "encode"
EXACT = "as it is"
SPARSE = "sparse"
SPARSE_ENCODE = "sparse, values encoded"
NONE = "none"


@dataclasses.dataclass(frozen=True)
class Gradient:
    """One gradient and what will be done with it.

    Attributes:
      position: in the list.
      name: of its variable.
      tensor: a tensor, IndexedSlices or None; a TensorSpec where there is only a plan.
      treatment: ENCODE, EXACT, SPARSE, SPARSE_ENCODE or NONE.
      encoding: how, where it is encoded.
      reason: why not, where it is not.
    """

    position: int
    name: str
    tensor: Any
    treatment: str
    encoding: Encoding | None = None
    reason: str = ""

    def describe(self, usual: Encoding | None = None) -> str:
        """A line that is the same on all workers; names the encoding unless it is the usual one."""
        # Keras numbers layers as a process builds them; a number at the end of a part does not tell workers apart.
        name = re.sub(r"_\d+(?=/|:|$)", "", self.name)
        if self.treatment == NONE:
            return f"{name}: no gradient"
        shape = self.tensor.shape
        if isinstance(self.tensor, tf.IndexedSlices):
            shape = f"rows of {self.tensor.values.shape[1:]}, {self.tensor.indices.dtype.name} indices"
        own = f" with {self.encoding}" if self.encoding not in (None, usual) else ""
        return f"{name}: {self.tensor.dtype.name} {shape}, {self.treatment}{own}"

    @property
    def elements(self) -> int | None:
        return self.tensor.shape.num_elements()

    def exactly(self) -> Gradient:
        """The same, but not encoded."""
        treatment = {ENCODE: EXACT, SPARSE_ENCODE: SPARSE}.get(self.treatment, self.treatment)
        return dataclasses.replace(self, treatment=treatment, encoding=None)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that travel together, encoded alike; `mode` is how, or None: as they are, since 8 bits do not pay."""

    gradients: tuple[Gradient, ...]
    encoding: Encoding
    mode: str | None


def make(
    gradients: Sequence, names: Sequence[str], variables: Sequence | None, compression, sparse_as_dense: bool
) -> list[Gradient]:
    """A plan for `gradients`: tensors (or TensorSpecs), IndexedSlices or None, one for each variable.

    Without `variables`, rules of the compression that are functions raise TypeError.
    """
    eight_bit = isinstance(compression, EightBitCompressor)
    # Rules are about variables' own names, even where gradients are told apart by others.
    known = list(names) if variables is None else [name_of(variable) for variable in variables]
    if eight_bit:
        for pattern in compression.select.idle_patterns(known):
            log_once(f"no variable has a name like the pattern {pattern!r} of {compression.select}")
    return [
        Gradient(
            position, name, *_treatment(gradient, own, variable, compression if eight_bit else None, sparse_as_dense)
        )
        for position, (gradient, name, own, variable) in enumerate(
            zip(gradients, names, known, [None] * len(known) if variables is None else variables)
        )
    ]


def _treatment(gradient, name: str, variable, compression: EightBitCompressor | None, sparse_as_dense: bool):
    """The gradient as a tensor, what will be done with it, how, and why it is not encoded."""
    if gradient is None:
        return None, NONE, None, "no gradient"
    sparse = isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense
    if not sparse and not isinstance(gradient, tf.TensorSpec):
        gradient = tf.convert_to_tensor(gradient)
    exactly = SPARSE if sparse else EXACT
    if compression is None:
        return gradient, exactly, None, "no 8-bit compression"
    select = compression.select
    if sparse and select.sparse == "exact":
        log_once(
            "sparse gradients (IndexedSlices) are not compressed; sparse_as_dense=True makes them dense, "
            "EightBit(select=hvd8bit.Selection(sparse='compress')) sends their values in 8 bits"
        )
        return gradient, exactly, None, "sparse"
    encoding, reason = select.encoding_for(name, variable, compression.encoding)
    if encoding is None:
        return gradient, exactly, None, reason
    if sparse:
        # How many rows there are differs between workers and steps.
        if gradient.dtype.name not in ENCODABLE:
            return gradient, exactly, None, f"{gradient.dtype.name}: only {', '.join(ENCODABLE)} are compressed"
        return gradient, SPARSE_ENCODE, encoding, ""
    why = select.reason_to_pass(gradient.dtype.name, gradient.shape.num_elements(), None, encoding)
    return (gradient, EXACT, None, why) if why else (gradient, ENCODE, encoding, "")


def encoded_buckets(
    plan: Sequence[Gradient], compression: EightBitCompressor, workers: int, workers_to_choose_by: int | None
) -> Iterator[Bucket]:
    """The gradients to encode, in the order of the backward pass, which makes the last layer's first."""
    to_encode = [g for g in reversed(plan) if g.treatment == ENCODE]
    for encoding in dict.fromkeys(g.encoding for g in to_encode):
        assert encoding is not None
        for bucket in buckets([g for g in to_encode if g.encoding == encoding]):
            sizes = tuple(g.elements for g in bucket)
            mode = modes.choose(compression.exchange, sizes, workers_to_choose_by, encoding.block_size)
            worth_it = compression.select.bucket_pays(sizes, encoding, workers, mode)
            yield Bucket(tuple(bucket), encoding, mode if worth_it else None)


def buckets(gradients: list[Gradient]) -> list[list[Gradient]]:
    """Consecutive gradients together, up to `BUCKET_ELEMENTS`; one of unknown size alone."""
    made: list[list[Gradient]] = []
    room = 0
    for gradient in gradients:
        elements = gradient.elements
        size = BUCKET_ELEMENTS if elements is None else elements
        if not made or size > room:
            made.append([])
            room = BUCKET_ELEMENTS
        made[-1].append(gradient)
        room -= size
    return made
