"""The CUDA back end on the machine at hand: every case of the table against the CPU's bytes, then how fast it is.

    python tests/gpu/check.py --library build/gpu/libhvd8bit_codec.so     # as tests/gpu/check.sh builds it

Without TensorFlow. With `--memory host` for a library of emulated CUDA. Exit status 0: all cases agree; 1: one does
not; 3: there is no GPU that PyTorch or CuPy gives access to.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parent / "unit")]

import cases  # noqa: E402
from measure import measure  # noqa: E402
from memory import open_memory  # noqa: E402

from hvd8bit import native  # noqa: E402

NO_GPU = 3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", required=True, help="built by tests/gpu/check.sh")
    parser.add_argument("--memory", choices=["auto", "torch", "cupy", "host"], default="auto")
    parser.add_argument("--against", default="", help="the CPU back end that is right; default: the fastest")
    parser.add_argument("--random", type=int, default=1_000_000_000, help="random floats to compare")
    parser.add_argument("--mantissa-step", type=int, default=1, help="every how many of the octave's numbers")
    parser.add_argument("--elements", type=int, default=256 << 20, help="of the measurement; 0: none")
    parser.add_argument("--json", help="where to write the results")
    options = parser.parse_args(arguments)

    try:
        memory = open_memory(options.memory)
    except RuntimeError as error:
        print(f"no GPU to check the CUDA back end on: {error}")
        return NO_GPU
    library = native.open_c_library(pathlib.Path(options.library).resolve())
    runtime, driver = native.cuda_versions(library)
    against = options.against or library.hvd8bit_runnable_backends().decode().split(",")[0]
    machine = f"{memory.name}; CUDA {_version(runtime)}, driver for {_version(driver)}; CPU back end {against}"
    print(machine)
    device = cases.Device(library, memory, against)
    rows, failed = [], 0
    for name, case in cases.cases(options.random, options.mantissa_step):
        start = time.monotonic()
        try:
            case(device)
            found = "same bytes"
        except (AssertionError, ValueError) as error:
            found = f"DIFFERS: {error}"
            failed += 1
        rows.append({"case": name, "found": found, "seconds": round(time.monotonic() - start, 2)})
        print(f"  {name:34} {found:10} {rows[-1]['seconds']:8.1f} s", flush=True)
    timings = measure(device, options.elements) if options.elements and not failed else []
    if timings:
        print(f"  {'kernel':34} {'ns/element':>10} {'GB/s':>9} {'of the copy':>12} {'spread':>8}")
    for row in timings:
        print(
            f"  {row['kernel']:34} {row['ns_per_element']:10.4f} {row['gb_per_s']:9.1f} {row['of_copy']:11.0%} "
            f"{row['spread']:8.0%}"
        )
    if options.json:
        document = {"machine": {"gpu": machine, "system": platform.platform()}, "cases": rows, "results": timings}
        pathlib.Path(options.json).write_text(json.dumps(document, indent=2) + "\n")
    print("FAILED" if failed else "passed")
    return 1 if failed else 0


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"


if __name__ == "__main__":
    raise SystemExit(main())
