"""Trains an image model whose layers are spread over workers, stage after stage.

    python examples/split_model.py
    horovodrun -np 2 python examples/split_model.py --compression eightbit
    horovodrun -np 4 python examples/split_model.py --compression none --compression eightbit --json out.json
    horovodrun -np 4 python examples/split_model.py --replicas 2 --compression eightbit
    horovodrun -np 2 python examples/split_model.py --dataset cifar10 --data_dir D --compression eightbit

Each worker has one of as many stages as there are workers (1 to 4; with --replicas 2, half as many, twice). Activations
and error signals pass between neighbours, in 8 bits or as they are. Rank 0 shows progress and, at the end, a table:
accuracy, time, bytes sent by all workers, and a digest of the weights; and what crossed each boundary. --json writes
the same and more.
"""

import itertools

import common
import common_parallel
import horovod.tensorflow as hvd
import numpy as np
from absl import app, flags
from common import FLAGS, keras

from hvd8bit.parallel import SplitModel

flags.DEFINE_integer("micro_batches", 4, "Into how many parts each batch is cut.", lower_bound=1)
flags.DEFINE_integer("replicas", 1, "How many pipelines train as one, each on its part of the data.", lower_bound=1)
flags.DEFINE_integer("ahead", 0, "Lets exchanges hide beside computation, for more memory.", lower_bound=0)


def make_layers() -> list:
    """Eight layers: two, or more, for each of four stages."""
    layers = keras.layers
    return [
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(256, activation="relu"),
        layers.Dense(128, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ]


def in_stages(layers: list, stages: int) -> list[list]:
    """Consecutive layers together, nearly as many in each stage."""
    ends = [len(layers) * stage // stages for stage in range(stages + 1)]
    return [layers[start:end] for start, end in zip(ends, ends[1:])]


def train(compression_name: str, seed: int, data, test) -> dict:
    """One training; returns what there is to tell of it."""
    keras.utils.set_random_seed(seed + 1000 * hvd.rank())
    stages = in_stages(make_layers(), hvd.size() // FLAGS.replicas)
    compression = common_parallel.compression(compression_name)
    model = SplitModel(
        stages,
        FLAGS.micro_batches,
        FLAGS.replicas,
        compression=compression,
        gradient_compression=compression,
        ahead=FLAGS.ahead,
    )
    model.compile(keras.optimizers.Adam(), loss="sparse_categorical_crossentropy", metrics=["accuracy"])

    images, labels = (array[model.replica_number :: FLAGS.replicas] for array in data)
    images, labels = (array[: len(data[0]) // FLAGS.replicas] for array in (images, labels))
    run, boundaries = common_parallel.fit(model, compression_name, seed, images, labels)
    outputs = model.predict(test[0], batch_size=1000, verbose=0)
    return common_parallel.record(
        run,
        float(np.mean(np.argmax(outputs, axis=1) == test[1])),
        boundaries,
        common_parallel.combined_digest(model.stage_number, model.trainable_weights),
        stages=len(stages),
        replicas=FLAGS.replicas,
        micro_batches=FLAGS.micro_batches,
        parameters=sum(hvd.allgather_object(model.count_params())) // FLAGS.replicas,
    )


def main(_):
    common.start(process_sets=FLAGS.replicas > 1)
    layers, stages = len(make_layers()), hvd.size() // FLAGS.replicas
    if hvd.size() % FLAGS.replicas:
        common.usage_error(
            f"--replicas must divide the number of workers, {hvd.size()}, got {FLAGS.replicas}: each replica takes as "
            f"many workers; horovodrun -np {2 * FLAGS.replicas} gives each two stages"
        )
    if stages > layers:
        common.usage_error(
            f"--replicas must leave at most {layers} stages, one for each layer, got {FLAGS.replicas} on {hvd.size()} "
            "workers; give more replicas or fewer workers"
        )
    data, test = common.whole_data()
    settings = itertools.product(FLAGS.compression, FLAGS.seed)
    records = [train(compression, seed, data, test) for compression, seed in settings]
    common.finish(records, common_parallel.COLUMNS)
    common_parallel.show_boundaries(records)


if __name__ == "__main__":
    common.define_training_flags(("digits", "mnist", "cifar10"), common_parallel.COMPRESSIONS)
    app.run(main)
