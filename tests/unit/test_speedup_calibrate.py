"""Calibration: parameters that made a profile come back out of it; real figures; bad profiles."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest

from hvd8bit.speedup import CPU_CODING, Cluster, Coding, Link, MeasuredStep, Transport, calibrate, compare, load

SIZES = (1_000, 30_000, 1_000_000, 25_000_000)
RATES = (2e8, 1e9)
CODING = Coding(0.5e-9, 0.3e-9, 0.25e-9, 1024)
TRANSPORTS = {  # by bits; efficiency by workers
    32: (Transport(1.0, 2e-9, 1e-3, 40e-6), {2: 0.6, 3: 0.7, 4: 0.75}),
    16: (Transport(1.0, 40e-9, 2e-3, 50e-6), {2: 0.9, 3: 0.85, 4: 0.8}),
    8: (Transport(1.0, 3e-9, 3e-3, 60e-6), {2: 0.62, 3: 0.84, 4: 0.93}),
}
NAMES = {32: "none", 16: "fp16", 8: "dynamic_tree"}


def true_cluster(workers: int, rate: float, hidden_share: float = 0.0) -> Cluster:
    transports = {
        bits: Transport(
            efficiency[workers],
            0.0 if bits == 8 and hidden_share else shared.s_per_element,
            shared.call_s,
            shared.latency_s,
        )
        for bits, (shared, efficiency) in TRANSPORTS.items()
    }
    coding = Coding(0.5e-9, 0.3e-9, 0.25e-9, 1024, hidden_share)
    return Cluster(workers, between=Link(rate / 8, 1.0), coding=coding, transports=transports)


def profile(workers=(2, 3, 4), rates=RATES, sizes=SIZES, hidden_share: float = 0.0) -> dict:
    """What the benchmark would write on a cluster that the model describes exactly."""
    results = []
    for n, rate, elements, bits in itertools.product(workers, rates, sizes, (32, 16, 8)):
        cluster = true_cluster(n, rate, hidden_share)
        record = {
            "workers": n,
            "elements": elements,
            "compression": NAMES[bits],
            "rate_bit_per_s": rate,
            "median_s": cluster.exchange(elements, bits).total_s,
            "bytes_per_element": 0,
        }
        if bits == 8:
            record |= {
                "encode_s": 0.5e-9 * elements,
                "reduce_s": 0.3e-9 * elements + 0.5e-9 * elements / n,
                "decode_s": 0.25e-9 * elements,
                "alltoall_s": 0.1,
                "allgather_s": 0.1,
            }
        results.append(record)
    return {"results": results, "machine": {}, "versions": {}}


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_round_trip_gives_the_parameters_back(bits, workers):
    found = calibrate(profile())
    shared, efficiency = TRANSPORTS[bits]
    transport = found.transport(bits, workers)
    assert transport.efficiency == pytest.approx(efficiency[workers], rel=1e-6)
    assert transport.s_per_element == pytest.approx(shared.s_per_element, rel=1e-4)
    assert transport.call_s == pytest.approx(shared.call_s, rel=1e-5)
    assert transport.latency_s == pytest.approx(shared.latency_s, rel=1e-5)


def test_round_trip_gives_the_coding_back():
    coding = calibrate(profile()).coding
    assert coding.encode_s_per_element == pytest.approx(0.5e-9)
    assert coding.reduce_s_per_element == pytest.approx(0.3e-9), "less the encoding of the sum"
    assert coding.decode_s_per_element == pytest.approx(0.25e-9)


def test_round_trip_gives_the_hidden_share_back():
    found = calibrate(profile(hidden_share=0.7))
    cluster = found.cluster(3, 1e8)
    assert cluster.coding.hidden_share == pytest.approx(0.7, rel=1e-4)
    assert cluster.transport(8).s_per_element == pytest.approx(0, abs=1e-15)


def test_residuals_of_a_perfect_profile_are_nothing():
    residuals = calibrate(profile()).residuals
    assert len(residuals) == 3 * 2 * 4 * 3
    assert max(abs(item.error_percent) for item in residuals) < 1e-4


def test_other_rates_are_predicted():
    found = calibrate(profile())
    for rate, bits in itertools.product((1e8, 5e8, 1e10), (32, 16, 8)):
        predicted = found.cluster(4, rate / 8).exchange(7_000_000, bits).total_s
        assert predicted == pytest.approx(true_cluster(4, rate).exchange(7_000_000, bits).total_s, rel=1e-4)


def test_residuals_show_what_the_model_does_not_fit():
    data = profile()
    data["results"][-1]["median_s"] *= 2
    worst = max(calibrate(data).residuals, key=lambda item: abs(item.error_percent))
    assert (worst.workers, worst.elements, worst.compression) == (4, 25_000_000, "dynamic_tree")
    assert worst.error_percent < -20


def test_a_little_noise_changes_little():
    data = profile()
    for number, record in enumerate(data["results"]):
        record["median_s"] *= 1 + 0.02 * (-1) ** number
    found = calibrate(data)
    for bits in (32, 16, 8):
        predicted = found.cluster(4, 5e8 / 8).exchange(25_000_000, bits).total_s
        assert predicted == pytest.approx(true_cluster(4, 5e8).exchange(25_000_000, bits).total_s, rel=0.05)


# ------------------------------------------------------------------------------------------ fewer data


def test_one_rate_takes_the_coding_from_its_parts():
    data = profile(rates=(1e9,), hidden_share=0.0)
    found = calibrate(data)
    assert found.coding.encode_s_per_element == pytest.approx(0.5e-9)
    for workers in (2, 3, 4):
        cost = found.cluster(workers, 1e9 / 8).exchange(25_000_000, 8)
        assert cost.total_s == pytest.approx(true_cluster(workers, 1e9).exchange(25_000_000, 8).total_s, rel=1e-3)
        assert cost.coding_s == pytest.approx(CODING.exchange_s(25_000_000, workers))


def test_unknown_rates_give_the_bandwidth_itself():
    data = profile(rates=(1e9,))
    for record in data["results"]:
        record["rate_bit_per_s"] = None
    found = calibrate(data)
    assert found.bandwidth_bytes_per_s is not None
    for bits in (32, 16, 8):
        predicted = found.cluster(3).exchange(25_000_000, bits).total_s
        assert predicted == pytest.approx(true_cluster(3, 1e9).exchange(25_000_000, bits).total_s, rel=1e-3)
    assert all(item.rate_bit_per_s is None for item in found.residuals)
    assert max(abs(item.error_percent) for item in found.residuals) < 1


def test_coding_that_takes_longer_than_the_exchange_leaves_a_perfect_transport():
    """Measured part by part coding is slower than in the exchange, where it overlaps: nothing is left for the link."""
    data = profile(rates=(1e9,), workers=(4,))
    for record in data["results"]:
        record["rate_bit_per_s"] = None
        for part in ("encode_s", "reduce_s", "decode_s"):
            if part in record:
                record[part] = record["median_s"]
    found = calibrate(data)
    assert found.transport(8, 4).efficiency == 1
    assert found.cluster(4).exchange(25_000_000, 8).total_s < 10
    assert found.cluster(16).exchange(25_000_000, 8).total_s < 10


def test_one_number_of_workers_tells_no_latency():
    found = calibrate(profile(workers=(4,)))
    assert found.latency_s(32) is None
    assert found.transport(32, 4).call_s == pytest.approx(1e-3 + 6 * 40e-6)
    assert found.bits == (32, 16, 8)


def test_exchanges_of_one_length_tell_no_bandwidth():
    record = {"workers": 4, "compression": "none", "rate_bit_per_s": None, "median_s": 0.01}
    with pytest.raises(ValueError, match="does not tell the bandwidth"):
        calibrate({"results": [{**record, "elements": 10**k} for k in (3, 4, 5)]})


def test_known_rates_need_a_bandwidth_to_predict_for():
    with pytest.raises(ValueError, match="bandwidth_bytes_per_s is needed"):
        calibrate(profile()).cluster(4)


def test_workers_that_were_not_measured_are_extrapolated():
    """Gloo's alltoall and allgather of 25 MB at 200 Mbit/s: 1.62, 1.59, 1.63 s with 2, 3, 4 workers."""
    measured = {2: 1.62, 3: 1.59}
    records = [
        {
            "workers": n,
            "elements": 25_000_000,
            "compression": "dynamic_tree",
            "rate_bit_per_s": 2e8,
            "median_s": seconds,
        }
        for n, seconds in measured.items()
    ]
    found = calibrate({"results": records})
    assert found.extrapolated(4)
    assert not found.extrapolated(3)
    predicted = found.cluster(4, 2e8 / 8).exchange(25_000_000, 8).total_s
    assert predicted == pytest.approx(1.63, rel=0.10)
    # Far away it stays within what a link can do.
    far = found.cluster(1024, 2e8 / 8).exchange(25_000_000, 8)
    assert far.bandwidth_s >= Cluster(1024, between=Link(2e8 / 8)).exchange(25_000_000, 8).bandwidth_s * 0.999


