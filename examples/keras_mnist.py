"""Trains a Keras model on handwritten digits, with any number of Horovod workers.

    python examples/keras_mnist.py
    horovodrun -np 2 python examples/keras_mnist.py --compression eightbit
    horovodrun -np 2 python examples/keras_mnist.py --compression none --compression eightbit --json out.json
    horovodrun -np 2 python examples/keras_mnist.py --dataset mnist --data_dir D --compression eightbit

Rank 0 shows progress and, at the end, a table: accuracy, time, bytes sent, and a digest of the weights, which
must be the same on all workers. --json writes the same and more. TF_USE_LEGACY_KERAS=1 does it with Keras 2.
"""

import itertools

import common
import horovod.tensorflow as hvd
from absl import app
from common import FLAGS, KERAS_3, keras

from hvd8bit.keras import callbacks

if KERAS_3:
    from hvd8bit.keras import DistributedOptimizer  # Horovod's own would reduce nothing
else:
    from horovod.tensorflow.keras import DistributedOptimizer


def train(compression_name: str, seed: int, images, labels, test) -> dict:
    """One training; returns what there is to tell of it."""
    # Every worker shuffles in an order of its own. Weights differ, too, until rank 0 broadcasts its own.
    keras.utils.set_random_seed(seed + 1000 * hvd.rank())
    model = common.build_model(images.shape[1:])

    compression = common.compression(compression_name)
    if KERAS_3:
        optimizer = DistributedOptimizer(keras.optimizers.Adam(), compression=compression)
    else:
        # groups=1 lets all gradients travel together. hvd8bit's optimizer does that by itself.
        optimizer = DistributedOptimizer(keras.optimizers.Adam(), compression=compression, groups=1)
    model.compile(optimizer, loss="sparse_categorical_crossentropy")

    run = common.Run(compression_name, seed)
    model.fit(
        images,
        labels,
        batch_size=FLAGS.batch_size,
        epochs=FLAGS.epochs,
        verbose=0,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.MetricAverageCallback(),
            Progress(run),
        ],
    )
    test_accuracy = common.accuracy(model, *test)
    return run.record(model, test_accuracy, 0 if KERAS_3 else common.bytes_left_to_horovod(model, compression))


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


def main(_):
    common.start()
    (images, labels), test = common.load_data()
    settings = itertools.product(FLAGS.compression, FLAGS.seed)
    records = [train(compression, seed, images, labels, test) for compression, seed in settings]
    common.finish(records, common.TRAINING_COLUMNS)


if __name__ == "__main__":
    common.define_training_flags()
    app.run(main)
