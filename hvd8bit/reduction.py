"""The reduction of a whole list of gradients: what hvd8bit's own wrappers call.

Unlike a bare compressor it sees all gradients at once. It compares with the other workers what is about to be
exchanged, before anything is; it packs small gradients together; and it sends the buckets in the order in which the
backward pass makes the gradients.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Sequence

import tensorflow as tf

from hvd8bit import collectives, planning
from hvd8bit.collectives import HorovodComm
from hvd8bit.compression import EightBitCompressor, check_compression, check_process_set
from hvd8bit.exchange import correcting_exchange, differentiable_exchange, exchange_slices
from hvd8bit.feedback import ErrorFeedback, keep, with_residual
from hvd8bit.graphs import keeps_order, node_name, take_turns
from hvd8bit.variables import tf_variable


@tf.autograph.experimental.do_not_convert
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
    variables: Sequence | None = None,
    step=None,
    passes: int = 1,
    observer=None,
) -> list:
    """Averages or sums the gradients of all workers.

    Args:
      gradients: tensors, IndexedSlices or None, one for each variable, in the variables' order.
      names: the variables' names, unique.
      compression: `EightBit`, or any Horovod compressor.
      op: `hvd.Average` (the default) or `hvd.Sum`.
      gradient_predivide_factor: as in Horovod; only with Average.
      sparse_as_dense: IndexedSlices become dense tensors, and are compressed. Otherwise they are gathered: exactly, or
        with `Selection(sparse="compress")` their values in 8 bits.
      process_set: the Horovod process set to reduce over; None: all workers.
      scope: prefix of the names of the collectives: one for each optimizer or tape.
      variables: whose gradients these are, for rules of the `Selection` that are functions, and for error feedback.
      step: number of the step, a variable or a tensor, for `Selection(start_step=...)`.
      passes: by how much `step` grows in a step, of which this is the last: how many gradients have been accumulated.
      observer: what looks on, for telemetry, an `hvd8bit.keras.telemetry.Observer`; the same on all workers.

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
    feedback = compression.feedback if isinstance(compression, EightBitCompressor) else None
    if feedback is not None and collectives.elastic():
        raise ValueError(
            "error_feedback must be False in an elastic job, got True: a worker's residuals would be lost with it"
        )
    comm = HorovodComm(process_set)
    scope = node_name(scope)
    average, factor = _scale(op, gradient_predivide_factor)
    check_process_set(compression, comm)
    if len(gradients) != len(names):
        raise ValueError(f"names must be as many as gradients, got {len(names)} names for {len(gradients)} gradients")
    workers = comm.size()
    if not comm.process_set.included():
        if feedback is not None:
            feedback.used_among(comm)
        return list(gradients)
    if workers == 1 and (tf.executing_eagerly() or not collectives.elastic()):
        return list(gradients)

    start_step = compression.select.start_step if isinstance(compression, EightBitCompressor) else 0
    if start_step and step is None:
        raise ValueError(
            f"Selection(start_step={start_step}) needs the number of the step: give it to "
            "hvd8bit.DistributedGradientTape(tape, step=optimizer.iterations); hvd8bit.keras.DistributedOptimizer "
            "knows it"
        )
    plan = planning.make(gradients, names, variables, compression, sparse_as_dense)
    residuals, refusal = _residuals(feedback, plan, variables, comm)
    settings = f"compression={_described(compression)}, average={average}, factor={factor}, scope={scope}"
    if observer is not None:
        settings += f", {observer}"
    usual = getattr(compression, "encoding", None)
    if refusal:
        settings += f", {refusal}"
    started = f"step {_value(step)}" if start_step else ""
    lines = [settings, *(gradient.describe(usual) for gradient in plan)]
    _agree(lines, comm, scope, started, _first_collective(plan, compression, comm, scope))
    if refusal:
        raise ValueError(refusal)

    def reduced(plan, scope, residuals=residuals):
        return _reduce(plan, compression, comm, average, factor, gradient_predivide_factor, scope, residuals)

    def exact():
        return reduced([gradient.exactly() for gradient in plan], f"{scope}_exact")

    on = tf.convert_to_tensor(tf_variable(step)) >= start_step * passes if start_step else True

    def reduce():
        if tf.is_tensor(on) and not tf.executing_eagerly():
            return tf.cond(on, lambda: reduced(plan, scope), exact)
        return reduced(plan, scope) if on else exact()

    if collectives.elastic() and not tf.executing_eagerly():
        # One worker may be left of many, or become many, under the same graph.
        untouched = [gradient.tensor for gradient in plan]
        return tf.cond(comm.size_tensor() > 1, reduce, lambda: untouched)
    if observer is None:
        return reduce()
    began = observer.begin(plan)
    results = reduce()
    observer.observe(plan, results, began, on, lambda some: reduced(some, f"{scope}_observed", {}), compression, comm)
    return results


