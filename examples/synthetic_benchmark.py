"""Images per second of a model of keras.applications, on random images, for each compression of gradients.

    horovodrun -np 2 python examples/synthetic_benchmark.py --model MobileNetV2 --image_size 96
    horovodrun -np 8 -H a:4,b:4 python examples/synthetic_benchmark.py --model ResNet50 --batch_size 64

"alone" is the same step without any exchange: what no compression can beat. The compressions take turns, so
that a disturbance of the machine hits all of them. Before anything is timed, all workers must have the same
weights.
"""

import inspect
import math
import statistics

import common
import horovod.tensorflow as hvd
import tensorflow as tf
from absl import app, flags
from common import FLAGS, keras

import hvd8bit

COLUMNS = {
    "compression": "{}",
    "images_per_second": "{:.1f}",
    "quartiles": "{0[0]:.1f} - {0[1]:.1f}",
    "of_alone": "{:.0%}",
    "seconds_per_step": "{:.4f}",
    "gradient_bytes_per_step": "{:,}",
}


def main(_):
    build = getattr(keras.applications, FLAGS.model, None)
    if not inspect.isfunction(build):
        known = ", ".join(name for name in dir(keras.applications) if name[0].isupper())
        common.usage_error(f"--model must be one of keras.applications, got {FLAGS.model!r}; there are {known}")
    common.start()
    size = {"input_shape": (FLAGS.image_size, FLAGS.image_size, 3)} if FLAGS.image_size else {}
    model = build(weights=None, **size)
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    hvd8bit.broadcast_variables([model.weights, list(optimizer.variables)], root_rank=0)
    common.say(f"{FLAGS.model}: {model.count_params():,} parameters, {hvd.size()} × {FLAGS.batch_size} images a step")

    names = [*dict.fromkeys(FLAGS.compression), "alone"]  # which comes last: it lets the weights drift apart
    steps = {name: make_step(model, optimizer, name) for name in names}
    digests = {}
    for name, step in steps.items():
        common.say(f"{name}: {FLAGS.num_warmup_batches} steps to warm up")
        for _ in range(FLAGS.num_warmup_batches):
            step()
        digests[name] = common.weight_digest(model) if name != "alone" else None

    meters = {name: common.Meter() for name in names}
    for iteration in range(FLAGS.num_iters):
        common.say(f"round {iteration + 1} of {FLAGS.num_iters}")
        for name, step in steps.items():
            with meters[name].step():
                for _ in range(FLAGS.num_batches_per_iter):
                    step()
    alone = statistics.median(meters["alone"].seconds)
    common.finish([record(name, meters[name], alone, digests[name], model) for name in names], COLUMNS)


def make_step(model, optimizer, compression_name: str):
    """A function that trains one step, always on the same random images."""
    images = tf.random.uniform([FLAGS.batch_size, *model.input_shape[1:]], seed=hvd.rank())
    labels = tf.random.uniform([FLAGS.batch_size], maxval=model.output_shape[-1], dtype=tf.int64, seed=hvd.rank())
    loss_function = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        if compression_name != "alone":
            compression = common.compression(compression_name)
            tape = hvd8bit.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    return step


def record(name: str, meter, alone: float, digest, model) -> dict:
    images = hvd.size() * FLAGS.batch_size * FLAGS.num_batches_per_iter
    low, median, high = statistics.quantiles([images / seconds for seconds in meter.seconds], n=4)
    return {
        **common.compression_settings(name),
        "model": FLAGS.model,
        "parameters": sum(math.prod(weight.shape) for weight in model.trainable_weights),
        "workers": hvd.size(),
        "batch_size": FLAGS.batch_size,
        "images_per_second": median,
        "quartiles": [low, high],
        "of_alone": alone / statistics.median(meter.seconds),
        "seconds_per_step": statistics.median(meter.seconds) / FLAGS.num_batches_per_iter,
        "gradient_bytes_per_step": round(statistics.mean(meter.bytes) / FLAGS.num_batches_per_iter),
        "weight_digest": digest,
    }


if __name__ == "__main__":
    flags.DEFINE_string("model", "ResNet50", "Any of keras.applications.")
    flags.DEFINE_integer("image_size", 0, "Height and width; 0: what the model is made for.", lower_bound=0)
    flags.DEFINE_integer("batch_size", 8, "Images per step and worker.", lower_bound=1)
    flags.DEFINE_integer("num_warmup_batches", 3, "Steps before anything is timed.", lower_bound=1)
    flags.DEFINE_integer("num_batches_per_iter", 1, "Steps that are timed together.", lower_bound=1)
    flags.DEFINE_integer("num_iters", 10, "How often that is done.", lower_bound=2)
    common.define_compression_flags(list(common.COMPRESSIONS))
    app.run(main)
