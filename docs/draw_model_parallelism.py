"""Draws docs/img/model-parallelism.png and prints the page's table of bytes: python docs/draw_model_parallelism.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

COLOURS = ("#4477aa", "#cc8833")  # of the two workers' parts
GREY = "#bbbbbb"  # what both have
RED = "#aa3355"  # what travels
HEIGHT = 0.8
ROW = 1.5  # from worker to worker
BATCH, BLOCK = 128, 1024
LAYERS = ((784, 1024), (4096, 4096), (9216, 4096))


def main() -> None:
    figure, axes = plt.subplots(3, 1, figsize=(9.5, 9.2))
    by_output(axes[0])
    by_input(axes[1])
    chained(axes[2])
    for plot in axes:
        plot.set_xlim(-1.6, 10.6)
        plot.set_ylim(-2.5, 2.0)
        plot.axis("off")
    path = Path(__file__).parent / "img" / "model-parallelism.png"
    figure.savefig(path, dpi=110, bbox_inches="tight", pad_inches=0.05)
    for inputs, outputs in LAYERS:
        data, split = (megabytes(n) for n in (data_parallel(inputs, outputs), split_by_output(inputs, outputs)))
        print(f"| {inputs} → {outputs} | {data} | {split} |")


# ---- the table ----


def chunk(elements: int) -> int:
    """Bytes of so many elements in 8 bits."""
    return 64 + -(-elements // 4) * 4 + -(-elements // BLOCK) * 4


def data_parallel(inputs: int, outputs: int, workers: int = 2) -> int:
    """What a worker sends for a layer's gradient in a step."""
    return 2 * (workers - 1) * chunk(inputs * outputs // workers)


def split_by_output(inputs: int, outputs: int, workers: int = 2) -> int:
    """What a worker sends for a layer's activations and error signals in a step."""
    forward = (workers - 1) * chunk(BATCH * outputs // workers)
    return forward + 2 * (workers - 1) * chunk(BATCH * inputs // workers)


def megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


# ---- the figure ----


def by_output(plot) -> None:
    title(plot, "split by output: ColumnParallelDense")
    for worker in range(2):
        name(plot, worker)
        box(plot, 0.0, worker, 1.2, GREY, "x")
        box(plot, 3.0, worker, 1.0, COLOURS[worker], f"x W{'₀₁'[worker]}")
        box(plot, 6.6, worker, 1.0, COLOURS[0], "x W₀")
        box(plot, 7.6, worker, 1.0, COLOURS[1], "x W₁")
        arrow(plot, (1.3, worker), (2.9, worker), "black")
    cross(plot, 4.1, 6.5, "all_gather", "8 bits, stacked")
    plot.text(2.1, 0.75, "copy", ha="center", family="monospace", weight="bold")
    back(plot, "backward: the parts' error signals for x are added up (all_reduce, 8 bits); of y each takes its part")


def by_input(plot) -> None:
    title(plot, "split by input: RowParallelDense")
    for worker in range(2):
        name(plot, worker)
        box(plot, 0.0, worker, 0.6, COLOURS[0] if worker == 0 else GREY, "x₀")
        box(plot, 0.6, worker, 0.6, COLOURS[1] if worker == 1 else GREY, "x₁")
        box(plot, 3.0, worker, 1.3, COLOURS[worker], f"x{'₀₁'[worker]} W{'₀₁'[worker]}")
        box(plot, 6.6, worker, 2.0, GREY, "x₀ W₀ + x₁ W₁")
        arrow(plot, (1.3, worker), (2.9, worker), "black")
    cross(plot, 4.4, 6.5, "all_reduce", "8 bits, added up")
    plot.text(2.1, 0.75, "scatter", ha="center", family="monospace", weight="bold")
    back(plot, "backward: the parts' error signals for x are stacked (all_gather, 8 bits); that of y all have")


def chained(plot) -> None:
    title(plot, "chained: gather_output=False, then input_is_parallel=True")
    for worker in range(2):
        name(plot, worker)
        index = "₀₁"[worker]
        box(plot, 0.0, worker, 1.2, GREY, "x")
        box(plot, 2.3, worker, 1.5, COLOURS[worker], f"h{index} = f(x W{index})")
        box(plot, 4.9, worker, 1.0, COLOURS[worker], f"h{index} V{index}")
        box(plot, 8.3, worker, 2.0, GREY, "h₀ V₀ + h₁ V₁")
        arrow(plot, (1.3, worker), (2.2, worker), "black")
        arrow(plot, (3.9, worker), (4.8, worker), "black")
    cross(plot, 6.0, 8.2, "all_reduce", "8 bits, added up")
    back(plot, "one exchange forward, and one backward, for x, for both layers")


def title(plot, text: str) -> None:
    plot.text(-1.5, 1.6, text, weight="bold", size=11)


def name(plot, worker: int) -> None:
    plot.text(-0.2, middle(worker), f"worker {worker}", ha="right", va="center", size=9)


def middle(worker: int) -> float:
    return -worker * ROW


def box(plot, x: float, worker: int, width: float, colour: str, text: str) -> None:
    corner = (x, middle(worker) - HEIGHT / 2)
    plot.add_patch(Rectangle(corner, width, HEIGHT, facecolor=colour, edgecolor="white", alpha=0.75))
    plot.text(x + width / 2, middle(worker), text, ha="center", va="center", size=8)


def arrow(plot, start: tuple[float, int], end: tuple[float, int], colour: str) -> None:
    a, b = (start[0], middle(start[1])), (end[0], middle(end[1]))
    plot.add_patch(FancyArrowPatch(a, b, arrowstyle="-|>", mutation_scale=9, shrinkA=0, shrinkB=0, color=colour))


def cross(plot, start: float, end: float, text: str, below: str) -> None:
    for worker in range(2):
        for other in range(2):
            arrow(plot, (start, worker), (end, other), RED)
    plot.text((start + end) / 2, 0.75, text, ha="center", family="monospace", weight="bold", color=RED)
    plot.text((start + end) / 2, 0.45, below, ha="center", size=8)


def back(plot, text: str) -> None:
    plot.text(0, -2.3, text, size=8.5, va="center", style="italic")


if __name__ == "__main__":
    main()
