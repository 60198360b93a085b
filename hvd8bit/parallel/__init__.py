"""Model parallelism: one model over several workers, with activations and error signals in 8 bits.

Importing it loads neither TensorFlow nor Keras: a name brings in what it needs when it is first used.
"""

import importlib

_HOMES = {
    "HybridModel": "hvd8bit.parallel.hybrid_model",
    "SplitModel": "hvd8bit.parallel.split_model",
    "all_gather": "hvd8bit.parallel.primitives",
    "all_reduce": "hvd8bit.parallel.primitives",
    "copy": "hvd8bit.parallel.primitives",
    "layers_for": "hvd8bit.parallel.layers",
    "measure_boundaries": "hvd8bit.parallel.report",
    "merge": "hvd8bit.parallel.convert",
    "part_sizes": "hvd8bit.parallel.partition",
    "reduce_scatter": "hvd8bit.parallel.primitives",
    "scatter": "hvd8bit.parallel.primitives",
    "send_recv": "hvd8bit.parallel.neighbours",
    "split": "hvd8bit.parallel.convert",
}

_LAYERS = ("ColumnParallelConv2D", "ColumnParallelDense", "LocallyConnected2D", "ParallelEmbedding", "RowParallelDense")

__all__ = [*_HOMES, *_LAYERS]


def __getattr__(name):
    if name in _LAYERS:
        import tensorflow as tf

        value = getattr(importlib.import_module("hvd8bit.parallel.layers").layers_for(tf.keras), name)
        globals()[name] = value
        return value
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'hvd8bit.parallel' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__():
    return sorted(__all__)
