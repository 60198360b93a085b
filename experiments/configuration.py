"""What there is to run: suites of experiments in YAML files, checked as they are read.

A suite (a file in configurations/) holds experiments; an experiment is one training set-up, which is run once for each
of its arms and seeds. An arm is a way to treat what workers exchange, written as text:

    none                 32 bit
    fp16                 16 bit
    dynamic_tree/1024    8 bit, a scale for each block of 1024 elements
    dynamic_tree/tensor  8 bit, one scale for each tensor's part of a chunk: the paper's scaling by absolute maximum
    mantissa/1e0         8 bit, the paper's exponent offset 10^0
    linear/64/stochastic the same kinds of 8 bit, with stochastic rounding
    linear/64/feedback   the same, with error feedback (mode "data" alone)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from typing import Any

import yaml

from hvd8bit.encoding import Encoding

FOLDER = pathlib.Path(__file__).with_name("configurations")
EXCHANGES = ("rounding", "real")
MODES = ("data", "model", "hybrid")


@dataclasses.dataclass(frozen=True)
class Arm:
    """How exchanged values are treated.

    Attributes:
      text: as above; what tells arms apart.
      encoding: for 8 bits, else None.
      feedback: with error feedback.
    """

    text: str
    encoding: Encoding | None
    feedback: bool = False

    @property
    def title(self) -> str:
        """For tables."""
        if self.encoding is None:
            return {"none": "32 bit", "fp16": "fp16"}[self.text]
        name, scaling, *more = self.text.split("/")
        how = f"blocks of {scaling}"
        if scaling == "tensor":
            how = "one scale per tensor"
        elif scaling.startswith("1e"):
            how = f"exponent offset {int(scaling[2:])}"
        return ", ".join([name, how, *(_IN_TABLES.get(option, option) for option in more)])


_IN_TABLES = {"feedback": "error feedback"}


def parse_arm(text: str) -> Arm:
    """The arm that a text like `dynamic_tree/1024` means.

    Raises:
      ValueError: it means none.
    """
    if text in ("none", "fp16"):
        return Arm(text, None)
    match = re.fullmatch(r"([a-z_]+)/(tensor|\d+|1e-?\d+)(/stochastic)?(/feedback)?", text)
    if match is None:
        raise ValueError(
            "an arm must be none, fp16, or TYPE/BLOCK with a block size, tensor, or an exponent offset like 1e0, and "
            f"after it /stochastic for that rounding and /feedback for error feedback, got {text!r}"
        )
    name, scaling, stochastic, feedback = match.groups()
    how: dict = {"rounding": "stochastic"} if stochastic else {}
    if scaling == "tensor":
        encoding = Encoding(name, block_size=None, **how)
    elif "e" in scaling:
        encoding = Encoding(name, scaling=float(scaling), **how)
    else:
        encoding = Encoding(name, block_size=int(scaling), **how)
    return Arm(text, encoding, bool(feedback))


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One training set-up.

    Attributes:
      suite, name: together they tell experiments apart.
      title: for tables.
      task: model, one of `experiments.models.TASKS`.
      data: one of `experiments.data.DATA`.
      mode: "data": workers exchange gradients; "model": activations and error signals; "hybrid": gradients below,
        activations and error signals above.
      exchange: "rounding": one process, every exchanged value rounded; "real": Horovod workers.
      workers: how many, played or real.
      seeds: of weights, order of the data and dropout; the same for all arms.
      arms: as text; the first is what the others are compared with.
      epochs, batch_size: the batch of all workers together.
      optimizer, learning_rate: a Keras optimizer's name.
      last_epochs: a run's error is the mean over so many last epochs.
      train_examples: only the first so many, 0: all.
      min_elements: smaller tensors are not rounded.
      options: of the task.
    """

    suite: str
    name: str
    title: str
    task: str
    data: str
    mode: str
    workers: int
    seeds: tuple[int, ...]
    arms: tuple[str, ...]
    epochs: int
    batch_size: int
    optimizer: str
    learning_rate: float
    exchange: str = "rounding"
    last_epochs: int = 5
    train_examples: int = 0
    min_elements: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self):
        _one_of(self, "mode", MODES)
        _one_of(self, "exchange", EXCHANGES)
        for key in ("workers", "epochs", "batch_size", "last_epochs"):
            if not isinstance(getattr(self, key), int) or getattr(self, key) < 1:
                raise ValueError(f"{self.id}: {key} must be an integer of at least 1, got {getattr(self, key)!r}")
        if self.batch_size % self.workers:
            raise ValueError(
                f"{self.id}: batch_size must be a multiple of workers={self.workers}, got {self.batch_size}"
            )
        if self.last_epochs > self.epochs:
            raise ValueError(f"{self.id}: last_epochs must be at most epochs={self.epochs}, got {self.last_epochs}")
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds:
            raise ValueError(f"{self.id}: seeds must be different integers, got {list(self.seeds)}")
        if len(set(self.arms)) < len(self.arms) or not self.arms:
            raise ValueError(f"{self.id}: arms must be different, got {list(self.arms)}")
        for arm in self.arms:
            if parse_arm(arm).feedback and self.mode != "data":
                raise ValueError(
                    f"{self.id}: error feedback is for gradients, mode data, got {arm} in mode {self.mode}"
                )

    @property
    def id(self) -> str:
        return f"{self.suite}/{self.name}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of all that makes a run's result what it is: rows of results made with other settings do not count."""
        settings = dataclasses.asdict(self)
        for key in ("suite", "name", "title", "seeds", "arms"):
            del settings[key]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: an experiment, an arm, a seed."""

    experiment: Experiment
    arm: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What tells runs apart: two of the same key are the same run."""
        return (self.experiment.name, self.arm, self.seed, self.experiment.fingerprint)

    def __str__(self):
        return f"{self.experiment.id} {self.arm} seed {self.seed}"


