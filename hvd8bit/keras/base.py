"""What the callbacks have in common."""

from __future__ import annotations

import keras

from hvd8bit import collectives


class Callback(keras.callbacks.Callback):
    """A callback for models of either Keras: tf_keras asks its callbacks what they implement."""

    def _implements_train_batch_hooks(self):
        return True

    def _implements_test_batch_hooks(self):
        return False

    def _implements_predict_batch_hooks(self):
        return False

    def set_model(self, model):
        """Called by Keras. Raises ValueError where the optimizer would train each worker by itself."""
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        # What Horovod 0.28.1 makes of a Keras 3 optimizer reduces nothing, and says nothing.
        if is_keras3(model) and hasattr(inner, "_allreduce_grads") and collectives.running_workers() > 1:
            raise ValueError(
                "the model's optimizer is Horovod's own DistributedOptimizer, which reduces nothing with Keras 3: each "
                "worker would train alone; use hvd8bit.keras.DistributedOptimizer"
            )


def is_keras3(model) -> bool:
    return int(keras.__version__.split(".")[0]) >= 3 and isinstance(model, keras.Model)


def steps_per_execution(model) -> int:
    """How many steps `fit` runs between two calls of its callbacks."""
    several = getattr(model, "steps_per_execution", None)
    if several is None:  # Keras 2: a variable, or None
        several = getattr(model, "_steps_per_execution", None)
    return 1 if several is None else int(several)
