"""Network namespaces and what runs in them: commands, names, ends. `netlab` makes hosts of them."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

# `ip netns exec NAME` mounts what lies in FILES/NAME over /etc.
FILES = Path("/etc/netns")

# A namespace's name tells which process made it, so that the leavings of dead processes can be told apart:
# PREFIX.PID.STARTED.NUMBER.ROLE, with the process's start in clock ticks since boot (pids are used again).
PREFIX = "hvd8bit"


class NetLabError(RuntimeError):
    """A command that sets up a lab failed; the text holds the command and what it said."""


def ip(*arguments: str) -> str:
    """What the command `ip` says."""
    return call(["ip", *arguments])


def call(command: Sequence[str]) -> str:
    """What the command says on standard output. Raises NetLabError if it fails."""
    told = subprocess.run(command, check=False, capture_output=True, text=True)
    if told.returncode != 0:
        raise NetLabError(f"{shlex.join(command)}: {told.stderr.strip() or f'exit status {told.returncode}'}")
    return told.stdout


def remove_leavings() -> None:
    """Takes down the labs of processes that have died. Those of living processes are left alone."""
    names = {line.split()[0] for line in ip("netns", "list").splitlines() if line}
    if FILES.is_dir():
        names |= {path.name for path in FILES.iterdir()}
    remove([name for name in names if name.startswith(PREFIX + ".") and not owner_lives(name)])


def owner_lives(name: str) -> bool:
    """Whether the process that made the namespace still runs."""
    pid, since = name.split(".")[1:3]
    return started(int(pid)) == int(since)


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none."""
    text = text_of(Path("/proc", str(pid), "stat"))
    # The second field, the command in parentheses, may hold spaces; the start is the 22nd field.
    return int(text.rpartition(")")[2].split()[19]) if text else None


def remove(namespaces: Sequence[str]) -> None:
    """Ends what runs in the namespaces and deletes them, as far as they exist; goes on after errors."""
    existing = [name for name in namespaces if Path("/run/netns", name).exists()]
    kill(existing, stay=set())
    for name in existing:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    for name in namespaces:
        shutil.rmtree(FILES / name, ignore_errors=True)


def kill(namespaces: Sequence[str], stay: set[int]) -> None:
    """Ends all processes in the namespaces but those in `stay`."""
    for _ in range(20):
        found = [pids(name) - stay for name in namespaces]
        if not any(found):
            return
        for pid in set().union(*found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def pids(namespace: str) -> set[int]:
    """The processes in a namespace."""
    told = subprocess.run(["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True)
    found = {int(pid) for pid in told.stdout.split()}
    # A child that has ended stays until its parent has asked for its status; it cannot be killed any more.
    return {pid for pid in found if " Z " not in text_of(Path("/proc", str(pid), "stat")).rpartition(")")[2][:3]}


def text_of(path: Path) -> str:
    """What a file holds; nothing if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
