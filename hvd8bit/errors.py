"""What rounding to 8 bits does to numbers: the paper's table 2, block scaling, and people's own arrays.

The numbers go through the codec itself: the op library where TensorFlow and the library are there, else the
NumPy reference, which gives the same bits. Samples are drawn, coded and added up in pieces, so memory does
not grow with their number, and the result depends on the seed alone.

Source: Dettmers 2016, sec. 3.1 and table 2.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable, Optional

import numpy as np

from hvd8bit import reference
from hvd8bit.datatypes import DATA_TYPES
from hvd8bit.encoding import Encoding

TABLE_SAMPLES = 25_000_000
"""Samples behind each cell of the paper's table 2."""
SWEEP_SAMPLES = 1_000_000
BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, None)
"""Scalings of the sweep; None is one scale for the whole sample."""
PIECE = 2**18  # a multiple of every block size; a megabyte of float32 stays near the core
TABLE_CELLS = len(DATA_TYPES) * 4
SWEEP_CELLS = TABLE_CELLS * len(BLOCK_SIZES)
ARRAY_SCALINGS = len(DATA_TYPES) * len(BLOCK_SIZES) + 2  # of `of_array`
WORTH_IMPORTING_TENSORFLOW = 4_000_000  # samples; below, NumPy is done before TensorFlow is there

Roundtrip = Callable[[np.ndarray, Encoding, Optional[float]], np.ndarray]
Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Distribution:
    """One of the paper's four.

    Attributes:
      name: as in table 2.
      deviation: of normal numbers with the mean 0; None for uniform ones in (0, 1).
      exponent_offset: the power of ten that scales `mantissa` and `static_tree` in the paper.
      paper_percent: table 2's mean relative error of each data type.
    """

    name: str
    deviation: float | None
    exponent_offset: float
    paper_percent: dict[str, float]

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Independent numbers: float32 [count]."""
        if self.deviation is None:
            # By way of float64: float32 draws are multiples of 2^-24, too coarse near zero, where relative
            # errors are largest.
            return random.random(count).astype(np.float32)
        return random.standard_normal(count, dtype=np.float32) * np.float32(self.deviation)


def _percent(dynamic_tree: float, linear: float, mantissa: float, static_tree: float) -> dict[str, float]:
    return {
        "dynamic_tree": dynamic_tree,
        "linear": linear,
        "mantissa": mantissa,
        "static_tree": static_tree,
    }


DISTRIBUTIONS = (
    Distribution("U(0,1)", None, 10.0, _percent(1.39, 2.16, 7.22, 4.82)),
    Distribution("N(0,1)", 1.0, 10.0, _percent(2.46, 6.47, 6.89, 6.30)),
    Distribution("N(0,10^2)", 10.0, 100.0, _percent(2.49, 6.44, 7.19, 6.28)),
    Distribution("N(0,0.2^2)", 0.2, 10.0, _percent(2.45, 6.15, 8.26, 6.58)),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """What coding did to one sample. Also the JSON record; the paper's table is where `paper_percent` is set.

    Attributes:
      data, data_type, scaling: what was coded and how, in words.
      block_size: elements that share a scale; None for the whole sample and for a fixed scale.
      samples: elements.
      mean_relative_error_percent: mean of |decoded - x| / |x| over the elements that are not zero.
      mean_absolute_error, rms_error, bias: of decoded - x; bias is its mean, with the sign.
      rms_error_over_rms: rms_error over the root mean square of x.
      flushed_to_zero_share: of all elements, those that are not zero and decode to zero.
      saturated_share: of all elements, those beyond the largest value of a fixed scale.
      paper_percent: table 2's mean relative error, or None.
    """

    data: str
    data_type: str
    scaling: str
    block_size: int | None
    samples: int
    mean_relative_error_percent: float
    paper_percent: float | None
    mean_absolute_error: float
    rms_error: float
    rms_error_over_rms: float
    bias: float
    flushed_to_zero_share: float
    saturated_share: float


@dataclasses.dataclass(frozen=True)
class _Job:
    """A data type and scaling to try, and the paper's figure for it."""

    encoding: Encoding
    paper_percent: float | None = None

    @property
    def whole(self) -> bool:
        return self.encoding.scaling == "absmax" and self.encoding.block_size is None

    @property
    def scaling(self) -> str:
        if self.encoding.scaling != "absmax":
            return f"exponent offset 10^{round(math.log10(float(self.encoding.scaling)))}"
        return "whole sample" if self.whole else f"block of {self.encoding.block_size}"


