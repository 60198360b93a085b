"""The pictures that `hvd8bit errors` and `hvd8bit predict` draw, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd8bit.datatypes import DATA_TYPES, codebook
from hvd8bit.errors import error_curve
from hvd8bit.speedup import Verdict

_COLOURS = dict(zip(DATA_TYPES, ("tab:blue", "tab:orange", "tab:green", "tab:red")))
_BIT_STYLES = {32: ("tab:red", "o"), 16: ("tab:orange", "s"), 8: ("tab:blue", "^")}


def errors(path: str) -> None:
    """The codebooks on a logarithmic axis, and the mean relative error over the magnitude below them."""
    figure, (books, curves) = _figure(2, (9, 7), {"height_ratios": (1, 2)}, sharex=True)
    for row, name in enumerate(DATA_TYPES):
        values = codebook(name)
        books.plot(values[values > 0], [row] * int((values > 0).sum()), "|", markersize=14, color=_COLOURS[name])
        magnitudes, percent = error_curve(name)
        curves.plot(magnitudes, percent, color=_COLOURS[name], label=name)
    books.set_yticks(range(len(DATA_TYPES)), DATA_TYPES)
    books.set_ylim(-0.7, len(DATA_TYPES) - 0.3)
    books.set_title("The magnitudes of each data type, but for 0")
    curves.set_xscale("log")
    curves.set_yscale("log")
    curves.set_ylim(0.1, 130)
    curves.set_xlabel("magnitude / scale")
    curves.set_ylabel("mean relative error, %")
    curves.grid(True, which="both", alpha=0.3)
    curves.legend()
    _save(figure, path)


def predictions(path: str, verdicts: Sequence[Verdict], title: str) -> None:
    """Speedup over the number of workers for 32, 16 and 8 bit, with the ideal."""
    figure, (axes,) = _figure(1, (8, 5.5))
    workers = [verdict.workers for verdict in verdicts]
    axes.plot(workers, workers, ":", color="grey", label="ideal")
    for bits in verdicts[0].predictions:
        colour, marker = _BIT_STYLES[bits]
        speedups = [verdict.predictions[bits].speedup for verdict in verdicts]
        axes.plot(workers, speedups, marker=marker, color=colour, label=f"{bits} bit")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("workers")
    axes.set_ylabel("speedup over one worker")
    axes.set_title(title, fontsize=10)
    axes.grid(True, alpha=0.3)
    axes.legend()
    _save(figure, path)


def _figure(rows: int, inches: tuple[float, float], ratios: dict | None = None, **shared: Any) -> Any:
    """A figure and its axes, one below the other."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error
    # No pyplot: no window system is looked for, and it takes half the time to import.
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, squeeze=False, gridspec_kw=ratios, **shared)[:, 0]
    return figure, axes


def _save(figure: Any, path: str) -> None:
    figure.savefig(path, dpi=130, format="png")