def test_extrapolation_of_a_constant_efficiency_is_that():
    data = profile(workers=(2, 3))
    for bits in (32, 16, 8):
        shared, _ = TRANSPORTS[bits]
        for record in data["results"]:
            if record["compression"] == NAMES[bits]:
                cluster = Cluster(
                    record["workers"],
                    between=Link(record["rate_bit_per_s"] / 8),
                    coding=CODING,
                    transports={bits: Transport(0.8, shared.s_per_element, shared.call_s, shared.latency_s)},
                )
                record["median_s"] = cluster.exchange(record["elements"], bits).total_s
    transport = calibrate(data).transport(32, 4)
    assert transport.efficiency == pytest.approx(0.8, rel=1e-4)
    assert transport.s_per_element == pytest.approx(2e-9, rel=1e-3)


def test_step_comes_from_the_profile_where_it_is_there():
    data = profile()
    assert calibrate(data).step is None
    data["results"] += [{"step_compute_s": seconds} for seconds in (0.2, 0.18, 0.19)]
    assert calibrate(data).step == MeasuredStep(0.19, None, None)
    for record in data["results"][-3:]:
        record |= {"model": "VGG16", "batch_size": 4}
    assert calibrate(data).step == MeasuredStep(0.19, "VGG16", 4)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        (
            "model",
            ("VGG16", "ResNet50"),
            "model must be the same in all records with step_compute_s, got ResNet50, VGG",
        ),
        ("batch_size", (4, 8), "batch_size must be the same in all records with step_compute_s, got 4, 8"),
    ],
)
def test_steps_of_several_models_or_batches_are_no_step(key, values, message):
    data = profile()
    data["results"] += [{"step_compute_s": 0.2, "model": "VGG16", "batch_size": 4, key: value} for value in values]
    with pytest.raises(ValueError, match=message):
        calibrate(data)


