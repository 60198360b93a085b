"""The benchmarks' arithmetic, arguments and files: what needs no Horovod job."""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import re

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd8bit
from hvd8bit import cli
from hvd8bit import exchange as path
from hvd8bit.bench import bitsandbytes, codec, codec_ops, exchange, hybrid, netlab, output, report, timing, train
from hvd8bit.commands import bench
from hvd8bit.datatypes import DATA_TYPES
from hvd8bit.encoding import Encoding


def record(compression: str, median_s: float, **more) -> dict:
    """As `bench exchange` writes it."""
    return {
        "workers": 4,
        "tensors": 1,
        "elements": 1000,
        "compression": compression,
        "rate_bit_per_s": 1e9,
        "median_s": median_s,
        "spread": 0.1,
        "bytes_per_element": 1.5,
        "gradients_of": None,
        "slices": 1,
        **more,
    }


EXCHANGE = [record("none", 4.0), record("fp16", 5.0), record("dynamic_tree", 1.0), record("bare", 0.8)]


def write(folder, name: str, results: list, **more) -> None:
    content = {"machine": {"cpu": "<fast>"}, "versions": {"tensorflow": "2.18.1"}, "results": results, **more}
    (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def results(tmp_path):
    """A folder of results of every kind."""
    other_sizes = [record(name, 10.0 * r["median_s"], elements=10_000) for r in EXCHANGE for name in [r["compression"]]]
    slices = [record("slices", 2.0, slices=7)]
    write(tmp_path, "exchange", EXCHANGE + other_sizes, benchmark="exchange", slices=slices)
    step = {"model": "M", "workers": 2, "rate_bit_per_s": None, "compression": "none", "images_per_s": 3.0}
    write(tmp_path, "train", [step, {**step, "compression": "alone", "images_per_s": 6.0}], benchmark="train")
    kernel = {"kernel": "encode", "backend": "avx2", "data_type": "linear", "elements": 5, "placement": "in"}
    write(tmp_path, "codec", [{**kernel, "ns_per_element": 0.5}], benchmark="codec")
    write(tmp_path, "errors", [{"data": "N(0,1)", "mean_relative_error_percent": 1.23456789, "list": [1]}])
    (tmp_path / "empty.json").write_text('{"results": []}')
    return tmp_path


# Arguments


@pytest.mark.parametrize(
    ("text", "bits"), [("1gbit", 1e9), ("100mbit", 1e8), ("64kbit", 64e3), ("10Gbit/s", 1e10), ("1MB/s", 8e6)]
)
def test_rates(text, bits):
    assert bench.rate(text) == bits


@pytest.mark.parametrize("text", ["1", "1gb", "gbit", "0gbit", "-1gbit", "1 potato"])
def test_a_rate_without_a_known_unit_is_a_usage_error(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "netlab", "--rate", text, "--", "true"])
    assert stopped.value.code == 2
    assert "--rate" in capsys.readouterr().err


def test_numbers_of_elements():
    assert bench._elements("1000,25M,64Mi,1k,4Ki") == [1000, 25_000_000, 64 * 2**20, 1000, 4096]


@pytest.mark.parametrize("text", ["", "0", "1.5M", "-3", "1G", "1,,2"])
def test_other_numbers_of_elements_are_usage_errors(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "exchange", f"--elements={text}"])
    assert stopped.value.code == 2
    assert "such as 1000,25M,64Mi" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [exchange.Settings, train.Settings])
@pytest.mark.parametrize("compressions", [(), ("none", "int4")])
def test_an_unknown_compression_is_named(settings, compressions):
    with pytest.raises(ValueError, match=r"compressions must be of none, fp16, .*, got (int4|none)$"):
        settings(compressions=compressions)


KERAS_3 = hasattr(tf.keras, "ops")


def test_an_optimizer_is_hvd8bits_or_with_keras_2_horovods():
    with pytest.raises(ValueError, match=r"optimizer must be one of hvd8bit, horovod, horovod_group, got 'other'"):
        train.Settings(optimizer="other")
    for name in ("horovod", "horovod_group"):
        if KERAS_3:
            with pytest.raises(ValueError, match=rf"must be hvd8bit with Keras 3, got {name}: .*TF_USE_LEGACY_KERAS=1"):
                train.Settings(optimizer=name)
        else:
            assert train.Settings(optimizer=name).optimizer == name


