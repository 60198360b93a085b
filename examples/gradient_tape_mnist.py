"""Trains a model on handwritten digits in a loop of its own, with any number of Horovod workers.

    python examples/gradient_tape_mnist.py
    horovodrun -np 2 python examples/gradient_tape_mnist.py --compression eightbit
    horovodrun -np 2 python examples/gradient_tape_mnist.py --dataset mnist --data_dir D

Flags and output are those of keras_mnist.py, which shows how to do it with `fit`.
"""

import itertools

import common
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from absl import app
from common import FLAGS, keras

import hvd8bit


def train(compression_name: str, seed: int, images, labels, test) -> dict:
    """One training; returns what there is to tell of it."""
    keras.utils.set_random_seed(seed + 1000 * hvd.rank())
    model = common.build_model(images.shape[1:])
    loss_function = keras.losses.SparseCategoricalCrossentropy()
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    compression = common.compression(compression_name)

    # All workers start from the same weights, and the same state of the optimizer.
    hvd8bit.broadcast_variables([model.weights, list(optimizer.variables)], root_rank=0)

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        tape = hvd8bit.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    run = common.Run(compression_name, seed)
    shuffle = np.random.default_rng([seed, hvd.rank()])
    for _ in range(FLAGS.epochs):
        order = shuffle.permutation(len(images))
        losses = []
        for start in range(0, len(images) - FLAGS.batch_size + 1, FLAGS.batch_size):
            batch = order[start : start + FLAGS.batch_size]
            with run.step():
                losses.append(step(images[batch], labels[batch]))
        run.end_epoch(float(hvd.allreduce(tf.reduce_mean(losses))))
    return run.record(model, common.accuracy(model, *test))


def main(_):
    common.start()
    (images, labels), test = common.load_data()
    settings = itertools.product(FLAGS.compression, FLAGS.seed)
    records = [train(compression, seed, images, labels, test) for compression, seed in settings]
    common.finish(records, common.TRAINING_COLUMNS)


if __name__ == "__main__":
    common.define_training_flags()
    app.run(main)