def test_one_data_type_is_calibrated_at_a_time():
    data = profile()
    linear = [copy.deepcopy(r) for r in data["results"] if r["compression"] == "dynamic_tree"]
    for record in linear:
        record |= {"compression": "linear", "median_s": 3 * record["median_s"]}
    data["results"] += linear
    assert calibrate(data).transport(8, 4).efficiency == pytest.approx(0.93, rel=1e-5)
    assert calibrate(data, data_type="linear").transport(8, 4).efficiency == pytest.approx(0.31, rel=1e-4)
    with pytest.raises(ValueError, match="data_type must be one that the profile has"):
        calibrate(data, data_type="mantissa")


def test_what_is_no_exchange_is_left_out():
    data = profile()
    count = len(data["results"])
    extra = {"elements": 10, "rate_bit_per_s": 1e9, "median_s": 1.0}
    data["results"] += [
        {**extra, "workers": 1, "compression": "none"},
        {**extra, "workers": 4, "compression": "ceiling"},
    ]
    assert len(calibrate(data).residuals) == count


def test_an_8_bit_record_that_sent_float32_is_left_out():
    data = profile()
    before = calibrate(data)
    data["results"].append({**data["results"][-1], "elements": 70, "encoded_elements": 0, "median_s": 99.0})
    assert calibrate(data).residuals == before.residuals


def test_a_list_of_gradients_travels_in_buckets():
    """A list of 25M elements is three exchanges of 8.3M: three calls, and the messages of three."""
    data = profile()
    for record in list(data["results"]):
        if record["elements"] == 25_000_000:
            bits = {name: bits for bits, name in NAMES.items()}[record["compression"]]
            cluster = true_cluster(record["workers"], record["rate_bit_per_s"])
            three = cluster.exchange(25_000_000 / 3, bits) * 3
            data["results"].append({**record, "tensors": 161, "median_s": three.total_s})
    assert max(abs(item.error_percent) for item in calibrate(data).residuals) < 1e-4


def test_block_size_comes_from_the_profile():
    data = profile()
    assert calibrate(data).coding.block_size == 1024
    for record in data["results"]:
        record["block_size"] = None
    assert calibrate(data).coding.block_size is None


def without(*names: str) -> dict:
    data = profile()
    data["results"] = [record for record in data["results"] if record["compression"] not in names]
    return data


def test_bits_without_records_are_not_known():
    found = calibrate(without("fp16"))
    assert found.bits == found.cluster(4, 1e8).bits == (32, 8)
    assert found.latency_s(16) is None
    with pytest.raises(ValueError, match="bits must be one of 32, 8, which the profile has, got 16"):
        found.transport(16, 4)
    with pytest.raises(ValueError, match="bits must be one of 32, 8, which the cluster's profile has, got 16"):
        found.cluster(4, 1e8).exchange(1e6, 16)


def test_bits_without_records_are_not_compared():
    workload = load("vgg16").timed(0.3)
    everything = compare(workload, calibrate(profile()).cluster(4, 1e8))
    found = compare(workload, calibrate(without("fp16")).cluster(4, 1e8))
    assert set(found.predictions) == {32, 8}
    assert all(found.predictions[bits] == everything.predictions[bits] for bits in (32, 8))
    assert found.best_bits == 8
    gain = 1 - found.predictions[8].step_s / found.predictions[32].step_s
    assert found.eight_bit_gain == pytest.approx(gain)


