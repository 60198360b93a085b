"""What `SplitModel` and `HybridModel` share: how they fit into Keras' `compile`, `fit` and its steps."""

from __future__ import annotations

import contextlib
import json

import keras
import tensorflow as tf

from hvd8bit.collectives import HorovodComm
from hvd8bit.keras.keras3_class import is_distributed
from hvd8bit.variables import is_sharded

_MEANS = ("sum_over_batch_size", "mean")


def check_keras() -> None:
    """Raises RuntimeError unless Keras is Keras 3 on TensorFlow."""
    if int(keras.__version__.split(".")[0]) < 3 or keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"SplitModel and HybridModel need Keras 3 on TensorFlow, got Keras {keras.__version__}; install "
            "tensorflow>=2.16 and leave TF_USE_LEGACY_KERAS and KERAS_BACKEND alone"
        )


def checked_compile_arguments(model: str, arguments: dict) -> dict:
    """The arguments for Keras' `compile`. Raises ValueError where a step of our own cannot follow them."""
    if arguments.get("steps_per_execution", 1) != 1:
        raise ValueError(
            f"steps_per_execution must be 1 for a {model}, got {arguments['steps_per_execution']}: a step's exchanges "
            "have "
            "names, and those of two steps would meet"
        )
    if arguments.get("jit_compile", "auto") not in ("auto", False, None):
        raise ValueError(f"jit_compile must be False for a {model}: XLA cannot compile the collectives")
    return {**arguments, "jit_compile": False}


def check_losses(loss) -> bool:
    """Whether the losses are means over the batch (or else sums). Raises ValueError for others."""
    reductions = {getattr(one, "reduction", _MEANS[0]) for one in keras.tree.flatten(loss) if one is not None} or {
        _MEANS[0]
    }
    if reductions <= set(_MEANS):
        return True
    if reductions == {"sum"}:
        return False
    raise ValueError(
        "loss must be a mean over the batch (reduction='sum_over_batch_size') or, all of them, a sum "
        "(reduction='sum'), got "
        f"{', '.join(sorted(map(str, reductions)))}: of others the parts of a batch do not add up to the whole"
    )


def check_optimizer(model: str, optimizer, *, split: bool, cuts_weights: bool) -> None:
    """Raises ValueError for an optimizer that would need to know of the other workers."""
    if is_distributed(optimizer):
        raise ValueError(
            f"optimizer must be the plain one for a {model}, got a DistributedOptimizer: it would average gradients of "
            f"different layers; the {model} reduces what has to be reduced"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"loss scaling is not supported in a {model}: workers would have to agree on every overflow; use "
            "mixed_bfloat16 "
            "instead of mixed_float16, or auto_scale_loss=False"
        )
    # A HybridModel's worker has parts of weights, a SplitModel's whole ones.
    remedy = "clipvalue (each number by itself)" if cuts_weights else "clipnorm (each weight by itself)"
    if split and cuts_weights and getattr(optimizer, "clipnorm", None):
        raise ValueError(
            f"clipnorm must be None in a {model}, got {optimizer.clipnorm}: of a split weight a worker knows the norm "
            f"of its own part's gradient alone; use {remedy}"
        )
    if split and getattr(optimizer, "global_clipnorm", None):
        raise ValueError(
            f"global_clipnorm must be None in a {model}, got {optimizer.global_clipnorm}: a worker knows the norm of "
            f"its own weights' gradients alone; use {remedy}"
        )


def as_layer(argument: str, given):
    """A Keras layer or model as it is, a list of layers as a Sequential. Raises TypeError for anything else."""
    if isinstance(given, (list, tuple)) and given and all(isinstance(layer, keras.layers.Layer) for layer in given):
        return keras.Sequential(given, name=argument)
    if not isinstance(given, keras.layers.Layer):
        raise TypeError(
            f"{argument} must be a Keras model or layer, or a list of layers, got {given!r} of type "
            f"{type(given).__name__}"
        )
    return given


_WITHOUT_WEIGHTS = (
    "Dropout",
    "Flatten",
    "Reshape",
    "Permute",
    "Activation",
    "ReLU",
    "MaxPooling2D",
    "AveragePooling2D",
)


def entrance(upper):
    """The layer that all of a model's input passes, if it is split by output; else None.

    Each worker has its share of the error signal of its input, then, and they add up; also behind layers without
    weights.
    """
    for layer in upper.layers if isinstance(upper, keras.Sequential) else [upper]:
        if hasattr(layer, "input_gradient_is_summed"):
            return layer if hasattr(layer, "gather_output") and layer.comm == HorovodComm() else None
        if type(layer).__name__ not in _WITHOUT_WEIGHTS or layer.activity_regularizer is not None:
            return None
    return None


def split_layers(layer) -> list:
    """The layers inside a layer or model whose weights are split over workers."""
    return [inner for inner in layer._flatten_layers() if is_split(inner)]


def whole_layers(layer) -> list:
    """The others, by themselves: without those inside them."""
    return [inner for inner in layer._flatten_layers() if not is_split(inner)]


def split_weights(layer) -> list:
    """The weights of which each worker has its part alone."""
    return [weight for weight in layer.weights if is_sharded(weight)]


def whole_weights(layer) -> list:
    """The weights that each worker has whole."""
    return [weight for weight in layer.weights if not is_sharded(weight)]


def is_split(layer) -> bool:
    """Whether a layer's own weights, not those of layers inside it, are split over workers."""
    return any(is_sharded(weight) for weight in [*layer._trainable_variables, *layer._non_trainable_variables])