# ------------------------------------------------------------------------------------------ what is asked for


def paper_table(
    samples: int = TABLE_SAMPLES,
    seed: int = 0,
    *,
    roundtrip: Roundtrip | None = None,
    progress: Progress | None = None,
) -> list[Cell]:
    """The 16 cells of table 2, each from `samples` numbers.

    `dynamic_tree` and `linear` are scaled by the whole sample's absolute maximum, `mantissa` and
    `static_tree` by the paper's exponent offsets.

    Args:
      samples: numbers per cell, at least 1.
      seed: the same seed gives the same figures.
      roundtrip: a codec from `codec`; by default the faster one for this many samples.
      progress: called with the number of numbers that have been coded since the last call.
    """
    roundtrip = roundtrip or codec(samples)
    return [
        cell
        for number, distribution in enumerate(DISTRIBUTIONS)
        for cell in _measure(
            distribution.name,
            _Drawn(distribution.draw, samples, (seed, number)),
            _table_jobs(distribution),
            roundtrip,
            progress,
        )
    ]


def block_sweep(
    samples: int = SWEEP_SAMPLES,
    seed: int = 0,
    *,
    roundtrip: Roundtrip | None = None,
    progress: Progress | None = None,
) -> list[Cell]:
    """Every data type with each of `BLOCK_SIZES` on the four distributions. Arguments as `paper_table`.

    With a million samples two seeds agree within 1 % with block scaling, `linear` within 3 %: with few blocks
    its error follows their largest values.
    """
    roundtrip = roundtrip or codec(samples * len(BLOCK_SIZES))
    return [
        cell
        for number, distribution in enumerate(DISTRIBUTIONS)
        for cell in _measure(
            distribution.name,
            _Drawn(distribution.draw, samples, (seed, len(DISTRIBUTIONS) + number)),
            _sweep_jobs(),
            roundtrip,
            progress,
        )
    ]


