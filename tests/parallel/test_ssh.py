"""A job over several hosts as a user runs it: `horovodrun -np 3 -H h0:1,h1:1,h2:1`, over ssh."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hvd8bit.bench import netlab

HOSTS = 3
EXAMPLE = Path(__file__).parents[2] / "examples" / "keras_mnist.py"
MISSING = netlab.available(ssh=True)

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def test_the_example_trains_one_model_on_three_hosts(tmp_path):
    results = tmp_path / "results.json"
    command = [sys.executable, EXAMPLE, "--dataset=digits", "--compression=eightbit", f"--json={results}"]
    with netlab.NetLab(HOSTS) as lab:
        job = lab.horovodrun(command, env={"TF_CPP_MIN_LOG_LEVEL": "2"}, timeout=240)
        traffic = lab.traffic()
    # The example compares the digests of all ranks' weights and ends with an error where they differ.
    assert job.returncode == 0, job.describe()
    (record,) = json.loads(results.read_text())["results"]
    assert record["workers"] == HOSTS
    assert len(record["weight_digest"]) == 64
    assert record["test_accuracy"] > 0.9
    # Really on three hosts: the gradients went through each one's interface.
    for host in traffic:
        assert host.sent_bytes > record["gradient_bytes_per_step"] * record["steps"] > 0


def test_a_failing_worker_fails_the_job_with_its_words(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nif os.environ['HOROVOD_RANK'] == '2': sys.exit('broken')\ntime.sleep(1000)"
    )
    with netlab.NetLab(HOSTS) as lab:
        job = lab.horovodrun([sys.executable, script], timeout=120)
    assert job.returncode != 0
    assert job.problem is None
    assert "broken" in job.stderr[2]
