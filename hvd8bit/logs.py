"""What hvd8bit has to say once in a process."""

from __future__ import annotations

import logging

_log = logging.getLogger("hvd8bit")
_logged: set[str] = set()


def log_once(message: str, level: int = logging.WARNING) -> None:
    """Logs it, unless there has been the same message."""
    if message not in _logged:
        _logged.add(message)
        _log.log(level, "hvd8bit: %s", message)


def forget() -> None:
    """Everything may be logged again: for tests."""
    _logged.clear()