@pytest.mark.parametrize(
    ("whose", "module", "groups"),
    [
        ("hvd8bit", "hvd8bit.keras", {}),
        ("horovod", "horovod.tensorflow.keras", {}),
        ("horovod_group", "horovod.tensorflow.keras", {"groups": 1}),
    ],
)
def test_the_optimizer_that_was_asked_for_wraps(whose, module, groups, monkeypatch):
    asked = []
    for each in ("hvd8bit.keras", "horovod.tensorflow.keras"):
        wrap = lambda optimizer, each=each, **settings: asked.append((each, optimizer, settings))  # noqa: E731
        monkeypatch.setattr(importlib.import_module(each), "DistributedOptimizer", wrap)
    for name, compression in (("fp16", hvd.Compression.fp16), ("eightbit", hvd8bit.EightBit)):
        train._distributed(whose, "sgd", name)
        settings = {"compression": compression, "name": f"bench_{name}", **groups}
        assert asked.pop() == (module, "sgd", settings)
        assert not asked


def test_bytes_that_are_not_known_are_not_shown():
    step = {"compression": "none", "optimizer": "horovod", "gradient_bytes_per_step": None}
    heads, rows = output.cells([step, {**step, "compression": "alone", "gradient_bytes_per_step": 0}], output.TRAIN)
    assert heads == ["compression", "optimizer", "gradient bytes/step"]
    assert rows == [["none", "horovod", ""], ["alone", "horovod", "0"]]


def test_hybrid_has_two_compressions_alone():
    with pytest.raises(ValueError, match=r"compressions must be of none, eightbit, got fp16$"):
        hybrid.Settings(compressions=("none", "fp16"))


def test_hybrid_times_nothing_if_nets_do_not_start_alike():
    hybrid._check({(4, "none"): 2.0, (4, "eightbit"): 2.03})
    for loss in (2.05, 1.95, math.nan, math.inf):
        with pytest.raises(
            RuntimeError, match=r"the first loss with 1 sub-batches, eightbit, is .*, not 2.0: not timed"
        ):
            hybrid._check({(4, "none"): 2.0, (1, "eightbit"): loss})


def test_an_unknown_model_is_named():
    for of in (lambda: train.Settings(model="layers"), lambda: exchange.gradient_shapes("layers")):
        with pytest.raises(ValueError, match=r"keras.applications \(.*ResNet50.*\), got 'layers'"):
            of()


def test_gradients_of_a_workload_and_of_a_keras_model():
    def total(model):
        return sum(math.prod(shape) for shape in exchange.gradient_shapes(model))

    assert total("vgg16") == 138_357_544
    assert total("MobileNetV2") == 3_504_872 == 3_538_984 - 34_112  # less what is not trained


# netlab


def test_netlab_says_why_it_cannot(monkeypatch, capsys):
    monkeypatch.setattr(netlab, "available", lambda **asked: "network namespaces need root")
    assert cli.main(["bench", "netlab", "--", "true"]) == 2
    assert capsys.readouterr().err == "hvd8bit: hosts cannot be set up: network namespaces need root\n"


@pytest.mark.parametrize("more", [[], ["--"]])
def test_netlab_needs_a_command(more, capsys):
    assert cli.main(["bench", "netlab", "-n", "2", *more]) == 2
    assert "a command is needed" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["1bit/s", "100Tbit/s"])
