"""Runs pytest cases, scripts and commands on N Horovod workers of this machine, and lets nothing hang.

For authors of tests:

1. Put plain pytest tests into `tests/parallel/cases_NAME.py`; take the fixture `hvd` (Horovod,
   initialised) and assert on every rank. All workers run all cases in the same order; never skip or
   parametrize by rank.
2. In `tests/parallel/test_NAME.py`, after `import launch`: `def test_two_workers():
   launch.run_cases(["cases_NAME.py"], workers=2)`. A launch costs 5 to 20 s, so put many cases into
   one. Each shows in the outer report as `cases_NAME.py::test_x[2 workers]`, failures with every
   failing rank's own traceback, first the rank that failed first.
3. A case that fails on one rank while the others wait for it in a collective: 5 s later Horovod is shut
   down, which makes the others raise, then restarted, and the cases that follow run. So it is with a
   case that takes longer than `case_timeout` seconds (120). Horovod's own stall check never fires with
   Gloo: see worker.py.
4. `launch.run_python("script.py", "--flag", workers=3)` or `launch.run_python(TEXT_OF_A_SCRIPT,
   workers=3)` runs a script on each worker and returns a Result: `.stdout(rank)`, `.stderr(rank)`,
   `.json(rank)` (the last line printed, parsed), `.returncode`. It fails the test on a non-zero exit or
   a timeout unless `check=False`. `launch.run_command` does the same for any program. Neither frees a
   stalled collective: `timeout` ends it.
5. `env={"TF_USE_LEGACY_KERAS": "1"}` adds variables to the workers' environment; all functions take it.
6. Some cases only: `HVD8BIT_CASES="sum and not keras" pytest tests/parallel/test_NAME.py` (as pytest's
   -k).
7. All that the workers print: `pytest -s`, or HVD8BIT_KEEP_OUTPUT=FOLDER to keep it in files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

CASES_TIMEOUT = 1500.0
"""Seconds for a launch of many cases, on a busy machine. A hang ends by `case_timeout`, long before."""

# Marks every process of a launch: horovodrun puts its workers into sessions of their own, so that a signal
# to a process group does not reach them, but all of them inherit this variable.
MARK_VARIABLE = "HVD8BIT_TEST_LAUNCH"

STALL_CHECK = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "10", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
# Several workers share a GPU where there is one; without this the first would take all of its memory.
SHARED_GPU = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}

# Lines that say nothing about a test: TensorFlow's on machines without a GPU, faulthandler's list of modules,
# and pytest's own frames in TensorFlow's "defined at".
NOISE = re.compile(
    r"cuda_(fft|dnn|blas|driver)\.cc|before absl::InitializeLog|^Extension modules: |^E\s*$|"
    r"File \"(<frozen runpy>|.*/(_pytest|pytest|pluggy)/[^\"]*)\", line"
)

TERMINATE_SECONDS = 8  # horovodrun itself gives its workers 5 s between SIGTERM and SIGKILL
TAIL_LINES = 60

# The test of the outer pytest that is running; conftest.py sets it. Cases are reported through it.
outer_test: pytest.Item | None = None


@dataclass
class Result:
    """What a launch did. `problem` is None, or why the launch was ended from here."""

    command: list[str]
    workers: int
    returncode: int
    seconds: float
    launcher_output: str
    outputs: list[tuple[str, str]] = field(repr=False)
    problem: str | None = None

    def stdout(self, rank: int = 0) -> str:
        return self.outputs[rank][0]

    def stderr(self, rank: int = 0) -> str:
        return self.outputs[rank][1]

    def json(self, rank: int = 0) -> Any:
        """The last line that the rank printed to standard output, parsed."""
        lines = self.stdout(rank).strip().splitlines()
        if not lines:
            raise AssertionError(f"rank {rank} printed nothing\n{self.describe()}")
        return json.loads(lines[-1])

    def describe(self) -> str:
        """Everything a reader of a failure needs, by rank."""
        parts = [f"$ {' '.join(self.command)}", self.problem or f"exit status {self.returncode}"]
        parts += [f"after {self.seconds:.1f} s on {self.workers} worker(s)"]
        for rank, (stdout, stderr) in enumerate(self.outputs):
            parts += _titled(f"rank {rank}, standard output", stdout)
            parts += _titled(f"rank {rank}, standard error", stderr)
        parts += _titled("launcher", self.launcher_output)
        return "\n".join(parts)


def _titled(title: str, text: str) -> list[str]:
    lines = [line for line in text.strip().splitlines() if not NOISE.search(line)]
    if not lines:
        return []
    left_out = len(lines) - TAIL_LINES
    if left_out > 0:
        lines = [f"... {left_out} lines left out", *lines[-TAIL_LINES:]]
    return [f"--- {title} ---", *lines]


def run_command(
    *command: str | Path,
    workers: int,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    check: bool = True,
    horovodrun: Sequence[str] = (),
    wrapper: Sequence[str] = (),
    cwd: Path = ROOT,
    watch: Callable[[], str | None] = lambda: None,
) -> Result:
    """Runs `command` on each of `workers` workers under horovodrun and returns its Result.

    `horovodrun` holds further options of horovodrun, `wrapper` a command that runs it. `watch` is called four
    times a second and ends the launch when it returns a reason. With `check` the running test fails, with all
    output, unless every worker exits with status 0.
    """
    folder = Path(tempfile.mkdtemp(prefix="hvd8bit-launch-"))
    try:
        # Each worker's output goes to files of its own: whole lines, nothing interleaved.
        redirect = 'exec "$@" >"$0/$HOROVOD_RANK.out" 2>"$0/$HOROVOD_RANK.err"'
        told = [str(part) for part in command]
        launcher = [
            *wrapper,
            sys.executable,
            "-m",
            "horovod.runner.launch",
            "--gloo",
            "--disable-cache",
            "-np",
            str(workers),
        ]
        launcher += [*horovodrun, "sh", "-c", redirect, str(folder), *told]
        mark = uuid.uuid4().hex
        started = time.monotonic()
        with (folder / "launcher").open("wb") as output:
            process = subprocess.Popen(
                launcher,
                cwd=cwd,
                env=_environment(env or {}, mark),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_no_core_files,
            )
            problem = None
            try:
                problem = _wait(process, started + timeout, timeout, watch)
            finally:
                _end(process, mark, stacks=problem is not None)
        outputs = [(_text(folder / f"{rank}.out"), _text(folder / f"{rank}.err")) for rank in range(workers)]
        result = Result(
            command=["horovodrun", "-np", str(workers), *horovodrun, *told],
            workers=workers,
            returncode=process.returncode,
            seconds=time.monotonic() - started,
            launcher_output=_text(folder / "launcher"),
            outputs=outputs,
            problem=problem,
        )
        _show(result, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if check and (result.problem or result.returncode != 0):
        pytest.fail(result.describe(), pytrace=False)
    return result


def run_python(script: str | Path, *arguments: str | Path, workers: int, **options: Any) -> Result:
    """Runs a Python script on each worker.

    `script` is a path from the repository's root or, where it has a line break, the text of a script. Options
    and result are those of `run_command`.
    """
    if "\n" not in str(script):
        return run_command(sys.executable, script, *arguments, workers=workers, **options)
    with tempfile.TemporaryDirectory(prefix="hvd8bit-script-") as folder:
        path = Path(folder, "script.py")
        path.write_text(str(script), encoding="utf-8")
        return run_command(sys.executable, path, *arguments, workers=workers, **options)


def _environment(extra: Mapping[str, str], mark: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "PYTEST_"))}
    path = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env.update(STALL_CHECK, PYTHONPATH=os.pathsep.join(path), **SHARED_GPU, **QUIET)
    env.update(extra)
    env[MARK_VARIABLE] = mark
    return env


def _no_core_files() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _show(result: Result, folder: Path) -> None:
    keep = os.environ.get("HVD8BIT_KEEP_OUTPUT")
    if keep:
        name = f"{time.strftime('%H%M%S')}-{result.workers}-{uuid.uuid4().hex[:4]}"
        shutil.copytree(folder, Path(keep, name))
    if outer_test is not None and outer_test.config.getoption("capture") == "no":
        print(result.describe())


def _wait(
    process: subprocess.Popen[bytes], deadline: float, timeout: float, watch: Callable[[], str | None]
) -> str | None:
    """Until the launch ends. Returns why it has to be ended, or None."""
    while True:
        try:
            process.wait(timeout=0.25)
            return None
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline:
            return f"not finished after {timeout:.0f} s; ended"
        reason = watch()
        if reason:
            return reason


def _end(process: subprocess.Popen[bytes], mark: str, stacks: bool) -> None:
    """Leaves no process of the launch behind. With `stacks` the workers first print where they are."""
    if stacks:
        for pid in _marked(mark, b"HOROVOD_RANK="):
            _signal(pid, signal.SIGABRT)  # faulthandler prints all threads
        time.sleep(0.5)
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=TERMINATE_SECONDS)
    # Also after a good end: a script may have left children.
    for _ in range(3):
        left = _marked(mark)
        if not left:
            break
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.1)
    process.wait()


def _marked(mark: str, also: bytes = b"") -> list[int]:
    """The processes of a launch."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environ = Path("/proc", entry, "environ").read_bytes()
            except OSError:  # gone, or another user's
                continue
            if wanted in environ and also in environ:
                pids.append(int(entry))
    return pids


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# Cases: pytest inside every worker, reported case by case.


