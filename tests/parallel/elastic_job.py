"""A worker of an elastic job: trains until told to stop, and after each epoch writes down what it has.

    python elastic_job.py FOLDER

FOLDER/stop ends it; FOLDER/HOST-PID.jsonl is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

# The tree that this file lies in: over ssh PYTHONPATH does not come along.
sys.path.insert(0, str(Path(__file__).parents[2]))
import hvd8bit
import hvd8bit.keras

keras = tf.keras


def main(folder: Path) -> None:
    hvd.init()
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    model.compile(hvd8bit.keras.DistributedOptimizer(keras.optimizers.Adam(1e-2)), "mse")
    state = hvd8bit.keras.ElasticState(model, epoch=0)

    @tf.function
    def mean_of_ranks():
        ranks = tf.fill([4096], tf.cast(hvd.rank_op(), tf.float32))
        return hvd8bit.allreduce(ranks, name="ranks")

    @hvd.elastic.run
    def train(state):
        while not hvd.broadcast_object(Path(folder, "stop").exists()):
            random = np.random.default_rng([state.epoch, hvd.rank()])
            inputs = random.standard_normal((64, 32), dtype=np.float32)
            model.fit(inputs, inputs[:, :10], batch_size=16, verbose=0, shuffle=False)
            state.epoch += 1
            weights = [*model.get_weights(), *(np.asarray(v) for v in optimizer_variables(model.optimizer))]
            record = {
                "epoch": state.epoch,
                "rank": hvd.rank(),
                "size": hvd.size(),
                "host": os.environ["HOROVOD_HOSTNAME"],
                "pid": os.getpid(),
                "mean_of_ranks": mean_of_ranks().numpy().tolist()[:: 4096 // 4],
                "weight_digest": hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest(),
            }
            with Path(folder, f"{record['host']}-{record['pid']}.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            state.commit()
            time.sleep(0.1)

    train(state)


def optimizer_variables(optimizer):
    variables = optimizer.variables
    return variables() if callable(variables) else variables


if __name__ == "__main__":
    main(Path(sys.argv[1]))
