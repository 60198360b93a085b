"""Will 8 bits pay? A model of training steps on a cluster. NumPy alone, no TensorFlow.

    workload = speedup.load("resnet50").timed(step_s=0.18)
    cluster = speedup.Cluster(16, between=speedup.Link(1.25e9, 30e-6))
    speedup.predict(workload, cluster, "data", bits=8).speedup

docs/prediction.md has the equations and their limits.
"""

from hvd8bit.speedup import paper, units
from hvd8bit.speedup.calibrate import Calibration, MeasuredStep, Residual, calibrate
from hvd8bit.speedup.cluster import BITS, CPU_CODING, PAPER_CODING, Cluster, Coding, Cost, Link, Transport
from hvd8bit.speedup.compare import Verdict, compare
from hvd8bit.speedup.predict import SCHEMES, DataParallel, Hybrid, Pipeline, Prediction, predict
from hvd8bit.speedup.workload import Layer, Workload, bundled, load

__all__ = [
    "BITS",
    "CPU_CODING",
    "PAPER_CODING",
    "SCHEMES",
    "Calibration",
    "Cluster",
    "Coding",
    "Cost",
    "DataParallel",
    "Hybrid",
    "Layer",
    "Link",
    "MeasuredStep",
    "Pipeline",
    "Prediction",
    "Residual",
    "Transport",
    "Verdict",
    "Workload",
    "bundled",
    "calibrate",
    "compare",
    "load",
    "paper",
    "predict",
    "units",
]
