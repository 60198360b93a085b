"""What the examples share: flags, data, model, measuring, results. What concerns Horovod is in the others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import NoReturn

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else every worker greets with a screen of its own

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from absl import flags, logging

import hvd8bit
from hvd8bit import collectives
from hvd8bit.bench.machine import machine, versions
from hvd8bit.datatypes import DATA_TYPES

keras = tf.keras
KERAS_3 = getattr(keras, "__version__", "2").startswith("3.")
"""False with TensorFlow up to 2.15, and with TF_USE_LEGACY_KERAS=1."""

FLAGS = flags.FLAGS
COMPRESSIONS = ("none", "fp16", "eightbit")


# ---- Flags and start ----


def define_training_flags(datasets=("digits", "mnist"), compressions=COMPRESSIONS) -> None:
    """The flags of a training. The first of the datasets is the default."""
    flags.DEFINE_enum("dataset", datasets[0], datasets, "digits: 8 × 8 pixels, comes with scikit-learn.")
    flags.DEFINE_string("data_dir", "~/tensorflow_datasets", "Where tensorflow-datasets has prepared the others.")
    flags.DEFINE_integer("epochs", 3, "How often each worker goes through its part of the data.", lower_bound=1)
    flags.DEFINE_integer("batch_size", 32, "Images per step and worker.", lower_bound=1)
    flags.DEFINE_multi_integer("seed", [1], "Of weights and order. Several: one training after another.")
    define_compression_flags(["none"], compressions)


def define_compression_flags(default: list[str], compressions=COMPRESSIONS) -> None:
    encoding = hvd8bit.EightBit.encoding
    flags.DEFINE_multi_enum("compression", default, compressions, "Of what is sent. Several: one after another.")
    flags.DEFINE_enum("data_type", encoding.data_type, list(DATA_TYPES), "8-bit data type of eightbit.")
    flags.DEFINE_integer("block_size", encoding.block_size, "Elements that share a scale; 0: one scale for all.")
    flags.DEFINE_string("json", None, "Where to write the results; - for standard output.")
    FLAGS.verbosity = logging.WARNING  # else absl shows what any library logs


def start(process_sets: bool = False) -> None:
    """Starts Horovod, and with process sets where they are wanted; each worker of a host takes a GPU of its own."""
    hvd.init(process_sets="dynamic" if process_sets else None)
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")


def compression(name: str):
    """What to give to `compression=`."""
    if name == "eightbit":
        return hvd8bit.EightBit(data_type=FLAGS.data_type, block_size=FLAGS.block_size or None)
    return {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}[name]


def compression_settings(name: str) -> dict:
    """The same, for a record of the results."""
    if name == "eightbit":
        return {"compression": name, "data_type": FLAGS.data_type, "block_size": FLAGS.block_size or None}
    return {"compression": name}


def usage_error(text: str) -> NoReturn:
    """Ends the program: a flag's value cannot be used; on every worker."""
    print(text, file=sys.stderr)
    sys.exit(2)


def say(text: str) -> None:
    """Prints on rank 0, at once, also into a pipe."""
    if hvd.rank() == 0:
        print(text, flush=True)


# ---- Data and model ----


def load_data() -> tuple:
    """(images, labels) for training, this worker's share only, and (images, labels) for the test, all.

    Images are float32 [n, height, width, 1] in [0, 1]. All workers get equally many: all take as many steps.
    """
    train, test = whole_data()
    share = len(train[0]) // hvd.size()
    if FLAGS.batch_size > share:
        sys.exit(f"--batch_size must be at most {share}, a worker's share of the images, got {FLAGS.batch_size}")
    return tuple(array[hvd.rank() :: hvd.size()][:share] for array in train), test


def whole_data() -> tuple:
    """(images, labels) for training, and for the test: all of them. Images as in `load_data`; cifar10's have "
    "colours."""
    readers = {"digits": _digits, "mnist": _prepared, "cifar10": _prepared}
    return readers[FLAGS.dataset]()


def _digits() -> tuple:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(images))  # neighbours are by the same hand
    test, train = order[:360], order[360:]
    return (images[train], labels[train]), (images[test], labels[test])


def _prepared() -> tuple:
    parts = prepared_builder(FLAGS.dataset).as_dataset(split=["train", "test"], batch_size=-1, as_supervised=True)
    return tuple((images.numpy().astype(np.float32) / 255, labels.numpy()) for images, labels in parts)


def prepared_builder(name: str):
    """A data set that tensorflow-datasets has prepared in --data_dir. Ends the program where there is none."""
    data_dir = Path(FLAGS.data_dir).expanduser().resolve()
    prepared = sorted(data_dir.glob(f"{name}/*/dataset_info.json"), key=_version)
    if not prepared:
        # Asked for data that it does not have, tensorflow-datasets would try to download it, on every worker.
        title = {"mnist": "MNIST", "cifar10": "CIFAR-10", "imagenet2012": "ImageNet"}[name]
        sys.exit(
            f"No {title} found: looked for {data_dir}/{name}/*/dataset_info.json. Name the folder that "
            "tensorflow-datasets has prepared by --data_dir, or prepare it, with a network: python -c "
            f'\'import tensorflow_datasets as tfds; tfds.load("{name}", data_dir="{data_dir}")\''
        )
    import tensorflow_datasets as tfds

    return tfds.builder_from_directory(prepared[-1].parent)


