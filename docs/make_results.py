"""Writes the tables and plots of docs/results.md from experiments/results/*.csv.

    python docs/make_results.py

Tables stand between `<!-- table NAME -->` and `<!-- end of table -->`. tests/unit checks that the page's are the CSVs'.
"""

from __future__ import annotations

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments import configuration, statistics, tables  # noqa: E402
from experiments.configuration import Experiment, parse_arm  # noqa: E402
from experiments.results import FOLDER, Results  # noqa: E402

PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "img"
_MARK = re.compile(r"(<!-- table (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def filled(text: str, folder: pathlib.Path = FOLDER) -> str:
    """The page's text with all its tables made anew.

    Raises:
      ValueError: it asks for a table that is not made.
    """
    made = all_tables(folder)

    def fill(match: re.Match) -> str:
        if match[2] not in made:
            raise ValueError(f"no table {match[2]!r}; there are {', '.join(made)}")
        return f"{match[1]}{made[match[2]]}{match[4]}"

    return _MARK.sub(fill, text)


def all_tables(folder: pathlib.Path = FOLDER) -> dict[str, str]:
    """Name -> table in Markdown."""
    stores = {suite: Results(suite, folder) for suite in configuration.suites()}
    experiments = [experiment for suite in stores for experiment in configuration.load(suite)]
    by_id = {experiment.id: experiment for experiment in experiments}
    rows = {experiment.id: stores[experiment.suite].rows_of(experiment) for experiment in experiments}
    made = {
        "progress": tables.progress(experiments, stores),
        "places": tables.places(r for s in stores.values() for r in s.rows()),
    }
    for id_, experiment in by_id.items():
        if experiment.suite not in CASES:
            margin = MARGINS.get(experiment.suite, 0.15)
            made[id_.replace("/", "-")] = tables.comparison(experiment, rows[id_], margin)
            made[f"{id_.replace('/', '-')}-converged"] = tables.converged(experiment, rows[id_])
            if (experiment.exchange, experiment.mode) == ("real", "model"):
                merged = tables.of_merged(experiment, rows[id_])
                made[f"{id_.replace('/', '-')}-merged"] = tables.comparison(experiment, merged, margin)
    paper = [by_id["mnist/data"], by_id["mnist/model"]]
    made["mnist-f"] = tables.f_table(paper, [rows[experiment.id] for experiment in paper])
    for suite in CASES:
        cases = [experiment for experiment in experiments if experiment.suite == suite]
        for what in ("error", "loss"):
            made[f"{suite}-{what}"] = tables.stress(cases, [rows[experiment.id] for experiment in cases], what)
    real = [experiment for experiment in experiments if experiment.exchange == "real"]
    pairs = [(by_id[e.id.removesuffix("_real")], rows[e.id.removesuffix("_real")], e, rows[e.id]) for e in real]
    for suite in PLOTS:
        picture = f"![Differences from 32 bit with their 95 % intervals](img/results-{suite}.png)\n"
        made[f"{suite}-picture"] = (
            picture if _of_picture(suite, folder) else "No picture: fewer than two seeds have been run.\n"
        )
    made["real"] = tables.real_beside_played(pairs)
    return made


CASES = ("stress", "rounding")
"""Suites of small cases with the same arms, which fit into one table."""

MARGINS = {"cifar10": 1.0, "model_parallel": 0.25}
"""Suite -> what counts as no difference, in points."""

PLOTS = {"mnist": (("data", "model"), 0.15), "cifar10": (("hybrid",), 1.0)}
"""Suite -> the experiments in its picture, and the margin that it shows."""


def plots(folder: pathlib.Path = FOLDER) -> None:
    """Pictures of the differences with their intervals, and of the stress set's training losses."""
    for suite, (_, margin) in PLOTS.items():
        with_rows = _of_picture(suite, folder)
        if with_rows:
            _differences(with_rows, margin, IMAGES / f"results-{suite}.png")
    _losses(_of_picture("stress", folder), IMAGES / "results-stress.png")


def _of_picture(suite: str, folder: pathlib.Path) -> list[tuple[Experiment, list]]:
    """The experiments with something to compare, on two seeds at least."""
    store = Results(suite, folder)
    chosen = [e for e in configuration.load(suite) if suite not in PLOTS or e.name in PLOTS[suite][0]]
    with_rows = [(experiment, store.rows_of(experiment)) for experiment in chosen]
    return [
        (e, rows) for e, rows in with_rows if any(len(tables.differences(rows, a, e.arms[0])) > 1 for a in e.arms[1:])
    ]


def _losses(with_rows: list[tuple[Experiment, list]], path: pathlib.Path) -> None:
    """Each run's last training loss over that of 32 bit with the same seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullFormatter

    figure = Figure(figsize=(9, 1 + 2.2 * len(with_rows)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (experiment, rows) in zip(
        figure.subplots(len(with_rows), 1, squeeze=False, sharex=True)[:, 0], with_rows
    ):
        losses = {(row["arm"], row["seed"]): float(row["loss"]) for row in rows}
        for (arm, seed), loss in losses.items():
            beside = losses.get((experiment.arms[0], seed))
            if arm != experiment.arms[0] and beside:
                axes.plot(experiment.arms.index(arm), loss / beside, "o", color="tab:blue", alpha=0.5)
        axes.axhline(1, color="grey", linewidth=1)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high > 5 * low:
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.yaxis.set_minor_locator(MaxNLocator(5))
            axes.yaxis.set_minor_formatter(lambda value, _: f"{value:.4g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
        axes.tick_params(axis="y", which="both", labelsize=7)
        axes.set_title(experiment.title, fontsize=10)
        axes.set_ylabel("loss / 32 bit's")
        names = [arm.replace("/", "\n") for arm in experiment.arms[1:]]
        axes.set_xticks(range(1, len(experiment.arms)), names, fontsize=8)
    figure.savefig(path, dpi=110, format="png", metadata={"Software": None})


def _differences(with_rows: list[tuple[Experiment, list]], margin: float, path: pathlib.Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(with_rows) + 3, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(with_rows), squeeze=False, sharex=True)[0]
    for axes, (experiment, rows) in zip(all_axes, with_rows):
        arms = [arm for arm in experiment.arms[1:] if len(tables.differences(rows, arm, experiment.arms[0])) > 1]
        for place, arm in enumerate(arms):
            result = statistics.paired(tables.differences(rows, arm, experiment.arms[0]), margin)
            axes.errorbar(
                result.mean, -place, xerr=(result.high - result.low) / 2, fmt="o", color="tab:blue", capsize=4
            )
        axes.axvspan(-margin, margin, color="tab:green", alpha=0.12)
        axes.axvline(0, color="grey", linewidth=1)
        axes.set_yticks([-place for place in range(len(arms))], [parse_arm(arm).title for arm in arms])
        axes.set_title(experiment.title, fontsize=10)
        axes.set_xlabel("test error less that of 32 bit, points")
    figure.savefig(path, dpi=130, format="png", metadata={"Software": None})


def main() -> None:
    """Fills the page and draws the plots."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    plots()
    print(f"{PAGE}: written")


if __name__ == "__main__":
    main()
