"""Trains one-column AlexNet: convolutions data-parallel, fully connected layers model-parallel (Dettmers 2016, sec.
3.4).

    python examples/alexnet_imagenet.py --dataset stand_in
    horovodrun -np 2 python examples/alexnet_imagenet.py --dataset stand_in --compression eightbit
    horovodrun -np 4 python examples/alexnet_imagenet.py --data_dir D --compression eightbit --epochs 90 --batch_size 32

The net is that of Krizhevsky 2014 (arXiv:1404.5997): five convolutions, and three fully connected layers with dropout.
The data are imagenet2012 as tensorflow-datasets prepares them, with the usual augmentation: a random part of the image,
and its mirror image half of the time. Optimiser and learning rate are our choice: the paper prints none.

stand_in is a small data set of the same structure, made by this program: coloured stripes in images of many sizes,
whose 20 classes differ in colour and width of the stripes. A quarter of the net's width learns it on two workers in
minutes; the loss is half of what guessing gives, log(20), within 100 steps, and the records tell after how many:

    horovodrun -np 2 python examples/alexnet_imagenet.py --dataset stand_in --width 0.25 --image_size 64 \\
        --optimizer adam --learning_rate 0.001 --epochs 4 --compression none --compression eightbit

Every worker has its own share of the images. Rank 0 shows progress and, at the end, a table: accuracy (top 1; the
records have top 5, too), time, bytes sent by all workers, and a digest of the weights; and what crossed each boundary.
"""

from __future__ import annotations

import itertools
import math

import common
import common_parallel
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from absl import app, flags
from common import FLAGS, keras

from hvd8bit.parallel import ColumnParallelDense, HybridModel

flags.DEFINE_integer("steps", 0, "Steps of an epoch; 0: as many as the data have.", lower_bound=0)
flags.DEFINE_integer("sub_batches", 4, "In how many parts the batch passes to the upper layers.", lower_bound=1)
flags.DEFINE_enum("update", "step", ["step", "sub_batch"], "When the upper weights change.")
flags.DEFINE_integer("image_size", 224, "Height and width of what the net sees, in pixels.", lower_bound=63)
flags.DEFINE_float("width", 1.0, "Factor for the numbers of channels and units: for a quick try.", lower_bound=0.01)
flags.DEFINE_enum("optimizer", "sgd", ["sgd", "adam"], "sgd: with momentum 0.9.")
flags.DEFINE_float("learning_rate", 0.01, "Of the optimizer.", lower_bound=0.0)

CLASSES = {"imagenet2012": 1000, "stand_in": 20}
STAND_IN_IMAGES = 2048


# ---- Data ----


