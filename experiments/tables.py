"""What rows of results say, as tables in Markdown: all figures of docs/results.md come from here."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence

from experiments import statistics
from experiments.configuration import Experiment, parse_arm
from experiments.data import TEST_EXAMPLES
from experiments.results import Results, numbers

Row = dict[str, str]
PAPER_F = {"data": "F(4,4) = 0.71, p = 0.59", "model": "F(4,4) = 0.54, p = 0.71"}
"""Dettmers 2016, sec. 3.4, MNIST."""
PAPER_RELATIVE_PERCENT = 2.0
"""Within which the paper finds all types on CIFAR-10."""


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table: the first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, rule, *lines]) + "\n"


def errors_of(rows: Iterable[Row], arm: str) -> dict[int, float]:
    """Seed -> a run's error in percent, of an arm's rows."""
    return {int(row["seed"]): float(row["error_percent"]) for row in rows if row["arm"] == arm}


def of_merged(experiment: Experiment, rows: Iterable[Row]) -> list[Row]:
    """The rows with the errors of the merged models in the place of their own."""
    last = experiment.last_epochs
    found = [(row, numbers(row["merged_errors_percent"])[-last:]) for row in rows]
    return [{**row, "error_percent": f"{sum(errors) / last:.6g}"} for row, errors in found if len(errors) == last]


def differences(rows: Sequence[Row], arm: str, beside: str) -> list[float]:
    """An arm's errors less those of another one, in points, for the seeds that both have."""
    own, other = errors_of(rows, arm), errors_of(rows, beside)
    return [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]


def comparison(experiment: Experiment, rows: Sequence[Row], margin: float) -> str:
    """Each arm's error, its difference from the first arm's, and whether that is surely less than the margin."""
    first = experiment.arms[0]
    heads = [
        "exchanged as",
        "seeds",
        "error, %",
        "deviation",
        "difference, points [95 %]",
        f"TOST ±{margin:g}",
        "its power",
        "relative",
        "s per epoch",
    ]
    lines = []
    for arm in experiment.arms:
        title, errors = parse_arm(arm).title, errors_of(rows, arm)
        if not errors:
            lines.append([title, f"0 of {len(experiment.seeds)}", "not run", *[""] * 6])
            continue
        values = list(errors.values())
        mean = sum(values) / len(values)
        seconds = sorted(float(row["training_seconds_per_epoch"]) for row in rows if row["arm"] == arm)
        line = [title, f"{len(values)} of {len(experiment.seeds)}", f"{mean:.3f}", _deviation(values)]
        paired = differences(rows, arm, first)
        if arm == first or not paired:
            line += ["", "", "", ""]
        else:
            line += _difference(paired, errors_of(rows, first), margin)
        lines.append([*line, f"{seconds[len(seconds) // 2]:.1f}"])
    return markdown(heads, lines)


def _difference(paired: list[float], beside: dict[int, float], margin: float) -> list[str]:
    result = statistics.paired(paired, margin)
    relative = f"{100 * result.mean / (sum(beside.values()) / len(beside)):+.1f} %"
    if result.n < 2:
        return [f"{result.mean:+.3f}", "one seed", "", relative]
    verdict = "passes" if result.equivalent else "**fails**"
    return [
        f"{result.mean:+.3f} [{result.low:+.3f}, {result.high:+.3f}]",
        f"{verdict}, p = {result.tost_p:.2g}",
        f"{result.power:.2f}",
        relative,
    ]


def paper_arms(experiment: Experiment) -> list[str]:
    """32 bit and the types at the paper's scaling, as far as the experiment has them."""
    arms = [(arm, parse_arm(arm).encoding) for arm in experiment.arms]
    return [a for a, e in arms if a == "none" or (e and (e.block_size is None or e.scaling != "absmax"))]


