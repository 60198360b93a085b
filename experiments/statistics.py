"""What errors of runs say: paired differences, their intervals, equivalence, its power, F-tests over arms.

Runs of one seed have the same weights at the start, the same batches and the same dropout masks in every arm, so that
differences within seeds vary less than errors do. All tests take errors in percent, differences in points.

"No significant difference" alone proves little: few runs would do to get it. An equivalence test turns the question
round (two one-sided tests, TOST; Schuirmann 1987): it passes if a difference as large as the margin can be ruled out on
both sides. Its power says how likely that was, had there been no difference at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import integrate, stats

LEVEL = 0.05


@dataclasses.dataclass(frozen=True)
class Difference:
    """Paired differences of an arm from the arm it is compared with, in points.

    Attributes:
      n: how many pairs.
      mean, sd: of the differences; sd is NaN for one pair.
      low, high: the mean's 95 % interval (Student's t).
      tost_p: p of the equivalence test; it passes below `LEVEL`.
      power: of that test, had there been no difference, with this sd and n.
    """

    n: int
    mean: float
    sd: float
    low: float
    high: float
    tost_p: float
    power: float

    @property
    def equivalent(self) -> bool:
        return self.tost_p < LEVEL

    @property
    def differs(self) -> bool:
        """Whether 0 lies outside the interval."""
        return self.low > 0 or self.high < 0


def paired(differences: Sequence[float], margin: float) -> Difference:
    """What paired differences say.

    Args:
      differences: an arm's error less that of the arm it is compared with, for each seed; at least one. Where one is
        no number, the test fails.
      margin: of the equivalence test, in points.
    """
    n, mean = len(differences), float(np.mean(differences))
    if not math.isfinite(mean):
        return Difference(n, mean, math.nan, math.nan, math.nan, 1.0, math.nan)
    if n < 2:
        return Difference(n, mean, math.nan, math.nan, math.nan, math.nan, math.nan)
    sd = float(np.std(differences, ddof=1))
    half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * sd / math.sqrt(n)
    return Difference(n, mean, sd, mean - half, mean + half, tost_p(mean, sd, n, margin), tost_power(sd, n, margin))


def tost_p(mean: float, sd: float, n: int, margin: float) -> float:
    """p of the equivalence test: the larger one of two one-sided t-tests'."""
    if sd == 0:
        return 0.0 if abs(mean) < margin else 1.0
    error = sd / math.sqrt(n)
    return float(max(stats.t.sf((mean + margin) / error, n - 1), stats.t.cdf((mean - margin) / error, n - 1)))


def tost_power(sd: float, n: int, margin: float, difference: float = 0.0) -> float:
    """How likely the equivalence test passes if the true mean difference is `difference` and the true deviation `sd`.

    The test passes if the mean lies within margin - t·s/√n on both sides. Mean and s are independent: the normal
    probability of that, averaged over the distribution of s.
    """
    if sd == 0:
        return 1.0 if abs(difference) < margin else 0.0
    freedom, error = n - 1, sd / math.sqrt(n)
    t = float(stats.t.ppf(1 - LEVEL, freedom))

    def passes(ratio):  # ratio = s / sd
        room = margin - t * ratio * error
        inside = stats.norm.cdf((room - difference) / error) - stats.norm.cdf((-room - difference) / error)
        return inside * stats.chi2.pdf(freedom * ratio**2, freedom) * 2 * freedom * ratio

    widest = margin / (t * error)  # a larger s leaves no room
    # Beyond, s is too improbable to count; a far end would let the integration miss the bulk.
    end = min(widest, math.sqrt(float(stats.chi2.isf(1e-12, freedom)) / freedom))
    return float(integrate.quad(passes, 0, end, limit=200)[0])


def seeds_for_power(sd: float, margin: float, power: float = 0.8, most: int = 1000) -> int | None:
    """How many pairs give the equivalence test that power if there is no difference; None if more than `most`."""
    return next((n for n in range(2, most + 1) if tost_power(sd, n, margin) >= power), None)


@dataclasses.dataclass(frozen=True)
class FTest:
    """F with its degrees of freedom, and p."""

    f: float
    between: int
    within: int
    p: float

    def __str__(self):
        return f"F({self.between},{self.within}) = {self.f:.2f}, p = {self.p:.2g}"


def one_way_f(groups: Sequence[Sequence[float]]) -> FTest:
    """Whether groups have the same mean; what pairs them is left out of account."""
    values = [np.asarray(group, float) for group in groups]
    everything = np.concatenate(values)
    between, within = len(values) - 1, len(everything) - len(values)
    spread = sum(len(v) * (v.mean() - everything.mean()) ** 2 for v in values) / between
    noise = sum(((v - v.mean()) ** 2).sum() for v in values) / within
    return _f(spread, noise, between, within)


def blocked_f(table: Sequence[Sequence[float]]) -> FTest:
    """Whether columns (arms) have the same mean, rows (seeds) aside: the F-test that goes with pairs."""
    values = np.asarray(table, float)
    rows, columns = values.shape
    between, within = columns - 1, (rows - 1) * (columns - 1)
    spread = rows * ((values.mean(0) - values.mean()) ** 2).sum() / between
    rest = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    return _f(spread, (rest**2).sum() / within, between, within)


def _f(spread: float, noise: float, between: int, within: int) -> FTest:
    f = float(spread / noise) if noise else (math.inf if spread else math.nan)
    return FTest(f, between, within, float(stats.f.sf(f, between, within)))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of values."""
    half = float(stats.t.ppf(1 - LEVEL / 2, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def agree(some: Sequence[float], others: Sequence[float]) -> tuple[bool, float]:
    """Whether two sets of runs have the same mean as far as their spread tells; half the difference's 95 % interval.

    The interval is that of the difference of two means with the pooled deviation: a mean of few runs scatters, too.
    """
    a, b = np.asarray(some, float), np.asarray(others, float)
    freedom = len(a) + len(b) - 2
    pooled = (((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum()) / freedom
    half = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * math.sqrt(pooled * (1 / len(a) + 1 / len(b)))
    return abs(a.mean() - b.mean()) <= half, half


def paired_p(differences: Sequence[float], least_sd: float = 0.0) -> float:
    """p of the two-sided paired t-test of at least two differences.

    Args:
      differences: of the pairs.
      least_sd: a smaller deviation is taken for this: where values are counts, a few equal ones are no certainty.
    """
    sd = max(float(np.std(differences, ddof=1)), least_sd)
    if sd == 0:
        return 1.0 if differences[0] == 0 else 0.0
    t = float(np.mean(differences)) / (sd / math.sqrt(len(differences)))
    return float(2 * stats.t.sf(abs(t), len(differences) - 1))


def holm(p_values: dict[str, float]) -> set[str]:
    """The names whose p stays below `LEVEL` when all are tested together (Holm 1979)."""
    kept = set()
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        if p_values[name] * (len(p_values) - rank) >= LEVEL:
            break
        kept.add(name)
    return kept