@dataclass
class Case:
    """One case as all ranks saw it."""

    nodeid: str
    location: tuple[str, int | None, str]
    outcome: str  # passed, skipped, xfailed, failed
    seconds: float
    text: str  # why it was skipped or failed


def run_cases(
    files: Sequence[str],
    workers: int,
    env: Mapping[str, str] | None = None,
    timeout: float = CASES_TIMEOUT,
    case_timeout: float = 120,
    label: str = "",
) -> list[Case]:
    """Runs the cases of `files` (of this folder) on each of `workers` workers, in one launch.

    Each case is reported to the outer pytest as a test of its own; the calling test fails when any case did.
    `label` tells launches of the same cases with the same number of workers apart.
    """
    if isinstance(files, str):
        raise TypeError(f'files must be a list of file names, got the string "{files}"; write ["{files}"]')
    reports = Path(tempfile.mkdtemp(prefix="hvd8bit-reports-"))
    try:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "worker",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
        ]
        command += ["-o", "addopts=", "--rootdir", str(ROOT), "--tb=short", "-q", "--capture=sys"]
        if os.environ.get("HVD8BIT_CASES"):
            command += ["-k", os.environ["HVD8BIT_CASES"]]
        command += [str(HERE / name) for name in files]
        path = os.pathsep.join([str(HERE), str(ROOT)])
        result = run_command(
            *command,
            workers=workers,
            env={
                "HVD8BIT_TEST_REPORTS": str(reports),
                "HVD8BIT_TEST_CASE_TIMEOUT": str(case_timeout),
                "PYTHONPATH": path,
                **(env or {}),
            },
            timeout=timeout,
            check=False,
            watch=_idle_watch(reports, case_timeout + 60),  # workers free themselves first, where they can
        )
        events = [_events(reports / f"rank.{rank}.jsonl") for rank in range(workers)]
    finally:
        shutil.rmtree(reports, ignore_errors=True)
    cases = _merge(events, result)
    title = f"{workers} worker{'s' if workers > 1 else ''}{', ' + label if label else ''}"
    _report(cases, title)
    _check(cases, events, result, title)
    return cases


