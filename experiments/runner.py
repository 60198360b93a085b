"""Runs what has no row yet, shows how far it is, and adds a row for each run that ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from experiments import data, results
from experiments.configuration import Run
from experiments.results import Results
from experiments.training import Training, Worker, mean_error

SECONDS_BETWEEN_LINES = 30


def left(runs: Sequence[Run], store: Results) -> list[Run]:
    """The runs that have no row yet."""
    finished = store.finished()
    return [run for run in runs if run.key not in finished]


def run_all(
    runs: Sequence[Run],
    store: Results,
    data_dir,
    *,
    worker: Worker | None = None,
    console: Console | None = None,
    limit_s: float = math.inf,
) -> int:
    """Runs one after another; those that have a row are left out.

    Args:
      runs: what to run; with Horovod the same on all workers.
      store: where the rows go.
      data_dir: see `experiments.data.load`.
      worker: with `exchange: real` which one this is; rank 0 writes and prints.
      console: where progress goes: a bar on a terminal, else now and then a line.
      limit_s: start no run after so many seconds; not with Horovod.

    Returns:
      How many were not run for lack of time.

    Raises:
      ValueError: there is a limit, and a worker.
    """
    if worker is not None and limit_s < math.inf:
        raise ValueError(
            f"--minutes must be left out under horovodrun, whose workers have clocks of their own, got "
            f"{limit_s / 60:g}: select runs by --arms or --seeds"
        )
    first = worker is None or worker.rank == 0
    todo = _agreed(left(runs, store), worker)
    started = time.perf_counter()
    loaded: dict[tuple, data.Data] = {}
    place = results.environment()
    with Show(todo, len(runs) - len(todo), (console or Console()) if first else Console(quiet=True)) as show:
        for number, run in enumerate(todo):
            if time.perf_counter() - started > limit_s:
                return len(todo) - number
            experiment = run.experiment
            key = (experiment.data, experiment.train_examples)
            if key not in loaded:
                loaded[key] = data.load(experiment.data, data_dir, experiment.train_examples)
            finished = _run(run, loaded[key], worker, show, place)
            if first:
                store.add(finished)
            show.finished(run, finished)
    return 0


def _run(run: Run, loaded: data.Data, worker, show: Show, place: dict) -> dict:
    import keras

    keras.backend.clear_session()
    training = Training(run.experiment, run.arm, run.seed, loaded, worker)
    errors, losses, seconds, merged = [], [], [], []
    for epoch in training.epochs():
        errors.append(epoch.error_percent)
        losses.append(epoch.loss)
        seconds.append(epoch.training_seconds)
        if epoch.merged_error_percent is not None:
            merged.append(epoch.merged_error_percent)
        show.epoch(run, len(errors), epoch.error_percent, epoch.seconds)
    return results.row(
        run,
        errors_percent=errors,
        losses=losses,
        training_seconds=seconds,
        merged_errors_percent=merged,
        error_percent=mean_error(errors, run.experiment.last_epochs),
        weights=training.digest(),
        place=place,
    )


def _agreed(todo: list[Run], worker: Worker | None) -> list[Run]:
    """What rank 0 has to do: the file may have changed between two workers' looks at it."""
    if worker is None:
        return todo
    import horovod.tensorflow as hvd

    keys = hvd.broadcast_object([run.key for run in todo], 0, name="experiments_todo")
    by_key = {run.key: run for run in todo}
    missing = [key for key in keys if key not in by_key]
    if missing:
        raise RuntimeError(f"workers see different results: rank 0 runs {missing[0]}, rank {worker.rank} has its row")
    return [by_key[key] for key in keys]


class Show:
    """Progress with remaining time.

    The time is that of the epochs so far of the same experiment and exchange of the same width, else of the same
    experiment, else of all.
    """

    def __init__(self, todo: Sequence[Run], done: int, console: Console, clock: Callable[[], float] = time.monotonic):
        self._console, self._clock = console, clock
        self._left = {run.key: run.experiment.epochs for run in todo}
        self._runs = {run.key: run for run in todo}
        self._done, self._total = done, done + len(todo)
        self._seconds: dict[str, list[float]] = {}
        self._last_line = -math.inf
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("runs", total=self._total, completed=done, note="")

    def __enter__(self):
        self._bar.start()
        if not self._console.is_terminal:
            self._say(f"{self._done} of {self._total} runs have been made already")
            self._last_line = -math.inf
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def epoch(self, run: Run, number: int, error_percent: float, seconds: float) -> None:
        """An epoch of a run has ended."""
        self._left[run.key] = run.experiment.epochs - number
        self._seconds.setdefault(run.experiment.id, []).append(seconds)
        text = f"{run}: epoch {number}/{run.experiment.epochs}, test error {error_percent:.2f} %"
        self._bar.update(self._task, description=text, note=f"{self.remaining()} left")
        if not self._console.is_terminal and self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._say(f"{text}; {self._done} of {self._total} runs done, {self.remaining()} left")

    def finished(self, run: Run, row: dict) -> None:
        """A run has ended."""
        self._left.pop(run.key)
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        text = f"{run}: error {float(row['error_percent']):.3f} % in {row['training_seconds']} s"
        self._say(f"{text}; {self._done} of {self._total} runs done, {self.remaining()} left")

    def remaining(self) -> str:
        """How long it will take, in words; "?" before the first epoch has ended."""
        everything = [s for seconds in self._seconds.values() for s in seconds]
        if not everything:
            return "?"
        total = 0.0
        for key, epochs in self._left.items():
            known = self._seconds.get(self._runs[key].experiment.id, everything)
            total += epochs * sum(known) / len(known)
        return in_words(total)

    def _say(self, text: str) -> None:
        self._last_line = self._clock()
        self._console.print(text, highlight=False, soft_wrap=True)


def in_words(seconds: float) -> str:
    """A duration: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
