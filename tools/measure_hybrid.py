"""Measures a step of a HybridModel on two hosts with a slow link between them: the whole, its computation, its
exchange.

    sudo .venv/bin/python tools/measure_hybrid.py
    sudo .venv/bin/python tools/measure_hybrid.py --rate 1e9 --sub_batches 1 --json out.json

A small convolutional net below, fully connected layers 4096-4096-1000 above, as network namespaces with a shaped link
let it (hvd8bit.bench.netlab). For each compression:

* step: the step as it is.
* computation: the same step with stand-ins for the collectives, that hand a worker its own bytes back at once. Encoding
  and decoding are in it.
* exchange: the collectives of that step alone, all under way at once, with as many bytes each.

Where exchange hides behind computation, step is less than their sum. Two workers share this machine's cores, so
computation takes longer than it would on two hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

COMPRESSIONS = ("none", "eightbit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100e6, help="of each host's link, in bit/s")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=128, help="rows of the union batch")
    parser.add_argument("--sub_batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return 0

    from hvd8bit.bench import netlab

    problem = netlab.available(shaping=True)
    if problem:
        print(problem, file=sys.stderr)
        return 1
    with netlab.NetLab(arguments.hosts, arguments.rate) as lab:
        job = lab.run([sys.executable, __file__, *sys.argv[1:], "--worker"], timeout=900)
    if job.returncode:
        print(job.describe(), file=sys.stderr)
        return 1
    report = json.loads(job.stdout[0].splitlines()[-1])
    show(report["results"])
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def show(records: list[dict]) -> None:
    print(f"{'compression':12} {'step':>8} {'computation':>12} {'exchange':>9} {'sum':>8}   step/sum   MB per worker")
    for record in records:
        whole = record["computation_s"] + record["exchange_s"]
        print(
            f"{record['compression']:12} {record['step_s']:7.3f}s {record['computation_s']:11.3f}s "
            f"{record['exchange_s']:8.3f}s {whole:7.3f}s   {record['step_s'] / whole:8.2f}   "
            f"{record['sent_bytes'] / 1e6:.2f}"
        )
    by_name = {record["compression"]: record for record in records}
    if len(by_name) == len(COMPRESSIONS):
        print(f"8 bits / exact: step {by_name['eightbit']['step_s'] / by_name['none']['step_s']:.3f}")


def work(arguments) -> None:
    """On each host."""
    import horovod.tensorflow as hvd
    import keras
    import numpy as np
    import tensorflow as tf

    import hvd8bit
    from hvd8bit import collectives
    from hvd8bit.bench import timing
    from hvd8bit.bench.machine import machine, versions
    from hvd8bit.parallel import ColumnParallelDense, HybridModel

    timing.start()
    rng = np.random.default_rng(hvd.rank())
    rows = arguments.batch_size // hvd.size()
    images = tf.constant(rng.standard_normal((rows, 32, 32, 3)), tf.float32)
    labels = tf.constant(rng.integers(0, 1000, rows))

    def make(name: str):
        keras.utils.set_random_seed(1)
        compression = hvd8bit.EightBit if name == "eightbit" else None
        lower = [
            keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
        ]
        upper = [
            ColumnParallelDense(4096, activation="relu", compression=compression, name="fc1"),
            ColumnParallelDense(4096, activation="relu", compression=compression, name="fc2"),
            ColumnParallelDense(1000, activation="softmax", compression=compression, name="fc3"),
        ]
        model = HybridModel(
            lower, upper, arguments.sub_batches, compression=compression, gradient_compression=compression
        )
        model.compile(keras.optimizers.SGD(0.001), loss="sparse_categorical_crossentropy")
        return model

    cases, sent = {}, {}
    for name in COMPRESSIONS:
        model = make(name)
        step = tf.function(model.train_step)
        before = collectives.sent_bytes()
        step((images, labels))
        sent[name] = collectives.sent_bytes() - before
        cases[f"{name} step"] = lambda step=step: step((images, labels))

        log: list = []
        with stand_ins(log):
            alone = tf.function(model.train_step)
            alone((images, labels))
        cases[f"{name} computation"] = lambda alone=alone: alone((images, labels))
        cases[f"{name} exchange"] = replay(log)
    samples = timing.interleaved(cases, arguments.rounds, budget_s=400)
    records = []
    for name in COMPRESSIONS:
        parts = {part: samples[f"{name} {part}"] for part in ("step", "computation", "exchange")}
        records.append(
            {
                "compression": name,
                "workers": hvd.size(),
                "rate_bit_per_s": arguments.rate,
                "batch_size": arguments.batch_size,
                "sub_batches": arguments.sub_batches,
                "rounds": len(parts["step"].seconds),
                "sent_bytes": sent[name],
                **{f"{part}_s": sample.median_s for part, sample in parts.items()},
                **{f"{part}_spread": sample.spread for part, sample in parts.items()},
            }
        )
    if hvd.rank() == 0:
        print(json.dumps({"results": records, "machine": machine(), "versions": versions()}))


@contextlib.contextmanager
def stand_ins(log: list):
    """While a graph is traced inside: Horovod's collectives give a worker its own part from everyone, and `log` gets
    what
    each of them would have moved: (kind, dtype, a variable with the shape)."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    real = {name: getattr(hvd, name) for name in ("alltoall", "allgather", "grouped_allreduce")}

    def note(kind, tensor, splits=None):
        with tf.init_scope():
            shape = tf.Variable([0], shape=[None], dtype=tf.int32, trainable=False)
            parts = tf.Variable([0], shape=[None], dtype=tf.int32, trainable=False)
        shape.assign(tf.shape(tensor))
        if splits is not None:
            parts.assign(tf.cast(splits, tf.int32))
        log.append((kind, tensor.dtype, shape, parts))

    def alltoall(tensor, splits=None, **unused):
        note("alltoall", tensor, splits)
        own = tf.split(tensor, splits, num=hvd.size())[hvd.rank()]
        counts = tf.repeat(tf.cast(splits, tf.int32)[hvd.rank() : hvd.rank() + 1], hvd.size())
        return tf.concat([own] * hvd.size(), 0), counts

    def allgather(tensor, **unused):
        note("allgather", tensor)
        return tf.concat([tensor] * hvd.size(), 0)

    def grouped_allreduce(tensors, **unused):
        for tensor in tensors:
            note("allreduce", tensor)
        return [tf.identity(tensor) for tensor in tensors]

    for name, stand_in in (("alltoall", alltoall), ("allgather", allgather), ("grouped_allreduce", grouped_allreduce)):
        setattr(hvd, name, stand_in)
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(hvd, name, function)


def replay(log: list):
    """A function that runs the logged collectives, all at once, on data of the same sizes."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    data = [(kind, tf.Variable(tf.zeros(shape.numpy(), dtype)), parts.numpy()) for kind, dtype, shape, parts in log]

    @tf.function
    def run():
        ends = []
        for number, (kind, variable, parts) in enumerate(data):
            name = f"replay_{number}"
            if kind == "alltoall":
                result, _ = hvd.alltoall(variable.read_value(), splits=parts, name=name)
            elif kind == "allgather":
                result = hvd.allgather(variable.read_value(), name=name)
            else:
                result = hvd.allreduce(variable.read_value(), op=hvd.Sum, name=name)
            ends.append(tf.size(result))
        return tf.add_n(ends)

    return run


if __name__ == "__main__":
    sys.exit(main())