@pytest.mark.parametrize("missing", ["none", "dynamic_tree"])
def test_a_comparison_needs_both_32_and_8_bit(missing):
    cluster = calibrate(without(missing)).cluster(4, 1e8)
    with pytest.raises(ValueError, match="bits must have 32 and 8, which are compared, got "):
        compare(load("vgg16").timed(0.3), cluster)


def test_coding_that_was_not_measured_is_the_given_one():
    data = profile()
    for record in data["results"]:
        for part in ("encode_s", "reduce_s", "decode_s"):
            record.pop(part, None)
        record["block_size"] = 256
    assert calibrate(profile()).coding_is_measured
    found = calibrate(data)
    assert not found.coding_is_measured
    assert found.coding == dataclasses.replace(CPU_CODING, block_size=256)
    assert calibrate(data, coding=CODING).coding == dataclasses.replace(CODING, block_size=256)
    # What an element costs is measured: its coding, whatever is assumed, is a part of that.
    large = [r for r in found.residuals if r.elements == 25_000_000]
    assert max(abs(r.error_percent) for r in large) < 1


def test_known_and_unknown_rates_do_not_mix():
    data = profile()
    for record in data["results"]:
        if record["compression"] == "dynamic_tree":
            record["rate_bit_per_s"] = None
    with pytest.raises(ValueError, match=r"rate_bit_per_s must be known .* null for 24 of 72 \(dynamic_tree\)"):
        calibrate(data)


def test_workers_that_shared_a_hosts_link_are_refused():
    data = profile()
    for record in data["results"]:
        record["workers_per_host"] = 1
    assert calibrate(data).residuals == calibrate(profile()).residuals
    data["results"][-1]["workers_per_host"] = 2
    with pytest.raises(
        ValueError, match="workers_per_host of record 71 of the profile must be 1, or all 4 workers, got 2"
    ):
        calibrate(data)


def test_a_fitted_latency_is_that_between_nodes():
    inside = Link(1e10, 7e-6)
    found = calibrate(profile()).cluster(8, 1e9, workers_per_node=8, within=inside)
    assert found.exchange(1e6, 32).latency_s == pytest.approx(14 * 7e-6)
    nodes = calibrate(profile()).cluster(8, 1e9, workers_per_node=4, within=inside, hierarchical=True)
    assert nodes.exchange(1e6, 32).latency_s == pytest.approx(6 * 7e-6 + 2 * 40e-6, rel=1e-4)
    other = calibrate(profile()).cluster(8, 1e9, latency_s=1e-3, workers_per_node=4, within=inside, hierarchical=True)
    assert other.exchange(1e6, 32).latency_s == pytest.approx(6 * 7e-6 + 2 * 1e-3)


def test_a_default_latency_is_for_what_the_profile_does_not_tell():
    data = profile()
    data["results"] = [r for r in data["results"] if r["compression"] != "dynamic_tree" or r["elements"] == 25_000_000]
    found = calibrate(data)
    assert found.latency_s(8) is None
    cluster = found.cluster(4, 1e8, default_latency_s=1e-3)
    assert cluster.exchange(1e6, 8).latency_s == pytest.approx(6 * 1e-3)
    assert cluster.exchange(1e6, 32).latency_s == pytest.approx(6 * 40e-6, rel=1e-4)


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "must have a list of records under results"),
        ([], "must have a list of records under results"),
        ({"results": []}, "must have a record of an exchange between at least 2 workers"),
        ({"results": [{"workers": 2}]}, "record 0 of the profile lacks elements, compression"),
        (
            {"results": [{"workers": 2, "elements": 5, "compression": "none", "rate_bit_per_s": 1e9, "median_s": 0}]},
            "median_s of record 0 of the profile must be above 0, got 0",
        ),
        (
            {
                "results": [
                    {
                        "workers": 2,
                        "elements": 5,
                        "compression": "none",
                        "rate_bit_per_s": "1G",
                        "median_s": 1,
                    }
                ]
            },
            "rate_bit_per_s of record 0 of the profile must be above 0, got '1G'",
        ),
    ],
)
def test_bad_profile_is_an_error_that_says_why(data, message):
    with pytest.raises(ValueError, match=message):
        calibrate(data)


def test_sums_that_took_one_round_are_left_out():
    marked = profile()
    for record in marked["results"]:
        if record["compression"] == "dynamic_tree":
            record["exchange"] = "scatter_reduce"
            if record["elements"] <= 30_000:
                record["exchange"], record["median_s"] = "allgather", record["median_s"] / 3
    found = calibrate(marked)
    ours = [r for r in found.residuals if r.compression == "dynamic_tree"]
    assert {r.elements for r in ours} == {1_000_000, 25_000_000}
    assert all(abs(r.error_percent) < 0.1 for r in ours)