def _idle_watch(reports: Path, limit: float) -> Callable[[], str | None]:
    last = [(-1, time.monotonic())]

    def watch() -> str | None:
        size = sum(path.stat().st_size for path in reports.iterdir())
        if size != last[0][0]:
            last[0] = (size, time.monotonic())
        if time.monotonic() - last[0][1] > limit:
            return f"no rank got on within {limit:.0f} s; ended"
        return None

    return watch


def _events(path: Path) -> list[dict[str, Any]]:
    lines = _text(path).splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _merge(events: list[list[dict[str, Any]]], result: Result) -> list[Case]:
    """Joins what the ranks reported; a case that was started and not finished by all has failed."""
    order: list[str] = []
    for rank_events in events:
        order += [
            event["nodeid"] for event in rank_events if event["event"] == "start" and event["nodeid"] not in order
        ]
    return [_merge_case(nodeid, events, result) for nodeid in order]


def _merge_case(nodeid: str, events: list[list[dict[str, Any]]], result: Result) -> Case:
    outcomes, texts, failed_at, seconds = [], [], [], 0.0
    location: tuple[str, int | None, str] = (nodeid.split("::")[0], None, nodeid.split("::")[-1])
    reason = ""
    for rank_events in events:
        mine = [event for event in rank_events if event.get("nodeid") == nodeid]
        reports = [event for event in mine if event["event"] == "report"]
        seconds = max(seconds, sum(event["duration"] for event in reports))
        if reports:
            path, line, domain = reports[0]["location"]
            location = (path, line, domain)
        failed = [event for event in reports if event["outcome"] == "failed"]
        skipped = [event for event in reports if event["outcome"] == "skipped"]
        freed = [event["text"] for event in mine if event["event"] == "freed"]
        text = ""
        if failed:
            outcome = "failed"
            text = "\n".join([*freed, *(_failure_text(event) for event in failed)])
        elif not any(event["event"] == "finish" for event in mine):
            outcome = "unfinished" if mine else "not started"
            text = result.problem or f"the launch ended with status {result.returncode}"
        elif skipped:
            reason = skipped[0]["text"] or skipped[0]["xfail"] or ""
            outcome = "xfailed" if skipped[0]["xfail"] is not None else "skipped"
        else:
            outcome = "passed"
        outcomes.append(outcome)
        texts.append(text)
        failed_at.append(failed[0]["time"] if failed else float("inf"))
    if len(set(outcomes)) == 1 and outcomes[0] in ("passed", "skipped", "xfailed"):
        return Case(nodeid, location, outcomes[0], seconds, reason)
    lines = [", ".join(f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes))]
    if "failed" not in outcomes and result.returncode == 0:
        lines += ["a case must end alike on all ranks"]
    first_failed_first = sorted(range(len(texts)), key=lambda rank: (failed_at[rank], rank))
    for text in dict.fromkeys(texts[rank] for rank in first_failed_first if texts[rank]):
        ranks = [str(rank) for rank, other in enumerate(texts) if other == text]
        lines += [f"----- rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} -----", text]
    return Case(nodeid, location, "failed", seconds, "\n".join(lines))


