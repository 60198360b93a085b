"""Times a step that has next to nothing but gradients to exchange, by wrapper and compression: for docs/performance.md.

    horovodrun -np 2 python tools/measure_small_gradients.py --gradients 200 --elements 64

All workers run it; rank 0 prints a table. The step is compiled (`tf.function`), and the loss is the sum of squares:
there is next to nothing to compute. Cases take turns. "first step" is how long the first one took, tracing included.
"""

from __future__ import annotations

import argparse
import time

import horovod.tensorflow as hvd
import tensorflow as tf

import hvd8bit
from hvd8bit.bench import timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--elements", type=int, default=64, help="of each, float32 (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=30, metavar="SECONDS", help="for all (default: %(default)s)")
    options = parser.parse_args()
    for name in ("gradients", "elements", "budget"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name} must be positive, got {getattr(options, name)}")

    timing.start()
    variables = [tf.Variable(tf.random.normal([options.elements])) for _ in range(options.gradients)]
    cases = {name: step(wrap, variables) for name, wrap in WRAPPERS.items()}
    to_start = {name: seconds_of(case) for name, case in cases.items()}
    samples = timing.interleaved(cases, 200, options.budget)
    if hvd.rank() == 0:
        plain = next(iter(samples.values())).median_s
        print("| wrapper | compression | step | of the first row | spread | first step |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
        for name, seen in samples.items():
            shown = f"{1000 * seen.median_s:.1f} ms | {seen.median_s / plain:.2f} | {seen.spread:.0%}"
            print(f"| {name[0]} | {name[1]} | {shown} | {to_start[name]:.1f} s |")
        print(f"\n{options.gradients} gradients of {options.elements} elements, {hvd.size()} workers")


def seconds_of(case) -> float:
    timing.barrier()
    began = time.perf_counter()
    case()
    return time.perf_counter() - began


def step(wrap, variables):
    @tf.function(jit_compile=False)
    def run():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variable * variable) for variable in variables])
        return wrap(tape).gradient(loss, variables)

    return run


def _wrappers() -> dict:
    all_of_them = hvd8bit.EightBit(min_elements=0)
    compressions = {"none": hvd.Compression.none, "EightBit": hvd8bit.EightBit, "EightBit(min_elements=0)": all_of_them}
    tapes = {
        "Horovod's tape": hvd.DistributedGradientTape,
        "Horovod's, `num_groups=1`": lambda tape, **how: hvd.DistributedGradientTape(tape, num_groups=1, **how),
        "hvd8bit's tape": hvd8bit.DistributedGradientTape,
    }
    cases = [(wrapper, how) for wrapper in tapes for how in compressions]
    compressions["EightBit(min_elements=0, error_feedback=True)"] = all_of_them(error_feedback=True)
    cases.append(("hvd8bit's tape", "EightBit(min_elements=0, error_feedback=True)"))
    return {
        (wrapper, how): lambda tape, wrap=tapes[wrapper], value=compressions[how]: wrap(tape, compression=value)
        for wrapper, how in cases
    }


WRAPPERS = _wrappers()

if __name__ == "__main__":
    main()
