"""`python -m experiments quick`: makes some runs of a table's row anew and compares them with the row."""

from __future__ import annotations

import pathlib

from experiments import statistics, tables
from experiments.configuration import parse_arm, select
from experiments.results import FOLDER, Results

WHAT, ARMS, SEEDS = "mnist/data", ("none", "dynamic_tree/1024"), "0..2"
"""About 10 minutes on a quiet core."""


def compare(here: Results, committed: Results | None = None) -> tuple[list[str], bool]:
    """What the new runs say about the committed rows.

    A mean of few new runs scatters as the row's own do: it is to be within the 95 % interval of a difference of two
    means.

    Args:
      here: the new runs.
      committed: default: the repository's.

    Returns:
      Lines to print, and whether all means agree.
    """
    runs = select(WHAT, ",".join(ARMS), SEEDS)
    experiment = runs[0].experiment
    old = (committed or Results(experiment.suite, FOLDER)).rows_of(experiment)
    new = here.rows_of(experiment)
    lines, good = [f"{experiment.title}: error in percent, the table's and made here"], True
    for arm in ARMS:
        a, b = tables.errors_of(old, arm), tables.errors_of(new, arm)
        if len(a) < 2 or not b:
            lines.append(f"{parse_arm(arm).title}: nothing to compare: {len(a)} runs in the table, {len(b)} made here")
            good = False
            continue
        agree, half = statistics.agree(list(b.values()), list(a.values()))
        mean_a, mean_b = sum(a.values()) / len(a), sum(b.values()) / len(b)
        same = _same_weights(old, new, arm)
        lines.append(
            f"{parse_arm(arm).title}: {mean_a:.3f} ({len(a)} seeds), {mean_b:.3f} ({len(b)} seeds); "
            f"{'agree' if agree else 'DO NOT AGREE'}: {mean_b - mean_a:+.3f}, 95 % of such differences are within "
            f"±{half:.3f}; the same weights bit for bit in {same} of {len(b)} runs"
        )
        good &= agree
    return lines, good


def folder() -> pathlib.Path:
    """Where the new runs go: not into the repository's results."""
    return pathlib.Path("out") / "experiments-quick"


def _same_weights(old, new, arm: str) -> int:
    weights = {row["seed"]: row["weights"] for row in old if row["arm"] == arm}
    return sum(row["weights"] == weights.get(row["seed"]) for row in new if row["arm"] == arm)
