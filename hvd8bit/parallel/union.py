"""The union batch of a `HybridModel`: all workers' mini-batches as one, in sub-batches, and what adds up over them."""

from __future__ import annotations

import dataclasses

import keras
import tensorflow as tf

from hvd8bit.parallel import keras_step, pipeline
from hvd8bit.parallel.primitives import all_gather
from hvd8bit.variables import tf_variable


class Gradients:
    """The gradients of some variables, as they add up."""

    def __init__(self, variables):
        self.variables = list(variables)
        self.tensors = [tf_variable(variable) for variable in self.variables]
        self.gradients: list = [None] * len(self.variables)

    def add(self, gradients) -> None:
        self.gradients = [pipeline.add(total, part) for total, part in zip(self.gradients, gradients)]

    def divide(self, share) -> None:
        self.gradients = [
            None
            if gradient is None
            else tf.math.divide_no_nan(tf.convert_to_tensor(gradient), tf.cast(share, gradient.dtype))
            for gradient in self.gradients
        ]


class Penalties:
    """Regularisation losses: those of which each worker has a part, and those that all have whole."""

    def __init__(self, lower, upper, union: Union):
        self._split = keras_step.split_layers(upper)
        self._whole = keras_step.whole_layers(upper)
        self.own = _known([scaled(keras_step.penalty(lower), union.own_share)])
        self.whole: list[tf.Tensor] = []

    def of_sub_batch(self, share) -> None:
        """Takes in those of the upper part's last call."""
        self.own += _known([scaled(keras_step.penalty_of(self._split), share)])
        self.whole += _known([scaled(keras_step.penalty_of(self._whole), share)])


class Union:
    """All workers' mini-batches as one batch, cut into sub-batches: which rows are where, and their labels.

    Sub-batch k holds part k of each worker's rows, in order of rank. Workers exchange the numbers of their rows, and
    labels and sample weights as they are. A sub-batch that would be empty holds rows that belong to others, and counts
    for nothing; no other holds such rows.
    """

    def __init__(self, wiring, x, y, sample_weight):
        comm, scope = wiring.comm, wiring.scope
        own = tf.shape(keras.tree.flatten(x)[0], tf.int64)[0]
        counts = comm.gather_rows(own[None], f"{scope}_rows") if comm.size() > 1 else own[None]
        by_worker = tf.unstack(counts, num=comm.size())
        self.rows = tf.reduce_sum(counts)
        self._parts = _cut_together(by_worker, wiring.sub_batches)
        self.own_parts = self._parts[comm.rank()]
        self.own_share = tf.cast(own, tf.float64) / tf.cast(self.rows, tf.float64)
        self._first_rows = [tf.reduce_sum(counts[:rank]) for rank in range(comm.size())]
        self._sub_batches = range(wiring.sub_batches)
        self._labels, self._weights = keras.tree.map_structure(
            lambda leaf: leaf if leaf is None or comm.size() == 1 else _gathered_exactly(leaf, by_worker, wiring),
            (y, sample_weight),
        )

    def sizes(self, number: int) -> list:
        """Rows of a sub-batch, by worker."""
        return [tf.cast(parts[number].stop - parts[number].start, tf.int32) for parts in self._parts]

    def own(self, number: int) -> tf.Tensor:
        """How many rows of the sub-batch are its own: all, or none."""
        return tf.add_n([parts[number].own for parts in self._parts])

    def share(self, number: int) -> tf.Tensor:
        """Own rows of the sub-batch / rows of the union batch, float64."""
        return tf.cast(self.own(number), tf.float64) / tf.cast(self.rows, tf.float64)

    def labels(self, number: int):
        """Labels of a sub-batch, and sample weights."""
        return self._rows_of(self._labels, number), self._rows_of(self._weights, number)

    def kept(self, predictions: list):
        """Labels, outputs and sample weights of all rows of the union, each once."""
        keep = tf.concat(
            [tf.fill([tf.reduce_sum(self.sizes(number))], self.own(number) > 0) for number in self._sub_batches], 0
        )

        def whole(nest):
            parts = [self._rows_of(nest, number) for number in self._sub_batches]
            return keras.tree.map_structure(
                lambda *leaves: None if leaves[0] is None else tf.boolean_mask(tf.concat(leaves, 0), keep), *parts
            )

        return whole(self._labels), tf.boolean_mask(tf.concat(predictions, 0), keep), whole(self._weights)

    def _rows_of(self, nest, number: int):
        places = [
            (first + parts[number].start, first + parts[number].stop)
            for first, parts in zip(self._first_rows, self._parts)
        ]
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.concat([leaf[start:stop] for start, stop in places], 0), nest
        )


def _cut_together(rows: list, sub_batches: int) -> list[list[pipeline.Part]]:
    """The parts of each worker's rows. A worker repeats a row only where nobody has one for that sub-batch."""
    by_worker = [pipeline.cut(count, sub_batches) for count in rows]
    anybody = [tf.add_n([part.own for part in parts]) > 0 for parts in zip(*by_worker)]
    return [
        [
            dataclasses.replace(part, stop=tf.where(some, part.start + part.own, part.stop))
            for part, some in zip(parts, anybody)
        ]
        for parts in by_worker
    ]


def _gathered_exactly(leaf, counts, wiring):
    keras_step.row_shape("labels and sample weights", leaf)
    return all_gather(
        leaf,
        compression=None,
        process_set=wiring.comm.process_set,
        name=f"{wiring.scope}/labels",
        sizes=[tf.cast(count, tf.int32) for count in counts],
    )


def scaled(penalty, share):
    """A regularisation loss's share, or None where there is none."""
    return None if penalty is None else penalty * tf.cast(share, penalty.dtype)


def _known(penalties: list) -> list:
    return [tf.cast(penalty, tf.float64) for penalty in penalties if penalty is not None]
