"""Measurements in, parameters of the model out: latency, efficiency of the transport, coding rates, step.

`calibrate` reads what `hvd8bit bench exchange` writes, a list of records with

    workers, elements, compression ("none", "fp16" or a data type), rate_bit_per_s (of a worker's link; null
    where it is not known), median_s, and for data types encode_s, reduce_s, decode_s

and fits, for 32, 16 and 8 bit on their own,

    median_s = alpha * messages + call + c(N) * elements + f(N) * bytes / rate

with no parameter below 0, each record weighing by its relative error. 1 / f is the transport's efficiency, c
what each element costs whatever the bandwidth: the transport's processor time and the coding that is not
hidden.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd8bit.datatypes import DATA_TYPES
from hvd8bit.encoding import Encoding
from hvd8bit.modes import ALLGATHER
from hvd8bit.speedup.cluster import CPU_CODING, Cluster, Coding, Cost, Link, Transport
from hvd8bit.speedup.predict import BUCKET_ELEMENTS

_BITS = {"none": 32, "fp16": 16, **dict.fromkeys(DATA_TYPES, 8)}
_NEEDED = ("workers", "elements", "compression", "rate_bit_per_s", "median_s")
_PARTS = ("encode_s", "reduce_s", "decode_s")


@dataclasses.dataclass(frozen=True)
class Residual:
    """A measured exchange beside the calibrated model's.

    Attributes:
      workers, elements, compression, rate_bit_per_s: as in the record; rate_bit_per_s is None where it is not known.
      measured_s, predicted_s: seconds of the exchange.
      error_percent: predicted over measured, less 1; in percent.
    """

    workers: int
    elements: int
    compression: str
    rate_bit_per_s: float | None
    measured_s: float
    predicted_s: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted_s / self.measured_s - 1)


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """One worker's step alone, as `hvd8bit bench train` timed it.

    Attributes:
      compute_s: seconds, the median of the records.
      model, samples: whose step it is, and of how many samples; None where the records do not say.
    """

    compute_s: float
    model: str | None
    samples: int | None


@dataclasses.dataclass(frozen=True)
class _Fit:
    """The fitted parameters of 32, 16 or 8 bit; those by N for the numbers of workers that were measured.

    latency_s is None where the records cannot tell it; slowness f is 0 where the link never held anything up.
    """

    latency_s: float | None
    call_s: float
    s_per_element: dict[int, float]
    slowness: dict[int, float]

    def at(self, workers: int) -> tuple[float, float]:
        """c and f for any N. Between measured ones and beyond, c and f (N-1)/N follow a line over (N-1)/N.

        Seconds on the link are f (N-1)/N times those of sending everything once, so a transport that spends time on
        the worker's own share, too, is a line there. f is 1, a perfect transport, where the link held nothing up, and
        below 1 only where that was measured.
        """
        if workers in self.slowness:
            return self.s_per_element[workers], self.slowness[workers] or 1.0
        share = _share(workers)
        measured = {_share(n): value or 1.0 for n, value in self.slowness.items()}
        f = _line({at: at * value for at, value in measured.items()}, share) / share
        c = _line({_share(n): value for n, value in self.s_per_element.items()}, share)
        return max(c, 0.0), max(f, min(1.0, *measured.values()))


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The model's parameters for the machines that a profile was measured on.

    Attributes:
      coding: seconds per element; `hidden_share` is set for each number of workers by `cluster`.
      coding_is_measured: whether the profile has it; else it is what `calibrate` was given.
      bandwidth_bytes_per_s: what the links gave, where the profile does not say their rate; else None.
      step: where the profile has `step_compute_s`; else None.
      workers: numbers of workers that were measured.
      residuals: every record used, beside the model.
    """

    coding: Coding
    coding_is_measured: bool
    bandwidth_bytes_per_s: float | None
    step: MeasuredStep | None
    workers: tuple[int, ...]
    residuals: tuple[Residual, ...]
    _fits: dict[int, _Fit] = dataclasses.field(repr=False)

    def transport(self, bits: int, workers: int) -> Transport:
        """The transport of `bits` for N workers. Raises ValueError where the profile has no such records."""
        if bits not in self._fits:
            raise ValueError(
                f"bits must be one of {', '.join(map(str, self._fits))}, which the profile has, got {bits!r}"
            )
        return self._parameters(bits, workers)[0]

    def latency_s(self, bits: int) -> float | None:
        """Seconds per message, or None where the profile does not tell: it takes two numbers of workers."""
        return self._fits[bits].latency_s if bits in self._fits else None

    def cluster(
        self,
        workers: int,
        bandwidth_bytes_per_s: float | None = None,
        *,
        latency_s: float | None = None,
        default_latency_s: float = 0.0,
        **others: Any,
    ) -> Cluster:
        """A cluster like the measured one. It knows the bits that were measured.

        Args:
          workers: N; `extrapolated` tells whether the parameters for it are measured.
          bandwidth_bytes_per_s: of a node's link; None for what the profile gave.
          latency_s: per message between nodes, in place of the fitted one.
          default_latency_s: the same for the bits whose latency the profile does not tell.
          **others: of `Cluster`.

        Raises:
          ValueError: no bandwidth, and the profile, measured on links of known rate, has no single one.
        """
        bandwidth = bandwidth_bytes_per_s or self.bandwidth_bytes_per_s
        if bandwidth is None:
            raise ValueError(
                "bandwidth_bytes_per_s is needed: the profile was measured on links of known rates, and the "
                "model predicts for any"
            )
        transports, coding = {}, self.coding
        for bits in self._fits:
            transports[bits], hidden = self._parameters(bits, workers)
            if latency_s is not None:
                transports[bits] = dataclasses.replace(transports[bits], latency_s=latency_s)
            if bits == 8:
                coding = dataclasses.replace(coding, hidden_share=hidden)
        link = Link(bandwidth, default_latency_s if latency_s is None else latency_s)
        return Cluster(workers, between=link, coding=coding, transports=transports, bits=self.bits, **others)

    @property
    def bits(self) -> tuple[int, ...]:
        """Of the exchanges that were measured."""
        return tuple(self._fits)

    def extrapolated(self, workers: int) -> bool:
        """Whether the profile has no records of so many workers."""
        return workers not in self.workers

    def _parameters(self, bits: int, workers: int) -> tuple[Transport, float]:
        """The transport, and the share of the coding that is hidden."""
        if workers == 1:
            return Transport(), 0.0
        fit = self._fits[bits]
        per_element, slowness = fit.at(workers)
        hidden = 0.0
        if bits == 8:
            # What an element costs beside the bandwidth is coding first. Less than all of the coding: the
            # rest is hidden. More: the transport takes it.
            coding = self.coding.exchange_s(1, workers)
            hidden = max(0.0, 1 - per_element / coding) if coding else 0.0
            per_element = max(0.0, per_element - coding)
        return Transport(1 / slowness, per_element, fit.call_s, fit.latency_s), hidden