def suites() -> list[str]:
    """Names of the suites there are."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(suite: str) -> list[Experiment]:
    """The experiments of a suite, by name.

    Raises:
      ValueError: there is no such suite, or its file is wrong; the message names the key.
    """
    path = FOLDER / f"{suite}.yaml"
    if not path.exists():
        raise ValueError(f"there is no suite {suite!r}; there are {', '.join(suites())}")
    return parse(suite, path.read_text(encoding="utf-8"))


def parse(suite: str, text: str) -> list[Experiment]:
    """The experiments that the text of a suite's file describes: `defaults`, and `experiments` by name."""
    document = yaml.safe_load(text)
    if not isinstance(document, dict) or set(document) - {"defaults", "experiments"} or not document.get("experiments"):
        raise ValueError(f"suite {suite!r} must hold `experiments` and may hold `defaults`, nothing else")
    experiments = []
    for name, own in document["experiments"].items():
        settings = {**(document.get("defaults") or {}), **(own or {})}
        fields = {field.name: field for field in dataclasses.fields(Experiment)}
        unknown = set(settings) - (set(fields) - {"suite", "name"})
        if unknown:
            raise ValueError(f"{suite}/{name}: unknown {', '.join(sorted(unknown))}; there are {', '.join(fields)}")
        missing = [
            key
            for key, field in fields.items()
            if field.default is dataclasses.MISSING and key not in settings and key not in ("suite", "name")
        ]
        if missing:
            raise ValueError(f"{suite}/{name}: {', '.join(missing)} missing")
        settings["seeds"] = parse_numbers(settings["seeds"])
        settings["arms"] = tuple(settings["arms"])
        settings["learning_rate"] = float(settings["learning_rate"])
        options = settings.get("options") or {}
        settings["options"] = tuple((key, _frozen(options[key])) for key in sorted(options))
        experiments.append(Experiment(suite=suite, name=str(name), **settings))
    return experiments


def parse_numbers(text) -> tuple[int, ...]:
    """`0..4`, `3`, `0,2,5..7`, or a list of integers. Raises ValueError for others."""
    if isinstance(text, list):
        return tuple(int(number) for number in text)
    numbers: list[int] = []
    for part in str(text).split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\.\.(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"seeds must be like 0..4 or 0,2,5, got {text!r}")
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        numbers += range(first, last + 1)
    return tuple(numbers)


def select(what: str, arms: str | None = None, seeds: str | None = None) -> list[Run]:
    """Runs by SUITE or SUITE/EXPERIMENT, all of them or those of some arms and seeds (comma-separated).

    Seed by seed, so that what was run when it was stopped can be compared.

    Raises:
      ValueError: nothing is left, or a name is unknown.
    """
    suite, _, name = what.partition("/")
    chosen = [experiment for experiment in load(suite) if not name or experiment.name == name]
    if not chosen:
        known = ", ".join(experiment.id for experiment in load(suite))
        raise ValueError(f"there is no experiment {what!r}; there are {known}")
    wanted_arms = None if arms is None else arms.split(",")
    wanted_seeds = None if seeds is None else parse_numbers(seeds)
    unknown = set(wanted_arms or ()) - {arm for experiment in chosen for arm in experiment.arms}
    unknown |= {str(seed) for seed in set(wanted_seeds or ()) - {seed for e in chosen for seed in e.seeds}}
    if unknown:
        raise ValueError(
            f"{what} has no {', '.join(sorted(unknown))}: arms and seeds are fixed in "
            f"configurations/{suite}.yaml; python -m experiments list shows them"
        )
    return [
        Run(experiment, arm, seed)
        for experiment in chosen
        for seed in experiment.seeds
        if wanted_seeds is None or seed in wanted_seeds
        for arm in experiment.arms
        if wanted_arms is None or arm in wanted_arms
    ]


def _frozen(value):
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _one_of(experiment: Experiment, key: str, values: tuple[str, ...]) -> None:
    if getattr(experiment, key) not in values:
        raise ValueError(f"{experiment.id}: {key} must be one of {', '.join(values)}, got {getattr(experiment, key)!r}")