def datasets(seed: int) -> tuple:
    """tf.data of (images, labels) batches: this worker's share for training, and of the test; and the steps of an
    epoch.

    All workers take as many steps.
    """
    train, test, images = {"imagenet2012": imagenet, "stand_in": stand_in}[FLAGS.dataset](seed)
    share = images // hvd.size()
    if FLAGS.batch_size > share:
        raise SystemExit(f"--batch_size must be at most {share}, a worker's share of images, got {FLAGS.batch_size}")
    steps = min(share // FLAGS.batch_size, FLAGS.steps or share)
    train = train.repeat()
    train = train.map(lambda image, label: (augmented(image), label), num_parallel_calls=tf.data.AUTOTUNE)
    test = test.map(lambda image, label: (middle(image), label), num_parallel_calls=tf.data.AUTOTUNE)
    return train.batch(FLAGS.batch_size).prefetch(2), test.batch(FLAGS.batch_size).prefetch(2), steps


def imagenet(seed: int) -> tuple:
    """imagenet2012: this worker's images for training and for the test, and how many all have for training."""
    import tensorflow_datasets as tfds

    builder = common.prepared_builder("imagenet2012")
    splits = builder.info.splits
    test_name = "validation" if "validation" in splits else "test"
    # Equal shares, so that all workers take as many steps.
    train, test = (
        builder.as_dataset(
            split=tfds.split_for_jax_process(
                name, process_index=hvd.rank(), process_count=hvd.size(), drop_remainder=True
            ),
            as_supervised=True,
            shuffle_files=name == "train",
        )
        for name in ("train", test_name)
    )
    return train.shuffle(4096, seed=seed + hvd.rank()), test, splits["train"].num_examples


def stand_in(seed: int) -> tuple:
    """Like `imagenet`: uint8 [height, width, 3] of many sizes, and labels."""
    classes = CLASSES["stand_in"]

    def image_of(number):
        rng = np.random.default_rng(int(number))
        label = int(number) % classes
        height, width = rng.integers(96, 160, 2)
        # Five hues, and stripes of four widths. Crops change the widths, by less than a factor of two mostly.
        hue, stripes = label % 5, label // 5
        period = 4.0 * 2.2**stripes
        across = np.arange(width)[None, :] + rng.uniform(-0.3, 0.3) * np.arange(height)[:, None]
        light = 0.5 + 0.5 * np.sin(2 * np.pi * across / period + rng.uniform(0, 6))
        colour = 0.5 + 0.5 * np.cos(2 * np.pi * (hue / 5 - np.arange(3) / 3))
        image = light[..., None] * colour * rng.uniform(0.6, 1) + rng.normal(0, 0.1, (height, width, 3))
        return (255 * np.clip(image, 0, 1)).astype(np.uint8), label

    def make(number):
        image, label = tf.numpy_function(image_of, [number], (tf.uint8, tf.int64))
        return tf.ensure_shape(image, [None, None, 3]), tf.ensure_shape(label, [])

    def of_this_worker(first: int, count: int):
        share = count // hvd.size()
        return tf.data.Dataset.range(first + hvd.rank() * share, first + (hvd.rank() + 1) * share)

    train = of_this_worker(0, STAND_IN_IMAGES).shuffle(STAND_IN_IMAGES, seed=seed + hvd.rank())
    test = of_this_worker(STAND_IN_IMAGES, STAND_IN_IMAGES // 8)
    return train.map(make, num_parallel_calls=2), test.map(make, num_parallel_calls=2), STAND_IN_IMAGES


def augmented(image):
    """A random part of the image, 8 to 100 % of it, at the net's size; mirrored half of the time."""
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros([1, 0, 4]),
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        use_image_if_no_bounding_boxes=True,
    )
    part = tf.slice(image, begin, size)
    return normalised(tf.image.random_flip_left_right(resized(part, FLAGS.image_size, FLAGS.image_size)))


def middle(image):
    """The middle of the image: its shorter side becomes 8/7 of the net's size, and the rest is cut away."""
    shape = tf.cast(tf.shape(image)[:2], tf.float32)
    scale = 8 / 7 * FLAGS.image_size / tf.reduce_min(shape)
    size = tf.cast(tf.math.ceil(shape * scale), tf.int32)
    image = tf.image.resize_with_crop_or_pad(resized(image, size[0], size[1]), FLAGS.image_size, FLAGS.image_size)
    return normalised(image)


def resized(image, height, width):
    return tf.image.resize(tf.cast(image, tf.float32), [height, width])


def normalised(image):
    """In about [-2, 2]: the means and deviations of ImageNet's colours."""
    image = (image / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    return tf.ensure_shape(image, [FLAGS.image_size, FLAGS.image_size, 3])


# ---- Net ----


def make_model(compression) -> HybridModel:
    """60 million weights and 1,000 classes, for --width 1 and ImageNet."""
    layers = keras.layers

    def channels(number: int) -> int:
        return max(8, round(number * FLAGS.width))

    def conv(number: int, kernel: int, **arguments):
        return layers.Conv2D(
            channels(number), kernel, activation="relu", kernel_initializer="he_normal", padding="same", **arguments
        )

    def fully_connected(units: int, name: str, **arguments):
        arguments = {"activation": "relu", **arguments}
        return ColumnParallelDense(units, compression=compression, name=name, **arguments)

    lower = [
        conv(64, 11, strides=4),
        layers.MaxPooling2D(3, strides=2),
        conv(192, 5),
        layers.MaxPooling2D(3, strides=2),
        conv(384, 3),
        conv(256, 3),
        conv(256, 3),
        layers.MaxPooling2D(3, strides=2),
        layers.Flatten(),
    ]
    upper = [
        layers.Dropout(0.5),
        fully_connected(channels(4096), "fc6"),
        layers.Dropout(0.5),
        fully_connected(channels(4096), "fc7"),
        fully_connected(CLASSES[FLAGS.dataset], "fc8", activation="softmax"),
    ]
    return HybridModel(
        lower, upper, FLAGS.sub_batches, FLAGS.update, compression=compression, gradient_compression=compression
    )


def make_optimizer():
    if FLAGS.optimizer == "adam":
        return keras.optimizers.Adam(FLAGS.learning_rate)
    return keras.optimizers.SGD(FLAGS.learning_rate, momentum=0.9)


class Progress(common_parallel.Progress):
    """Keeps each batch's own loss, too; an epoch's is their mean."""

    def __init__(self, run):
        super().__init__(run)
        self.losses: list[float] = []
        self.steps_of_earlier_epochs = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self.losses.append(logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        mean = float(np.mean(self.losses[self.steps_of_earlier_epochs :]))
        self.steps_of_earlier_epochs = len(self.losses)
        super().on_epoch_end(epoch, {**logs, "loss": mean})

    def steps_until(self, loss: float) -> int | None:
        """How many steps it took until a batch's loss was below; None if none was."""
        return next((step for step, seen in enumerate(self.losses, 1) if seen < loss), None)


def train(compression_name: str, seed: int) -> dict:
    """One training; returns what there is to tell of it."""
    keras.utils.set_random_seed(seed)
    images, test, steps = datasets(seed)
    model = make_model(common_parallel.compression(compression_name))
    model.compile(
        make_optimizer(),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(5, name="top_5_accuracy")],
    )
    first = next(iter(images))
    boundaries = common_parallel.boundaries_of_a_step(lambda: model.train_on_batch(*first))
    model.make_train_function(force=True)  # that step's graph measures at each step; the next one does not

    run = common.Run(compression_name, seed)
    progress = Progress(run)
    model.fit(
        images,
        steps_per_epoch=steps,
        epochs=FLAGS.epochs,
        shuffle=False,  # the data come shuffled
        verbose=0,
        callbacks=[progress],
    )
    results = model.evaluate(test, verbose=0, return_dict=True)
    return common_parallel.record(
        run,
        results["accuracy"],
        boundaries,
        common_parallel.hybrid_digest(model),
        test_top_5_accuracy=results["top_5_accuracy"],
        update=FLAGS.update,
        sub_batches=FLAGS.sub_batches,
        steps_until_loss_was_half_of_guessing=progress.steps_until(math.log(CLASSES[FLAGS.dataset]) / 2),
    )


def main(_):
    common.start()
    settings = itertools.product(FLAGS.compression, FLAGS.seed)
    records = [train(compression, seed) for compression, seed in settings]
    common.finish(records, common_parallel.COLUMNS)
    common_parallel.show_boundaries(records)


if __name__ == "__main__":
    common.define_training_flags(("imagenet2012", "stand_in"), common_parallel.COMPRESSIONS)
    flags.FLAGS.set_default("epochs", 1)
    app.run(main)
