"""An elastic job that gains a host and loses another, by kill -9, goes on with the right number of workers."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from hvd8bit.bench import netlab

MISSING = netlab.available(ssh=True)
JOB = Path(__file__).with_name("elastic_job.py")
PATIENCE_S = 240  # a machine may be busy

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


class _Watched:
    """What the workers of a job have written so far."""

    def __init__(self, folder: Path, job: threading.Thread):
        self.folder, self.job = folder, job

    def records(self) -> list[dict]:
        lines = [line for file in self.folder.glob("*.jsonl") for line in file.read_text().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, hosts: set[str], epochs: int = 3) -> list[dict]:
        """The records of the newest epoch that just these hosts have finished together, after some more."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.job.is_alive():
            by_epoch: dict[int, list[dict]] = {}
            for record in self.records():
                if record["size"] == len(hosts):
                    by_epoch.setdefault(record["epoch"], []).append(record)
            whole = [found for _, found in sorted(by_epoch.items()) if {r["host"] for r in found} == hosts]
            if len(whole) >= epochs:
                return whole[-1]
            time.sleep(0.1)
        raise AssertionError(f"no {epochs} epochs on {sorted(hosts)}: {self.records()[-6:]}")


@pytest.mark.parametrize("legacy", ["0", pytest.param("1", marks=pytest.mark.soak)], ids=["keras3", "keras2"])
def test_a_job_that_gains_and_loses_a_worker_goes_on(tmp_path, legacy):
    hosts, script = tmp_path / "hosts", tmp_path / "discover.sh"
    hosts.write_text("h0:1\nh1:1\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "HOROVOD_GLOO_TIMEOUT_SECONDS": "120", "TF_USE_LEGACY_KERAS": legacy}
    jobs = []
    with netlab.NetLab(hosts=3) as lab:

        def run() -> None:
            options = [
                "-np",
                "2",
                "--min-np",
                "2",
                "--max-np",
                "3",
                "--slots-per-host",
                "1",
                "--elastic-timeout",
                "240",
            ]
            command = [sys.executable, JOB, tmp_path]
            jobs.append(lab.horovodrun(command, env=env, timeout=600, options=options, discovery=script))

        thread = threading.Thread(target=run)
        thread.start()
        watched = _Watched(tmp_path, thread)
        try:
            watched.wait_for({"h0", "h1"})
            hosts.write_text("h0:1\nh1:1\nh2:1\n")
            (lost,) = [r["pid"] for r in watched.wait_for({"h0", "h1", "h2"}) if r["host"] == "h1"]
            hosts.write_text("h0:1\nh2:1\n")
            os.kill(lost, signal.SIGKILL)
            watched.wait_for({"h0", "h2"})
        except AssertionError as error:
            (tmp_path / "stop").touch()
            thread.join()
            raise AssertionError(f"{error}\n{jobs[0].describe()}") from error
        finally:
            (tmp_path / "stop").touch()
            thread.join()
    (job,) = jobs
    records = watched.records()
    assert job.problem is None, job.describe()
    by_epoch: dict[tuple, set] = {}
    for record in records:
        # The right number of workers, in a graph that was traced for another.
        assert record["mean_of_ranks"] == [(record["size"] - 1) / 2] * 4, record
        by_epoch.setdefault((record["epoch"], record["size"]), set()).add(record["weight_digest"])
    assert all(len(digests) == 1 for digests in by_epoch.values()), by_epoch
    # Nothing began anew: the workers that stayed have every epoch.
    epochs = sorted({record["epoch"] for record in records})
    assert epochs == list(range(1, epochs[-1] + 1))
