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


def test_a_hybrid_step_in_8_bits_is_short_and_hides_some_of_its_exchange():
    records = json.loads((DOCS / "measurements" / "hybrid-2-hosts-100mbit.json").read_text())["results"]
    by_case = {(r["sub_batches"], r["compression"]): r for r in records}
    assert by_case[4, "eightbit"]["of_none"] <= 0.45
    for r in records:
        assert (r["workers"], r["batch_size"], r["rate_bit_per_s"]) == (2, 128, 1e8)
        assert r["step_s"] < r["computation_s"] + r["exchange_s"]
    for name in ("none", "eightbit"):
        assert by_case[4, name]["of_sum"] < by_case[1, name]["of_sum"], "sub-batches overlap more"
