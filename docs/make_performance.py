"""Writes the measured tables of docs/performance.md and docs/model-parallelism.md from docs/measurements.

These files are what tools/measure_exchange.sh leaves.

    python docs/make_performance.py                     after new files have been put there

Tables whose files the folder lacks stay as they are. Where there is a Chromium, it takes a picture of the folder's
report, too.
"""

from __future__ import annotations

import json
import math
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from hvd8bit.bench import output, report
from hvd8bit.datatypes import DATA_TYPES
from hvd8bit.encoding import Encoding
from hvd8bit.modes import ALLGATHER, MODES, SCATTER_REDUCE, choose
from hvd8bit.speedup import Calibration, calibrate, units

PAGE = pathlib.Path(__file__).with_name("performance.md")
ALL_PAGES = (PAGE, PAGE.with_name("model-parallelism.md"))
FOLDER = pathlib.Path(__file__).with_name("measurements")
BITS = {"none": 32, **dict.fromkeys(DATA_TYPES, 8)}
AT_MOST = {
    ("hvd8bit", 2, None): 1.15,
    ("hvd8bit", 2, 2e8): 0.5,
    ("hvd8bit", 4, 2e8): 0.4,
    ("horovod_group", 2, None): 1.15,
    ("horovod_group", 2, 2e8): 0.5,
    ("horovod_group", 4, 2e8): 0.4,
    ("horovod", 2, None): 1.4,
    ("horovod", 2, 2e8): 0.6,
    ("horovod", 4, 2e8): 0.6,
}
"""What a step of ResNet-50 in 8 bits is to take of an exact one: by optimizer, workers and bit/s of each link."""
OPTIMIZERS = {
    "hvd8bit": "hvd8bit's",
    "horovod_group": "Horovod's, `groups=1`",
    "horovod": "Horovod's",
}


def documents() -> list[report.Document]:
    """The folder's files, and the model's predictions beside them."""
    # Files of both modes show which of them is sooner, and nothing else.
    found = [d for d in report.read(str(FOLDER)) if not d.name.startswith("modes-")]
    if modes := list(FOLDER.glob("modes-*.json")):
        found.append(report.Document("modes", "", modes_beside(sorted(modes)), {}, {}))
    profiles = [d for d in found if d.name.startswith("profile-")]
    lists = [r for d in found if d.name.startswith("prediction-") for r in d.results if r["compression"] in BITS]
    on_4 = _records(profiles, workers=(4,))
    if on_4 and lists:
        calibration = calibrate({"results": on_4})
        seen = {record["rate_bit_per_s"] for record in on_4}
        unseen = [record for record in lists if record["rate_bit_per_s"] not in seen]
        found.append(report.Document("prediction", "", beside(calibration, unseen), {}, {}))
    on_2_and_3 = _records(profiles, workers=(2, 3))
    if on_4 and {record["workers"] for record in on_2_and_3} == {2, 3}:
        rows = beside(calibrate({"results": on_2_and_3}), on_4)
        found.append(report.Document("prediction-of-4-workers", "", rows, {}, {}))
    rows = steps([d.results for d in found if d.name.startswith("train-resnet50-")])
    if rows:
        found.append(report.Document("resnet50", "", rows, {}, {}))
    return found


def main() -> None:
    for page in ALL_PAGES:
        report.fill_markdown(str(page), documents())
        print(f"{page}: written")
    with tempfile.TemporaryDirectory() as scratch:
        seen = pathlib.Path(scratch, "report.html")
        seen.write_text(report.html(report.read(str(FOLDER))), encoding="utf-8")
        _photograph(seen)


