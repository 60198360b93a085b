"""Model parallelism: one model over several workers, with activations and error signals in 8 bits.

Importing it loads neither TensorFlow nor Keras: a name brings in what it needs when it is first used.
"""

import importlib

_HOMES = {
    "all_gather": "hvd8bit.parallel.primitives",
    "all_reduce": "hvd8bit.parallel.primitives",
    "copy": "hvd8bit.parallel.primitives",
    "measure_boundaries": "hvd8bit.parallel.report",
    "part_sizes": "hvd8bit.parallel.partition",
    "reduce_scatter": "hvd8bit.parallel.primitives",
    "scatter": "hvd8bit.parallel.primitives",
}

__all__ = [*_HOMES]


def __getattr__(name):
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'hvd8bit.parallel' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__():
    return sorted(__all__)
