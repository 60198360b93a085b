"""The union batch of a `HybridModel`: all workers' mini-batches as one, in sub-batches, and what adds up over them."""

from __future__ import annotations

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
    labels and sample weights as they are.
    """

    def __init__(self, wiring, x, y, sample_weight):
        comm, scope = wiring.comm, wiring.scope
        own = tf.shape(keras.tree.flatten(x)[0], tf.int64)[0]
        counts = comm.gather_rows(own[None], f"{scope}_rows") if comm.size() > 1 else own[None]
        by_worker = tf.unstack(counts, num=comm.size())
        self.rows = tf.reduce_sum(counts)
        self.own_parts = pipeline.cut(own, wiring.sub_batches)
        self.own_share = tf.cast(own, tf.float64) / tf.cast(self.rows, tf.float64)
        self._parts = [pipeline.cut(count, wiring.sub_batches) for count in by_worker]
        self._first_rows = [tf.reduce_sum(counts[:rank]) for rank in range(comm.size())]
        self._sub_batches = range(wiring.sub_batches)
        self._labels, self._weights = keras.tree.map_structure(
            lambda leaf: leaf if leaf is None or comm.size() == 1 else _gathered_exactly(leaf, by_worker, wiring),
            (y, sample_weight),
        )

    def sizes(self, number: int) -> list:
        """Rows of a sub-batch, by worker."""
        return [tf.cast(parts[number].stop - parts[number].start, tf.int32) for parts in self._parts]

    def share(self, number: int) -> tf.Tensor:
        """Rows of the sub-batch / rows of the union batch, float64."""
        own = tf.add_n([parts[number].own for parts in self._parts])
        return tf.cast(own, tf.float64) / tf.cast(self.rows, tf.float64)

    def share_with_repeated(self, number: int) -> tf.Tensor:
        """The same, where a row counts that is there to fill a sub-batch: a mean over it divides by that, too."""
        held = tf.add_n([parts[number].stop - parts[number].start for parts in self._parts])
        return tf.cast(held, tf.float64) / tf.cast(self.rows, tf.float64)

    def labels(self, number: int):
        """Labels of a sub-batch, and sample weights; rows that are there to fill it weigh nothing."""
        counts = self._counts(number)
        weights = self._rows_of(self._weights, number)
        if weights is None:
            return self._rows_of(self._labels, number), counts
        return self._rows_of(self._labels, number), weights * tf.reshape(
            tf.cast(counts, weights.dtype), [-1] + [1] * (weights.shape.rank - 1)
        )

    def kept(self, predictions: list):
        """Labels, outputs and sample weights of all rows of the union, each once."""
        keep = tf.concat([self._counts(number) for number in self._sub_batches], 0) > 0

        def whole(nest):
            parts = [self._rows_of(nest, number) for number in self._sub_batches]
            return keras.tree.map_structure(
                lambda *leaves: None if leaves[0] is None else tf.boolean_mask(tf.concat(leaves, 0), keep), *parts
            )

        return whole(self._labels), tf.boolean_mask(tf.concat(predictions, 0), keep), whole(self._weights)

    def _counts(self, number: int):
        """1.0 for each row of a sub-batch, 0.0 for those that fill it."""
        parts = [parts[number] for parts in self._parts]
        return tf.concat(
            [tf.fill([part.stop - part.start], tf.cast(part.own > 0, keras.config.floatx())) for part in parts], 0
        )

    def _rows_of(self, nest, number: int):
        places = [
            (first + parts[number].start, first + parts[number].stop)
            for first, parts in zip(self._first_rows, self._parts)
        ]
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.concat([leaf[start:stop] for start, stop in places], 0), nest
        )


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