def load(path: str) -> np.ndarray:
    """The array of an .npy file, mapped and not read.

    Raises:
      ValueError: the file is no .npy file with one array of at least one number.
      TypeError: its dtype is not float16, float32 or float64.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"--input must be an .npy file of numbers, and {path} is none ({error}); write one with numpy.save"
        ) from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"--input must be an .npy file with one array, got {path}; use numpy.save, not savez")
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(
            f"--input must hold float16, float32 or float64, and {path} holds {array.dtype}; cast it to float32 first"
        )
    if array.size == 0:
        raise ValueError(f"--input must hold at least one number, and {path} is empty")
    return array


def of_array(
    array: np.ndarray, name: str, *, roundtrip: Roundtrip | None = None, progress: Progress | None = None
) -> list[Cell]:
    """Every data type with each of `BLOCK_SIZES` on an array's numbers, in the order of its memory.

    `mantissa` and `static_tree` are also tried with the smallest exponent offset that saturates nothing.

    Args:
      array: float16, float32 or float64, of any shape, with at least one element.
      name: the `data` of the cells.
      roundtrip, progress: as in `paper_table`.

    Raises:
      ValueError: there is a NaN, an Inf, or a number beyond float32.
    """
    source = _Stored(array)
    largest = source.largest()
    if not math.isfinite(largest):
        raise ValueError(
            f"the numbers must be finite in float32, and {name} holds a NaN, an Inf or a number beyond it; "
            "a block with one decodes to NaN, so there is no error to measure: leave it out"
        )
    offset = 10.0 ** max(-30, min(30, math.ceil(math.log10(largest)))) if largest else 1.0
    fixed = [_Job(Encoding(data_type, None, offset)) for data_type in ("mantissa", "static_tree")]
    jobs = _sweep_jobs() + fixed
    return _measure(name, source, jobs, roundtrip or codec(array.size * len(jobs)), progress)


def missed(cells: Iterable[Cell]) -> list[str]:
    """The bounds that cells of the paper's table miss, in words: empty if all hold.

    Each mean relative error is at or below the paper's, and `dynamic_tree` has the lowest of each
    distribution.
    """
    table = [cell for cell in cells if cell.paper_percent is not None]
    wrong = [
        f"{cell.data_type} on {cell.data}: mean relative error {cell.mean_relative_error_percent:.3f} %, "
        f"above the paper's {cell.paper_percent:.2f} %"
        for cell in table
        if not cell.mean_relative_error_percent <= (cell.paper_percent or 0)
    ]
    for data in dict.fromkeys(cell.data for cell in table):
        row = {cell.data_type: cell.mean_relative_error_percent for cell in table if cell.data == data}
        best = min(row, key=lambda name: row[name])
        if best != "dynamic_tree":
            wrong.append(
                f"on {data} {best} has the lowest mean relative error, {row[best]:.3f} %, and not dynamic_tree"
            )
    return wrong


def error_curve(
    data_type: str, decades: int = 7, per_decade: int = 400, bin_: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """Mean relative error in percent over the magnitude, a share of the scale, in (10^-decades, 1].

    Returns:
      Magnitudes (the bins' geometric means) and errors, float64 [decades * per_decade / bin_] each.
    """
    steps = decades * per_decade
    x = (10.0 ** (-decades + (np.arange(steps) + 0.5) / per_decade)).astype(np.float32)
    decoded = with_numpy(x, Encoding(data_type, None), 1.0)
    relative = np.abs(decoded.astype(np.float64) - x) / x
    middles = np.exp(np.log(x.astype(np.float64)).reshape(-1, bin_).mean(axis=1))
    return middles, 100 * relative.reshape(-1, bin_).mean(axis=1)


# ------------------------------------------------------------------------------------------ through the codec


def codec(numbers: int) -> Roundtrip:
    """The codec to use for so many numbers: the op library if it is there and worth loading, else NumPy."""
    if numbers < WORTH_IMPORTING_TENSORFLOW:
        return with_numpy
    try:
        from hvd8bit import ops  # TensorFlow

        ops.native.load()
    except ImportError:
        return with_numpy
    return with_ops


def with_numpy(x: np.ndarray, encoding: Encoding, largest: float | None = None) -> np.ndarray:
    """Encodes and decodes float32 [n] with the reference, many blocks at once.

    Args:
      x: finite numbers.
      encoding: how.
      largest: for block_size=None, the absolute maximum of the sample that x is a piece of.

    Returns:
      float32 [n].
    """
    if encoding.scaling != "absmax":
        return reference.decode_block(*reference.encode_block(x, encoding), encoding.data_type)
    size = encoding.block_size or x.size
    rows = np.zeros((-(-x.size // size), size), np.float32)
    rows.reshape(-1)[: x.size] = x
    scales = np.abs(rows).max(axis=1) if largest is None else np.full(len(rows), largest, np.float32)
    # A block over its own scale has the maximum 1, so all blocks together have the one scale 1: the reference
    # takes them as one block. The 1 at the end stands for a maximum that lies in another piece.
    units = np.append((rows / np.where(scales > 0, scales, np.float32(1))[:, None]).reshape(-1), np.float32(1))
    one_block = Encoding(encoding.data_type, None)
    codes, scale = reference.encode_block(units, one_block)
    decoded = reference.decode_block(codes, scale, encoding.data_type)[:-1].reshape(rows.shape)
    return (decoded * scales[:, None]).reshape(-1)[: x.size]


def with_ops(x: np.ndarray, encoding: Encoding, largest: float | None = None) -> np.ndarray:
    """`with_numpy`, by the op library."""
    import tensorflow as tf

    from hvd8bit import ops

    if largest is not None:
        # One block, whose maximum lies in another piece of the sample.
        x = np.append(x, np.float32(largest))
    tensor = tf.constant(x)
    payload, _ = ops.encode_list([tensor], 1, encoding)
    (decoded,) = ops.decode_list([payload], [tensor], 1, encoding)
    return decoded.numpy()[: x.size if largest is None else x.size - 1]


# ------------------------------------------------------------------------------------------ samples in pieces


class _Drawn:
    """Random numbers, drawn anew each time a piece is asked for."""

    def __init__(self, draw: Callable[[np.random.Generator, int], np.ndarray], samples: int, seed: tuple[int, int]):
        self.size = samples
        self._draw = draw
        self._seed = seed

    def piece(self, number: int) -> np.ndarray:
        random = np.random.default_rng([*self._seed, number])
        return self._draw(random, min(PIECE, self.size - number * PIECE))

    def largest(self) -> float:
        return _largest(self)


class _Stored:
    """The numbers of an array, as float32."""

    def __init__(self, array: np.ndarray):
        self.size = array.size
        # The order of the elements in a file is that of its memory: a file in Fortran order is not copied.
        self._flat = array.reshape(-1, order="A")

    def piece(self, number: int) -> np.ndarray:
        with np.errstate(over="ignore"):  # found by the caller, as an Inf
            return np.ascontiguousarray(self._flat[number * PIECE : (number + 1) * PIECE]).astype(np.float32)

    def largest(self) -> float:
        return _largest(self)


def _pieces(source: Any) -> range:
    return range(-(-source.size // PIECE))


def _largest(source: Any) -> float:
    """The absolute maximum; NaN if there is one."""
    return float(np.max(list(_in_parallel(lambda n: np.abs(source.piece(n)).max(), _pieces(source)))))


def _in_parallel(function: Callable[[int], Any], pieces: Sequence[int]) -> Iterator[Any]:
    """`function` of each piece, in order. NumPy and TensorFlow let other threads run meanwhile."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(cores, 8)) as pool:
        yield from pool.map(function, pieces)


def _table_jobs(distribution: Distribution) -> list[_Job]:
    fixed = ("mantissa", "static_tree")
    return [
        _Job(
            Encoding(name, None, distribution.exponent_offset if name in fixed else "absmax"),
            distribution.paper_percent[name],
        )
        for name in DATA_TYPES
    ]


def _sweep_jobs() -> list[_Job]:
    return [_Job(Encoding(name, size)) for name in DATA_TYPES for size in BLOCK_SIZES]


def _measure(
    data: str, source: Any, jobs: Sequence[_Job], roundtrip: Roundtrip, progress: Progress | None
) -> list[Cell]:
    largest = source.largest() if any(job.whole for job in jobs) else None

    def of_piece(number: int) -> np.ndarray:
        x = source.piece(number)
        magnitude = np.abs(x)
        return np.array(
            [
                _sums(x, magnitude, job.encoding, roundtrip(x, job.encoding, largest if job.whole else None))
                for job in jobs
            ]
        )

    totals = np.zeros((len(jobs), _SUMS))
    for number, sums in zip(_pieces(source), _in_parallel(of_piece, _pieces(source))):
        totals += sums
        if progress:
            progress(min(PIECE, source.size - number * PIECE) * len(jobs))
    return [_cell(data, job, source.size, total) for job, total in zip(jobs, totals)]


_SUMS = 8


def _sums(x: np.ndarray, magnitude: np.ndarray, encoding: Encoding, decoded: np.ndarray) -> list[float]:
    """What a piece adds to the means; every sum in float64."""
    error = decoded - x
    absolute = np.abs(error)
    nonzero = np.count_nonzero(x)
    saturated = np.count_nonzero(magnitude > np.float32(encoding.fixed_scale)) if encoding.fixed_scale else 0
    # A zero decodes to zero: its error is 0 whatever it is divided by.
    relative = absolute / (magnitude if nonzero == x.size else np.where(magnitude > 0, magnitude, np.float32(1)))
    return [
        relative.sum(dtype=np.float64),
        nonzero,
        absolute.sum(dtype=np.float64),
        np.square(error, dtype=np.float64).sum(),
        error.sum(dtype=np.float64),
        np.square(x, dtype=np.float64).sum(),
        nonzero - np.count_nonzero(decoded),
        saturated,
    ]


def _cell(data: str, job: _Job, samples: int, totals: np.ndarray) -> Cell:
    relative, nonzero, absolute, square, error, x_square, flushed, saturated = totals.tolist()
    return Cell(
        data=data,
        data_type=job.encoding.data_type,
        scaling=job.scaling,
        block_size=job.encoding.block_size,
        samples=samples,
        mean_relative_error_percent=100 * relative / nonzero if nonzero else 0.0,
        paper_percent=job.paper_percent,
        mean_absolute_error=absolute / samples,
        rms_error=math.sqrt(square / samples),
        rms_error_over_rms=math.sqrt(square / x_square) if x_square else 0.0,
        bias=error / samples,
        flushed_to_zero_share=flushed / samples,
        saturated_share=saturated / samples,
    )
