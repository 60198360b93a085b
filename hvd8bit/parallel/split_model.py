"""`SplitModel`: a Keras model whose layers are spread over workers, stage after stage."""

from __future__ import annotations

import collections
import json
import logging
from collections.abc import Sequence

import keras
import tensorflow as tf

from hvd8bit import api, collectives
from hvd8bit.collectives import HorovodComm
from hvd8bit.compression import EightBit, check_compression
from hvd8bit.parallel import keras_step, pipeline, transfer
from hvd8bit.parallel import plan as plans
from hvd8bit.parallel.boundary import check_activation_compression
from hvd8bit.parallel.schedule import one_forward_one_backward
from hvd8bit.parallel.split_wiring import Wiring
from hvd8bit.reduction import reduce_gradients
from hvd8bit.variables import name_of, tf_variable, unique

_log = logging.getLogger("hvd8bit")
_do_not_convert = tf.autograph.experimental.do_not_convert
_made: collections.Counter[str] = collections.Counter()


class SplitModel(keras_step.JointModel):
    """A model in stages, each on a worker of its own: activations pass forward, error signals back, in 8 bits.

        stages = [make_lower_half, make_upper_half]             # or models, or lists of layers
        model = hvd8bit.parallel.SplitModel(stages, micro_batches=4)
        model.compile("sgd", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(images, labels, batch_size=64)                # on all workers

    Stage s is on worker s; with replicas the next worker has stage 0 of the next pipeline. A batch is cut into
    micro-batches, which follow one another through the pipeline: one forward, one backward, so that stage s of P holds
    the activations of P - s micro-batches at most. The gradient is that of the whole batch, whatever its size, as one
    process has it: weights change once per batch. In layers that look at a batch as a whole (BatchNormalization) that
    is a micro-batch.

    All workers call the same methods with the same arguments. What is computed with is the data of the first stage's
    worker; the last one gets labels and sample weights from there. The others' data only have to be of the same shapes
    and as many, and with replicas each pipeline trains on its own. All workers of a pipeline see the same losses and
    metrics; rank 0 prints them. `predict` gives the result on all of them.

    A worker builds its own stage alone where stages are functions; the model's weights are those of its own stage. To
    save all of it, call `merge` on all workers.

    Args:
      stages: a list with a Keras model or layer, a list of layers, or a function without arguments that makes one of
        these, for each stage. Each takes one tensor and gives one float tensor, but the first may take a nest of
        tensors.
      micro_batches: into how many parts a batch is cut. Of P stages each idles (P - 1) / (micro_batches + P - 1) of the
        time. Batches of fewer rows work, too.
      replicas: how many such pipelines train as one, each on its own data. Needs process sets:
        hvd.init(process_sets="dynamic").
      compression: `EightBit`, a copy of it, or None (exact), for activations and error signals; or a list with one for
        each boundary between stages.
      gradient_compression: `EightBit`, or one of hvd.Compression, for gradients of replicas; None: exact.
      ahead: see `hvd8bit.parallel.schedule`: 1 lets exchanges hide beside computation, for more memory.
      name: the model's.

    Raises:
      ValueError or TypeError: an argument is not one of the above, or the number of workers is not that of stages times
        replicas; later, at the first step, where stages do not fit together: on all workers, and it names the stage.
    """

    def __init__(
        self,
        stages: Sequence,
        micro_batches: int = 4,
        replicas: int = 1,
        compression=EightBit,
        gradient_compression=EightBit,
        ahead: int = 0,
        name=None,
    ):
        super().__init__(name=name)
        keras_step.check_keras()
        if isinstance(stages, keras.layers.Layer) or not isinstance(stages, (list, tuple)):
            raise TypeError(f"stages must be a list with one entry for each stage, got {type(stages).__name__}")
        everyone = HorovodComm()
        place = plans.check_place(len(stages), replicas, everyone.rank(), everyone.size())
        plans.check_apart(stages)
        one_forward_one_backward(place.stages, place.stage, micro_batches, ahead)  # checks both
        if place.stages * place.replicas > 1 and collectives.elastic():
            raise ValueError("SplitModel needs a fixed number of workers, got an elastic job; run it without --min-np")
        if gradient_compression is not None:
            check_compression(gradient_compression)

        _made["split_model"] += 1
        self._hvd8bit = Wiring(
            place,
            list(stages),
            micro_batches,
            ahead,
            f"hvd8bit_split_{_made['split_model']}",
            _for_each_boundary(compression, place.stages - 1),
            gradient_compression,
            everyone,
        )
        self.stage = plans.built_stage(stages[place.stage], place.stage)
        self._hvd8bit.stages[place.stage] = self.stage
        self._step_in_graph: dict = {}

    # ---- what the stages are ----

    @property
    def stage_number(self) -> int:
        """Which stage this worker has, from 0."""
        return self._hvd8bit.place.stage

    @property
    def replica_number(self) -> int:
        """In which of the pipelines this worker is, from 0."""
        return self._hvd8bit.place.replica

    def build(self, input_shape, dtype=None):
        """Builds all stages, each on its worker. All workers must call. The first step does it by itself.

        Args:
          input_shape: of what comes into the first stage: (None, ...), or a nest of such.
          dtype: of it; default: Keras' float.
        """
        dtype = dtype or keras.config.floatx()
        is_shape = isinstance(input_shape, (list, tuple)) and all(
            size is None or isinstance(size, int) for size in input_shape
        )
        if is_shape:
            self._prepare(keras.KerasTensor(tuple(input_shape), dtype=dtype))
        else:
            self._prepare(
                keras.tree.map_shape_structure(lambda shape: keras.KerasTensor(tuple(shape), dtype=dtype), input_shape)
            )

    def _prepare(self, inputs) -> None:
        """Agrees with the other workers on what passes between the stages. Once; `inputs` are symbols."""
        wiring = self._hvd8bit
        if wiring.rows is not None:
            return
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise RuntimeError(
                    "SplitModel needs TensorFlow 2 behaviour; call model.build(...) before the first step"
                )
            wiring.first_inputs = inputs
            wiring.rows = plans.chain(self.stage, inputs, wiring.place, wiring.everyone)
            wiring.connect()
            if wiring.place.replicas > 1:
                api.broadcast_variables(
                    list(self.stage.weights), root_rank=wiring.place.stage, process_set=wiring.stage_set
                )
            self.built = True

    def merge(self):
        """The whole model with the weights of all workers, exactly, on each: a `keras.Sequential` of the stages.

        All workers must call, after the first step or `build`. It is a model of one process: it saves and loads
        without hvd8bit. Its stages are the layers that were given: to see what later training changes, call again.
        """
        wiring = self._hvd8bit
        place = wiring.place
        if wiring.rows is None:
            raise ValueError("the stages are not built yet; train first, or call model.build(input_shape)")
        stages = []
        for number, given in enumerate(wiring.stages):
            stage = plans.built_stage(given, number)
            if number > 0 and number != place.stage:
                stage(wiring.rows[number - 1].symbol())
            elif number != place.stage:
                stage(wiring.first_inputs)
            api.broadcast_variables(list(stage.weights), root_rank=place.pipeline_ranks(0)[number])
            wiring.stages[number] = stage
            stages.append(stage)
        return keras.Sequential(stages, name=f"{self.name}_merged")

    def call(self, inputs, training=None):
        """Not to be called: one worker has one stage. `predict` gives the outputs; `stage` is this worker's part."""
        return self(inputs, training=training)

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(
            "a SplitModel cannot be called: this worker has one stage of it; use predict, or merge() for a model of "
            "one process"
        )

    # ---- training ----

    def compile(self, optimizer="rmsprop", loss=None, **arguments):
        """As Keras' own, on all workers alike, with the plain optimizer: each worker updates its own stage.

        Args:
          optimizer, loss, **arguments: as in `keras.Model.compile`. Losses must be means or sums over the batch.

        Raises:
          ValueError: an argument that a split model cannot follow; the message says what to use.
        """
        self._hvd8bit.mean_loss = keras_step.check_losses(loss)
        super().compile(optimizer, loss, **keras_step.checked_compile_arguments("SplitModel", arguments))
        keras_step.check_optimizer(
            "SplitModel", self.optimizer, split=self._hvd8bit.place.stages > 1, cuts_weights=False
        )
        # What an earlier optimizer, loss and metrics have left.
        self._step_in_graph.clear()
        self._hvd8bit.metric_names = None

    def predict(self, *args, **kwargs):
        """As `keras.Model.predict`; rank 0 prints, all workers of the pipeline get the outputs."""
        return super().predict(*args, **kwargs)

    def _workers(self) -> tuple[HorovodComm, str]:
        return self._hvd8bit.everyone, self._hvd8bit.place.describe()

    def _naming_failures(self):
        return self._hvd8bit.naming_failures()

    @_do_not_convert
    def train_step(self, data):
        """One step of `fit`: a batch through the pipeline and back, and an update of this worker's stage."""
        if tf.executing_eagerly():
            return self._in_graph("train_step", data)
        wiring = self._hvd8bit
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self._get_ready(x, y, sample_weight)
        boundaries = wiring.boundaries()
        rows, (y, sample_weight) = self._dealt(boundaries, x, (y, sample_weight))
        parts = pipeline.cut(rows, wiring.micro_batches)
        actions = one_forward_one_backward(wiring.place.stages, wiring.place.stage, wiring.micro_batches, wiring.ahead)
        outcome = pipeline.forward_and_backward(
            self._pipeline_stage(parts, x, y, sample_weight), boundaries, parts, actions
        )
        self._update(outcome.gradients)
        outputs = None
        if wiring.place.last:
            outputs = tf.concat([output[: part.own] for output, part in zip(outcome.outputs, parts)], 0)
        return self._logs(boundaries, outcome.loss, outcome.penalty, rows, y, outputs, sample_weight)

    @_do_not_convert
    def test_step(self, data):
        """One step of `evaluate`."""
        if tf.executing_eagerly():
            return self._in_graph("test_step", data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self._get_ready(x, y, sample_weight)
        boundaries = self._hvd8bit.boundaries()
        rows, (y, sample_weight) = self._dealt(boundaries, x, (y, sample_weight))
        outputs, penalty = self._forward(boundaries, x, rows)
        loss = tf.zeros((), tf.float64)
        if outputs is not None and self._compile_loss is not None:
            loss = tf.cast(self._compile_loss(y, outputs, sample_weight), tf.float64)
        return self._logs(boundaries, loss, penalty, rows, y, outputs, sample_weight)

    @_do_not_convert
    def predict_step(self, data):
        """One step of `predict`: the outputs, on all workers of the pipeline."""
        if tf.executing_eagerly():
            return self._in_graph("predict_step", data)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        self._get_ready(x, None, None)
        wiring = self._hvd8bit
        boundaries = wiring.boundaries()
        rows, _ = self._dealt(boundaries, x, ())
        outputs, _ = self._forward(boundaries, x, rows)
        if wiring.place.stages > 1:
            payload = None if outputs is None else transfer.pack(outputs, None)
            came = transfer.share(payload, wiring.comm, f"{wiring.scope}_outputs")
            outputs = transfer.unpack(came, wiring.rows[-1].shape, wiring.rows[-1].dtype, None)
        return transfer.tied(outputs, boundaries.unfinished)

    def _in_graph(self, step: str, data):
        """Transfers of one step are under way at the same time, so a step is a graph even with run_eagerly=True."""
        if step not in self._step_in_graph:
            self._step_in_graph[step] = tf.function(getattr(self, step), reduce_retracing=True, autograph=False)
        return self._step_in_graph[step](data)

    def _get_ready(self, x, y, sample_weight) -> None:
        if tf.config.functions_run_eagerly():
            raise RuntimeError(
                "a SplitModel's step must be a graph: transfers wait for one another otherwise; call "
                "tf.config.run_functions_eagerly(False)"
            )
        self._prepare(keras_step.symbols(x))
        wiring = self._hvd8bit
        if wiring.metric_names is None and y is not None:
            names: list[str] = []
            if wiring.place.last:
                names = keras_step.metric_names(self, y, wiring.rows[-1].symbol(), sample_weight)
            with tf.init_scope():
                texts = wiring.everyone.gather_text(json.dumps(names), "hvd8bit_split_model_metrics")
            wiring.metric_names = json.loads(texts[wiring.place.pipeline_ranks(wiring.place.replica)[-1]])

    def _dealt(self, boundaries, x, labels):
        """The number of rows of the first stage's batch, on all; and its labels (any nest), on the last."""
        wiring = self._hvd8bit
        rows = tf.shape(keras.tree.flatten(x)[0], tf.int64)[0]
        if wiring.place.stages == 1:
            return rows, labels
        leaves = keras.tree.flatten(labels)
        payloads = None
        if wiring.place.first:
            head = transfer.bytes_of(rows[None])
            packed = tf.concat([head, *(transfer.pack(leaf, None) for leaf in leaves if leaf is not None)], 0)
            payloads = [head[:0], *[head] * (wiring.place.stages - 2), packed]
        came = transfer.deal(payloads, wiring.comm, f"{wiring.scope}_batch")
        if wiring.place.first:
            boundaries.unfinished.append(came)
            return rows, labels
        rows = tf.reshape(tf.bitcast(tf.reshape(came[:8], [1, 8]), tf.int64), [])
        if not wiring.place.last:
            # Empty. Of the rows a stage in the middle makes no use in predict, and the transfer would be left out.
            boundaries.unfinished.append(came[8:])
            return rows, labels
        received, position = [], tf.constant(8, tf.int64)
        for leaf in leaves:
            if leaf is not None:
                row_shape = keras_step.row_shape("labels and sample weights", leaf)
                end = position + transfer.exact_bytes(rows, row_shape, leaf.dtype)
                leaf, position = transfer.unpack(came[position:end], row_shape, leaf.dtype, None), end
            received.append(leaf)
        return rows, keras.tree.pack_sequence_as(labels, received)

    def _pipeline_stage(self, parts, x, y=None, sample_weight=None) -> pipeline.Stage:
        wiring = self._hvd8bit
        place, rows = wiring.place, wiring.rows

        def objective(number, output):
            part = parts[number]
            labels = keras_step.slice_rows(y, part.start, part.stop)
            weights = keras_step.slice_rows(sample_weight, part.start, part.stop)
            loss = self._compile_loss(labels, output, weights)
            counts = tf.cast(part.share, loss.dtype) if wiring.mean_loss else tf.cast(part.own > 0, loss.dtype)
            return loss * counts

        return pipeline.Stage(
            call=self.stage,
            penalties=lambda: keras_step.penalty(self.stage),
            variables=[tf_variable(variable) for variable in self.stage.trainable_weights],
            input_rows=None if place.first else (rows[place.stage - 1].shape, rows[place.stage - 1].dtype),
            output_rows=None if place.last else (rows[place.stage].shape, rows[place.stage].dtype),
            inputs=(lambda n: keras_step.slice_rows(x, parts[n].start, parts[n].stop)) if place.first else None,
            objective=objective if place.last else None,
        )

    def _forward(self, boundaries, x, rows):
        """The last stage's outputs (None on the others), and this stage's regularisation loss."""
        parts = pipeline.cut(rows, self._hvd8bit.micro_batches)
        outcome = pipeline.forward(self._pipeline_stage(parts, x), boundaries, parts)
        if not self._hvd8bit.place.last:
            return None, outcome.penalty
        return tf.concat([output[: part.own] for output, part in zip(outcome.outputs, parts)], 0), outcome.penalty

    def _update(self, gradients) -> None:
        wiring = self._hvd8bit
        variables = list(self.stage.trainable_weights)
        if wiring.place.replicas > 1:
            gradients = reduce_gradients(
                gradients,
                unique(name_of(variable) for variable in variables),
                compression=wiring.gradient_compression,
                process_set=wiring.stage_set,
                scope=f"{wiring.scope}_stage_{wiring.place.stage}",
                variables=variables,
            )
        if any(gradient is not None for gradient in gradients):
            self.optimizer.apply(gradients, variables)

    def _logs(self, boundaries, loss, penalty, rows, y, outputs, sample_weight) -> dict:
        """Loss and metrics of the batch, and of the epoch up to it, on all workers."""
        wiring = self._hvd8bit
        names = wiring.metric_names or []
        values = [tf.zeros((), tf.float64)] * len(names)
        if outputs is not None and names:
            found = keras_step.updated_metrics(self, y, outputs, sample_weight)
            values = [tf.cast(found[name], tf.float64) for name in names]
        if wiring.place.stages > 1:
            report = tf.stack([loss + penalty, *values])[None]
            report = tf.reduce_sum(wiring.comm.gather_rows(report, f"{wiring.scope}_logs"), 0)
            loss, values = report[0], tf.unstack(report[1:], num=len(names))
        else:
            loss = loss + penalty
        self._loss_tracker.update_state(tf.cast(loss, keras.config.floatx()), sample_weight=rows)
        logs = {"loss": transfer.tied(self._loss_tracker.result(), boundaries.unfinished), **dict(zip(names, values))}
        return {name: tf.cast(value, keras.config.floatx()) for name, value in logs.items()}

    def get_metrics_result(self):
        """As Keras' own; on workers without the last stage the loss alone: the rest comes with each step's logs."""
        if self._hvd8bit.place.last:
            return super().get_metrics_result()
        return {"loss": self._loss_tracker.result()}

    def _flatten_metrics_in_order(self, logs):
        names = ["loss", *(self._hvd8bit.metric_names or [])]
        values = [logs[name] for name in names if name in logs]
        return values[0] if len(values) == 1 else values


def _for_each_boundary(compression, boundaries: int) -> list:
    several = list(compression) if isinstance(compression, (list, tuple)) else [compression] * boundaries
    if len(several) != boundaries:
        raise ValueError(
            f"compression must be one for all boundaries, or a list with one for each of {boundaries}, got "
            f"{len(several)}"
        )
    return [check_activation_compression(each) for each in several]