def calibrate(profile: Mapping[str, Any], *, data_type: str | None = None, coding: Coding = CPU_CODING) -> Calibration:
    """Fits the model to a profile.

    Args:
      profile: what `hvd8bit bench exchange` wrote: `results`, a list of records as above. `tensors` above 1
        marks a list of gradients, `encoded_elements` 0 an 8-bit exchange that sent float32, `block_size` its
        blocks, `exchange` "allgather" one that took one round and is left out. Records with `step_compute_s`, of
        `hvd8bit bench train`, give one worker's step alone.
      data_type: whose records are the 8-bit ones; None for the first of `DATA_TYPES` that there is.
      coding: what 8-bit codes cost, where the profile does not have it.

    Raises:
      ValueError: a record lacks a key or has a value that cannot be, there are no records to use, some rates are
        known and others not, several workers of a host were measured, or steps are of several models.
    """
    records = _records(profile)
    step = _step(profile["results"])
    names = {record["compression"] for record in records}
    chosen = data_type or next((name for name in DATA_TYPES if name in names), None)
    if data_type and data_type not in names:
        raise ValueError(f"data_type must be one that the profile has ({', '.join(sorted(names))}), got {data_type!r}")
    used = [r for r in records if _BITS[r["compression"]] != 8 or r["compression"] == chosen]

    known = [record for record in used if record["rate_bit_per_s"] is not None]
    bandwidth = None
    if not known:
        # Seconds per byte come out of the fit as the slowness of a link of 1 byte per second.
        used = [{**record, "rate_bit_per_s": 8.0, "unknown": True} for record in used]
    elif len(known) < len(used):
        without = sorted({r["compression"] for r in used if r["rate_bit_per_s"] is None})
        raise ValueError(
            "rate_bit_per_s must be known for all exchanges of a profile or for none, got null for "
            f"{len(used) - len(known)} of {len(used)} ({', '.join(without)}); give it, or leave these records out"
        )

    coding, coding_is_measured = _coding([r for r in used if _BITS[r["compression"]] == 8], coding)
    fits = {}
    for bits in (32, 16, 8):
        ours = [record for record in used if _BITS[record["compression"]] == bits]
        if ours:
            fits[bits] = _fit(ours, bits, coding)
    if not known:
        bandwidth, fits = _own_bandwidth(fits)

    workers = tuple(sorted({record["workers"] for record in used}))
    calibration = Calibration(coding, coding_is_measured, bandwidth, step, workers, (), fits)
    residuals = []
    for record in used:
        rate = bandwidth if record.get("unknown") else record["rate_bit_per_s"] / 8
        cluster = calibration.cluster(record["workers"], rate)
        cost = _exchange(cluster, record, _BITS[record["compression"]])
        residuals.append(
            Residual(
                record["workers"],
                record["elements"],
                record["compression"],
                None if record.get("unknown") else record["rate_bit_per_s"],
                record["median_s"],
                cost.total_s,
            )
        )
    return dataclasses.replace(calibration, residuals=tuple(residuals))