def symbols(x):
    """Symbols like the tensors of a nest, for as many rows as there may be."""
    return keras.tree.map_structure(
        lambda tensor: keras.KerasTensor((None, *tensor.shape[1:]), dtype=tensor.dtype.name), x
    )


def row_shape(what: str, tensor) -> list[int]:
    """The static shape of a tensor's rows. Raises ValueError where it is not known."""
    shape = tf.TensorShape(tensor.shape)
    if shape.rank is None or shape.rank == 0 or None in shape[1:]:
        raise ValueError(f"{what} must be [rows, ...] of known shape but for the rows, got {shape}")
    return shape[1:].as_list()


def slice_rows(nest, start, stop):
    """Rows [start, stop) of all tensors of a nest; None stays None."""
    return keras.tree.map_structure(lambda tensor: None if tensor is None else tensor[start:stop], nest)


def penalty(layer):
    """The sum of a layer's regularisation and added losses of its last call, or None."""
    return _added(layer.losses)


def penalty_of(layers):
    """The sum of what each of these layers by itself adds to the loss, or None."""
    return _added([loss for layer in layers for loss in [*layer._losses, *_of_weights(layer)]])


def _of_weights(layer) -> list:
    return [
        weight.regularizer(weight)
        for weight in [*layer._trainable_variables]
        if getattr(weight, "regularizer", None) is not None
    ]


def _added(losses: list):
    sums = [tf.reduce_sum(loss) for loss in losses]
    return tf.add_n([tf.cast(loss, sums[0].dtype) for loss in sums]) if sums else None


def metric_names(model, y, y_pred, sample_weight) -> list[str]:
    """The names of a compiled model's metrics but the loss; builds them."""
    if model._compile_metrics is None:
        return []
    if not model._compile_metrics.built:
        keras.src.backend.compute_output_spec(
            model._compile_metrics, symbols(y), y_pred, None if sample_weight is None else symbols(sample_weight)
        )
    return list(model._compile_metrics.result())


def updated_metrics(model, y, y_pred, sample_weight) -> dict:
    """The metrics, updated by a batch: name -> value."""
    model._compile_metrics.update_state(y, y_pred, sample_weight)
    return model._compile_metrics.result()


def is_failure_of_exchange(error: Exception) -> bool:
    """Whether an error comes from Horovod: another worker has ended, or a connection broke."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, (tf.errors.OpError, RuntimeError)) and any(
        sign in text for sign in ("Horovod", "onnection closed", "Gloo", "gloo", "hvd8bit_split", "hvd8bit_hybrid")
    )


class JointModel(keras.Model):
    """A model that several workers train together: all call the same methods for as many steps, and rank 0 prints."""

    def fit(self, *args, callbacks=None, verbose="auto", **kwargs):
        """As `keras.Model.fit`; rank 0 prints."""
        return self._together(super().fit, args, kwargs, callbacks, verbose)

    def evaluate(self, *args, callbacks=None, verbose="auto", **kwargs):
        """As `keras.Model.evaluate`; rank 0 prints."""
        return self._together(super().evaluate, args, kwargs, callbacks, verbose)

    def predict(self, *args, callbacks=None, verbose="auto", **kwargs):
        """As `keras.Model.predict`; rank 0 prints."""
        return self._together(super().predict, args, kwargs, callbacks, verbose)

    def _workers(self) -> tuple[HorovodComm, str]:
        """All workers, and what to call this one."""
        raise NotImplementedError

    def _naming_failures(self):
        """Around all of it: may make an exchange that fails tell where."""
        return contextlib.nullcontext()

    def _together(self, method, args, kwargs, callbacks, verbose):
        comm, place = self._workers()
        if not isinstance(callbacks, keras.callbacks.CallbackList):  # else called by fit, which has checked
            given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] * bool(callbacks)
            callbacks = [CheckSteps(comm, place), *given]
        with self._naming_failures():
            return method(*args, callbacks=callbacks, verbose=verbose if comm.rank() == 0 else 0, **kwargs)


class CheckSteps(keras.callbacks.Callback):
    """Compares what the workers do next, and for how many steps: before the first one, and wherever `fit` goes on to
    something else, to another epoch or to validation."""

    def __init__(self, comm, place: str):
        super().__init__()
        self._comm = comm
        self._place = place
        self._training = False

    def on_train_begin(self, logs=None):
        self._training = True
        self._compare(f"fit: {self.params.get('epochs')} epochs of {self.params.get('steps')} steps")

    def on_epoch_begin(self, epoch, logs=None):
        self._compare(f"fit: epoch {epoch + 1}")

    def on_train_end(self, logs=None):
        self._training = False
        self._compare("the end of fit")

    def on_test_begin(self, logs=None):
        if self._training:
            # Keras calls with the params of fit.
            batches = getattr(getattr(self.model, "_eval_epoch_iterator", None), "num_batches", None)
            self._compare(f"fit: validation of {batches} steps")
        else:
            self._compare(f"evaluate: {self.params.get('steps')} steps")

    def on_predict_begin(self, logs=None):
        self._compare(f"predict: {self.params.get('steps')} steps")

    def _compare(self, what: str) -> None:
        texts = [json.loads(text) for text in self._comm.gather_text(json.dumps([what, self._place]), "hvd8bit_steps")]
        for other, place in texts:
            if other != texts[0][0]:
                raise ValueError(
                    f"workers must call the same method for as many steps, got {texts[0][0]} on {texts[0][1]} and "
                    f"{other} on {place}; give all of them as many batches, and the same arguments for validation"
                )
