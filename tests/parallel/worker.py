"""The pytest plugin inside every worker: reports per rank, and keeps the ranks in step.

`launch.run_cases` loads it with `-p worker`. Each rank appends one JSON object per line to
`rank.N.jsonl` in the folder named by HVD8BIT_TEST_REPORTS, so that what a killed or crashed rank did up
to its end is known.

After every case each rank waits until all ranks have finished it. The ranks wait by reading each
other's report files and not by a collective: a rank that failed early then starts no collective that
could pair with one the others are still in. Those others are freed by shutting Horovod down, which
makes every waiting collective raise, and Horovod is started afresh for the cases that follow. Horovod's
own stall check would not do: with the Gloo controller of Horovod 0.28.1 it never fires (its list of
ranks has room reserved but size 0, so no rank is ever missing).
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPORTS_VARIABLE = "HVD8BIT_TEST_REPORTS"
CASE_TIMEOUT_VARIABLE = "HVD8BIT_TEST_CASE_TIMEOUT"
POLL_SECONDS = 0.005
# How long a rank whose case failed leaves the others to end by themselves.
PATIENCE_SECONDS = 5
# What Horovod's errors say once its background thread has ended. All collectives fail until a new hvd.init().
OWN_CODE = re.compile(
    rf"{re.escape(str(Path(__file__).resolve().parents[2]))}/(hvd8bit|examples|experiments|tests)/(?!parallel/worker)"
)
SHUT_DOWN_SIGNS = ("has been shut down", "HorovodInternalError", "Horovod has not been initialized")


class Peer:
    """Reads one rank's report file as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.collected: list[str] | None = None
        self.finished = 0
        self.restarted = 0
        self.failures: dict[str, str] = {}

    def read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        complete = text.rfind(b"\n") + 1
        self._position += complete
        for line in text[:complete].splitlines():
            event = json.loads(line)
            if event["event"] == "collected":
                self.collected = event["nodeids"]
            elif event["event"] == "report" and event["outcome"] == "failed":
                self.failures[event["nodeid"]] = event["text"]
            elif event["event"] == "finish":
                self.finished += 1
            elif event["event"] == "restart":
                self.restarted += 1


class Worker:
    """One rank's side of a launch."""

    def __init__(self, folder: Path, rank: int, size: int, case_timeout: float) -> None:
        self._lock = threading.Lock()
        self._hostname = os.environ["HOROVOD_HOSTNAME"]
        self._case_timeout = case_timeout
        self._watchdog: threading.Timer | None = None
        self._file = (folder / f"rank.{rank}.jsonl").open("a", encoding="utf-8")
        self._peers = [Peer(folder / f"rank.{peer}.jsonl") for peer in range(size)]
        self._finished = 0
        self._restarted = 0
        self._failed = ""

    def _write(self, event: str, **values: Any) -> None:
        with self._lock:  # the watchdog writes from a thread of its own
            self._file.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")
            self._file.flush()

    def _wait(self, ready: Callable[[Peer], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Until `ready(peer)` holds for every rank. The launcher ends a wait that lasts too long."""
        for peer in self._peers:
            while True:
                peer.read()
                if ready(peer):
                    break
                meanwhile()
                time.sleep(POLL_SECONDS)

    def _free(self, nodeid: str, reason: str) -> None:
        """Makes every collective that any rank waits in raise."""
        horovod = sys.modules.get("horovod.tensorflow")
        if horovod is not None and horovod.is_initialized():
            text = f"Horovod was shut down here: {reason}"
            # What the case raises then says where it ended, not where it waited.
            frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
            if own := [frame for frame in frames if OWN_CODE.match(frame.filename)]:
                text += "; it was in\n" + "".join(traceback.format_list(own))
            self._write("freed", nodeid=nodeid, text=text)
            horovod.shutdown()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        nodeids = [item.nodeid for item in session.items]
        self._write("collected", nodeids=nodeids)
        self._wait(lambda peer: peer.collected is not None)
        for rank, peer in enumerate(self._peers):
            if peer.collected != nodeids:
                differing = sorted(set(peer.collected or []) ^ set(nodeids)) or ["the same cases in another order"]
                pytest.exit(f"rank {rank} collected other cases than this rank: {differing[:5]}", returncode=3)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("collect_error", nodeid=report.nodeid, text=report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("start", nodeid=nodeid)
        limit = self._case_timeout
        reason = f"the case took longer than {limit:.0f} s on this rank (run_cases(case_timeout=...))"
        self._watchdog = threading.Timer(limit, self._free, (nodeid, reason))
        self._watchdog.daemon = True
        self._watchdog.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = report.nodeid
        text = report.longreprtext if report.failed else ""
        if report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2]
        self._write(
            "report",
            nodeid=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            text=text,
            xfail=getattr(report, "wasxfail", None),
            sections=[list(section) for section in report.sections] if report.failed else [],
            location=list(report.location),
            duration=report.duration,
        )

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog.join()
        self._finished += 1
        self._write("finish", nodeid=nodeid)
        failed_at = time.monotonic() if self._failed == nodeid else float("inf")

        def free_the_others() -> None:
            if time.monotonic() > failed_at + PATIENCE_SECONDS:
                self._free(nodeid, "the case failed on this rank, and others were still in it")

        self._wait(lambda peer: peer.finished >= self._finished, meanwhile=free_the_others)
        failures = [peer.failures[nodeid] for peer in self._peers if nodeid in peer.failures]
        if any(sign in text for text in failures for sign in SHUT_DOWN_SIGNS):
            self._restart_horovod()

    def _restart_horovod(self) -> None:
        """All ranks come here after the same case, since all read the same reports."""
        horovod = sys.modules.get("horovod.tensorflow")
        if horovod is None:
            return
        horovod.shutdown()
        self._restarted += 1
        # The rendezvous server may keep the addresses of the last meeting on a host: meet under a new name.
        os.environ["HOROVOD_HOSTNAME"] = f"{self._hostname}-{self._restarted}"
        self._write("restart")
        self._wait(lambda peer: peer.restarted >= self._restarted)
        horovod.init()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._write("done", exitstatus=int(exitstatus))
        if exitstatus == pytest.ExitCode.TESTS_FAILED and not session.shouldfail:
            # horovodrun kills the others when one ends with an error. The reports tell what failed.
            session.exitstatus = pytest.ExitCode.OK


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(os.environ[REPORTS_VARIABLE])
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    case_timeout = float(os.environ[CASE_TIMEOUT_VARIABLE])
    config.pluginmanager.register(Worker(folder, rank, size, case_timeout), "hvd8bit-worker")
