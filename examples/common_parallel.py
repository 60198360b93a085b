"""What the examples of model parallelism share: compression of activations, and what crosses each boundary."""

from __future__ import annotations

import collections
import hashlib
import sys

import common
import horovod.tensorflow as hvd
from common import FLAGS, keras

import hvd8bit

COMPRESSIONS = ("none", "eightbit")

COLUMNS = {
    "compression": "{}",
    "seed": "{}",
    "test_accuracy": "{:.4f}",
    "seconds_per_step": "{:.5f}",
    "activation_bytes_per_step": "{:,}",
    "gradient_bytes_per_step": "{:,}",
    "weight_digest": "{:.16}",
}


def compression(name: str):
    """What to give to `compression=` of layers and models: None is exact."""
    if name == "none":
        return None
    return hvd8bit.EightBit(data_type=FLAGS.data_type, block_size=FLAGS.block_size or None)


def boundaries_of_a_step(step) -> list[dict]:
    """Calls `step`, a training step that is traced anew, and tells what crossed each boundary, of all workers together:
    records of boundary, direction, sent_bytes, and relative_error of those who sent."""
    with hvd8bit.parallel.measure_boundaries() as report:
        step()
    totals: dict = collections.OrderedDict()
    for rows in hvd.allgather_object(report.rows()):
        for row in rows:
            key = (row["boundary"], row["direction"])
            total = totals.setdefault(key, {"sent_bytes": 0, "errors": []})
            total["sent_bytes"] += row["sent_bytes"]
            total["errors"].append(row["relative_error"])
    return [
        {
            "boundary": boundary,
            "direction": direction,
            "sent_bytes": total["sent_bytes"],
            "relative_error": sum(total["errors"]) / len(total["errors"]),
        }
        for (boundary, direction), total in sorted(totals.items())
    ]


def show_boundaries(records: list[dict]) -> None:
    """Prints, for each training, what crossed the boundaries in a step."""
    for record in records:
        common.say(f"\n{record['compression']}, seed {record['seed']}: what crosses the boundaries in a step")
        for row in record["boundaries"]:
            common.say(
                f"  {row['boundary']:40} {row['direction']:8} {row['sent_bytes']:12,} bytes, "
                f"relative error {100 * row['relative_error']:.2f} %"
            )


def digest(weights) -> str:
    """SHA-256 of this worker's weights."""
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()


def combined_digest(part: int, weights) -> str:
    """SHA-256 of the weights of all workers. Ends the program, on all of them, where two that have the same part of the
    model do not hold the same."""
    mine = digest(weights)
    parts: dict = {}
    for number, found in hvd.allgather_object((part, mine)):
        if parts.setdefault(number, found) != found:
            sys.exit(
                f"Workers that hold part {number} of the model have different weights: they did not train one model."
            )
    return hashlib.sha256("".join(parts[number] for number in sorted(parts)).encode()).hexdigest()


def hybrid_digest(model) -> str:
    """SHA-256 of a HybridModel's weights. Ends the program, on all workers, where the lower parts differ."""
    lower = hvd.allgather_object(digest(model.lower.trainable_weights))
    if len(set(lower)) > 1:
        sys.exit("The workers' lower layers have different weights: they did not train one model.")
    return combined_digest(hvd.rank(), model.trainable_weights)


class Progress(keras.callbacks.Callback):
    """Measures each step; shows each epoch."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def on_train_batch_begin(self, batch, logs=None):
        self.run.begin_step()

    def on_train_batch_end(self, batch, logs=None):
        self.run.end_step()

    def on_epoch_end(self, epoch, logs=None):
        self.run.end_epoch(logs["loss"])


def fit(model, compression_name: str, seed: int, images, labels) -> tuple:
    """Trains a compiled model; the Run of it, and what crosses its boundaries in a step."""
    first = slice(FLAGS.batch_size)
    boundaries = boundaries_of_a_step(lambda: model.train_on_batch(images[first], labels[first]))
    model.make_train_function(force=True)  # that step's graph measures at each step; the next one does not
    run = common.Run(compression_name, seed)
    settings = {"batch_size": FLAGS.batch_size, "epochs": FLAGS.epochs, "verbose": 0}
    model.fit(images, labels, callbacks=[Progress(run)], **settings)
    return run, boundaries


def record(run, test_accuracy: float, boundaries: list[dict], digest: str, **more) -> dict:
    """What there is to tell of a training."""
    activations = sum(row["sent_bytes"] for row in boundaries)
    everything = sum(hvd.allgather_object(sum(run.bytes) / len(run.bytes)))
    return {
        **common.compression_settings(run.compression_name),
        "dataset": FLAGS.dataset,
        "seed": run.seed,
        "workers": hvd.size(),
        "batch_size": FLAGS.batch_size,
        "steps": len(run.seconds),
        "loss_of_epochs": run.losses,
        "test_accuracy": test_accuracy,
        "seconds_per_step": sorted(run.seconds)[len(run.seconds) // 2],
        "activation_bytes_per_step": activations,
        "gradient_bytes_per_step": max(round(everything) - activations, 0),
        "boundaries": boundaries,
        "weight_digest": digest,
        **more,
    }
