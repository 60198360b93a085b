"""The reduction of a whole list of gradients: what hvd8bit's own wrappers call.

Unlike a bare compressor it sees all gradients at once. It compares with the other workers what is about to be
exchanged, before anything is; it packs small gradients together; and it sends the buckets in the order in which the
backward pass makes the gradients.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd8bit import collectives
from hvd8bit.collectives import HorovodComm
from hvd8bit.compression import EightBitCompressor, check_compression
from hvd8bit.exchange import differentiable_exchange

_log = logging.getLogger("hvd8bit")

BUCKET_ELEMENTS = 8 * 2**20
"""32 MB of float32: large against headers, small enough that the first one leaves early in the backward pass."""


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """One gradient and what will be done with it: "encode", "as it is", "sparse" or "none"."""

    position: int
    name: str
    tensor: Any
    treatment: str

    def describe(self) -> str:
        # Keras numbers layers as a process builds them; a number at the end of a part does not tell workers apart.
        name = re.sub(r"_\d+(?=/|:|$)", "", self.name)
        if self.treatment == "none":
            return f"{name}: no gradient"
        return f"{name}: {self.tensor.dtype.name} {self.tensor.shape}, {self.treatment}"


def reduce_gradients(
    gradients: Sequence,
    names: Sequence[str],
    *,
    compression,
    op=None,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    process_set=None,
    scope: str = "hvd8bit",
) -> list:
    """Averages or sums the gradients of all workers.

    Args:
      gradients: tensors, IndexedSlices or None, one for each variable, in the variables' order.
      names: the variables' names, unique.
      compression: `EightBit`, or any Horovod compressor.
      op: `hvd.Average` (the default) or `hvd.Sum`.
      gradient_predivide_factor: as in Horovod; only with Average.
      sparse_as_dense: IndexedSlices become dense tensors, and are compressed. Otherwise they are gathered exactly.
      process_set: the Horovod process set to reduce over; None: all workers.
      scope: prefix of the names of the collectives: one for each optimizer or tape.

      All arguments, and of the gradients number, order, shapes and dtypes, must be the same on all workers.

    Returns:
      A list like `gradients`: the same shapes and dtypes, None where there was None, bit-identical on all workers. With
      one worker the gradients themselves.

    Raises:
      TypeError: `compression` is no compressor.
      ValueError: an argument is out of range, or workers differ; then every worker raises it, and it names the
        first gradient or setting that differs and the values.
    """
    check_compression(compression)
    comm = HorovodComm(process_set)
    average, factor = _scale(op, gradient_predivide_factor)
    _check_process_set(compression, comm)
    if len(gradients) != len(names):
        raise ValueError(f"names must be as many as gradients, got {len(names)} names for {len(gradients)} gradients")
    if not comm.process_set.included():
        return list(gradients)
    if comm.size() == 1 and (tf.executing_eagerly() or not collectives.elastic()):
        return list(gradients)

    plan = [
        _Gradient(position, name, *_treatment(gradient, compression, sparse_as_dense))
        for position, (name, gradient) in enumerate(zip(names, gradients))
    ]
    settings = f"compression={compression!r}, average={average}, factor={factor}, scope={scope}"
    _agree([settings, *(gradient.describe() for gradient in plan)], comm)

    def reduce():
        return _reduce(plan, compression, comm, average, factor, gradient_predivide_factor, scope)

    if collectives.elastic() and not tf.executing_eagerly():
        # One worker may be left of many, or become many, under the same graph.
        untouched = [gradient.tensor for gradient in plan]
        return tf.cond(comm.size_tensor() > 1, reduce, lambda: untouched)
    return reduce()


def _scale(op, predivide: float) -> tuple[bool, float]:
    """Whether to average, and the product of the scalings before and after the sum."""
    import horovod.tensorflow as hvd

    if op not in (None, hvd.Average, hvd.Sum):
        names = {hvd.Adasum: "Adasum", hvd.Min: "Min", hvd.Max: "Max", hvd.Product: "Product"}
        raise ValueError(f"op must be Average or Sum, got {names.get(op, op)}")
    average = op != hvd.Sum
    if not average and predivide != 1.0:
        raise ValueError(f"gradient_predivide_factor must be 1 with op=Sum, got {predivide}")
    if not predivide > 0:
        raise ValueError(f"gradient_predivide_factor must be positive, got {predivide}")
    return average, (1.0 / predivide) * predivide


def _check_process_set(compression, comm: HorovodComm) -> None:
    own = getattr(compression, "process_set", None)
    if own is not None and own.process_set_id != comm.process_set_id:
        raise ValueError(
            f"process_set differs: {comm.process_set_id} in the call, {own.process_set_id} in {compression!r}; "
            "leave it out of EightBit, the call's is used"
        )


def _treatment(gradient, compression, sparse_as_dense: bool):
    """The gradient as a tensor, and what will be done with it."""
    if gradient is None:
        return None, "none"
    if isinstance(gradient, tf.IndexedSlices):
        if not sparse_as_dense:
            _log_once("sparse gradients (IndexedSlices) are not compressed; sparse_as_dense=True compresses them")
            return gradient, "sparse"
        gradient = tf.convert_to_tensor(gradient)
    gradient = tf.convert_to_tensor(gradient)
    if not isinstance(compression, EightBitCompressor):
        return gradient, "as it is"
    reason = compression.select.reason_to_pass(
        gradient.dtype.name, gradient.shape.num_elements(), None, compression.encoding
    )
    return gradient, "encode" if reason is None else "as it is"


def _reduce(plan, compression, comm: HorovodComm, average, factor, predivide, scope) -> list:
    import horovod.tensorflow as hvd

    results = [gradient.tensor for gradient in plan]
    # The backward pass makes the last layer's gradients first.
    backward = list(reversed(plan))
    scale = tf.constant(factor, tf.float64)
    if not average:
        scale = scale * tf.cast(comm.size_tensor(), tf.float64)
    as_they_are = [g for g in backward if g.treatment == "as it is"]
    for number, bucket in enumerate(_buckets([g for g in backward if g.treatment == "encode"])):
        sizes = tuple(g.tensor.shape.num_elements() for g in bucket)
        if not compression.select.bucket_pays(sizes, compression.encoding, collectives.workers_to_judge_by(comm)):
            as_they_are += bucket
            continue
        outputs = differentiable_exchange(
            [g.tensor for g in bucket], compression.encoding, comm, factor=scale, name=f"{scope}_bucket_{number}"
        )
        for gradient, output in zip(bucket, outputs):
            results[gradient.position] = output

    plain = None if isinstance(compression, EightBitCompressor) else compression
    for dtype in sorted({g.tensor.dtype.name for g in as_they_are}):
        # bfloat16 is none of Horovod's dtypes; beside EightBit float16 is summed as float32, too.
        wide = dtype == "bfloat16" or (plain is None and dtype == "float16")
        for number, bucket in enumerate(_buckets([g for g in as_they_are if g.tensor.dtype.name == dtype])):
            outputs = comm.allreduce(
                [tf.cast(g.tensor, tf.float32) if wide else g.tensor for g in bucket],
                f"{scope}_{dtype}_{number}",
                op=hvd.Average if average else hvd.Sum,
                prescale_factor=1.0 / predivide,
                postscale_factor=predivide,
                compression=plain,
            )
            for gradient, output in zip(bucket, outputs):
                results[gradient.position] = tf.cast(output, dtype) if wide else output

    for gradient in backward:
        if gradient.treatment == "sparse":
            results[gradient.position] = comm.gather_slices(
                gradient.tensor, f"{scope}_sparse_{gradient.position}", average=average
            )
    return results


def _buckets(gradients: list[_Gradient]) -> list[list[_Gradient]]:
    """Consecutive gradients together, up to `BUCKET_ELEMENTS`; one of unknown size alone."""
    buckets: list[list[_Gradient]] = []
    room = 0
    for gradient in gradients:
        elements = gradient.tensor.shape.num_elements()
        size = BUCKET_ELEMENTS if elements is None else elements
        if not buckets or size > room:
            buckets.append([])
            room = BUCKET_ELEMENTS
        buckets[-1].append(gradient)
        room -= size
    return buckets


_agreed: set[tuple] = set()


def _agree(lines: list[str], comm: HorovodComm) -> None:
    """Raises ValueError on every worker unless all have the same lines. Says nothing twice.

    Not in elastic jobs: a worker that joins has a new plan, the others keep the graph that they built, and nobody would
    answer. There the chunk headers tell.
    """
    if collectives.elastic():
        return
    text = "\n".join(lines)
    key = (text, comm.process_set_id, comm.size())
    if key in _agreed:
        return
    with tf.init_scope():
        if tf.executing_eagerly():
            digest = hashlib.sha256(text.encode()).hexdigest()
            if len(set(comm.gather_text(digest, "hvd8bit_plan"))) > 1:
                raise ValueError(_difference(comm.gather_text(text, "hvd8bit_plan_in_full"), comm.ranks()))
    _agreed.add(key)


def _difference(texts: list[str], ranks: list[int]) -> str:
    """Names the first line in which a worker differs from the first one; the same text on every worker."""
    other = next(index for index, text in enumerate(texts) if text != texts[0])
    first, second = texts[0].split("\n"), texts[other].split("\n")
    line = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
    shown = [lines[line] if line < len(lines) else "no such gradient" for lines in (first, second)]
    where = "the settings" if line == 0 else f"gradient {line - 1}"
    return (
        f"workers differ in {where}: rank {ranks[0]} has '{shown[0]}' ({len(first) - 1} gradients), "
        f"rank {ranks[other]} has '{shown[1]}' ({len(second) - 1} gradients); settings, and the number, order, names, "
        "shapes and dtypes of the gradients must be the same on all workers"
    )


_logged: set[str] = set()


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        _log.warning("hvd8bit: %s", message)
