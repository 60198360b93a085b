"""8-bit gradients and activations for Horovod and TensorFlow.

    hvd.DistributedOptimizer(optimizer, compression=hvd8bit.EightBit)

Importing this package loads neither TensorFlow nor Horovod: a public name brings in what it needs when it is
first used.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Average": "hvd8bit.api",
    "DistributedGradientTape": "hvd8bit.tape",
    "EightBit": "hvd8bit.compression",
    "Encoded": "hvd8bit.api",
    "ErrorFeedback": "hvd8bit.feedback",
    "PartialDistributedGradientTape": "hvd8bit.tape",
    "Selection": "hvd8bit.selection",
    "Sum": "hvd8bit.api",
    "allreduce": "hvd8bit.api",
    "broadcast_variables": "hvd8bit.api",
    "codebook": "hvd8bit.datatypes",
    "decode": "hvd8bit.api",
    "encode": "hvd8bit.api",
    "grouped_allreduce": "hvd8bit.api",
    "load_ops": "hvd8bit.api",
    "summary": "hvd8bit.summaries",
}
_MODULES = ("bench", "keras", "parallel", "speedup")

__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name):
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"hvd8bit.{name}")
    raise AttributeError(f"module 'hvd8bit' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__():
    return sorted(__all__)