def _photograph(page: pathlib.Path) -> None:
    browser = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if browser is None:
        print("no picture of the report: it takes Chromium")
        return
    picture = PAGE.parent / "img" / "report.png"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,1500"]
    subprocess.run(
        [browser, *options, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=120
    )
    print(f"{picture}: written")


def modes_beside(files: Sequence[pathlib.Path]) -> list[dict]:
    """Both modes of exchange, size by size, of files that `bench exchange --exchanges` left."""
    times: dict[tuple, dict[str, float]] = {}
    for file in files:
        for record in json.loads(file.read_text(encoding="utf-8"))["exchanges"]:
            case = (record["workers"], output.rate(record), record["elements"])
            times.setdefault(case, {})[record["exchange"]] = record["median_s"]
    return [
        {
            "workers": workers,
            "link": link,
            "elements": elements,
            **{mode: units.show_seconds(of[mode]) for mode in MODES},
            "allgather / scatter_reduce": f"{of[ALLGATHER] / of[SCATTER_REDUCE]:.2f}",
            "auto": choose("auto", (elements,), workers, Encoding.block_size),
        }
        for (workers, link, elements), of in times.items()
    ]


def _records(documents: Sequence[report.Document], workers: tuple[int, ...]) -> list[dict]:
    return [r for d in documents for r in d.results if r["workers"] in workers and r["compression"] in BITS]


def beside(calibration: Calibration, records: Sequence[dict]) -> list[dict]:
    """What the calibrated model says of sums that were measured."""
    rows = []
    for record in records:
        cluster = calibration.cluster(record["workers"], record["rate_bit_per_s"] / 8)
        predicted = cluster.exchange(record["elements"], BITS[record["compression"]]).total_s
        rows.append(
            {
                "gradients": record["gradients_of"] or "one tensor",
                "elements": record["elements"],
                "workers": record["workers"],
                "link": units.show_bits_per_s(record["rate_bit_per_s"] / 8),
                "compression": record["compression"],
                "measured": units.show_seconds(record["median_s"]),
                "predicted": units.show_seconds(predicted),
                "error": f"{100 * (predicted / record['median_s'] - 1):+.0f} %",
            }
        )
    return rows


def steps(runs: Sequence[Sequence[dict]]) -> list[dict]:
    """A row for each run of `bench train` with none, eightbit and alone: what 8 bits take of the exact step."""
    rows = {}
    for run in runs:
        by_name = {record["compression"]: record for record in run}
        none, eightbit, alone = by_name["none"], by_name["eightbit"], by_name["alone"]
        optimizer, workers, rate = none["optimizer"], none["workers"], none["rate_bit_per_s"]
        ratio = eightbit["step_s"] / none["step_s"]
        rows[workers, -(rate or math.inf), list(OPTIMIZERS).index(optimizer)] = {
            "optimizer": OPTIMIZERS[optimizer],
            "workers": workers,
            "link": "not limited" if rate is None else units.show_bits_per_s(rate / 8),
            "alone": units.show_seconds(alone["step_s"]),
            "none": units.show_seconds(none["step_s"]),
            "8 bit": units.show_seconds(eightbit["step_s"]),
            "their spread": f"{none['spread']:.0%}, {eightbit['spread']:.0%}",
            "8 bit / none": f"{ratio:.2f}",
            "wanted": _wanted(ratio, AT_MOST.get((optimizer, workers, rate))),
            "bytes alone": "" if rate is None else f"{_transfer(eightbit, alone) / _transfer(none, alone):.2f}",
            "gradient bytes": f"{eightbit['gradient_bytes_per_step'] / _ring_bytes(none):.4f}",
            "at the interface": f"{eightbit['interface_bytes_per_step'] / none['interface_bytes_per_step']:.4f}",
        }
    return [rows[key] for key in sorted(rows)]


def _wanted(ratio: float, at_most: float | None) -> str:
    if at_most is None:
        return ""
    return f"at most {at_most:.2f}{'' if round(ratio, 2) <= at_most else ': missed'}"


def _transfer(record: dict, alone: dict) -> float:
    """Seconds of a step whose bytes cross the link at its rate, after the computation."""
    return alone["step_s"] + 8 * record["interface_bytes_per_step"] / record["rate_bit_per_s"]


def _ring_bytes(record: dict) -> float:
    """What a ring allreduce of all gradients in float32 makes a worker send."""
    return 2 * (1 - 1 / record["workers"]) * 4 * record["parameters"]


if __name__ == "__main__":
    main()