def _version(dataset_info: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", dataset_info.parent.name)]


def build_model(image_shape):
    """Two hidden layers: 301,066 parameters for digits, 669,706 for MNIST."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Flatten(),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def accuracy(model, images, labels) -> float:
    """The part of the images that the model names rightly."""
    return float(np.mean(np.argmax(model.predict(images, batch_size=1000, verbose=0), axis=1) == labels))


# ---- Measuring ----


class Meter:
    """Seconds, and gradient bytes sent by this worker, of each step."""

    def __init__(self):
        self.seconds: list[float] = []
        self.bytes: list[int] = []

    def begin_step(self) -> None:
        self._sent, self._started = collectives.sent_bytes(), time.perf_counter()

    def end_step(self) -> None:
        self.seconds.append(time.perf_counter() - self._started)
        self.bytes.append(collectives.sent_bytes() - self._sent)

    @contextlib.contextmanager
    def step(self):
        self.begin_step()
        yield
        self.end_step()


class Run(Meter):
    """One training: its settings, and what is measured of it."""

    def __init__(self, compression_name: str, seed: int):
        super().__init__()
        self.compression_name = compression_name
        self.seed = seed
        self.losses: list[float] = []

    def end_epoch(self, loss: float) -> None:
        """Tells how far the training is: at each epoch, or at each tenth part of a long one."""
        self.losses.append(loss)
        epoch, epochs = len(self.losses), FLAGS.epochs
        if epoch % -(-epochs // 10) == 0 or epoch == epochs:
            milliseconds = 1000 * statistics.median(self.seconds)
            say(
                f"{self.compression_name}, seed {self.seed}: epoch {epoch}/{epochs}, loss {loss:.4f}, "
                f"{milliseconds:.1f} ms per step"
            )

    def record(self, model, test_accuracy: float, uncounted_bytes_per_step: int = 0) -> dict:
        """What there is to tell of the training. All workers must call it: it compares their weights."""
        return {
            **compression_settings(self.compression_name),
            "dataset": FLAGS.dataset,
            "seed": self.seed,
            "workers": hvd.size(),
            "batch_size": FLAGS.batch_size,
            "parameters": model.count_params(),
            "steps": len(self.seconds),
            "loss_of_epochs": self.losses,
            "test_accuracy": test_accuracy,
            "seconds_per_step": statistics.median(self.seconds),
            "gradient_bytes_per_step": round(statistics.mean(self.bytes)) + uncounted_bytes_per_step,
            "weight_digest": weight_digest(model),
        }


def weight_digest(model) -> str:
    """SHA-256 of the trained weights. Ends the program, on all workers, where these do not have the same."""
    weights = b"".join(weight.numpy().tobytes() for weight in model.trainable_weights)
    mine = hashlib.sha256(weights).hexdigest()
    digests = hvd.allgather_object(mine)
    if len(set(digests)) > 1:
        each = ", ".join(f"rank {rank}: {digest:.16}" for rank, digest in enumerate(digests))
        sys.exit(f"The workers' weights differ, so they did not train one model. Weight digests: {each}")
    return mine


def bytes_left_to_horovod(model, compression) -> int:
    """Gradient bytes per step that Horovod's own Keras optimizer sends past hvd8bit, uncounted."""
    if isinstance(compression, type(hvd8bit.EightBit)):
        return 0
    sizes = [int(np.prod(weight.shape)) for weight in model.trainable_weights]
    width = 2 if compression is hvd.Compression.fp16 else 4
    return sum(2 * (hvd.size() - 1) * width * n // hvd.size() for n in sizes)


# ---- Results ----

TRAINING_COLUMNS = {
    "compression": "{}",
    "seed": "{}",
    "test_accuracy": "{:.4f}",
    "seconds_per_step": "{:.5f}",
    "gradient_bytes_per_step": "{:,}",
    "weight_digest": "{:.16}",
}


def finish(records: list[dict], columns: dict) -> None:
    """On rank 0: prints the records as a table, and writes them to --json.

    `columns` maps keys of the records to the formats of their values.
    """
    if hvd.rank() != 0:
        return
    rows = [
        list(columns),
        *([form.format(record[key]) for key, form in columns.items()] for record in records),
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    print("\n" + "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows))
    if FLAGS.json:
        text = json.dumps({"results": records, "machine": machine(), "versions": versions()}, indent=2)
        if FLAGS.json == "-":
            print(text)
        else:
            Path(FLAGS.json).write_text(text + "\n", encoding="utf-8")
