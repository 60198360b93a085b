"""Keras layers that several workers share. Each holds a part of the weights; all see the same batch.

    layer                              split by   sent forward            sent backward
    ColumnParallelDense                output     output (all_gather)     input's error signal (all_reduce)
      gather_output=False                         nothing                 the same
    RowParallelDense                   input      output (all_reduce)     input's error signal (all_gather)
      input_is_parallel=True                      output (all_reduce)     nothing
    ColumnParallelConv2D               filters    as ColumnParallelDense
    LocallyConnected2D                 filters    as ColumnParallelDense
    ParallelEmbedding                  rows       output (all_reduce)     nothing

They come for the Keras that `tf.keras` is: Keras 3, or Keras 2 with `TF_USE_LEGACY_KERAS=1` and up to TensorFlow 2.15.
`layers_for(keras)` makes them for another one.
"""

from __future__ import annotations

import importlib
import types

from hvd8bit.parallel.layers_dense import ColumnParallelDense, RowParallelDense
from hvd8bit.parallel.layers_embedding import ParallelEmbedding
from hvd8bit.parallel.layers_images import ColumnParallelConv2D, LocallyConnected2D


def layers_for(keras) -> types.SimpleNamespace:
    """The layers as classes of one Keras.

    Args:
      keras: the module: `keras`, `tf_keras` or `tf.keras`.

    Returns:
      A namespace with ColumnParallelDense, RowParallelDense, ColumnParallelConv2D, LocallyConnected2D and
      ParallelEmbedding, which that Keras saves and loads.
    """
    base = keras.layers.Layer
    if base not in _made:
        # tf.keras is a view of it that lacks some of its parts.
        whole = importlib.import_module(base.__module__.partition(".")[0])
        classes = {mixin.__name__: _class_of(mixin, base, whole) for mixin in _MIXINS}
        _made[base] = types.SimpleNamespace(**classes)
    return _made[base]


_MIXINS = (ColumnParallelDense, RowParallelDense, ColumnParallelConv2D, LocallyConnected2D, ParallelEmbedding)
_made: dict[type, types.SimpleNamespace] = {}


def _class_of(mixin: type, base: type, keras) -> type:
    members = {"__module__": "hvd8bit.parallel", "__doc__": mixin.__doc__, "keras": keras}
    return keras.saving.register_keras_serializable("hvd8bit")(type(mixin.__name__, (mixin, base), members))
