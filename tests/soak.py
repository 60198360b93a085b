"""What the soak tests leave behind: JSON lines in the folder that HVD8BIT_SOAK names, one file for each kind of test.

`make soak` sets it to out/soak; docs/soak/ keeps the files of the last complete run.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
from typing import Any


def record(kind: str, result: dict[str, Any]) -> None:
    """Adds a line to KIND.jsonl; does nothing without HVD8BIT_SOAK."""
    folder = os.environ.get("HVD8BIT_SOAK")
    if not folder:
        return
    path = pathlib.Path(folder, f"{kind}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {**result, "machine": platform.machine(), "date": datetime.date.today().isoformat()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