def _described(compression) -> str:
    """The same on all workers, which an address is not."""
    plain = type(compression).__repr__ is object.__repr__
    return f"{type(compression).__module__}.{type(compression).__qualname__}" if plain else repr(compression)


def _value(step) -> str:
    """The step's number, where it can be told when a graph is built."""
    step = tf_variable(step)
    if not isinstance(step, tf.Variable):
        return str(tf.get_static_value(step)) if tf.is_tensor(step) else str(step)
    with tf.init_scope():
        return str(int(step.numpy())) if tf.executing_eagerly() else "unknown"


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


def _residuals(
    feedback: ErrorFeedback | None, plan, variables, comm: HorovodComm
) -> tuple[dict[int, tf.Variable], str]:
    """By position, of the gradients to encode: where what is not sent is kept; and why that cannot be, or ""."""
    if feedback is None:
        return {}, ""
    if not keeps_order():
        return {}, "error_feedback must be False in a graph of TensorFlow 1: call from a tf.function, or eagerly"
    sparse = next((gradient.name for gradient in plan if gradient.treatment == planning.SPARSE_ENCODE), None)
    if sparse is not None:
        return {}, (
            f"error_feedback cannot be kept for rows of {sparse}, which differ from step to step: use "
            "sparse_as_dense=True or Selection(sparse='exact')"
        )
    if variables is None:
        return {}, "error_feedback needs variables, got None: whose gradients these are"
    encoded = {g.position: variables[g.position] for g in plan if g.treatment == planning.ENCODE}
    if len({id(tf_variable(variable)) for variable in encoded.values()}) < len(encoded):
        return {}, "error_feedback needs each variable once: one of them is in the list of gradients twice"
    try:
        feedback.used_among(comm)
        return {position: feedback.residual_of(variable) for position, variable in encoded.items()}, ""
    except ValueError as error:
        return {}, str(error)


