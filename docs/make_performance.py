"""Writes the measured tables of docs/performance.md and docs/model-parallelism.md from docs/measurements.

These files are what tools/measure_exchange.sh leaves.

    python docs/make_performance.py                     after new files have been put there

Tables whose files the folder lacks stay as they are. Where there is a Chromium, it takes a picture of the folder's
report, too.
"""

from __future__ import annotations

import json
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


if __name__ == "__main__":
    main()
