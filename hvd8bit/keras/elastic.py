"""Elastic jobs: what a Keras model needs to go on when workers are lost or join.

Horovod's own `KerasState` does not work with Keras 3; this one works with Keras 3 and Keras 2. The rest is Horovod's:

```python
state = hvd8bit.keras.ElasticState(model, epoch=0)

@hvd.elastic.run
def train(state):
    while state.epoch < 10:
        model.fit(batches)
        state.epoch += 1
        state.commit()

train(state)
```
"""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
from horovod.common.elastic import ObjectState

from hvd8bit import api
from hvd8bit.variables import optimizer_variables, tf_variable


class ElasticState(ObjectState):
    """A model, its optimizer and further values that all workers share, for `hvd.elastic.run`.

    `commit` keeps a copy of all in memory. When a worker is lost, the others go back to it; when workers join, all
    take over the values of rank 0. Weights, optimizer slots, learning rate and loss scale are then the same bits on
    all workers. What stays each worker's own: metrics, and the states of random generators (dropout). No exchange may
    run before the function that `hvd.elastic.run` wraps: a worker that joins would not take part in it. So build the
    model and compile it, but do not fit it before.

    Args:
      model: a built Keras model.
      optimizer: its optimizer, if it is not compiled into the model. Its slots are made here where they are missing.
      **attributes: values that all workers share, such as epoch=0; they become attributes of the state.

    Raises:
      ValueError: the model is not built, or there is no optimizer.
    """

    def __init__(self, model, optimizer=None, **attributes):
        if not model.built:
            raise ValueError(f"model {model.name!r} must be built: give it an Input, or call model.build(input_shape)")
        optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if optimizer is None:
            raise ValueError(
                f"model {model.name!r} has no optimizer: compile it, or give ElasticState(model, optimizer=...)"
            )
        # Legacy optimizers of Keras 2 have no `build`.
        build = getattr(optimizer, "build", None) or getattr(optimizer, "_create_all_weights", None)
        if build is not None and not getattr(optimizer, "built", False):
            build(model.trainable_variables)
        self.model = model
        self.optimizer = optimizer
        self._saved: list[np.ndarray] = []
        self._keep()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **attributes)

    def save(self):
        """Keeps a copy of everything in this process's memory. `commit` calls it."""
        self._keep()
        super().save()

    def restore(self):
        """Goes back to the copy.

        Raises:
          ValueError: the model or its optimizer has other variables than when the copy was made.
        """
        variables = self._variables()
        if [tuple(variable.shape) for variable in variables] != [value.shape for value in self._saved]:
            raise ValueError(
                f"model {self.model.name!r} and its optimizer must have the variables of the last commit, got "
                f"{len(variables)} where it kept {len(self._saved)}, or other shapes; call commit() after what changes "
                "layers, the optimizer or what is trainable"
            )
        for variable, value in zip(variables, self._saved):
            variable.assign(value)
        super().restore()

    def sync(self):
        """Takes over everything from rank 0, and keeps a copy."""
        api.broadcast_variables(self._variables(), root_rank=0)
        self._keep()
        super().sync()

    def _variables(self) -> list:
        return [tf_variable(v) for v in [*self.model.weights, *optimizer_variables(self.optimizer)]]

    def _keep(self) -> None:
        self._saved = [variable.numpy() for variable in self._variables()]
