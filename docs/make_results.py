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
        if experiment.suite != "stress":
            margin = 1.0 if experiment.suite == "cifar10" else 0.15
            made[id_.replace("/", "-")] = tables.comparison(experiment, rows[id_], margin)
            made[f"{id_.replace('/', '-')}-converged"] = tables.converged(experiment, rows[id_])
    paper = [by_id["mnist/data"], by_id["mnist/model"]]
    made["mnist-f"] = tables.f_table(paper, [rows[experiment.id] for experiment in paper])
    stress = [experiment for experiment in experiments if experiment.suite == "stress"]
    for what in ("error", "loss"):
        made[f"stress-{what}"] = tables.stress(stress, [rows[experiment.id] for experiment in stress], what)
    real = [experiment for experiment in experiments if experiment.exchange == "real"]
    pairs = [(by_id[e.id.removesuffix("_real")], rows[e.id.removesuffix("_real")], e, rows[e.id]) for e in real]
    made["real"] = tables.real_beside_played(pairs)
    return made


def plots(folder: pathlib.Path = FOLDER) -> None:
    """Pictures of the differences with their intervals, and of the errors over the epochs."""
    for suite, ids, margin in (
        ("mnist", ("data", "model"), 0.15),
        ("cifar10", ("hybrid",), 1.0),
    ):
        store = Results(suite, folder)
        chosen = [experiment for experiment in configuration.load(suite) if experiment.name in ids]
        with_rows = [(experiment, store.rows_of(experiment)) for experiment in chosen]
        if any(len({row["arm"] for row in rows}) > 1 for _, rows in with_rows):
            _differences(with_rows, margin, IMAGES / f"results-{suite}.png")


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
