"""Trains a model with float32 and with 8-bit gradients on two workers, and compares. `make demo` runs it.

Exit status 0 means that all workers had the same weights after each training, that 8 bits sent at most 0.26
of float32's bytes, and that the mean test accuracies are within 1.5 points.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from absl import app, flags

HERE = Path(__file__).resolve().parent
MAX_BYTES_RATIO = 0.26
MAX_POINTS_APART = 1.5

FLAGS = flags.FLAGS


def main(_):
    out = Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    train(out / "demo.json")
    records = json.loads((out / "demo.json").read_text(encoding="utf-8"))["results"]
    runs = defaultdict(list)
    for record in records:
        runs[record["compression"]].append(record)
    plot(runs, out / "demo.png")
    held = compare(runs["none"], runs["eightbit"])
    print(f"\nLoss curves: {out / 'demo.png'}; all figures: {out / 'demo.json'}")
    sys.exit(0 if held else 1)


def train(results: Path) -> None:
    """All trainings in one launch; shows what rank 0 prints."""
    command = [sys.executable, HERE / "keras_mnist.py", "--compression=none", "--compression=eightbit"]
    command += [f"--seed={seed}" for seed in FLAGS.seed] + [f"--epochs={FLAGS.epochs}", f"--json={results}"]
    launcher = [
        sys.executable,
        "-m",
        "horovod.runner.launch",
        "-np",
        str(FLAGS.workers),
    ]  # what horovodrun runs
    print(f"horovodrun -np {FLAGS.workers} {' '.join(map(str, command[1:]))}\n", flush=True)
    process = subprocess.Popen(
        [*launcher, *command],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    others = []
    for line in process.stdout:
        # horovodrun puts "[0]<stdout>:" before the lines of rank 0.
        match = re.match(r"\[[\d,]+\]<stdout>:(.*)", line)
        if match:
            print(match[1], flush=True)
        else:
            others.append(line)
    if process.wait() != 0:
        sys.exit("".join(others[-60:]) + f"The training failed: horovodrun ended with status {process.returncode}.")


def compare(none: list[dict], eightbit: list[dict]) -> bool:
    """Prints both side by side; returns whether the bounds hold."""
    accuracy, sent, seconds = (
        [statistics.mean(run[key] for run in runs) for runs in (none, eightbit)]
        for key in ("test_accuracy", "gradient_bytes_per_step", "seconds_per_step")
    )
    ratio = sent[1] / sent[0]
    points_apart = 100 * abs(accuracy[0] - accuracy[1])
    print(f"\n{none[0]['parameters']:,} parameters, {none[0]['workers']} workers, means of {len(none)} seeds\n")
    show("", "none", "EightBit", "")
    show("test accuracy", *(f"{100 * a:.2f} %" for a in accuracy), f"{points_apart:.2f} points apart")
    show("bytes per step and worker", *(f"{b:,.0f}" for b in sent), f"ratio {ratio:.4f}")
    show("ms per step, no real network", *(f"{1000 * s:.1f}" for s in seconds), "")
    for a, b in zip(none, eightbit):
        digests = (f"{run['weight_digest']:.16}" for run in (a, b))
        show(f"weights after seed {a['seed']}", *digests, "the same on all workers")
    missed = []
    if ratio > MAX_BYTES_RATIO:
        missed.append(f"the ratio of the bytes must be at most {MAX_BYTES_RATIO}, got {ratio:.4f}")
    if points_apart > MAX_POINTS_APART:
        missed.append(f"accuracies must be at most {MAX_POINTS_APART} points apart, got {points_apart:.2f}")
    for text in missed:
        print(f"MISSED: {text}")
    return not missed


def show(*cells: str) -> None:
    print("{:<29}{:>18}{:>18}   {}".format(*cells).rstrip())


def plot(runs: dict[str, list[dict]], path: Path) -> None:
    """Mean training loss of each epoch, and the range over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for name, label, style in (("none", "float32 (none)", "-"), ("eightbit", "8 bits (EightBit)", "--")):
        curves = list(zip(*(run["loss_of_epochs"] for run in runs[name])))
        epochs = range(1, len(curves) + 1)
        (line,) = axes.plot(epochs, [statistics.mean(curve) for curve in curves], style, label=label)
        low, high = [min(curve) for curve in curves], [max(curve) for curve in curves]
        axes.fill_between(epochs, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss")
    axes.set_title(f"Handwritten digits, {runs['none'][0]['workers']} workers: mean and range of the seeds")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    flags.DEFINE_string("out", "out", "Folder for demo.json and demo.png.")
    flags.DEFINE_integer("workers", 2, "Number of workers.", lower_bound=2)
    flags.DEFINE_integer("epochs", 15, "Epochs of each training.", lower_bound=1)
    flags.DEFINE_multi_integer("seed", [1, 2, 3], "Seeds to train with.")
    app.run(main)
