"""The one-process arm: N workers played in one graph, and every value that they would exchange rounded.

This is what the paper ran (Dettmers 2016, sec. 3.4), with the product's own ops in place of a rounding function: each
played worker's tensors are encoded, the chunks summed and encoded again, the sums decoded, as in `hvd8bit.exchange`.
What comes out is bit for bit what real workers get.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from experiments.configuration import Arm
from hvd8bit import ops
from hvd8bit.encoding import Encoding
from hvd8bit.exchange import not_sent, with_errors_of_sum
from hvd8bit.feedback import keep
from hvd8bit.planning import BUCKET_ELEMENTS
from hvd8bit.selection import Selection


def exchange(of_workers: Sequence[Sequence[tf.Tensor]], encoding: Encoding, *, factor: float = 1.0) -> list[tf.Tensor]:
    """The sum of all workers' tensors times factor / workers, as `hvd8bit.exchange.exchange` gives it to each.

    Args:
      of_workers: for each worker its tensors; number, order, shapes and dtypes are the same for all.
      encoding: how they are encoded.
      factor: 1 for the mean, the number of workers for the sum.
    """
    return _exchange(of_workers, encoding, factor)[0]


def mean_with_errors(
    of_workers: Sequence[Sequence[tf.Tensor]], encoding: Encoding
) -> tuple[list[tf.Tensor], list[list[tf.Tensor]]]:
    """The mean of all workers' tensors, and each worker's errors: `hvd8bit.exchange.exchange_with_errors`."""
    workers = len(of_workers)
    outputs, payloads, received = _exchange(of_workers, encoding, 1.0)
    errors = []
    for worker, tensors in enumerate(of_workers):
        chunks, sizes = received[worker]
        total = ops.sum_shards(chunks, sizes, tensors, workers, worker, encoding)
        own = not_sent(tensors, [payloads[worker]], workers, encoding)
        scale = tf.constant(float(workers), tf.float64)
        errors.append(with_errors_of_sum(own, [total], outputs, encoding, workers=workers, scale=scale))
    return outputs, errors


def _exchange(of_workers, encoding: Encoding, factor: float):
    """What comes of it; what each worker encoded; and what it received, with the sizes of its parts."""
    workers, like = len(of_workers), list(of_workers[0])
    payloads, sent = [], []
    for tensors in of_workers:
        payload, splits = ops.encode_list(tensors, workers, encoding)
        payloads.append(payload)
        sent.append(tf.split(payload, splits, num=workers))
    received, sums = [], []
    for shard in range(workers):
        chunks = [chunks[shard] for chunks in sent]
        received.append((tf.concat(chunks, 0), tf.stack([tf.size(chunk) for chunk in chunks])))
        sums.append(ops.reduce_shards(*received[-1], like, workers, shard, encoding))
    return ops.decode_list([tf.concat(sums, 0)], like, workers, encoding, factor=factor), payloads, received


def reduce_gradients(
    of_workers: Sequence[Sequence[tf.Tensor]], arm: Arm, min_elements: int, residuals=None
) -> list[tf.Tensor]:
    """The mean of all workers' gradients, as `hvd8bit.reduction.reduce_gradients` makes it.

    Args:
      of_workers: for each worker its gradients, in the variables' order.
      arm: 8 bits: as above; "fp16": sums of halves; "none": float32.
      min_elements: see `hvd8bit.Selection`.
      residuals: with error feedback for each worker its float32 variables, one for each gradient.

    Raises:
      ValueError: they are too many for one bucket.
    """
    workers = len(of_workers)
    if workers == 1:
        return list(of_workers[0])
    results: list = [None] * len(of_workers[0])
    encoded = []
    for position, gradient in enumerate(of_workers[0]):
        if arm.encoding is not None and _is_encoded(gradient, min_elements, arm.encoding):
            encoded.append(position)
        else:
            same = [gradients[position] for gradients in of_workers]
            results[position] = _mean_of_halves(same) if arm.text == "fp16" else _mean(same)
    if arm.encoding is not None and encoded:
        backward = encoded[::-1]  # the order in which the exchange packs them, and so where chunks and blocks end
        sizes = tuple(of_workers[0][position].shape.num_elements() for position in backward)
        if sum(sizes) > BUCKET_ELEMENTS:
            raise ValueError(f"gradients must fit into one bucket of {BUCKET_ELEMENTS} elements, got {sum(sizes)}")
        if not Selection(min_elements).bucket_pays(sizes, arm.encoding, workers):
            raise ValueError(f"gradients of {sum(sizes)} elements would travel as float32; min_elements=0 rounds them")
        to_exchange = [[gradients[p] for p in backward] for gradients in of_workers]
        if residuals is None:
            outputs = exchange(to_exchange, arm.encoding)
        else:
            own = [[of_worker[p] for p in backward] for of_worker in residuals]
            corrected = [[x + r for x, r in zip(*pairs)] for pairs in zip(to_exchange, own)]
            outputs, errors = mean_with_errors(corrected, arm.encoding)
        for position, output in zip(backward, outputs):
            results[position] = output
        if residuals is not None:
            keep([pair for pairs in zip(own, errors) for pair in zip(*pairs)], results)
    return results


def _is_encoded(gradient: tf.Tensor, min_elements: int, encoding: Encoding) -> bool:
    selection = Selection(min_elements)
    return selection.reason_to_pass(gradient.dtype.name, gradient.shape.num_elements(), None, encoding) is None


def _mean(same: Sequence[tf.Tensor]) -> tf.Tensor:
    return _sum(same) * (1.0 / len(same))


def _mean_of_halves(same: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.cast(_sum([tf.cast(tensor, tf.float16) for tensor in same]) * (1.0 / len(same)), same[0].dtype)


def _sum(same: Sequence[tf.Tensor]) -> tf.Tensor:
    total = same[0]
    for tensor in same[1:]:  # in the order of the workers
        total = total + tensor
    return total


# ---- boundaries of a split model ----


def gather(parts: Sequence[tf.Tensor], arm: Arm, axis: int = -1) -> tf.Tensor:
    """All played workers' parts of an activation, as they arrive; `hvd8bit.parallel.all_gather`.

    The gradient goes straight through the rounding.
    """
    return tf.concat([_through(_round_trip, arm, part) for part in parts], axis)


def fan_out(x: tf.Tensor, workers: int, arm: Arm) -> list[tf.Tensor]:
    """A tensor that all workers have, once for each; backward, the exchanged sum of their error signals.

    `hvd8bit.parallel.copy`, whose backward pass is an allreduce: two roundings.
    """

    @tf.custom_gradient
    def copies(x):
        def grad(*upstream):
            return _sum_of_error_signals(upstream, arm)

        return tuple(tf.identity(x) for _ in range(workers)), grad

    return list(copies(x))


def _sum_of_error_signals(signals: Sequence[tf.Tensor], arm: Arm) -> tf.Tensor:
    if len(signals) == 1:
        return signals[0]
    if arm.encoding is not None:
        return exchange([[signal] for signal in signals], arm.encoding, factor=float(len(signals)))[0]
    if arm.text == "fp16":
        return tf.cast(_sum([tf.cast(signal, tf.float16) for signal in signals]), signals[0].dtype)
    return _sum(signals)


def _round_trip(x: tf.Tensor, arm: Arm) -> tf.Tensor:
    if arm.encoding is not None:
        payload, _ = ops.encode_list([x], 1, arm.encoding)
        return tf.ensure_shape(ops.decode_list([payload], [x], 1, arm.encoding)[0], x.shape)
    if arm.text == "fp16":
        return tf.cast(tf.cast(x, tf.float16), x.dtype)
    return x


def _through(function, arm: Arm, x: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def straight(x):
        return function(x, arm), lambda upstream: upstream

    return straight(x)