def results_of(profile: Any) -> list[dict[str, Any]]:
    """A profile's records, whatever is in them. Raises ValueError where it has none."""
    results = profile.get("results") if isinstance(profile, Mapping) else None
    if not isinstance(results, list) or not all(isinstance(record, Mapping) for record in results):
        raise ValueError("profile must have a list of records under results, as hvd8bit bench exchange writes it")
    return results


def _records(profile: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of exchanges between several workers, checked."""
    records = []
    for number, record in enumerate(results_of(profile)):
        step_s = record.get("step_compute_s")
        if step_s is not None and not _is_above_zero(step_s):
            raise ValueError(f"step_compute_s of record {number} of the profile must be above 0, got {step_s!r}")
        if "median_s" not in record and "step_compute_s" in record:
            continue  # a step, no exchange
        missing = [key for key in _NEEDED if key not in record]
        if missing:
            raise ValueError(f"record {number} of the profile lacks {', '.join(missing)}")
        if record["compression"] not in _BITS:
            continue  # a ceiling without communication, say
        for key in ("workers", "elements", "median_s", "rate_bit_per_s"):
            value = record[key]
            if key == "rate_bit_per_s" and value is None:
                continue
            if not _is_above_zero(value):
                raise ValueError(f"{key} of record {number} of the profile must be above 0, got {value!r}")
        # On one host there is no link that its workers share.
        if record.get("workers_per_host", 1) not in (1, record["workers"]):
            raise ValueError(
                f"workers_per_host of record {number} of the profile must be 1, or all {record['workers']} workers, "
                f"got {record['workers_per_host']!r}: what a shared link takes cannot be told apart from what the "
                "transport makes of a link; measure with one worker per host"
            )
        # The model knows two rounds; small sums take one, by an allgather.
        if record["workers"] > 1 and not _sent_float32(record) and record.get("exchange") != ALLGATHER:
            records.append(record)
    if not records:
        raise ValueError(
            "profile must have a record of an exchange between at least 2 workers, got none; run hvd8bit bench exchange"
        )
    return records


def _is_above_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


def _sent_float32(record: Mapping[str, Any]) -> bool:
    """Whether an 8-bit exchange was so small that it went in 32 bit."""
    if _BITS[record["compression"]] != 8:
        return False
    links = Cluster(record["workers"], between=Link(1.0))
    return record.get("encoded_elements") == 0 or not links.encodes(record["elements"])


def _step(results: Sequence[Mapping[str, Any]]) -> MeasuredStep | None:
    """The step of the records that have one. Raises ValueError where they are not of one model and batch."""
    records = [record for record in results if record.get("step_compute_s")]
    if not records:
        return None
    for key in ("model", "batch_size"):
        found = {record.get(key) for record in records}
        if len(found) > 1:
            raise ValueError(
                f"{key} must be the same in all records with step_compute_s, got {', '.join(sorted(map(str, found)))}; "
                "give the file of one hvd8bit bench train"
            )
    seconds = statistics.median(record["step_compute_s"] for record in records)
    return MeasuredStep(seconds, records[0].get("model"), records[0].get("batch_size"))


def _coding(records: Sequence[Mapping[str, Any]], otherwise: Coding) -> tuple[Coding, bool]:
    """Coding rates, all seconds over all elements, so that large exchanges count most; whether they are measured."""
    block_size = records[0].get("block_size", Encoding.block_size) if records else Encoding.block_size
    parts = [record for record in records if all(record.get(part) is not None for part in _PARTS)]
    elements = sum(_encoded(record) for record in parts)
    if not elements:
        return dataclasses.replace(otherwise, block_size=block_size), False
    encode, reduce, decode = (sum(record[part] for record in parts) / elements for part in _PARTS)
    # A worker's chunk of the sum, n / N elements, is encoded again: that is in reduce_s.
    again = encode * sum(_encoded(record) / record["workers"] for record in parts) / elements
    return Coding(encode, max(0.0, reduce - again), decode, block_size), True


def _encoded(record: Mapping[str, Any]) -> int:
    """Elements that were encoded: of a list of gradients, small ones are not."""
    return record.get("encoded_elements") or record["elements"]


def _fit(records: Sequence[Mapping[str, Any]], bits: int, coding: Coding) -> _Fit:
    """Least squares of the relative errors, no parameter below 0; what records cannot tell is left out."""
    numbers = sorted({record["workers"] for record in records})
    # c and f of a number of workers take measurements at two rates. At one rate c is the coding, all of it.
    several = {n: len({r["rate_bit_per_s"] for r in records if r["workers"] == n}) > 1 for n in numbers}
    free = [n for n in numbers if several[n]]
    # Costs of an exchange and of its messages take small exchanges beside large ones. With one number of workers both
    # look alike, and milliseconds are more likely what it takes Horovod to agree than a link's.
    sizes = [record["elements"] for record in records]
    call = max(sizes) >= 10 * min(sizes)
    message = call and len(numbers) > 1
    at_c = call + message
    at_f = at_c + len(free)
    matrix = np.zeros((len(records), at_f + len(numbers)))
    target = np.zeros(len(records))
    for row, record in enumerate(records):
        n, elements, rate = record["workers"], record["elements"], record["rate_bit_per_s"] / 8
        # With a latency of 1 s and 1 s per exchange, these seconds are the numbers of both.
        unit = _exchange(
            Cluster(
                n,
                between=Link(rate, 1.0),
                coding=Coding(block_size=coding.block_size),
                transports={bits: Transport(call_s=1.0)},
            ),
            record,
            bits,
        )
        matrix[row, :at_c] = [unit.transport_s, unit.latency_s][:at_c]
        if several[n]:
            matrix[row, at_c + free.index(n)] = elements
        matrix[row, at_f + numbers.index(n)] = unit.bandwidth_s
        known = 0.0 if several[n] or bits != 8 else coding.exchange_s(elements, n)
        target[row] = max(0.0, record["median_s"] - known)
        matrix[row] /= record["median_s"]
        target[row] /= record["median_s"]
    found = _nonnegative_least_squares(matrix, target).tolist()
    all_coding = {n: coding.exchange_s(1, n) if bits == 8 else 0.0 for n in numbers}
    return _Fit(
        latency_s=found[1] if message else None,
        call_s=found[0] if call else 0.0,
        s_per_element={n: found[at_c + free.index(n)] if several[n] else all_coding[n] for n in numbers},
        slowness={n: found[at_f + k] for k, n in enumerate(numbers)},
    )


def _exchanges(record: Mapping[str, Any]) -> int:
    """How many exchanges a record took: a list of gradients travels in buckets, one tensor at once."""
    if record.get("tensors", 1) == 1:
        return 1
    return max(1, math.ceil(record["elements"] / BUCKET_ELEMENTS))


def _exchange(cluster: Cluster, record: Mapping[str, Any], bits: int) -> Cost:
    """The model's cost of what a record timed."""
    count = _exchanges(record)
    return cluster.exchange(record["elements"] / count, bits) * count


def _own_bandwidth(fits: dict[int, _Fit]) -> tuple[float, dict[int, _Fit]]:
    """The bandwidth that the exchanges got, and the fits relative to it: the fastest had all of it."""
    known = [value for fit in fits.values() for value in fit.slowness.values() if value > 0]
    if not known:
        raise ValueError(
            "the profile does not tell the bandwidth: its exchanges take no longer the more they move; measure larger "
            "ones, or give the link's rate"
        )
    bandwidth = 1 / min(known)
    relative = {
        bits: dataclasses.replace(fit, slowness={n: value * bandwidth for n, value in fit.slowness.items()})
        for bits, fit in fits.items()
    }
    return bandwidth, relative


def _share(workers: int) -> float:
    return (workers - 1) / workers


def _line(points: Mapping[float, float], x: float) -> float:
    """The value at x of the least-squares line through the points; the only value if there is one."""
    if len(points) == 1:
        return next(iter(points.values()))
    at, values = np.array(list(points)), np.array(list(points.values()))
    slope = float(np.sum((at - at.mean()) * (values - values.mean())) / np.sum((at - at.mean()) ** 2))
    return float(values.mean()) + slope * (x - float(at.mean()))


def _nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 with the smallest |matrix x - target|: the active-set method of Lawson and Hanson (1974)."""
    sizes = np.linalg.norm(matrix, axis=0)
    sizes[sizes == 0] = 1.0
    scaled = matrix / sizes  # parameters differ by ten orders of magnitude
    x = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], bool)
    tolerance = 1e-12 * max(1.0, float(np.linalg.norm(target)))
    for _ in range(10 * matrix.shape[1]):
        gradient = scaled.T @ (target - scaled @ x)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            below = free & (trial < 0)
            if not below.any():
                x = trial
                break
            step = float(np.min(x[below] / (x[below] - trial[below])))
            x = x + step * (trial - x)
            free &= x > 1e-300
            x[~free] = 0.0
            if not free.any():
                break
    return x / sizes