def _reduce(plan, compression, comm: HorovodComm, average, factor, predivide, scope, residuals) -> list:
    import horovod.tensorflow as hvd

    results = [gradient.tensor for gradient in plan]
    # The backward pass makes the last layer's gradients first.
    backward = list(reversed(plan))
    scale = tf.constant(factor, tf.float64)
    if not average:
        scale = scale * tf.cast(comm.size_tensor(), tf.float64)
    as_they_are = [g for g in backward if g.treatment == planning.EXACT]
    errors: list[tuple[tf.Variable, tf.Tensor]] = []
    if isinstance(compression, EightBitCompressor):
        judge_by, choose_by = collectives.workers_to_judge_by(comm), collectives.workers_to_choose_by(comm)
        for number, bucket in enumerate(planning.encoded_buckets(plan, compression, judge_by, choose_by)):
            if bucket.mode is None:
                as_they_are += bucket.gradients
                continue
            tensors = [g.tensor for g in bucket.gradients]
            how = {"factor": scale, "name": _bucket_name(scope, number), "mode": bucket.mode}
            if residuals:
                own = [residuals[g.position] for g in bucket.gradients]
                outputs, withheld = correcting_exchange(tensors, own, bucket.encoding, comm, **how)
                errors += zip(own, withheld)
            else:
                outputs = differentiable_exchange(tensors, bucket.encoding, comm, **how)
            for gradient, output in zip(bucket.gradients, outputs):
                results[gradient.position] = output

    for at, gradient in enumerate(as_they_are):
        # One that is encoded in other steps takes along what it owes.
        if gradient.position in residuals:
            sent, owed = with_residual(gradient.tensor, residuals[gradient.position])
            as_they_are[at] = dataclasses.replace(gradient, tensor=sent)
            errors.append((residuals[gradient.position], owed))
    plain = None if isinstance(compression, EightBitCompressor) else compression
    for dtype in sorted({g.tensor.dtype.name for g in as_they_are}):
        # bfloat16 is none of Horovod's dtypes; beside EightBit float16 is summed as float32, too.
        wide = dtype == "bfloat16" or (plain is None and dtype == "float16")
        for number, fused in enumerate(planning.buckets([g for g in as_they_are if g.tensor.dtype.name == dtype])):
            outputs = comm.allreduce(
                [tf.cast(g.tensor, tf.float32) if wide else g.tensor for g in fused],
                f"{scope}_{dtype}_{number}",
                op=hvd.Average if average else hvd.Sum,
                prescale_factor=1.0 / predivide,
                postscale_factor=predivide,
                compression=plain,
            )
            for gradient, output in zip(fused, outputs):
                results[gradient.position] = tf.cast(output, dtype) if wide else output

    for gradient in backward:
        name = f"{scope}_sparse_{gradient.position}"
        if gradient.treatment == planning.SPARSE:
            results[gradient.position] = comm.gather_slices(gradient.tensor, name, average=average)
        elif gradient.treatment == planning.SPARSE_ENCODE:
            assert gradient.encoding is not None
            results[gradient.position] = exchange_slices(
                gradient.tensor, gradient.encoding, comm, average=average, name=name
            )
    if errors:
        keep(errors, results)
    take_turns([result for result in results if result is not None])
    return results


_agreed: set[tuple] = set()


def _first_collective(plan, compression, comm: HorovodComm, scope: str) -> str | None:
    """The name of one in which a worker waits that runs this plan by itself, or None where nothing is encoded."""
    if not isinstance(compression, EightBitCompressor):
        return None
    judge_by, choose_by = collectives.workers_to_judge_by(comm), collectives.workers_to_choose_by(comm)
    buckets = planning.encoded_buckets(plan, compression, judge_by, choose_by)
    number = next((number for number, bucket in enumerate(buckets) if bucket.mode is not None), None)
    return None if number is None else f"{_bucket_name(scope, number)}_out_0"


def _bucket_name(scope: str, number: int) -> str:
    return f"{scope}_bucket_{number}"


_first_collectives: dict[tuple, list[str]] = {}
"""By workers and name of the comparison: those of the plans that its workers have agreed on, the newest last."""
KEPT_COLLECTIVES = 8


def _agree(
    lines: list[str], comm: HorovodComm, scope: str, started: str = "", first_collective: str | None = None
) -> None:
    """Raises ValueError on every worker unless all have the same lines. Says nothing twice.

    `started` is compared, too, when the lines are new: what may change later, alike on all workers.
    `first_collective` is where workers wait from now on that run this plan while another has a new one.

    Not in elastic jobs: a worker that joins has a new plan, the others keep the graph that they built, and nobody would
    answer. There the chunk headers tell.
    """
    if collectives.elastic():
        return
    text = "\n".join(lines)
    # A process set that is removed leaves its number to the next one, which may have other workers.
    workers = tuple(comm.ranks())
    key = (text, workers)
    if key in _agreed:
        return
    # Other threads may be in steps of their own, which workers may have started in another order.
    main = threading.current_thread() is threading.main_thread()
    name = "hvd8bit_plan" if main else f"hvd8bit_plan_{scope}"
    known = _first_collectives.setdefault((workers, name), [])
    if started:
        text = f"{lines[0]}, {started}\n" + "\n".join(lines[1:])
    with tf.init_scope():
        if tf.executing_eagerly():
            digest = hashlib.sha256(text.encode()).hexdigest()
            if len(set(comm.gather_text(digest, name, known))) > 1:
                raise ValueError(_difference(comm.gather_text(text, f"{name}_in_full"), comm.ranks()))
    _agreed.add(key)
    if first_collective is not None and first_collective not in known:
        known.append(first_collective)
        del known[:-KEPT_COLLECTIVES]


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
