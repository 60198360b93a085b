"""Finished runs: one row each, in a CSV file for each suite, which is committed.

A row holds what was run, what came of it, and where: versions, processor, threads, commit. It is added when its run
ends, under a lock, by writing the file anew beside the old one: a killed run leaves nothing, and several runners may
share a file.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import fcntl
import io
import os
import pathlib
import subprocess
from collections.abc import Iterable, Iterator

from experiments.configuration import Experiment, Run

FOLDER = pathlib.Path(__file__).with_name("results")
ROOT = pathlib.Path(__file__).resolve().parents[1]

COLUMNS = (
    "experiment",
    "arm",
    "seed",
    "error_percent",  # mean over the last epochs
    "loss",  # of the training, last epoch
    "epochs",
    "workers",
    "exchange",
    "errors_percent",  # of each epoch, blanks between
    "merged_errors_percent",  # of real workers' models, merged into one; see `experiments.training.Epoch`
    "losses",
    "training_seconds",
    "training_seconds_per_epoch",  # median
    "weights",  # SHA-256, the first 16 digits
    "fingerprint",  # of the experiment's settings
    "commit",
    "date",
    "cpu",
    "cores",
    "threads",
    "versions",
)


_LATER = ("merged_errors_percent",)
"""Columns that files which were written before do not have."""


class Results:
    """The rows of a suite.

    Args:
      suite: its name.
      folder: where its CSV file is or will be.
    """

    def __init__(self, suite: str, folder: pathlib.Path = FOLDER):
        self.path = pathlib.Path(folder) / f"{suite}.csv"

    def rows(self) -> list[dict[str, str]]:
        """All rows, in the file's order. A line that was cut off is none.

        Raises:
          ValueError: the file has other columns.
        """
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(io.StringIO(whole))
        if tuple(reader.fieldnames or ()) not in (COLUMNS, tuple(name for name in COLUMNS if name not in _LATER)):
            raise ValueError(f"{self.path}: columns must be {', '.join(COLUMNS)}; move the file away")
        return [{column: row.get(column, "") for column in COLUMNS} for row in reader]

    def rows_of(self, experiment: Experiment) -> list[dict[str, str]]:
        """Those made with the experiment's settings as they are now, by seed and in the order of its arms."""
        mine = [
            row
            for row in self.rows()
            if (row["experiment"], row["fingerprint"]) == (experiment.name, experiment.fingerprint)
            and row["arm"] in experiment.arms
            and int(row["seed"]) in experiment.seeds
        ]
        return sorted(mine, key=lambda row: (int(row["seed"]), experiment.arms.index(row["arm"])))

    def finished(self) -> set[tuple[str, str, int, str]]:
        """Keys of the runs that have a row; see `Run.key`."""
        return {(row["experiment"], row["arm"], int(row["seed"]), row["fingerprint"]) for row in self.rows()}

    def add(self, row: dict) -> None:
        """Adds a row; one of the same run stays the only one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock():
            rows = [old for old in self.rows() if _key(old) != _key(row)]
            rows.append({column: str(row[column]) for column in COLUMNS})
            rows.sort(key=lambda r: (r["experiment"], int(r["seed"]), r["arm"], r["fingerprint"]))
            new = self.path.with_name(f".{self.path.stem}.{os.getpid()}.new")
            with new.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            os.replace(new, self.path)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with self.path.with_name(f".{self.path.stem}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def row(
    run: Run,
    *,
    errors_percent,
    losses,
    training_seconds,
    error_percent: float,
    weights: str,
    place: dict,
    merged_errors_percent=(),
) -> dict:
    """A run's row.

    Args:
      run: what was run.
      errors_percent, losses, training_seconds, merged_errors_percent: of each epoch; the last of models that were
        merged, else empty.
      error_percent: the run's error.
      weights: digest of the trained weights.
      place: what `environment` says.
    """
    seconds = sorted(training_seconds)
    return {
        "experiment": run.experiment.name,
        "arm": run.arm,
        "seed": run.seed,
        "error_percent": f"{error_percent:.6g}",
        "loss": f"{losses[-1]:.6g}",
        "epochs": len(errors_percent),
        "workers": run.experiment.workers,
        "exchange": run.experiment.exchange,
        "errors_percent": _joined(errors_percent, "{:.6g}"),
        "merged_errors_percent": _joined(merged_errors_percent, "{:.6g}"),
        "losses": _joined(losses, "{:.6g}"),
        "training_seconds": f"{sum(seconds):.1f}",
        "training_seconds_per_epoch": f"{seconds[len(seconds) // 2]:.3g}",
        "weights": weights[:16],
        "fingerprint": run.experiment.fingerprint,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        **place,
    }


def environment() -> dict:
    """Where runs are made: processor, cores, threads, versions, commit."""
    import tensorflow as tf

    from hvd8bit.bench.machine import machine, versions

    on = machine()
    threads = tf.config.threading.get_intra_op_parallelism_threads() or on["cores"]
    return {
        "cpu": on["cpu"],
        "cores": on["cores"],
        "threads": threads,
        "versions": "; ".join(f"{name} {version}" for name, version in versions().items()),
        "commit": commit(),
    }


def commit() -> str:
    """The commit that is checked out; with + where code was changed since, results and pages aside."""
    try:
        name = _git("rev-parse", "--short=10", "HEAD")
        code = ["experiments", "hvd8bit", "tf_ops", ":!experiments/results"]
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *code)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed else "")


def numbers(text: str) -> list[float]:
    """What a column of several numbers holds."""
    return [float(number) for number in text.split()]


def _git(*arguments: str) -> str:
    made = subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True)
    return made.stdout.strip()


def _key(row: dict) -> tuple:
    return (row["experiment"], row["arm"], int(row["seed"]), row["fingerprint"])


def _joined(values: Iterable[float], form: str) -> str:
    return " ".join(form.format(value) for value in values)