def test_netlab_names_a_rate_that_it_cannot_set(rate, monkeypatch, capsys):
    monkeypatch.setattr(netlab, "available", lambda **asked: None)
    assert cli.main(["bench", "netlab", "--rate", rate, "--", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "rate_bit_per_s must be in [4000, 10000000000000], or None for no limit, got 1" in line


def test_a_lab_that_fails_is_one_line(monkeypatch, capsys):
    def fail(lab):
        raise netlab.NetLabError("tc: no")

    monkeypatch.setattr(netlab, "available", lambda **asked: None)
    monkeypatch.setattr(netlab.NetLab, "__enter__", fail)
    assert cli.main(["bench", "netlab", "--", "true"]) == 2
    assert capsys.readouterr().err == "hvd8bit: hosts cannot be set up: tc: no\n"


# codec


def test_codec(tmp_path, capsys):
    made = tmp_path / "codec.json"
    arguments = ["--elements", "3000", "--rounds", "2", "--data-types", "linear", "--block-size", "64"]
    drawn = tmp_path / "codec.png"
    assert cli.main(["bench", "codec", *arguments, "--json", str(made), "--plot", str(drawn)]) == 0
    assert "sum of 4 and re-encode" in capsys.readouterr().out
    content = json.loads(made.read_text())
    assert content["benchmark"] == "codec"
    assert {"machine", "versions", "results"} <= set(content)
    kernels = {(r["kernel"], r["backend"]) for r in content["results"]}
    assert {("memcpy", ""), ("encode", "scalar"), ("decode", "scalar")} <= kernels
    assert ("encode stochastically", "scalar") in kernels
    assert all(r["ns_per_element"] > 0 and r["elements"] == 3000 for r in content["results"])
    memcpy = content["results"][0]
    assert (memcpy["of_memcpy"], memcpy["share_of_floor"]) == (1, 1)
    by_kernel = {r["kernel"]: r for r in content["results"] if r["backend"] == "scalar"}
    for r in by_kernel.values():  # five bytes of eight
        assert r["share_of_floor"] == pytest.approx(5 / 8 / r["of_memcpy"])
    threads = [r["threads"] for r in content["results"] if r["kernel"] == "encode op"]
    assert threads == list(dict.fromkeys([1, os.cpu_count()]))
    assert [r["kernel"] for r in content["results"] if r["of_kernel"]] == ["encode op", "decode op"]
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", ["encode", "encoder"])
def test_codec_times_nothing_that_is_wrong(wrong, monkeypatch):
    """The codes of rounding to the nearest value, and of stochastic rounding, by what is timed."""
    real = getattr(codec.c_api, wrong)

    def flipped(backend, x, encoding, *more):
        if encoding.rounding == ("nearest" if wrong == "encode" else "stochastic"):
            x = np.flip(x).copy()
        return real(backend, x, encoding, *more)

    monkeypatch.setattr(codec.c_api, wrong, flipped)
    with pytest.raises(RuntimeError, match="gives other bytes than the reference"):
        codec.run({"in cache": 1000}, ("linear",), 64, 1)


@pytest.mark.parametrize(
    ("made_by", "idle", "kernel"),
    [
        ("encoder", lambda x, encoding, out, seed=0: encoding.rounding == "stochastic", "encode stochastically"),
        ("decoder", lambda codes, scales, encoding, out, stream: not stream, "decode"),
        ("decoder", lambda codes, scales, encoding, out, stream: stream, "decode"),
        ("adder", lambda *_: True, "sum of 4 and re-encode"),
    ],
)
def test_codec_times_nothing_that_does_nothing(made_by, idle, kernel, monkeypatch):
    real = getattr(codec.c_api, made_by)
    monkeypatch.setattr(
        codec.c_api,
        made_by,
        lambda backend, *arguments: (lambda: None) if idle(*arguments) else real(backend, *arguments),
    )
    with pytest.raises(RuntimeError, match=f"^{kernel}: back end .+ gives other bytes than the reference"):
        codec._verify(Encoding("dynamic_tree", 1024))


def test_ops_that_cannot_be_timed_say_why():
    with pytest.raises(RuntimeError, match=r"(?s)could not be timed: .*data_type must be one of"):
        codec_ops.measure(10, "int4", 64, 1, 1)


class BitsAndBytes:
    """What the library's two functions do, but for rounding."""

    def __init__(self, works=True):
        self.works = works

    def cquantize_blockwise_cpu_fp32(self, table, source, scales, codes, block_size, count):
        self.source, self.sizes = source.value, (block_size.value, count.value)

    def cdequantize_blockwise_cpu_fp32(self, table, codes, scales, out, block_size, count):
        if self.works:
            ctypes.memmove(out, self.source, 4 * count.value)


def test_bitsandbytes_beside_the_codec(monkeypatch):
    x = np.arange(-3000, 3000, dtype=np.float32)
    library = BitsAndBytes()
    monkeypatch.setattr(bitsandbytes, "_library", lambda: library)
    assert list(bitsandbytes.calls(x)) == ["quantize", "dequantize"]
    assert library.sizes == (1024, 6000)
    monkeypatch.setattr(bitsandbytes, "_library", lambda: BitsAndBytes(works=False))
    with pytest.raises(RuntimeError, match="bitsandbytes' quantizer does not do what is expected"):
        bitsandbytes.calls(x)


def test_bitsandbytes_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(bitsandbytes.importlib.util, "find_spec", lambda name: None)
    assert bitsandbytes.calls(np.ones(10, np.float32)) == {}


def test_codec_names_an_unknown_data_type(capsys):
    assert cli.main(["bench", "codec", "--data-types", "int4"]) == 2
    assert "int4" in capsys.readouterr().err


# exchange


def test_median_and_spread():
    samples = timing.Samples(tuple(float(k) for k in range(1, 12)), None)
    assert samples.median_s == 6
    assert samples.spread == pytest.approx((10 - 2) / 6)


def test_the_link_is_what_was_given_else_what_the_lab_says(monkeypatch):
    monkeypatch.delenv(netlab.RATE_VARIABLE, raising=False)
    assert timing.rate_bit_per_s(None) is None
    monkeypatch.setenv(netlab.RATE_VARIABLE, "1000000000.0")
    assert timing.rate_bit_per_s(None) == 1e9
    assert timing.rate_bit_per_s(5.0) == 5.0


@pytest.mark.parametrize("name", exchange.COMPRESSIONS)
def test_the_error_bound_holds_and_is_tight_enough_to_find_a_wrong_sum(name, rng):
    """Two workers' numbers, summed as EightBit sums them, by the ops; or as Horovod does."""
    from hvd8bit import ops

    parts = [rng.standard_normal(50_000).astype(np.float32) for _ in range(2)]
    exact = parts[0] + parts[1]
    if name == "none":
        got = parts[1] + parts[0]
    elif name == "fp16":
        got = (parts[0].astype(np.float16) + parts[1].astype(np.float16)).astype(np.float32)
    else:
        encoding = Encoding(name)
        coded = [ops.encode_list([tf.constant(part)], 1, encoding)[0] for part in parts]
        decoded = [ops.decode_list([c], [tf.constant(parts[0])], 1, encoding)[0] for c in coded]
        payload, _ = ops.encode_list([decoded[0] + decoded[1]], 1, encoding)
        got = ops.decode_list([payload], [tf.constant(parts[0])], 1, encoding)[0].numpy()
    bound = exchange._error_bound(name, [float(np.abs(part).max()) for part in parts])
    assert exchange._problem(name, [got], [exact], [bound]) == ""
    assert "is wrong by" in exchange._problem(name, [parts[0]], [exact], [bound]), "one worker's part is missing"
    got[17] = np.nan
    assert "is wrong by nan" in exchange._problem(name, [got], [exact], [bound])


def test_another_number_of_slices_lasts_as_long_as_asked():
    x = [tf.zeros(5 * path.ELEMENTS_PER_SLICE)]
    with exchange._number_of_slices(7):
        assert path.number_of_slices(x) == 7
    assert path.number_of_slices(x) == 5


class OneWorker:
    """A comm of one worker; counts what it is asked for."""

    def __init__(self):
        self.calls: list[str] = []

    def size_tensor(self):
        return tf.constant(1)

    def rank_tensor(self):
        return tf.constant(0)

    def alltoall(self, payload, splits, name):
        self.calls.append(name)
        return payload, splits

    def allgather(self, chunk, name):
        self.calls.append(name)
        return chunk


def test_an_exchange_is_replayed_without_communication():
    comm, x = OneWorker(), tf.linspace(-1.0, 1.0, 10_000)
    recorded = exchange._Recorded(comm)

    def run():
        with exchange._number_of_slices(3):
            return path.exchange([x], Encoding(), recorded, factor=1.0, name="n")[0]

    first = run()
    assert len(comm.calls) == 6
    recorded.over = True
    assert np.array_equal(tf.function(run)(), first)
    assert len(comm.calls) == 6, "nothing more was sent"
    assert len(recorded.given) == 6, "all that would have been sent was made"


def timed(elements: int, scatter_reduce: float, allgather: float, workers: int) -> list[dict]:
    times = {"scatter_reduce": scatter_reduce, "allgather": allgather}
    common = {"workers": workers, "elements": elements}
    return [record("exchanges", time, exchange=mode, **common) for mode, time in times.items()]


def test_the_rule_of_the_modes():
    seen = [*timed(3000, 1.0, 1.1, 4), *timed(2000, 1.0, 1.0, 4), *timed(1000, 1.0, 0.5, 4), *timed(9000, 1.0, 0.5, 4)]
    assert exchange.rule(seen) == {"workers": 4, "largest_elements": 2000, "more_bytes": 3000}
    assert exchange.rule(timed(1000, 1.0, 2.0, 2)) == {"workers": 2, "largest_elements": 0, "more_bytes": 0}
    assert exchange.rule(seen[:1]) is None
    assert exchange.rule(EXCHANGE) is None


def test_modes_have_a_table_of_their_own():
    parts = output.split([*EXCHANGE, *timed(1000, 1.0, 2.0, 2)])
    assert [len(part) for _, part in parts] == [len(EXCHANGE), 2]
    heads, rows = output.cells(parts[1][1], parts[1][0])
    assert heads[:2] == ["exchange", "time"]
    assert [row[0] for row in rows] == ["scatter_reduce", "allgather"]


@pytest.mark.parametrize("wrong", [("ring",), ("allgather", "auto")])
def test_modes_that_are_none(wrong):
    with pytest.raises(ValueError, match=rf"exchanges must be of scatter_reduce, allgather, got {wrong[-1]}"):
        exchange.Settings(exchanges=wrong)


@pytest.mark.parametrize(("name", "tried"), [("slices", (1, 2)), ("exchanges", ("allgather",))])
def test_what_is_tried_needs_a_data_type(name, tried):
    message = rf"compressions must have one of dynamic_tree, .* for {name} to be tried with, got none, fp16$"
    with pytest.raises(ValueError, match=message):
        exchange.Settings(compressions=("none", "fp16"), **{name: tried})
    exchange.Settings(compressions=("none", "linear"), **{name: tried})


# Tables and plots


def test_ratios_are_within_a_run():
    other = [record("none", 8.0, workers=2), record("dynamic_tree", 1.0, workers=2)]
    ratios = [(r["of_none"], r["of_bare"]) for r in output.with_ratios(EXCHANGE + other)]
    assert ratios == [(1, 5), (1.25, 6.25), (0.25, 1.25), (0.2, 1), (1, None), (0.125, None)]


def test_columns_that_would_be_empty_are_left_out():
    heads, rows = output.cells(EXCHANGE[:1], output.EXCHANGE)
    assert heads == ["compression", "elements", "time", "spread", "B/element", "slices"]
    assert rows == [["none", "1,000", "4 s", "10%", "1.5000", "1"]]


@pytest.mark.parametrize("records", [EXCHANGE, [*EXCHANGE, record("none", 9.0, elements=9)]])
def test_plots_are_pictures(records, tmp_path):
    output.save(output.exchange_plot(records), str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


# Report


def test_the_page_needs_nothing_else(results, capsys):
    assert cli.main(["bench", "report", str(results)]) == 0
    assert "4 files" in capsys.readouterr().out
    page = (results / "report.html").read_text()
    sources = re.findall(r"(?:src|href)\s*=\s*\"([^\"]*)\"", page)
    assert len(sources) == 3, "a picture of each benchmark"
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert not re.search(r"url\(|@import|<script|<link", page)
    assert "&lt;fast&gt;" in page
    assert "<fast>" not in page
    assert page.count("&lt;fast&gt;") == 1, "a machine is told of once"
    for shown in ("1.2346", "2.18.1", "10,000 elements", "<td>0.25</td>", "<td>7</td>"):
        assert shown in page
    assert 'name="viewport"' in page
    assert "@media print" in page


def test_the_page_shows_the_modes_that_were_tried(tmp_path):
    tried = [r for elements in (1000, 2000) for r in timed(elements, 1.0, 2.0, 4)]
    sums = [*EXCHANGE, *(record(r["compression"], 2 * r["median_s"], elements=2000) for r in EXCHANGE)]
    write(tmp_path, "modes", sums, benchmark="exchange", exchanges=tried)
    assert cli.main(["bench", "report", str(tmp_path), "--json", str(tmp_path / "all")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<td>scatter_reduce</td>") == page.count("<td>allgather</td>") == 2
    assert "<td>exchanges</td>" not in page
    assert len(json.loads((tmp_path / "all").read_text())["results"]) == len(sums) + 4


def test_the_summary_judges_8_bit():
    documents = [report.Document("d", "exchange", EXCHANGE, {}, {})]
    (row,) = report.summary(documents)
    assert row["8 bit / float32"] == "0.25"
    assert row["8 bit / fp16"] == "0.20"
    assert row["8 bit / bare"] == "1.25"
    assert row["link"] == "1 Gbit/s"


def test_tables_go_between_their_marks(results):
    page = results / "page.md"
    mark = "<!-- table {} -->\n{}<!-- end of table -->\n"
    page.write_text("before\n" + mark.format("errors", "old\n") + mark.format("unknown", "kept\n") + "after\n")
    arguments = ["bench", "report", str(results), "--markdown", str(page)]
    assert cli.main(arguments) == 0
    table = "| data | mean_relative_error_percent |\n| ---: | ---: |\n| N(0,1) | 1.2346 |\n"
    filled = "before\n" + mark.format("errors", table) + mark.format("unknown", "kept\n") + "after\n"
    assert page.read_text() == filled
    assert cli.main(arguments) == 0
    assert page.read_text() == filled, "filled again it is the same"


def test_a_page_without_marks_and_a_folder_without_results_are_usage_errors(results, tmp_path, capsys):
    (results / "page.md").write_text("no marks")
    assert cli.main(["bench", "report", str(results), "--markdown", str(results / "page.md")]) == 2
    assert "no mark <!-- table NAME -->" in capsys.readouterr().err
    empty = tmp_path / "nothing"
    empty.mkdir()
    assert cli.main(["bench", "report", str(empty)]) == 2
    assert "no results in" in capsys.readouterr().err
    (empty / "broken.json").write_text("{")
    assert cli.main(["bench", "report", str(empty)]) == 2
    assert "broken.json is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", [*report.BENCHMARKS, "", 5, ["codec"]])
@pytest.mark.parametrize(
    "more",
    [
        {"results": [{"a": 1}]},
        {"results": [{**EXCHANGE[0], "spread": "much", "a": {}}, {"workers": []}]},
        {"machine": 5},
        {"machine": "fast"},
        {"versions": [1]},
        {"slices": 5},
        {"slices": [5]},
        {"exchanges": [5]},
        {"results": [record("none", 0.0), record("dynamic_tree", 0.0), record("bare", 0.0)]},
    ],
)
def test_a_file_that_is_none_of_ours_is_named(benchmark, more, results, capsys):
    kept = results / "report.html"
    kept.write_text("kept")
    (results / "page.md").write_text("no marks")
    (results / "stray.json").write_text(json.dumps({"results": [dict(EXCHANGE[0])], "benchmark": benchmark, **more}))
    status = cli.main(["bench", "report", str(results), "--markdown", str(results / "page.md")])
    out, err = capsys.readouterr()
    if "no mark <!-- table" in err:
        return  # a plain table can be made of it
    assert (status, out, kept.read_text()) == (2, "", "kept")
    (line,) = err.splitlines()
    assert "stray.json must be as hvd8bit's commands write it by --json, and is not (" in line
    assert "take it out of the folder" in line


def test_a_file_of_too_many_lists_within_lists_is_named(results, capsys):
    (results / "deep.json").write_text('{"results": ' + "[" * 200_000 + "]" * 200_000 + "}")
    assert cli.main(["bench", "report", str(results)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "deep.json is not JSON: maximum recursion depth exceeded" in line


def test_every_data_type_has_a_colour():
    assert set(output.EIGHT_BIT) == set(DATA_TYPES) <= set(output.COLOURS)
