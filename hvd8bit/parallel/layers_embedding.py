"""An embedding that several workers share, split by rows of its table."""

from __future__ import annotations

import tensorflow as tf

from hvd8bit.parallel import primitives
from hvd8bit.parallel.layers_base import ParallelLayer, positive
from hvd8bit.parallel.partition import part_range


class ParallelEmbedding(ParallelLayer):
    """An Embedding layer split by rows of its table.

        worker 0   ids ─→ its rows, else 0 ──┐               ┌─→ all rows
        worker 1   ids ─→ its rows, else 0 ──┴─ all_reduce ──┴─→ all rows

    All workers must call it with the same ids; one out of range is an error on all.

    Args:
      input_dim: rows of the whole table; at least the number of workers.
      output_dim: size of a row.
      embeddings_initializer, mask_zero: as in `keras.layers.Embedding`.
      compression, process_set: as in `ColumnParallelDense`.
      settings: those of any Keras layer: name, dtype, ...

    Raises:
      ValueError: an argument is out of range; the message names it.
    """

    def __init__(self, input_dim, output_dim, embeddings_initializer="uniform", mask_zero=False, **settings):
        # Ids come as float32, too, and half precision would make others of them: Keras' own Embedding sets it as well.
        super().__init__(**{**settings, "autocast": False})
        self.input_dim = positive("input_dim", input_dim)
        self.output_dim = positive("output_dim", output_dim)
        self.embeddings_initializer = self.keras.initializers.get(embeddings_initializer)
        self.mask_zero = bool(mask_zero)
        self.supports_masking = self.mask_zero

    def build(self, input_shape=None):
        """Makes this worker's rows."""
        self._check_units("input_dim", self.input_dim)
        shape = (self.input_dim, self.output_dim)
        self.embeddings = self._add_part("embeddings", shape, 0, self.embeddings_initializer)
        self.built = True

    def call(self, inputs):
        """The rows of the ids, the same on all workers."""
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        in_range = tf.debugging.assert_equal(
            tf.reduce_all((ids >= 0) & (ids < self.input_dim)),
            True,
            message=f"ids for layer {self.name!r} must be in [0, input_dim={self.input_dim})",
        )
        with tf.control_dependencies([] if in_range is None else [in_range]):
            ids = tf.identity(ids)
        table = tf.convert_to_tensor(self.embeddings)
        if self.workers == 1:
            return tf.cast(tf.gather(table, ids), self.compute_dtype)
        start, stop = part_range(self.input_dim, self.workers, self.comm.rank())
        mine = (ids >= start) & (ids < stop)
        rows = tf.cast(tf.gather(table, tf.where(mine, ids - start, tf.zeros_like(ids))), self.compute_dtype)
        rows = tf.where(mine[..., None], rows, tf.zeros_like(rows))
        return primitives.all_reduce(rows, **self._exchange("output"))

    def compute_mask(self, inputs, mask=None):
        """Where the ids are not 0, with `mask_zero`."""
        ops = getattr(self.keras, "ops", tf)  # Keras 3 asks with symbolic tensors of its own
        return ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape):
        """The ids' shape and the size of a row."""
        return (*tuple(input_shape), self.output_dim)

    def get_config(self):
        """As `ParallelLayer.get_config`."""
        config = super().get_config()
        config.update(
            input_dim=self.input_dim,
            output_dim=self.output_dim,
            embeddings_initializer=self.keras.initializers.serialize(self.embeddings_initializer),
            mask_zero=self.mask_zero,
        )
        return config
