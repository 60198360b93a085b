"""How long a training step takes with each compression of gradients: a model of keras.applications, random images.

Every worker calls `run` at the same time with the same arguments. Beside the compressions stands `alone`, the same step
without any exchange: what no compression can beat. Each compression trains a model of its own by Keras' own training
step, and they take turns. The optimizer is hvd8bit's, or with Keras 2 Horovod's own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from typing import Any, Callable

import numpy as np

from hvd8bit.bench import timing

COMPRESSIONS = ("none", "fp16", "eightbit")
OPTIMIZERS = ("hvd8bit", "horovod", "horovod_group")
ALONE = "alone"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, the same on all workers.

    Attributes:
      model: of keras.applications.
      image_size: height and width; None for what the model is made for.
      batch_size: images per step and worker.
      compressions: of `COMPRESSIONS`.
      optimizer: of `OPTIMIZERS`: hvd8bit's, or with Keras 2 Horovod's own, which exchanges gradients one by one, or in
        one group.
      rounds, budget_s: see `timing.interleaved`.
      rate_bit_per_s: of each host's link, for the records; None where it is not known.
    """

    model: str = "MobileNetV2"
    image_size: int | None = None
    batch_size: int = 8
    compressions: tuple[str, ...] = COMPRESSIONS
    optimizer: str = OPTIMIZERS[0]
    rounds: int = 20
    budget_s: float = 60.0
    rate_bit_per_s: float | None = None

    def __post_init__(self):
        unknown = [name for name in self.compressions if name not in COMPRESSIONS]
        if unknown or not self.compressions:
            raise ValueError(f"compressions must be of {', '.join(COMPRESSIONS)}, got {', '.join(unknown) or 'none'}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.optimizer != "hvd8bit" and hasattr(_keras(), "ops"):
            raise ValueError(
                f"optimizer must be hvd8bit with Keras 3, got {self.optimizer}: Horovod's own reduces nothing there; "
                "set TF_USE_LEGACY_KERAS=1"
            )
        application(self.model)


def application(name: str) -> Callable[..., Any]:
    """The function that builds a model of keras.applications.

    Raises:
      ValueError: there is no such model.
    """
    build = getattr(_keras().applications, name, None)
    if not inspect.isfunction(build):
        known = ", ".join(other for other in dir(_keras().applications) if other[0].isupper())
        raise ValueError(f"the model must be one of keras.applications ({known}), got {name!r}")
    return build


def run(settings: Settings, progress: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Trains with each compression, verified first, then timed.

    Args:
      settings: what to measure.
      progress: called with a line of text before each part.

    Returns:
      A record for each compression and `alone`, the same on all workers. `gradient_bytes_per_step` is what hvd8bit
      has sent, or handed to Horovod; None where Horovod's own optimizer sends gradients without it.

    Raises:
      RuntimeError: the workers' weights differ, or are not finite but with fp16: nothing is timed.
    """
    import horovod.tensorflow as hvd

    from hvd8bit import collectives

    names = [*settings.compressions, ALONE]
    steps, counted, finite = {}, {}, {ALONE: True}
    for name in names:
        progress(f"building {settings.model} for {name}")
        model, steps[name] = _training(settings, name)
        for _ in range(2):  # the first one traces
            collectives.reset_sent_bytes()
            steps[name]()
        seen = settings.optimizer == "hvd8bit" or name in ("eightbit", ALONE)
        counted[name] = collectives.sent_bytes() if seen else None
        if name != ALONE:
            finite[name] = _verify(model, name)
        parameters = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    samples = timing.interleaved(steps, settings.rounds, settings.budget_s, progress)
    alone = samples[ALONE].median_s
    images = hvd.size() * settings.batch_size
    workers_per_host = timing.workers_per_host()
    return [
        {
            "model": settings.model,
            "parameters": parameters,
            "workers": hvd.size(),
            "batch_size": settings.batch_size,
            "compression": name,
            "optimizer": settings.optimizer,
            "workers_per_host": workers_per_host,
            "rate_bit_per_s": settings.rate_bit_per_s,
            "step_s": samples[name].median_s,
            "spread": samples[name].spread,
            "rounds": len(samples[name].seconds),
            "images_per_s": images / samples[name].median_s,
            "of_alone": alone / samples[name].median_s,
            "step_compute_s": alone,
            "weights_finite": finite[name],
            "gradient_bytes_per_step": counted[name],
            "interface_bytes_per_step": samples[name].bytes_sent,
        }
        for name in names
    ]


def _training(settings: Settings, name: str) -> tuple[Any, Callable[[], object]]:
    """A model, and a function that trains it one step, always on the same random images."""
    import horovod.tensorflow as hvd

    keras = _keras()
    keras.utils.set_random_seed(0)  # the same weights on all workers
    size = {} if settings.image_size is None else {"input_shape": (settings.image_size, settings.image_size, 3)}
    model = application(settings.model)(weights=None, **size)
    optimizer = keras.optimizers.SGD(1e-3)
    if name != ALONE:
        optimizer = _distributed(settings.optimizer, optimizer, name)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    random = np.random.default_rng(hvd.rank())
    images = random.standard_normal((settings.batch_size, *model.input_shape[1:]), dtype=np.float32)
    labels = random.integers(model.output_shape[-1], size=settings.batch_size)
    if hasattr(keras, "ops"):
        return model, lambda: model.train_on_batch(images, labels)
    import tensorflow as tf

    # Keras 2's train_on_batch makes a dataset for each step, whose end now and then waits until 0.3 s have passed.
    batches = iter(tf.data.Dataset.from_tensors((images, labels)).repeat())
    train = model.make_train_function()
    return model, lambda: float(train(batches)["loss"])


def _distributed(whose: str, optimizer: Any, name: str) -> Any:
    """The optimizer as one of `OPTIMIZERS` wraps it, with a compression of `COMPRESSIONS`."""
    import horovod.tensorflow as hvd

    import hvd8bit.keras

    compression = hvd8bit.EightBit if name == "eightbit" else getattr(hvd.Compression, name)
    settings = {"compression": compression, "name": f"bench_{name}"}
    if whose == "hvd8bit":
        return hvd8bit.keras.DistributedOptimizer(optimizer, **settings)
    import horovod.tensorflow.keras as horovod_keras

    if whose == "horovod_group":
        settings["groups"] = 1
    return horovod_keras.DistributedOptimizer(optimizer, **settings)


def _verify(model: Any, name: str) -> bool:
    """Whether the weights are finite. Raises on all workers if one has other weights.

    fp16 turns gradients above 65,504 to infinity, which random images of a few pixels do reach: that is for the
    user to see, and no reason not to time it. The others must not.
    """
    import horovod.tensorflow as hvd

    weights = [weight.numpy() for weight in model.trainable_weights]
    digest = hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()
    everyone = hvd.allgather_object((digest, all(np.isfinite(w).all() for w in weights)))
    if len({digest for digest, _ in everyone}) > 1:
        raise RuntimeError(f"with {name} the workers' weights differ after 2 steps: not timed")
    finite = everyone[0][1]
    if not finite and name != "fp16":
        raise RuntimeError(f"with {name} the weights are not finite after 2 steps: not timed")
    return finite


def _keras() -> Any:
    import tensorflow as tf

    # The Keras that TensorFlow has: 2 with TF_USE_LEGACY_KERAS=1.
    return tf.keras
