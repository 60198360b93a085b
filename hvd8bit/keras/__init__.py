"""Keras on several Horovod workers: `DistributedOptimizer` and `callbacks`, for Keras 3 and Keras 2.

```python
model.compile(optimizer=hvd8bit.keras.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss=...)
model.fit(..., callbacks=[hvd8bit.keras.callbacks.BroadcastGlobalVariablesCallback(0)])
```
"""

from hvd8bit.keras import callbacks
from hvd8bit.keras.elastic import ElasticState
from hvd8bit.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer

__all__ = ["DistributedOptimizer", "ElasticState", "PartialDistributedOptimizer", "callbacks"]
