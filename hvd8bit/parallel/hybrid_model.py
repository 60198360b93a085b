"""`HybridModel`: data parallelism below, model parallelism above, and the switch between them in sub-batches."""

from __future__ import annotations

import collections
from typing import Any

import keras
import tensorflow as tf

from hvd8bit import api
from hvd8bit.collectives import HorovodComm
from hvd8bit.compression import EightBit, check_compression
from hvd8bit.parallel import keras_step, pipeline
from hvd8bit.parallel.boundary import check_activation_compression
from hvd8bit.parallel.primitives import all_gather, scatter
from hvd8bit.parallel.union import Gradients, Penalties, Union, scaled
from hvd8bit.reduction import reduce_gradients
from hvd8bit.variables import name_of, unique

_do_not_convert = tf.autograph.experimental.do_not_convert
_made: collections.Counter[str] = collections.Counter()
_UPDATES = ("step", "sub_batch")


class HybridModel(keras_step.JointModel):
    """The lower layers data-parallel, the upper ones model-parallel: for nets whose upper layers hold the weights.

        lower = keras.Sequential([... convolutions ..., keras.layers.Flatten()])
        upper = keras.Sequential([
            ColumnParallelDense(4096, activation="relu", name="fc6"),
            ColumnParallelDense(1000, activation="softmax", name="fc7"),
        ])
        model = hvd8bit.parallel.HybridModel(lower, upper, sub_batches=4)
        model.compile("sgd", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(my_images, my_labels, batch_size=32)          # on all workers, each with data of its own

    Every worker computes the lower layers for its own mini-batch; their gradients are averaged. In between the
    activations
    of all workers are gathered, and every worker computes its part of the upper layers for all of them: the union batch
    (Dettmers 2016, sec. 2.4). That happens in sub-batches of 1/sub_batches of each worker's mini-batch: all workers
    send alike all the time, and while one sub-batch is computed the next one is on the wire.

        worker 0   lower(x₀) ──┐                             ┌── upper, part 0 ──┐
                               ├── sub-batch 0, 1, 2, ... ──┤                    ├── loss of the union batch
        worker 1   lower(x₁) ──┘                             └── upper, part 1 ──┘

    Loss and gradients are those of one process on the union batch, the mean over all of its rows; workers' mini-batches
    may differ in size. All workers see the same loss and metrics, those of the union; rank 0 prints them.

    All workers must call the same methods, with as many batches. `predict` takes and gives each worker's own rows.

    Args:
      lower: a Keras model or layer, or a list of layers: the same on all workers. Gives one float tensor.
      upper: the same for the layers above, made of `ColumnParallelDense` and its like. Other layers in it are computed
        by every worker, for the whole union batch.
      sub_batches: in how many parts the union batch passes the switch, K.
      update: "step": all weights change once per batch. "sub_batch": the upper ones after each sub-batch, as if it were
        a batch of its own; so the compiled optimizer is for the lower layers, and a copy of it for the upper ones.
      compression: `EightBit`, a copy of it, or None (exact): for the activations at the switch, and for error signals
        on their way back. Layers of `upper` have their own.
      gradient_compression: `EightBit`, or one of hvd.Compression, for the gradients of the lower layers; None: exact.
      name: the model's.

    Raises:
      ValueError or TypeError: an argument is not one of the above; the message names it.
    """

    def __init__(
        self,
        lower,
        upper,
        sub_batches: int = 4,
        update: str = "step",
        compression=EightBit,
        gradient_compression=EightBit,
        name=None,
    ):
        super().__init__(name=name)
        keras_step.check_keras()
        if isinstance(sub_batches, bool) or not isinstance(sub_batches, int) or sub_batches < 1:
            raise ValueError(f"sub_batches must be an integer of at least 1, got {sub_batches!r}")
        if update not in _UPDATES:
            raise ValueError(f"update must be one of {', '.join(_UPDATES)}, got {update!r}")
        if gradient_compression is not None:
            check_compression(gradient_compression)
        _made["hybrid_model"] += 1
        self.lower = keras_step.as_layer("lower", lower)
        self.upper = keras_step.as_layer("upper", upper)
        self._hvd8bit = _Wiring(
            sub_batches,
            update,
            check_activation_compression(compression),
            gradient_compression,
            f"hvd8bit_hybrid_{_made['hybrid_model']}",
        )
        self.upper_optimizer: Any = None

    def build(self, input_shape, dtype=None):
        """Builds both parts, and gives all workers the weights of rank 0's lower part. All workers must call.

        Args:
          input_shape: of the lower part's input, (None, ...).
          dtype: of it; default: Keras' float.
        """
        self._prepare(keras.KerasTensor(tuple(input_shape), dtype=dtype or keras.config.floatx()))

    def _prepare(self, inputs) -> None:
        wiring = self._hvd8bit
        if wiring.ready:
            return
        with tf.init_scope():
            passed = self.lower(inputs)
            if not isinstance(passed, keras.KerasTensor) or not keras.backend.is_float_dtype(passed.dtype):
                raise ValueError(
                    f"lower must give one float tensor for the upper part, got {passed!r}; let it end where one passes"
                )
            keras_step.row_shape("the output of lower", passed)
            self.upper(passed)
            if wiring.comm.size() > 1:
                shared = [*self.lower.weights, *keras_step.whole_weights(self.upper)]
                # The upper part is computed by all: random numbers in it must be the same on all, too.
                seeds = [v for v in self.upper.variables if "seed_generator" in (getattr(v, "path", "") or "")]
                known = {id(variable) for variable in shared}
                api.broadcast_variables([*shared, *(seed for seed in seeds if id(seed) not in known)])
            wiring.ready = True
            self.built = True

    def call(self, inputs, training=None):
        """This worker's rows of the outputs. All workers must call, each with rows of its own.

        Gradients are those of the sum of all workers' losses, and all workers must ask for them. Those of the upper
        weights are complete. Those of the lower weights are this worker's share: add them up, with op=hvd.Sum.
        """
        self._prepare(keras_step.symbols(inputs))
        wiring = self._hvd8bit
        exactly = {"compression": None, "process_set": wiring.comm.process_set}
        rows = tf.shape(keras.tree.flatten(inputs)[0])[:1]
        counts = all_gather(rows, name=f"{wiring.scope}/rows", sizes=[1] * wiring.comm.size(), **exactly)
        sizes = tf.unstack(counts, num=wiring.comm.size())
        outputs = self._call_upper(self._gathered(self.lower(inputs, training=training), sizes), training)
        # Each worker knows the error signal of its own rows; the upper part needs that of all, and the same on all.
        return keras.tree.map_structure(
            lambda leaf: (
                leaf if leaf is None else scatter(leaf, name=f"{wiring.scope}/own_rows", sizes=sizes, **exactly)
            ),
            outputs,
        )

    # ---- training ----

    def compile(self, optimizer="rmsprop", loss=None, **arguments):
        """As Keras' own, on all workers alike, with the plain optimizer: gradients are reduced here.

        Args:
          optimizer, loss, **arguments: as in `keras.Model.compile`. Losses must be means or sums over the batch.

        Raises:
          ValueError: an argument that a hybrid model cannot follow; the message says what to use.
        """
        self._hvd8bit.mean_loss = keras_step.check_losses(loss)
        super().compile(optimizer, loss, **keras_step.checked_compile_arguments("HybridModel", arguments))
        keras_step.check_optimizer(
            "HybridModel", self.optimizer, split=self._hvd8bit.comm.size() > 1, cuts_weights=True
        )
        self.upper_optimizer = None
        if self._hvd8bit.update == "sub_batch":
            self.upper_optimizer = type(self.optimizer).from_config(self.optimizer.get_config())
            if isinstance(self.optimizer._learning_rate, keras.Variable):
                # Callbacks that change the learning rate know of one optimizer.
                self.upper_optimizer._learning_rate = self.optimizer._learning_rate

    def _workers(self) -> tuple[HorovodComm, str]:
        comm = self._hvd8bit.comm
        return comm, f"rank {comm.rank()}"

    @_do_not_convert
    def train_step(self, data):
        """One step of `fit`: the union batch through both parts and back, sub-batch by sub-batch, and the updates."""
        wiring = self._hvd8bit
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self._prepare(keras_step.symbols(x))
        union = Union(wiring, x, y, sample_weight)

        lower = Gradients(self.lower.trainable_weights)
        with tf.GradientTape(watch_accessed_variables=False) as lower_tape:
            lower_tape.watch(lower.tensors)
            activations = self.lower(x, training=True)
            parts = [activations[part.start : part.stop] for part in union.own_parts]
            penalty = scaled(keras_step.penalty(self.lower), union.own_share)
        penalties = Penalties(self.lower, self.upper, union)

        upper = Gradients(self.upper.trainable_weights)
        gathered: list = []
        errors, predictions, loss = [], [], tf.zeros((), tf.float64)
        for number, part in enumerate(parts):
            # The next sub-batch travels while this one is computed; the one after it waits for its turn.
            part = pipeline.after(gathered[-2:-1], part)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([part, *upper.tensors])
                gathered.append(self._gathered(part, union.sizes(number)))
                outputs = self._call_upper(gathered[-1], True)
                objective = self._objective(union, number, outputs)
                share = union.share(number)
                added = scaled(keras_step.penalty(self.upper), share)
            *gradients, error = tape.gradient(
                [objective] if added is None else [objective, added], [*upper.tensors, part]
            )
            penalties.of_sub_batch(share)
            upper.add(gradients)
            errors.append(tf.zeros_like(part) if error is None else error)
            predictions.append(outputs)
            loss += tf.cast(objective, tf.float64)
            if wiring.update == "sub_batch":
                # As a batch of its own: the mean over its rows, not its part of the mean over all.
                upper.divide(share if wiring.mean_loss else tf.ones((), tf.float64))
                self._reduce_upper(upper, number)
                self.upper_optimizer.apply(upper.gradients, upper.variables)
                upper = Gradients(self.upper.trainable_weights)

        targets, seeds = list(parts), list(errors)
        if penalty is not None:
            targets, seeds = [*targets, penalty], [*seeds, tf.ones_like(penalty)]
        lower.add(lower_tape.gradient(targets, lower.tensors, output_gradients=seeds))
        lower.gradients = self._reduced(lower, "lower", wiring.gradient_compression, average=False)
        if wiring.update == "step":
            self._reduce_upper(upper, 0)
            self.optimizer.apply([*lower.gradients, *upper.gradients], [*lower.variables, *upper.variables])
        elif lower.variables:
            self.optimizer.apply(lower.gradients, lower.variables)
        return self._logs(union, penalties, loss, predictions)

    @_do_not_convert
    def test_step(self, data):
        """One step of `evaluate`."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self._prepare(keras_step.symbols(x))
        union = Union(self._hvd8bit, x, y, sample_weight)
        activations = self.lower(x, training=False)
        penalties = Penalties(self.lower, self.upper, union)
        predictions, loss = [], tf.zeros((), tf.float64)
        gathered: list = []
        for number, part in enumerate(union.own_parts):
            part = pipeline.after(gathered[-2:-1], activations[part.start : part.stop])
            gathered.append(self._gathered(part, union.sizes(number)))
            predictions.append(self._call_upper(gathered[-1], False))
            penalties.of_sub_batch(union.share(number))
            loss += tf.cast(self._objective(union, number, predictions[-1]), tf.float64)
        return self._logs(union, penalties, loss, predictions)

    @_do_not_convert
    def predict_step(self, data):
        """One step of `predict`: this worker's rows of the outputs."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self(x, training=False)

    def _gathered(self, part, sizes):
        wiring = self._hvd8bit
        return all_gather(
            part,
            compression=wiring.compression,
            process_set=wiring.comm.process_set,
            name=f"{wiring.scope}/switch",
            gradient="slice" if keras_step.entrance(self.upper) is None else "sum",
            sizes=sizes,
        )

    def _call_upper(self, gathered, training):
        """The upper part's outputs. The switch adds up the workers' error signals, if it can, not the layer behind it:
        that is half of the bytes, for each worker needs its own rows alone."""
        layer = keras_step.entrance(self.upper)
        if layer is None:
            return self.upper(gathered, training=training)
        layer.input_gradient_is_summed = True
        try:
            return self.upper(gathered, training=training)
        finally:
            layer.input_gradient_is_summed = False

    def _objective(self, union, number: int, outputs):
        """A sub-batch's part of the union batch's loss."""
        if self._compile_loss is None:
            return tf.zeros((), outputs.dtype)
        labels, weights = union.labels(number)
        loss = self._compile_loss(labels, outputs, weights)
        counts = union.share(number) if self._hvd8bit.mean_loss else union.own(number) > 0
        return loss * tf.cast(counts, loss.dtype)

    def _reduce_upper(self, upper: Gradients, number: int) -> None:
        """Weights that every worker has whole: all compute the same gradient, and this keeps it so to the last bit."""
        split = {id(weight) for weight in keras_step.split_weights(self.upper)}
        places = [place for place, variable in enumerate(upper.variables) if id(variable) not in split]
        if places:
            whole = Gradients([upper.variables[place] for place in places])
            whole.add([upper.gradients[place] for place in places])
            reduced = self._reduced(whole, f"upper_{number}", None, average=True)
            for place, gradient in zip(places, reduced):
                upper.gradients[place] = gradient

    def _reduced(self, which: Gradients, what: str, compression, *, average: bool) -> list:
        import horovod.tensorflow as hvd

        return reduce_gradients(
            which.gradients,
            unique(name_of(variable) for variable in which.variables),
            compression=hvd.Compression.none if compression is None else compression,
            op=hvd.Average if average else hvd.Sum,
            scope=f"{self._hvd8bit.scope}_{what}",
            variables=which.variables,
        )

    def _logs(self, union: Union, penalties: Penalties, loss, predictions) -> dict:
        """Loss and metrics of the union batch; all workers have computed the same."""
        if penalties.own:
            own = tf.add_n(penalties.own)
            if self._hvd8bit.comm.size() > 1:
                own = tf.reduce_sum(self._hvd8bit.comm.gather_rows(own[None], f"{self._hvd8bit.scope}_penalties"))
            loss += own
        if penalties.whole:
            loss += tf.add_n(penalties.whole)
        if self._compile_metrics is not None:
            labels, outputs, weights = union.kept(predictions)
            keras_step.updated_metrics(self, labels, outputs, weights)
        self._loss_tracker.update_state(tf.cast(loss, keras.config.floatx()), sample_weight=union.rows)
        return self.get_metrics_result()


class _Wiring:
    """What a HybridModel knows of the other workers. Not a Keras object, so that Keras tracks none of it."""

    def __init__(self, sub_batches, update, compression, gradient_compression, scope):
        self.sub_batches = sub_batches
        self.update = update
        self.compression = compression
        self.gradient_compression = gradient_compression
        self.scope = scope
        self.comm = HorovodComm()
        self.mean_loss = True
        self.ready = False
