"""docs/measurements, docs/performance.md and the predictive model agree. The numbers are a machine's, seen once."""

from __future__ import annotations

import importlib
import json
import pathlib
import shutil
import sys

import pytest

from hvd8bit.bench import report
from hvd8bit.speedup import calibrate

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def make_performance():
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("make_performance")
    finally:
        sys.path.remove(str(DOCS))


PAGES = ["performance.md", "model-parallelism.md"]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_what_was_measured(tmp_path, make_performance, name):
    page = tmp_path / name
    shutil.copyfile(DOCS / name, page)
    report.fill_markdown(str(page), make_performance.documents())
    assert page.read_text() == (DOCS / name).read_text(), "run docs/make_performance.py"


@pytest.mark.parametrize("name", PAGES)
def test_every_table_of_the_page_is_filled(name):
    lines = (DOCS / name).read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("<!-- table ")]
    assert starts
    assert not [lines[number] for number in starts if lines[number + 1].startswith("<!-- end")]


@pytest.mark.parametrize("link", ["unlimited", "1gbit", "100mbit"])
def test_the_model_knows_whether_eight_bit_is_faster(link):
    """FIELD-CASES S2: fed with the measured coding rate and bandwidth, the sign is right where it is clear."""
    profile = json.loads((DOCS / "measurements" / f"exchange-4-hosts-{link}.json").read_text())
    calibration = calibrate(profile)
    measured = {(r["elements"], r["compression"]): r["median_s"] for r in profile["results"]}
    predicted = {(r.elements, r.compression): r.predicted_s for r in calibration.residuals}
    clear = 0
    for elements, compression in predicted:
        if compression != "dynamic_tree":
            continue
        of_measured = measured[elements, "dynamic_tree"] / measured[elements, "none"]
        of_predicted = predicted[elements, "dynamic_tree"] / predicted[elements, "none"]
        if abs(of_measured - 1) > 0.1:
            clear += 1
            assert (of_measured < 1) == (of_predicted < 1), (elements, of_measured, of_predicted)
    assert clear


def test_the_model_predicts_gradient_lists_and_rates_it_has_not_seen(make_performance):
    (document,) = [document for document in make_performance.documents() if document.name == "prediction"]
    assert {row["link"] for row in document.results} == {"100 Mbit/s", "500 Mbit/s"}
    assert {row["gradients"] for row in document.results} == {"ResNet50", "alexnet"}
    for row in document.results:
        assert abs(int(row["error"].split()[0])) <= 15, row


def step(compression: str, step_s: float, sent: int, rate: float | None = 2e8, optimizer: str = "horovod") -> dict:
    """As `bench train` writes it, of 1,000 parameters on two workers."""
    of = {"optimizer": optimizer, "workers": 2, "rate_bit_per_s": rate, "parameters": 1000}
    own = None if compression == "none" else sent
    counted = {"gradient_bytes_per_step": own, "interface_bytes_per_step": sent * 1.25}
    return {"compression": compression, "step_s": step_s, "spread": 0.1, **of, **counted}


def test_rows_of_the_training_table(make_performance):
    def run(rate, optimizer):
        none, eightbit = step("none", 2.0, 4000, rate, optimizer), step("eightbit", 1.0, 1000, rate, optimizer)
        return [none, eightbit, step("alone", 0.0001, 0, rate, optimizer)]

    rows = make_performance.steps([run(2e8, "horovod"), run(2e8, "hvd8bit"), run(None, "horovod")])
    # The faster link first, hvd8bit's optimizer first.
    assert [(row["link"], row["optimizer"]) for row in rows] == [
        ("not limited", "Horovod's"),
        ("200 Mbit/s", "hvd8bit's"),
        ("200 Mbit/s", "Horovod's"),
    ]
    assert [row["wanted"] for row in rows] == ["at most 1.40", "at most 0.50", "at most 0.60"]
    (slow,) = make_performance.steps([[*run(None, "hvd8bit")[::2], step("eightbit", 2.4, 1000, None, "hvd8bit")]])
    assert slow["wanted"] == "at most 1.15: missed"
    assert {row["8 bit / none"] for row in rows} == {"0.50"}
    assert {(row["gradient bytes"], row["at the interface"]) for row in rows} == {("0.2500", "0.2500")}
    # 0.1 ms of computation, and 5,000 or 1,250 bytes at 25 MB/s: 0.2 or 0.05 ms.
    assert [row["bytes alone"] for row in rows] == ["", "0.50", "0.50"]


def test_a_step_of_resnet_50_is_as_short_as_was_wanted(make_performance):
    (document,) = [document for document in make_performance.documents() if document.name == "resnet50"]
    of = [(row["workers"], row["link"]) for row in document.results]
    assert of == [(2, "not limited")] * 3 + [(2, "200 Mbit/s")] * 3 + [(4, "200 Mbit/s")] * 3
    assert all(float(row["gradient bytes"]) <= 0.26 for row in document.results)
    assert [row["optimizer"] for row in document.results] == [*make_performance.OPTIMIZERS.values()] * 3
    assert not [row for row in document.results if "missed" in row["wanted"]]


def test_a_hybrid_step_in_8_bits_is_short_and_hides_some_of_its_exchange():
    records = json.loads((DOCS / "measurements" / "hybrid-2-hosts-100mbit.json").read_text())["results"]
    by_case = {(r["sub_batches"], r["compression"]): r for r in records}
    assert by_case[4, "eightbit"]["of_none"] <= 0.45
    for r in records:
        assert (r["workers"], r["batch_size"], r["rate_bit_per_s"]) == (2, 128, 1e8)
        assert r["step_s"] < r["computation_s"] + r["exchange_s"]
    for name in ("none", "eightbit"):
        assert by_case[4, name]["of_sum"] < by_case[1, name]["of_sum"], "sub-batches overlap more"
