"""A worker that the others leave alone: it notices, says so, and ends the job instead of waiting for ever."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence

_log = logging.getLogger("hvd8bit")

STALL_VARIABLE = "HVD8BIT_STALL_TIMEOUT_SECONDS"
STALL_TIMEOUT_S = 600.0
STALL_WARNING_S = 30.0


def stall_timeout_s() -> float:
    """How long a worker waits for the others to compare a new plan: `HVD8BIT_STALL_TIMEOUT_SECONDS`; 0: for ever.

    Raises:
      ValueError: the variable holds no number of at least 0.
    """
    text = os.environ.get(STALL_VARIABLE)
    if not text:
        return STALL_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{STALL_VARIABLE} must be a number of seconds, 0 to wait for ever, got {text!r}")
    return seconds


@contextlib.contextmanager
def watched(comm, name: str, in_steps: Sequence[str]) -> Iterator[None]:
    """Inside, a worker that the others leave alone notices, says so, and ends the job instead of waiting for ever.

    Horovod's own check of stalled tensors never fires with Gloo. So this worker also starts collectives with the names
    of those in which workers wait that go on with what was compared before, but of another dtype. If they do wait
    there, Horovod finds that the dtypes differ. If they come here, they start the same ones. A worker that does
    something else altogether is left to the clock: `stall_timeout_s()`.
    """
    limit = stall_timeout_s()
    done, cause = threading.Event(), []
    waits = f"rank {comm.global_rank()} has a new list of gradients, kind of step, settings or metrics ({name})"
    remedy = "let all workers run the same steps"

    def end(reason: str) -> None:
        cause.append(f"{waits}, and {reason}; {remedy}. Horovod has been shut down")
        _log.error("hvd8bit: %s", cause[0])
        comm.end_job()

    def watch() -> None:
        warn_after = min(STALL_WARNING_S, limit / 2) if limit else STALL_WARNING_S
        if done.wait(warn_after):
            return
        _log.warning(
            "hvd8bit: %s and waits %.0f s for the others to compare it. Unless they are merely slow, %s",
            *(waits, warn_after, remedy),
        )
        if limit and not done.wait(limit - warn_after):
            end(f"the others have not come to compare it for {limit:.0f} s ({STALL_VARIABLE}; 0: wait for ever)")

    def meet(in_step: str) -> None:
        try:
            comm.gather_size(0, in_step)
        except Exception as error:
            if "Mismatched" in str(error):
                end("others go on with an older one instead of comparing it")

    threads = [threading.Thread(target=meet, args=(in_step,), daemon=True) for in_step in in_steps]
    watcher = threading.Thread(target=watch, daemon=True)
    for thread in [watcher, *threads]:
        thread.start()
    try:
        yield
        for thread in threads:
            thread.join()
    except Exception as error:
        for thread in threads:
            thread.join(STALL_WARNING_S)
        if cause:
            raise RuntimeError(cause[0]) from error
        raise
    finally:
        done.set()
        watcher.join()
    if cause:
        raise RuntimeError(cause[0])
