"""`DistributedGradientTape`: a gradient tape whose gradients are those of all workers, or of all but some layers'."""

from __future__ import annotations

import weakref

import tensorflow as tf

from hvd8bit import collectives
from hvd8bit.compression import EightBit, check_compression
from hvd8bit.reduction import reduce_gradients
from hvd8bit.variables import divided, is_sharded, name_of, tf_variable, unique, weights_of_local


class DistributedGradientTape:
    """Wraps a `tf.GradientTape`; `gradient` reduces over all workers. For tf and Keras variables alike.

        with tf.GradientTape() as tape:
            loss = ...
        tape = hvd8bit.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    Args:
      tape: the tape that recorded. It can also be recorded on afterwards: `with` and `watch` work here.
      compression: `EightBit`, or any Horovod compressor.
      sparse_as_dense, op, gradient_predivide_factor, process_set: see `hvd8bit.reduction.reduce_gradients`.
      step: number of the step, such as `optimizer.iterations`; needed for `Selection(start_step=...)`.
      scale_local_gradients: those of local variables (`register_local_source`) are divided by the number of workers.
      name: prefix of the collectives' names, the same on all workers. By default the calls of one graph are numbered.
        Tapes in graphs of their own, whose gradients are under way at the same time, need names of their own.
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        *,
        compression=EightBit,
        sparse_as_dense: bool = False,
        op=None,
        gradient_predivide_factor: float = 1.0,
        process_set=None,
        scale_local_gradients: bool = True,
        step=None,
        name: str | None = None,
    ):
        if isinstance(tape, DistributedGradientTape):
            raise ValueError("tape must not be a DistributedGradientTape already: its gradients would be reduced twice")
        check_compression(compression)
        self._tape = tape
        self._scale_local_gradients = scale_local_gradients
        self._process_set = process_set
        self._local: set = set()
        self._settings = {
            "compression": compression,
            "sparse_as_dense": sparse_as_dense,
            "op": op,
            "gradient_predivide_factor": gradient_predivide_factor,
            "process_set": process_set,
            "step": step,
        }
        self._name = name

    def __enter__(self):
        self._tape.__enter__()
        return self

    def __exit__(self, *exception):
        return self._tape.__exit__(*exception)

    def __getattr__(self, name):
        if name == "_tape":  # not there yet, or ever, in a copy
            raise AttributeError(name)
        return getattr(self._tape, name)

    def register_local_source(self, source) -> None:
        """Leaves this variable's gradient to the worker itself."""
        self._local.add(_reference(source))

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target, sources, output_gradients=None, use_generic_names: bool = False):
        """Gradients like `tf.GradientTape.gradient`'s, reduced over all workers.

        Args:
          target, sources, output_gradients: as there; `sources` may be nested.
          use_generic_names: take the gradients' positions for names, so that workers may name variables otherwise.

        Returns:
          The structure of `sources`; None where a source does not count for the target.
        """
        watched = tf.nest.map_structure(tf_variable, sources)
        gradients = tf.nest.flatten(self._tape.gradient(target, watched, output_gradients))
        flat = tf.nest.flatten(sources)
        # Of a variable of which each worker has a part of its own (hvd8bit.parallel) the gradient stays as it is.
        whole = [i for i, source in enumerate(flat) if not is_sharded(source)]
        shared = [i for i in whole if _reference(flat[i]) not in self._local]
        names = [f"grad_{i}" if use_generic_names else name_of(flat[i]) for i in shared]
        reduced = reduce_gradients(
            [gradients[i] for i in shared],
            unique(names),
            variables=[flat[i] for i in shared],
            scope=self._name or _default_name(),
            **self._settings,
        )
        for i, gradient in zip(shared, reduced):
            gradients[i] = gradient
        if self._local and self._scale_local_gradients:
            size = collectives.HorovodComm(self._process_set).size_tensor()
            for i in set(whole) - set(shared):
                gradients[i] = divided(gradients[i], size)
        return tf.nest.pack_sequence_as(sources, gradients)


_calls_of_graphs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _default_name() -> str:
    """hvd8bit_tape, and in a graph hvd8bit_tape_1, ... for the calls that follow: they may run at the same time.

    The same on all workers, for a worker that traces anew begins anew. Eager calls wait for one another.
    """
    if tf.executing_eagerly():
        return "hvd8bit_tape"
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and getattr(graph.outer_graph, "building_function", False):
        graph = graph.outer_graph
    number = _calls_of_graphs.get(graph, 0)
    _calls_of_graphs[graph] = number + 1
    return "hvd8bit_tape" if number == 0 else f"hvd8bit_tape_{number}"


def PartialDistributedGradientTape(tape: tf.GradientTape, *, local_layers, **settings) -> DistributedGradientTape:
    """A `DistributedGradientTape` that leaves the gradients of some layers to each worker itself.

    Args:
      tape, **settings: as there.
      local_layers: a built Keras layer or several.

    Raises:
      ValueError: a local layer is none, or not built.
    """
    local_layers = list(local_layers) if isinstance(local_layers, (list, tuple)) else [local_layers]
    distributed = DistributedGradientTape(tape, **settings)
    for layer in local_layers:
        for variable in weights_of_local(layer):
            distributed.register_local_source(variable)
    return distributed


def _reference(source):
    return tf_variable(source).ref()