def _failure_text(event: dict[str, Any]) -> str:
    lines = [f"(in {event['when']})"] if event["when"] != "call" else []
    lines += [line for line in event["text"].splitlines() if not NOISE.search(line)]
    for title, text in event["sections"]:
        lines += _titled(title, text)
    return "\n".join(lines)


class _CaseFailure:
    """What pytest shows of a failed case: the text, and a line of its summary."""

    def __init__(self, text: str) -> None:
        self._text = text
        errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
        # pytest reads `reprcrash.message`.
        self.reprcrash = SimpleNamespace(message=" - ".join([*errors[:1], text.splitlines()[0]]))

    def toterminal(self, terminal: Any) -> None:
        terminal.line(self._text)

    def __str__(self) -> str:
        return self._text


def _report(cases: list[Case], title: str) -> None:
    """Hands every case to the outer pytest as a result of its own."""
    if outer_test is None:
        return
    # Else the progress shown would exceed 100 %.
    outer_test.session.testscollected += len(cases)
    capture = outer_test.config.pluginmanager.getplugin("capturemanager")
    for case in cases:
        longrepr: Any = None
        if case.outcome == "failed":
            longrepr = _CaseFailure(case.text)
        elif case.outcome == "skipped":
            longrepr = (case.location[0], case.location[1] or 0, case.text)
        path, line, domain = case.location
        report = pytest.TestReport(
            nodeid=f"{case.nodeid}[{title}]",
            location=(path, line, f"{domain}[{title}]"),
            keywords={},
            outcome="skipped" if case.outcome == "xfailed" else case.outcome,  # type: ignore[arg-type]
            longrepr=longrepr,
            when="call",
            duration=case.seconds,
        )
        if case.outcome == "xfailed":
            report.wasxfail = case.text
        with capture.global_and_fixture_disabled():
            outer_test.ihook.pytest_runtest_logreport(report=report)


def _check(cases: list[Case], events: list[list[dict[str, Any]]], result: Result, title: str) -> None:
    """Fails the calling test unless all ranks ran all cases to the end and all passed."""
    errors = {
        event["text"]: None for rank_events in events for event in rank_events if event["event"] == "collect_error"
    }
    failed = [case for case in cases if case.outcome == "failed"]
    done = [event["exitstatus"] for rank_events in events for event in rank_events if event["event"] == "done"]
    ended_well = result.returncode == 0 and not result.problem and len(done) == len(events)
    if ended_well and cases and not failed:
        return
    lines = []
    if failed:
        lines += [f"{len(failed)} of {len(cases)} cases failed on {title}:"]
        lines += [f"  {case.nodeid}" for case in failed]
        if outer_test is None:
            lines += [f"===== {case.nodeid} =====\n{case.text}" for case in failed]
    if ended_well and not cases and os.environ.get("HVD8BIT_CASES") and all(status == 5 for status in done):
        pytest.skip(f"no case matches HVD8BIT_CASES={os.environ['HVD8BIT_CASES']}")
    collected = next((len(e["nodeids"]) for events_of in events for e in events_of if e["event"] == "collected"), 0)
    if collected > len(cases):
        lines += [f"{collected - len(cases)} cases that follow were not run"]
    lines += errors
    if not ended_well or not cases:
        lines += ["" if cases else "no case was run", result.describe()]
    pytest.fail("\n".join(lines).strip(), pytrace=False)
