"""The experiments' statistics: known values, scipy's own tests, simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from experiments import statistics


def test_paired_difference_of_a_small_example():
    """By hand: mean 2, deviation sqrt(2.5), t(0.975, 4) = 2.776."""
    result = statistics.paired([0, 1, 2, 3, 4], margin=10.0)
    assert (result.n, result.mean) == (5, 2.0)
    assert result.sd == pytest.approx(math.sqrt(2.5))
    half = 2.7764451 * math.sqrt(2.5 / 5)
    assert (result.low, result.high) == pytest.approx((2 - half, 2 + half))
    assert result.differs
    assert result.equivalent


def test_one_pair_says_nothing_but_its_difference():
    result = statistics.paired([0.3], margin=1.0)
    assert result.mean == 0.3
    assert math.isnan(result.tost_p)
    assert not result.equivalent
    assert not result.differs


def test_a_difference_that_is_no_number_is_not_equivalent():
    result = statistics.paired([0.01, math.nan, 0.02], margin=1.0)
    assert (result.equivalent, result.differs, result.tost_p) == (False, False, 1.0)


def test_the_equivalence_test_is_the_worse_of_two_one_sided_ones(rng):
    for _ in range(5):
        values = rng.normal(0.05, 0.1, size=6)
        result = statistics.paired(values, margin=0.15)
        above = stats.ttest_1samp(values, -0.15, alternative="greater").pvalue
        below = stats.ttest_1samp(values, 0.15, alternative="less").pvalue
        assert result.tost_p == pytest.approx(max(above, below))
        assert result.equivalent == (max(above, below) < 0.05)
        assert statistics.paired_p(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)


def test_equivalence_is_the_90_percent_interval_within_the_margin(rng):
    verdicts = set()
    for _ in range(40):
        values = rng.normal(0.05, 0.1, size=6)
        low, high = stats.t.interval(0.90, 5, values.mean(), values.std(ddof=1) / math.sqrt(6))
        inside = low > -0.15 and high < 0.15
        verdicts.add(inside)
        assert statistics.paired(values, margin=0.15).equivalent == inside
    assert verdicts == {True, False}


def test_differences_without_spread():
    assert statistics.paired([0.125, 0.125, 0.125], 0.15).tost_p == 0.0
    assert statistics.paired([0.25, 0.25, 0.25], 0.15).tost_p == 1.0
    assert statistics.paired([0.25, 0.25], 0.15).power == 1.0
    assert statistics.paired_p([0.0, 0.0]) == 1.0
    assert statistics.paired_p([0.5, 0.5]) == 0.0
    # Four times the same count is no certainty.
    assert statistics.paired_p([0.5] * 4, least_sd=0.5) == pytest.approx(stats.t.sf(2, 3) * 2)


@pytest.mark.parametrize(("sd", "n", "margin", "difference"), [(0.1, 5, 0.15, 0), (0.1, 8, 0.15, 0.05), (1, 20, 1, 0)])
def test_power_is_how_often_the_test_passes(sd, n, margin, difference):
    """20,000 simulated sets of pairs: four standard errors are 0.014 at most."""
    values = np.random.default_rng(1).normal(difference, sd, size=(20000, n))
    means, sds = values.mean(1), values.std(1, ddof=1)
    half = stats.t.ppf(0.95, n - 1) * sds / math.sqrt(n)
    passed = np.mean((means - half > -margin) & (means + half < margin))
    assert 0.05 < passed < 0.999
    assert statistics.tost_power(sd, n, margin, difference) == pytest.approx(passed, abs=0.015)


def test_power_at_the_ends():
    assert statistics.tost_power(0.001, 5, 0.15) == pytest.approx(1.0, abs=1e-6)
    assert statistics.tost_power(100.0, 5, 0.15) == pytest.approx(0.0, abs=1e-3)
    # At the margin itself the test passes with its level.
    assert statistics.tost_power(0.01, 10, 0.15, difference=0.15) == pytest.approx(0.05, abs=1e-6)


def test_how_many_seeds_a_power_takes():
    n = statistics.seeds_for_power(0.1, 0.15)
    assert n is not None
    assert statistics.tost_power(0.1, n, 0.15) >= 0.8 > statistics.tost_power(0.1, n - 1, 0.15)
    assert statistics.seeds_for_power(50.0, 0.15, most=50) is None


def test_one_way_f_is_scipys(rng):
    groups = [rng.normal(mean, 1, size=size) for mean, size in ((0, 4), (0.5, 5), (1, 7))]
    expected = stats.f_oneway(*groups)
    result = statistics.one_way_f(groups)
    assert (result.f, result.p) == pytest.approx((expected.statistic, expected.pvalue))
    assert (result.between, result.within) == (2, 13)


def test_one_way_f_by_hand():
    result = statistics.one_way_f([[0.5, 1.5], [1.5, 2.5], [5.5, 6.5]])
    # Sum of squares between: 2·(4 + 1 + 9) = 28 on 2; within: 6 · 0.25 = 1.5 on 3.
    assert result.f == pytest.approx((28 / 2) / (1.5 / 3))
    assert str(result).startswith("F(2,3) = 28.00, p = ")


def test_blocked_f_of_two_arms_is_the_paired_t_test(rng):
    table = rng.normal(size=(7, 1)) * 5 + rng.normal([0.0, 0.3], 0.2, size=(7, 2))
    expected = stats.ttest_rel(table[:, 0], table[:, 1])
    result = statistics.blocked_f(table)
    assert result.f == pytest.approx(expected.statistic**2)
    assert result.p == pytest.approx(expected.pvalue)
    assert (result.between, result.within) == (1, 6)
    # What seeds have in common drowns the difference in the other test.
    assert statistics.one_way_f(table.T).p > 0.5 > 0.05 > result.p


def test_no_spread_at_all_is_no_f():
    assert math.isnan(statistics.one_way_f([[1.0, 1.0], [1.0, 1.0]]).f)
    assert math.isinf(statistics.one_way_f([[1.0, 1.0], [2.0, 2.0]]).f)


def test_holm_stops_at_the_first_that_is_too_large():
    assert statistics.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == {"a", "d"}
    assert statistics.holm({"a": 0.03, "b": 0.03}) == set()
    assert statistics.holm({"a": 0.01, "b": 0.03}) == {"a", "b"}  # 0.03 counts once
    assert statistics.holm({}) == set()


def test_two_sets_of_runs_agree_as_in_the_t_test(rng):
    verdicts = set()
    for shift in (0.0, 0.1, 0.3):
        some, others = rng.normal(2, 0.05, size=3), rng.normal(2 + shift, 0.05, size=5)
        expected = stats.ttest_ind(some, others).pvalue >= 0.05
        verdicts.add(bool(expected))
        assert statistics.agree(some, others)[0] == expected
    assert verdicts == {True, False}


def test_interval_of_a_mean(rng):
    values = rng.normal(size=9)
    expected = stats.t.interval(0.95, 8, values.mean(), stats.sem(values))
    assert statistics.mean_interval(values) == pytest.approx(expected)
