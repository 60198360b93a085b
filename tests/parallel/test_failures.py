"""Workers that die, or that go their own way: the others end within a minute, with a cause in their output."""

from __future__ import annotations

import json

import launch
import pytest

KILLED = """
import json, os, signal, subprocess, sys, time

folder, compressor = sys.argv[1:3]
raised = [os.path.join(folder, f"{rank}.json") for rank in (0, 2)]
if os.environ["HOROVOD_RANK"] == "1" and "child" not in sys.argv:
    # The launcher sees this process, which goes on: it does not end the others.
    ended = subprocess.run([sys.executable, __file__, folder, compressor, "child"]).returncode
    killed = time.time()
    while not all(map(os.path.exists, raised)) and time.time() < killed + 90:
        time.sleep(0.1)
    print(json.dumps({"ended": ended, "killed": killed}))
    sys.exit()

import horovod.tensorflow as hvd
import tensorflow as tf
import hvd8bit

hvd.init()
weights = [tf.Variable(tf.zeros([300_000])), tf.Variable(tf.zeros([2000]))]

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(w) for w in weights])
    if compressor == "bare":
        return hvd.DistributedGradientTape(tape, compression=hvd8bit.EightBit).gradient(loss, weights)
    return hvd8bit.DistributedGradientTape(tape).gradient(loss, weights)

for number in range(10**6):
    if number == 20 and hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step()
    except Exception as error:
        with open(os.path.join(folder, f"{hvd.rank()}.part"), "w") as file:
            json.dump({"step": number, "time": time.time(), "error": f"{type(error).__name__}: {error}"}, file)
        os.rename(file.name, os.path.join(folder, f"{hvd.rank()}.json"))
        break
"""


@pytest.mark.parametrize("compressor", ["wrapper", "bare"])
def test_workers_notice_that_another_is_killed(compressor, tmp_path):
    """By themselves, when no launcher ends them."""
    result = launch.run_python(KILLED, tmp_path, compressor, workers=3, timeout=150)
    killed = result.json(1)
    assert killed["ended"] == -9, result.describe()
    for rank in (0, 2):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert 20 <= seen["step"] <= 21, seen
        assert seen["time"] - killed["killed"] < 60, (seen, killed)
        assert any(sign in seen["error"] for sign in ("Connection closed", "shut down", "Connection reset")), seen


ALONE = """
import json, sys, time
import horovod.tensorflow as hvd
import tensorflow as tf
import hvd8bit
from hvd8bit import reduction

hvd.init()
elements = int(sys.argv[1])

def reduce(names):
    gradients = [tf.ones([elements])] * len(names)
    return reduction.reduce_gradients(gradients, names, compression=hvd8bit.EightBit, scope="alone")

for _ in range(3):
    reduce(["a", "b"])
began, raised = time.monotonic(), ""
try:
    # The last worker has a new list; the others go on with the old one.
    reduce(["a", "b", "c"] if hvd.rank() == hvd.size() - 1 else ["a", "b"])
except Exception as error:
    raised = f"{type(error).__name__}: {error}"
print(json.dumps({"raised": raised, "seconds": time.monotonic() - began}))
"""


def test_a_worker_alone_with_a_new_plan_is_noticed_at_once():
    """The others wait in an exchange whose name it knows."""
    result = launch.run_python(ALONE, "2000", workers=3, timeout=120)
    seen = [json.loads(result.stdout(rank).strip().splitlines()[-1]) for rank in range(3)]
    assert all(worker["seconds"] < 20 for worker in seen), seen
    assert seen[2]["raised"].startswith("RuntimeError: rank 2 has a new list of gradients"), seen[2]
    assert "others go on with an older one instead of comparing it" in seen[2]["raised"]
    assert "others go on with an older one" in result.stderr(2)
    assert all("Mismatched" in worker["raised"] or "shut down" in worker["raised"] for worker in seen[:2]), seen


def test_a_worker_alone_with_a_new_plan_ends_the_job_in_time():
    """Nothing is encoded, so that nothing is noticed at once."""
    result = launch.run_python(ALONE, "20", workers=3, timeout=120, env={"HVD8BIT_STALL_TIMEOUT_SECONDS": "15"})
    seen = [json.loads(result.stdout(rank).strip().splitlines()[-1]) for rank in range(3)]
    assert all(14 < worker["seconds"] < 60 for worker in seen), seen
    assert seen[2]["raised"].startswith("RuntimeError: rank 2 has a new list of gradients"), seen[2]
    assert "HVD8BIT_STALL_TIMEOUT_SECONDS" in seen[2]["raised"]
    assert all("shut down" in worker["raised"] for worker in seen[:2]), seen
    assert "waits 8 s for the others to compare it" in result.stderr(2)
    assert "waits" not in result.stderr(0)


DIFFERENT = """
import json, sys, time
import horovod.tensorflow as hvd
import tensorflow as tf
import hvd8bit

hvd.init()
other = hvd.rank() == 1
case = sys.argv[1]
shape = [2001] if other and case == "shape" else [2000]
dtype = "float16" if other and case == "dtype" else "float32"
count = 2 if other and case == "number" else 1
compression = hvd8bit.EightBit(block_size=512) if other and case == "settings" else hvd8bit.EightBit
variables = [tf.Variable(tf.zeros(shape, dtype), name=f"weight{i}") for i in range(count)]

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(v) for v in variables])
    return hvd8bit.DistributedGradientTape(tape, compression=compression).gradient(loss, variables)

step()
"""


@pytest.mark.parametrize(
    ("case", "named"),
    [("shape", "2001"), ("dtype", "float16"), ("number", "no such gradient"), ("settings", "block_size=512")],
)
def test_workers_that_differ_end_with_the_cause(case, named):
    """FIELD-CASES D7, as a job of its own: every worker's error names it, and nobody is left waiting."""
    result = launch.run_python(DIFFERENT, case, workers=2, timeout=60, check=False)
    assert result.problem is None, result.describe()
    assert result.returncode != 0
    told = [rank for rank in range(2) if "workers differ in" in result.stderr(rank) and named in result.stderr(rank)]
    # The launcher ends the others as soon as one has ended.
    assert told, result.describe()
