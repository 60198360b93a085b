"""What the commands share: output, and arguments with units."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, Callable, TypeVar

_T = TypeVar("_T")


class Parser(argparse.ArgumentParser):
    """One whose options take -5ms for a value, so that the option's own check can say what is wrong with it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")


class UsageError(Exception):
    """What was asked for cannot be done as it was asked; exit status 2."""


def checked(function: Callable[[], _T]) -> _T:
    """What `function` returns; a ValueError or TypeError of it is the user's to mend."""
    try:
        return function()
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def write_json(path: str, content: Any) -> None:
    """Writes `content` to the file `path`, or to standard output where it is `-`."""
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    with open(path, "w", encoding="utf-8") as out:
        out.write(text)


def document(results: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The JSON form: the records under `results`, beside `machine` and `versions`."""
    from hvd8bit.bench import machine

    return {"machine": machine.machine(), "versions": machine.versions(), "results": results, **more}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops what goes to standard error meanwhile: TensorFlow logs lines that read like errors on import."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def add_outputs(parser: argparse.ArgumentParser, picture: str) -> None:
    parser.add_argument("--json", metavar="PATH", help="write the numbers to PATH, - for standard output")
    parser.add_argument("--plot", metavar="PATH.png", help=f"draw {picture}")


def check_outputs(args: argparse.Namespace) -> None:
    """Whether what was asked for can be written, before the work is done. Raises UsageError."""
    for name in ("json", "plot", "output", "markdown"):
        path = getattr(args, name, None)
        if path is None or (name == "json" and path == "-"):
            continue
        problem = _unwritable(path)
        if problem:
            raise UsageError(f"--{name} must be a path that can be written, got {path!r}: {problem}")
    if getattr(args, "plot", None) is not None:
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            raise UsageError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error


def _unwritable(path: str) -> str | None:
    """Why nothing can be written there, and what to do; None where it can."""
    if os.path.isdir(path) or not os.path.basename(path):
        return "name a file, not a folder"
    if os.path.exists(path):
        return None if os.access(path, os.W_OK) else "this file is not yours to write; name another one"
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f"there is no folder {folder!r}; make it first"
    return (
        None if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder!r} is not yours to write; name another"
    )


LARGEST_COUNT = 10**12
"""Of workers, samples, elements: beyond all that there is, and products of them are still numbers."""


def count(text: str) -> int:
    """An integer of at least 1, and at most `LARGEST_COUNT`."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {shown!r}")
    if value > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST_COUNT:,}, got {shown!r}")
    return value


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def block_size(text: str) -> int | None:
    """Of an encoding: `none` is None."""
    from hvd8bit.encoding import BLOCK_SIZE_STEP, MAX_BLOCK_SIZE, MIN_BLOCK_SIZE

    if text == "none":
        return None
    value = int(text) if re.fullmatch("[0-9]{1,9}", text) else 0
    if value not in range(MIN_BLOCK_SIZE, MAX_BLOCK_SIZE + 1, BLOCK_SIZE_STEP):
        raise argparse.ArgumentTypeError(
            f"must be a multiple of {BLOCK_SIZE_STEP} in [{MIN_BLOCK_SIZE}, {MAX_BLOCK_SIZE}], or none, got {text!r}"
        )
    return value


def bandwidth(text: str) -> float:
    """Bytes per second."""
    from hvd8bit.speedup import units

    return _argument(units.bandwidth, text)


def seconds(text: str) -> float:
    """Above 0."""
    from hvd8bit.speedup import units

    return _argument(units.seconds, text)


def seconds_or_zero(text: str) -> float:
    from hvd8bit.speedup import units

    return _argument(lambda value: units.seconds(value, zero=True), text)


def _argument(parse: Callable[[str], float], text: str) -> float:
    # argparse shows the text of its own error alone.
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
