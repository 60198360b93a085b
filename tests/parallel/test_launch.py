"""The launcher of the parallel tests: what fails is told, and nothing hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import launch
import pytest

CASES = """
import horovod.tensorflow as hvd
import pytest
import tensorflow as tf

hvd.init()

def total(name):
    return float(hvd.allreduce(tf.ones(4), op=hvd.Sum, name=name)[0])

def test_before():
    assert total("a") == hvd.size()

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass

def test_one_rank_fails_while_the_other_waits():
    assert hvd.rank() == 0, "only rank 0 goes on"
    total("b")

def test_after_a_failure():
    assert total("c") == hvd.size()

def test_ranks_wait_for_different_collectives():
    tf.function(lambda x: hvd.allreduce(x, name=f"d{hvd.rank()}"))(tf.ones(4))

def test_after_a_stall():
    assert total("e") == hvd.size()

def test_skipped_on_one_rank():
    if hvd.rank():
        pytest.skip("not here")
"""


def test_cases_are_told_apart_and_none_hangs(tmp_path, monkeypatch):
    cases = tmp_path / "cases_of_launch.py"
    cases.write_text(CASES)
    monkeypatch.setattr(launch, "outer_test", None)  # these failures are meant: keep them out of the report
    with pytest.raises(pytest.fail.Exception) as failure:
        launch.run_cases([str(cases)], workers=2, case_timeout=8)
    text = failure.value.msg
    summary, *details = text.split("\n===== ")
    assert "3 of 7 cases failed on 2 workers" in summary
    by_name = {detail.splitlines()[0].split("::")[1].split()[0]: detail for detail in details}
    assert set(by_name) == {
        "test_one_rank_fails_while_the_other_waits",
        "test_ranks_wait_for_different_collectives",
        "test_skipped_on_one_rank",
    }

    early = by_name["test_one_rank_fails_while_the_other_waits"]
    first, second = early.split("-----\n")[1:]
    assert "only rank 0 goes on" in first  # the cause comes first
    assert "the case failed on this rank, and others were still in it" in first
    assert "Horovod has been shut down" in second
    assert "took longer than 8 s" in by_name["test_ranks_wait_for_different_collectives"]
    assert "rank 0: passed, rank 1: skipped" in by_name["test_skipped_on_one_rank"]


LEAVE_A_CHILD = """
import os, subprocess, sys, time
print("started", flush=True)
env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
subprocess.Popen(["sleep", "1000"], env=env, start_new_session=True)
time.sleep(1000)
"""


def _of_launches() -> set[int]:
    """The processes that this process's launches have left."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if f"TEST_LAUNCH_OWNER={os.getpid()}".encode() in text:
            found.add(int(path.parent.name))
    return found


def test_a_timeout_ends_all_processes_and_shows_where_they_were():
    started = time.monotonic()
    env = {"TEST_LAUNCH_OWNER": str(os.getpid())}
    result = launch.run_python(LEAVE_A_CHILD, workers=2, env=env, timeout=15, check=False)
    assert time.monotonic() - started < 60
    assert result.problem == "not finished after 15 s; ended"
    assert result.stdout(1) == "started\n"
    assert 'script.py", line 6' in result.stderr(0)
    assert not _of_launches()


def test_a_failing_worker_fails_the_test_with_its_output():
    script = "import os, sys\nprint('told')\nsys.exit('broken' if os.environ['HOROVOD_RANK'] == '1' else 0)\n"
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 1, standard error.*broken"):
        launch.run_python(script, workers=2)
    result = launch.run_python("print('first')\nprint('{\"a\": 1}')\n", workers=1)
    assert (result.returncode, result.json()) == (0, {"a": 1})
