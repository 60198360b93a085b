"""Trains the CIFAR-10 network of Dettmers 2016 (sec. 3.4): convolutions data-parallel, local layers model-parallel.

    python examples/keras_cifar10.py --data_dir D
    horovodrun -np 2 python examples/keras_cifar10.py --data_dir D --compression none --compression eightbit
    horovodrun -np 2 python examples/keras_cifar10.py --dataset digits --epochs 3 --compression eightbit

The paper gives the layers: convolutions of 64 filters of 5×5 and of 3×3, each with 3×3 max-pooling and contrast
normalisation, two locally connected layers, softmax. Optimiser (Adam), batch and local-layer sizes (32 filters of 3×3)
are our choice. digits, which come with scikit-learn, are enlarged to 32×32 pixels: for a quick try.

Every worker has its own share of the images. Rank 0 shows progress and, at the end, a table: accuracy, time, bytes sent
by all workers, and a digest of the weights; and what crossed each boundary. --json writes the same and more.
"""

import itertools
import sys

import common
import common_parallel
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from absl import app, flags
from common import FLAGS, keras

from hvd8bit.parallel import ColumnParallelDense, HybridModel, LocallyConnected2D

flags.DEFINE_integer("sub_batches", 4, "In how many parts the batch passes to the upper layers.", lower_bound=1)
flags.DEFINE_enum("update", "step", ["step", "sub_batch"], "When the upper weights change.")


class ContrastNormalization(keras.layers.Layer):
    """Divides by the contrast of neighbouring channels at the same place (Krizhevsky 2012, sec. 3.3)."""

    def call(self, x):
        return tf.nn.local_response_normalization(x, depth_radius=4, bias=1.0, alpha=0.001 / 9, beta=0.75)

    def compute_output_shape(self, input_shape):
        return input_shape


def make_model(compression) -> HybridModel:
    layers = keras.layers

    def local(name: str):
        start = keras.initializers.RandomNormal(stddev=0.05)
        return LocallyConnected2D(
            32, 3, activation="relu", kernel_initializer=start, compression=compression, name=name
        )

    lower = [
        layers.Conv2D(64, 5, padding="same", activation="relu"),
        layers.MaxPooling2D(3, strides=2),
        ContrastNormalization(),
        layers.Conv2D(64, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(3, strides=2),
        ContrastNormalization(),
    ]
    upper = [
        local("local3"),
        local("local4"),
        layers.Flatten(),
        ColumnParallelDense(10, activation="softmax", compression=compression, name="softmax"),
    ]
    return HybridModel(
        lower, upper, FLAGS.sub_batches, FLAGS.update, compression=compression, gradient_compression=compression
    )


def load_data() -> tuple:
    """This worker's (images, labels) for training, and those of the test, the same number on each worker."""
    train, test = common.whole_data()
    if FLAGS.dataset == "digits":
        train, test = ((np.repeat(images, 4, 1).repeat(4, 2).repeat(3, 3), labels) for images, labels in (train, test))
    share = len(train[0]) // hvd.size()
    if FLAGS.batch_size > share:
        sys.exit(f"--batch_size must be at most {share}, a worker's share of the images, got {FLAGS.batch_size}")
    return tuple(
        tuple(array[hvd.rank() :: hvd.size()][: len(array) // hvd.size()] for array in part) for part in (train, test)
    )


def train(compression_name: str, seed: int, images, labels, test) -> dict:
    """One training; returns what there is to tell of it."""
    keras.utils.set_random_seed(seed)
    model = make_model(common_parallel.compression(compression_name))
    model.compile(keras.optimizers.Adam(), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    run, boundaries = common_parallel.fit(model, compression_name, seed, images, labels)
    results = model.evaluate(*test, batch_size=250, verbose=0, return_dict=True)
    return common_parallel.record(
        run,
        results["accuracy"],
        boundaries,
        common_parallel.hybrid_digest(model),
        update=FLAGS.update,
        sub_batches=FLAGS.sub_batches,
    )


def main(_):
    common.start()
    (images, labels), test = load_data()
    settings = itertools.product(FLAGS.compression, FLAGS.seed)
    records = [train(compression, seed, images, labels, test) for compression, seed in settings]
    common.finish(records, common_parallel.COLUMNS)
    common_parallel.show_boundaries(records)


if __name__ == "__main__":
    common.define_training_flags(("cifar10", "digits"), common_parallel.COMPRESSIONS)
    app.run(main)
