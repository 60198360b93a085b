"""A stage that is killed in the middle of training ends the others, and they say where they stood."""

from __future__ import annotations

import re
import time

import keras
import launch
import pytest

pytestmark = pytest.mark.skipif(keras.__version__ < "3", reason="for Keras 3")

SCRIPT = """
import os, signal, sys, time
import horovod.tensorflow as hvd
hvd.init()
import keras
import numpy as np
from hvd8bit.parallel import SplitModel

class Kill(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 10 and hvd.rank() == KILLED:
            with open(sys.argv[1], "w") as file:
                file.write(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

model = SplitModel([[keras.layers.Dense(64)] for _ in range(hvd.size())], micro_batches=4)
model.compile("sgd", loss="mse")
x = np.ones((100000, 64), "float32")
print("training", flush=True)
model.fit(x, x, batch_size=32, verbose=0, callbacks=[Kill()])
print("trained to the end", flush=True)
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_end_and_name_stage_and_boundary(killed, tmp_path):
    when = tmp_path / "killed"
    result = launch.run_python(SCRIPT.replace("KILLED", str(killed)), when, workers=3, check=False, timeout=180)
    ended = time.time()
    assert result.problem is None, result.describe()
    assert result.returncode != 0
    assert ended - float(when.read_text(encoding="utf-8")) < 60
    for rank in range(3):
        assert "training" in result.stdout(rank), result.describe()
        assert "trained to the end" not in result.stdout(rank)
        said = re.findall(r"stage (\d) of 3 \(rank (\d)\): the exchange at (.*) failed", result.stderr(rank))
        for stage, of_rank, where in said:
            assert stage == of_rank == str(rank)
            assert re.search(r"boundary \d \(stage \d to \d\)", where)
        # A worker that ends in another way than by the launcher's signal has said so.
        if "Traceback" in result.stderr(rank):
            assert said, result.describe()
    assert (
        f"rank {killed}" in result.launcher_output.lower() or f"process {killed}" in result.launcher_output.lower()
    ), result.launcher_output
