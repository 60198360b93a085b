"""Draws docs/img/wire-path.png, the README's figure: python docs/draw_wire_path.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

WORKERS = 3
COLOURS = ("#4477aa", "#cc8833", "#55a868")  # of the chunks, by the worker that reduces them
UNIT = 0.55  # height of a chunk
ROW = 2.6  # from worker to worker
FLOAT, CODE = 0.72, 0.18  # widths, as 4 bytes to 1

# Left edges of the columns: what a worker holds, step by step.
GRADIENTS, ENCODED, RECEIVED, REDUCED, GATHERED, RESULT = 0.0, 2.5, 5.0, 8.0, 10.3, 12.3
STEPS = (
    (1.65, "encode_list", "float32 →\n8-bit codes + scales"),
    (4.0, "hvd.alltoall", "(N−1)/N bytes\nper element"),
    (6.95, "reduce_shards", "decode N chunks,\nadd, encode the sum"),
    (9.25, "hvd.allgather", "(N−1)/N bytes\nper element"),
    (11.4, "decode_list", "the same bytes, so the\nsame bits everywhere"),
)


def main() -> None:
    figure, axes = plt.subplots(figsize=(11.5, 4.6))
    for worker in range(WORKERS):
        draw_worker(axes, worker)
    for x, name, text in STEPS:
        moves = name.startswith("hvd.")
        axes.text(
            x,
            1.35,
            name,
            ha="center",
            weight="bold",
            family="monospace",
            color="#aa3355" if moves else "black",
        )
        axes.text(x, 1.2, text, ha="center", va="top", size=8.5)
    for x, text in ((GRADIENTS, "gradients"), (RESULT, "their mean")):
        axes.text(x + FLOAT / 2, middle(WORKERS - 1, WORKERS), text, ha="center", size=8.5)
    axes.set_xlim(-1.5, 13.2)
    axes.set_ylim(-(WORKERS - 1) * ROW - 1.9, 1.8)
    axes.axis("off")
    figure.savefig(Path(__file__).parent / "img" / "wire-path.png", dpi=110, bbox_inches="tight", pad_inches=0.05)


def top(worker: int) -> float:
    return -worker * ROW


def middle(worker: int, chunk: int) -> float:
    return top(worker) - (chunk + 0.5) * UNIT


def box(axes, x: float, worker: int, place: int, width: float, chunk: int, alpha: float = 1.0) -> None:
    axes.add_patch(
        Rectangle(
            (x, top(worker) - (place + 1) * UNIT),
            width,
            UNIT,
            facecolor=COLOURS[chunk],
            edgecolor="white",
            alpha=alpha,
        )
    )


def draw_worker(axes, worker: int) -> None:
    axes.text(-0.25, middle(worker, 1), f"worker {worker}", ha="right", va="center")
    for chunk in range(WORKERS):
        box(axes, GRADIENTS, worker, chunk, FLOAT, chunk, alpha=0.45)
        box(axes, ENCODED, worker, chunk, CODE, chunk)
        # Worker i receives chunk i of everyone.
        box(axes, RECEIVED, worker, chunk, CODE, worker)
        box(axes, GATHERED, worker, chunk, CODE, chunk)
        box(axes, RESULT, worker, chunk, FLOAT, chunk, alpha=0.45)
        arrow(axes, (ENCODED + CODE, middle(worker, chunk)), (RECEIVED, middle(chunk, worker)), chunk)
        arrow(axes, (REDUCED + CODE, middle(worker, 1)), (GATHERED, middle(chunk, worker)), worker)
    box(axes, REDUCED, worker, 1, CODE, worker)
    for start, end in (
        (GRADIENTS + FLOAT, ENCODED),
        (RECEIVED + CODE, REDUCED),
        (GATHERED + CODE, RESULT),
    ):
        arrow(axes, (start + 0.1, middle(worker, 1)), (end - 0.1, middle(worker, 1)))


def arrow(axes, start: tuple[float, float], end: tuple[float, float], chunk: int | None = None) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9,
            shrinkA=1,
            shrinkB=1,
            color="#777777" if chunk is None else COLOURS[chunk],
            linewidth=1.1,
        )
    )


if __name__ == "__main__":
    main()