def f_tests(experiment: Experiment, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The F-test over 32 bit and the four types at the paper's scaling, without and with seeds as blocks."""
    arms = paper_arms(experiment)
    errors = [errors_of(rows, arm) for arm in arms]
    seeds = sorted(set.intersection(*(set(of_arm) for of_arm in errors)))
    if len(seeds) < 2:
        return [("F-test", f"not enough runs: {len(seeds)} seeds have all of {', '.join(arms)}")]
    table = [[of_arm[seed] for of_arm in errors] for seed in seeds]
    return [
        (f"F-test, {len(arms)} arms, {len(seeds)} seeds", str(statistics.one_way_f(list(zip(*table))))),
        ("the same, seeds as blocks", str(statistics.blocked_f(table))),
    ]


def f_table(experiments: Sequence[Experiment], rows: Sequence[Sequence[Row]]) -> str:
    """The F-tests of several experiments beside the paper's."""
    lines = [
        [experiment.title, what, value, PAPER_F.get(experiment.mode, "") if number == 0 else ""]
        for experiment, mine in zip(experiments, rows)
        for number, (what, value) in enumerate(f_tests(experiment, mine))
    ]
    return markdown(["", "test", "here", "the paper"], lines)


def converged(experiment: Experiment, rows: Sequence[Row]) -> str:
    """How much errors still fell: the mean over the last epochs less that over as many before them."""
    last = experiment.last_epochs
    lines = []
    for arm in experiment.arms:
        falls = []
        for row in rows:
            errors = numbers(row["errors_percent"])
            if row["arm"] == arm and len(errors) >= 2 * last:
                falls.append(sum(errors[-last:]) / last - sum(errors[-2 * last : -last]) / last)
        if falls:
            result = statistics.paired(falls, 1.0)
            interval = f" [{result.low:+.3f}, {result.high:+.3f}]" if result.n > 1 else ""
            lines.append([parse_arm(arm).title, str(result.n), f"{result.mean:+.3f}{interval}"])
    return markdown(["exchanged as", "seeds", "last less before, points [95 %]"], lines) if lines else "not run\n"


def stress(experiments: Sequence[Experiment], rows: Sequence[Sequence[Row]], what: str) -> str:
    """Cases by arms: what 8 bits change.

    Args:
      experiments, rows: the cases and their rows; the first has all arms.
      what: "error": differences of test errors in points; "loss": of the last training losses in percent, by the mean
        of their ratios' logarithms.

    A difference that is not chance is bold, see `not_chance`. Behind one that is of fewer seeds stands of how many.
    """
    arms = experiments[0].arms
    lines = []
    for experiment, mine in zip(experiments, rows):
        base = _values(mine, arms[0], what)
        line = [experiment.title, str(len(base)) if base else "not run"]
        line.append(_shown_base(base, what))
        paired = {}
        for arm in arms[1:]:
            own = _values(mine, arm, what)
            paired[arm] = [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]
        # One test image in one of the last epochs is the least that errors can differ by.
        step = 100 / TEST_EXAMPLES[experiment.data] / experiment.last_epochs if what == "error" else 0.0
        bold = not_chance(paired, step)
        for arm in arms[1:]:
            if arm not in experiment.arms:
                line.append("–")
                continue
            fewer = f" ({len(paired[arm])})" if 0 < len(paired[arm]) < len(base) else ""
            line.append(_shown_difference(paired[arm], what, arm in bold) + fewer)
        lines.append(line)
    heads = ["case", "seeds", "32 bit", *(arm.replace("/", " ") for arm in arms[1:])]
    return markdown(heads, lines)


def not_chance(paired: dict[str, list[float]], step: float) -> set[str]:
    """The arms whose paired differences are not chance, after Holm's correction: from three pairs on.

    Args:
      paired: arm -> differences.
      step: the least by which they can differ.
    """
    p_values = {
        arm: statistics.paired_p(values, least_sd=step) if all(map(math.isfinite, values)) else 0.0
        for arm, values in paired.items()
        if len(values) >= 3
    }
    return statistics.holm(p_values)


def _values(rows: Iterable[Row], arm: str, what: str) -> dict[int, float]:
    if what == "error":
        return errors_of(rows, arm)
    return {int(row["seed"]): math.log(max(float(row["loss"]), 1e-30)) for row in rows if row["arm"] == arm}


def _shown_base(base: dict[int, float], what: str) -> str:
    if not base:
        return ""
    mean = sum(base.values()) / len(base)
    return f"{mean:.2f} %" if what == "error" else f"{math.exp(mean):.2g}"


def _shown_difference(values: list[float], what: str, bold: bool) -> str:
    if not values:
        return ""
    if not all(map(math.isfinite, values)):
        return "**no number**"
    mean = sum(values) / len(values)
    percent = 100 * math.expm1(mean)
    # What is not chance is not shown as nothing.
    shown = f"{percent:+.1g} %" if bold and abs(percent) < 1 else f"{percent:+.0f} %"
    text = f"{mean:+.2f}" if what == "error" else shown
    return f"**{text}**" if bold else text


def real_beside_played(pairs: Sequence[tuple[Experiment, Sequence[Row], Experiment, Sequence[Row]]]) -> str:
    """Errors of real workers beside those of the one process that plays them, for the runs that both have."""
    lines = []
    for _, rows_played, real, rows_real in pairs:
        for arm in real.arms:
            a = {int(row["seed"]): row for row in rows_played if row["arm"] == arm}
            b = {int(row["seed"]): row for row in rows_real if row["arm"] == arm}
            seeds = sorted(a.keys() & b.keys())
            line = [real.title, parse_arm(arm).title, f"{len(seeds)} of {len(real.seeds)}"]
            if not seeds:
                lines.append([*line, "not run", "", "", ""])
                continue
            errors = [(float(a[s]["error_percent"]), float(b[s]["error_percent"])) for s in seeds]
            same = sum(a[seed]["weights"] == b[seed]["weights"] for seed in seeds)
            means = [sum(values) / len(seeds) for values in zip(*errors)]
            largest = max(abs(x - y) for x, y in errors)
            lines.append(
                [*line, f"{means[0]:.3f}", f"{means[1]:.3f}", f"{largest:.3f}", f"{same} of {len(seeds)} runs"]
            )
    heads = ["", "exchanged as", "seeds", "played, %", "real, %", "largest difference", "weights equal bit for bit"]
    return markdown(heads, lines)


def progress(experiments: Sequence[Experiment], stores: dict[str, Results]) -> str:
    """How much of each experiment has been run, and what the rest would take at the speed of these runs."""
    lines = []
    for experiment in experiments:
        rows = stores[experiment.suite].rows_of(experiment)
        total = len(experiment.arms) * len(experiment.seeds)
        seconds = [float(row["training_seconds_per_epoch"]) for row in rows]
        rest = (total - len(rows)) * experiment.epochs
        hours = "?" if rest else ""
        if seconds and rest:
            took = rest * sum(seconds) / len(seconds) / 60
            hours = f"{took:.0f} min" if took < 90 else f"{took / 60:.1f} h"
        lines.append([f"`{experiment.id}`", experiment.title, str(experiment.epochs), f"{len(rows)} of {total}", hours])
    return markdown(["", "", "epochs", "runs made", "the others would take"], lines)


def places(rows: Iterable[Row]) -> str:
    """Where the rows were made."""
    found = collections.Counter(
        (row["cpu"], row["cores"], row["threads"], row["versions"], row["commit"]) for row in rows
    )
    lines = [
        [cpu, cores, threads, versions, commit, str(n)]
        for (cpu, cores, threads, versions, commit), n in sorted(found.items())
    ]
    return markdown(["processor", "cores", "threads", "versions", "commit", "runs"], lines) if lines else "none\n"


def _deviation(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    return f"{math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)):.3f}" if len(values) > 1 else ""
