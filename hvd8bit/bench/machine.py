"""What a measurement was made on: every benchmark's JSON carries it."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform


def machine() -> dict:
    """Processor, cores that this process may use, memory, system."""
    info: dict = {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        info["cpu"] = names[0] if names else info["cpu"]
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        info["memory_bytes"] = int(meminfo.read_text().split()[1]) * 1024
    return info


def versions() -> dict:
    """Versions of what a measurement depends on; only what is installed."""
    found = {"python": platform.python_version()}
    for name in (
        "hvd8bit",
        "tensorflow",
        "tensorflow-cpu",
        "keras",
        "tf_keras",
        "horovod",
        "numpy",
        "bitsandbytes",
    ):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
