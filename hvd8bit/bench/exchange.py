"""How long workers take to sum tensors, for each compression: verified first, then timed.

Every worker calls `run` at the same time with the same arguments. Beside Horovod's own allreduce (`none`, `fp16`) and
EightBit with each data type stand two bounds: `bare`, the same bytes in the same slices by alltoall and allgather
without any coding, and `no_communication`, the coding with what the others sent put in from memory. The parts of an
exchange are timed one by one, too, each in one piece; in the exchange itself they overlap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

import hvd8bit.exchange as path
from hvd8bit import modes, ops
from hvd8bit.bench import timing, train
from hvd8bit.collectives import HorovodComm, reset_sent_bytes, sent_bytes
from hvd8bit.compression import EightBit
from hvd8bit.datatypes import DATA_TYPES, codebook
from hvd8bit.encoding import Encoding
from hvd8bit.layout import Layout, ring_bytes
from hvd8bit.reduction import reduce_gradients
from hvd8bit.speedup import workload

SIZES = (1024, 16 * 1024, 256 * 1024, 1024**2, 4 * 1024**2, 16 * 1024**2, 64 * 1024**2)
"""Elements: 4 kB to 256 MB of float32."""
COMPRESSIONS = ("none", "fp16", *DATA_TYPES)
BARE = "bare"
NO_COMMUNICATION = "no_communication"
PARTS = ("encode", "alltoall", "reduce", "allgather", "decode")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, the same on all workers.

    Attributes:
      compressions: of `COMPRESSIONS`; the first data type among them is also the one of `bare`,
        `no_communication` and `slices`.
      block_size: elements that share a scale.
      rounds, budget_s: for each list of tensors; see `timing.interleaved`.
      rate_bit_per_s: of each host's link, for the records; None where it is not known.
      slices: numbers of slices to try beside the default.
      exchanges: modes of the exchange to try, of `hvd8bit.modes.MODES`.
      sums_only: leave out the parts and both bounds.
    """

    compressions: tuple[str, ...] = COMPRESSIONS
    block_size: int | None = Encoding.block_size
    rounds: int = 20
    budget_s: float = 20.0
    rate_bit_per_s: float | None = None
    slices: tuple[int, ...] = ()
    sums_only: bool = False
    exchanges: tuple[str, ...] = ()

    def __post_init__(self):
        other = [name for name in self.exchanges if name not in modes.MODES]
        if other:
            raise ValueError(f"exchanges must be of {', '.join(modes.MODES)}, got {', '.join(other)}")
        unknown = [name for name in self.compressions if name not in COMPRESSIONS]
        if unknown or not self.compressions:
            raise ValueError(f"compressions must be of {', '.join(COMPRESSIONS)}, got {', '.join(unknown) or 'none'}")
        for name in ("slices", "exchanges"):
            if getattr(self, name) and not self.data_types:
                raise ValueError(
                    f"compressions must have one of {', '.join(DATA_TYPES)} for {name} to be tried with, got "
                    f"{', '.join(self.compressions)}"
                )

    @property
    def data_types(self) -> list[str]:
        return [name for name in self.compressions if name in DATA_TYPES]


def rule(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What the records of both modes say about `hvd8bit.modes`: up to which size an allgather was no slower.

    Returns:
      workers; largest_elements, the largest size up to which it was, 0 if there was none; more_bytes, what it sends
      more there than a scatter-reduce, which is a lower bound of ROUND_BYTES, as largest_elements is of
      MAX_ALLGATHER_ELEMENTS; None unless both modes were measured.
    """
    seen: dict[int, dict[str, float]] = {}
    for record in records:
        if record["compression"] == "exchanges":
            seen.setdefault(record["elements"], {})[record["exchange"]] = record["median_s"]
    both = {elements: times for elements, times in sorted(seen.items()) if len(times) == len(modes.MODES)}
    if not both:
        return None
    largest = 0
    for elements, times in both.items():
        if times[modes.ALLGATHER] > times[modes.SCATTER_REDUCE]:
            break
        largest = elements
    workers = records[0]["workers"]
    more = (workers - 1) * (workers - 2) / workers * largest
    return {"workers": workers, "largest_elements": largest, "more_bytes": more}


def gradient_shapes(model: str) -> list[tuple[int, ...]]:
    """Shapes of a model's gradients: of keras.applications, or one of `hvd8bit.speedup`'s workloads.

    Of a workload ("alexnet") each layer's parameters are one vector.

    Raises:
      ValueError: there is no such model.
    """
    if model in workload.bundled():
        return [(layer.parameters,) for layer in workload.load(model).layers if layer.parameters]
    return [tuple(weight.shape) for weight in train.application(model)(weights=None).trainable_weights]


def run(
    shapes: Sequence[tuple[int, ...]],
    settings: Settings,
    progress: Callable[[str], None] = lambda text: None,
    gradients_of: str | None = None,
) -> list[dict[str, Any]]:
    """Verifies and times the sum of one list of tensors over all workers.

    Args:
      shapes: of the float32 tensors. One alone is summed by `hvd.allreduce`, several by `reduce_gradients`.
      settings: what to measure.
      progress: called with a line of text before each part.
      gradients_of: name of the model whose gradients these are, for the records.

    Returns:
      A record for each compression, `bare` and `no_communication`, the same on all workers, and one for each number of
      slices in `settings.slices`, marked by `compression` being "slices", and for each mode in `settings.exchanges`,
      marked by "exchanges".

    Raises:
      RuntimeError: a sum is wrong, or the workers' sums differ: nothing is timed.
    """
    bench = _Bench(list(shapes), settings)
    progress("verifying")
    counted = bench.verify()
    samples = timing.interleaved(bench.cases(), settings.rounds, settings.budget_s, progress)
    return [{**record, "gradients_of": gradients_of} for record in bench.records(samples, counted)]


class _Bench:
    """One list of tensors: this worker's numbers, and everything that is done with them."""

    def __init__(self, shapes: list[tuple[int, ...]], settings: Settings):
        import horovod.tensorflow as hvd

        self.hvd = hvd
        self.settings = settings
        self.comm = HorovodComm()
        self.workers, self.rank = self.comm.size(), hvd.rank()
        self.workers_per_host = timing.workers_per_host()
        self.elements = sum(math.prod(shape) for shape in shapes)
        self.shapes = shapes
        self.tensors = self._numbers(self.rank)
        encoding = Encoding(block_size=settings.block_size)
        alone = self.workers if len(shapes) == 1 else None
        reasons = [EightBit.select.reason_to_pass("float32", math.prod(shape), alone, encoding) for shape in shapes]
        # Where none is worth it, EightBit sends float32; the parts are timed all the same.
        self.encoded = [t for t, reason in zip(self.tensors, reasons) if reason is None] or self.tensors
        self.encoded_elements = sum(math.prod(s) for s, reason in zip(shapes, reasons) if reason is None)
        self.slices = path.number_of_slices(self.encoded)

    def _numbers(self, rank: int) -> list[tf.Tensor]:
        random = np.random.default_rng(rank)
        return [tf.constant(random.standard_normal(shape, dtype=np.float32)) for shape in self.shapes]

    # The sums

    def step(self, name: str) -> Callable[[], list[tf.Tensor]]:
        """What a training step does with its gradients, traced as it would be there."""
        if name in DATA_TYPES:
            compression: Any = EightBit(data_type=name, block_size=self.settings.block_size)
        else:
            compression = getattr(self.hvd.Compression, name)
        names = [f"tensor_{number}" for number in range(len(self.shapes))]

        @tf.function(autograph=False)
        def total(tensors):
            if len(tensors) == 1:
                (x,) = tensors
                return [self.hvd.allreduce(x, op=self.hvd.Sum, compression=compression, name=f"bench_{name}")]
            return reduce_gradients(tensors, names, compression=compression, op=self.hvd.Sum, scope=f"bench_{name}")

        return lambda: total(self.tensors)

    def verify(self) -> dict[str, float]:
        """Compares all sums with the exact one. Returns the bytes each compression gave to Horovod.

        Exact is the float64 sum of everyone's numbers, which each worker makes anew; of large lists of their
        first ones. Beyond these, all are compared with Horovod's float32.
        """
        self.steps = {name: self.step(name) for name in self.settings.compressions}
        largest = [
            self.hvd.allgather(tf.reshape(tf.reduce_max(tf.abs(x)), [1]), name="bench_largest").numpy().tolist()
            for x in self.tensors
        ]
        plain: list[np.ndarray] = []
        counted = {}
        # Horovod's float32 first: the others are compared with it.
        for name in ["none", *(other for other in self.steps if other != "none")]:
            reset_sent_bytes()
            sums = [x.numpy() for x in self.steps.get(name, self.step(name))()]
            counted[name] = float(sent_bytes()) if name in DATA_TYPES else self._ring_bytes(name)
            if name == "none":
                plain = sums
                problem = self._problem_of_plain(sums[0], sum(largest[0]))
            else:
                problem = _problem(name, sums, plain, [_error_bound(name, maxima) for maxima in largest])
            self._agree(name, sums, problem)
        return counted

    def _agree(self, name: str, sums: list[np.ndarray], problem: str) -> None:
        """Raises on all workers if one of them has a problem, or if their sums differ."""
        digest = hashlib.sha256(b"".join(x.tobytes() for x in sums)).hexdigest()
        everyone = self.hvd.allgather_object((digest, problem))
        problems = [text for _, text in everyone if text]
        if problems:
            raise RuntimeError(problems[0])
        if len({digest for digest, _ in everyone}) > 1:
            raise RuntimeError(f"the workers' sums with {name} differ: not timed")

    def _problem_of_plain(self, got: np.ndarray, largest: float) -> str:
        count = min(got.size, 100_000)
        exact = np.zeros(count)
        for rank in range(self.workers):
            exact += np.random.default_rng(rank).standard_normal(count, dtype=np.float32)
        # N - 1 roundings of numbers no larger than the sum of the maxima.
        bound = self.workers * largest * 2.0**-24
        return _problem("none", [got.reshape(-1)[:count]], [exact], [bound])

    def _ring_bytes(self, name: str) -> float:
        return ring_bytes(self.elements, self.workers, 2 if name == "fp16" else 4)

    # The parts

    def cases(self) -> dict[str, Callable[[], object]]:
        """All that is timed, by name."""
        cases: dict[str, Callable[[], object]] = dict(self.steps)
        if not self.settings.data_types:
            return cases
        first = self.settings.data_types[0]
        if not self.settings.sums_only:
            for name in self.settings.data_types:
                cases.update(self._coding(name))
            cases.update(self._transport(first))
            cases[NO_COMMUNICATION] = self._without_communication(first)
            cases[BARE] = self._bare()
        cases.update({f"slices {n}": self._sliced(first, n) for n in self.settings.slices})
        cases.update({f"exchange {mode}": self._in_mode(first, mode) for mode in self.settings.exchanges})
        return cases

    def _encoding(self, name: str) -> Encoding:
        return Encoding(name, self.settings.block_size)

    def _coding(self, name: str) -> dict[str, Callable[[], object]]:
        encoding, tensors = self._encoding(name), self.encoded
        payload, splits = ops.encode_list(tensors, self.workers, encoding)
        received, sent = self.comm.alltoall(payload, splits, "bench_part_alltoall")
        mine = ops.reduce_shards(received, sent, tensors, self.workers, self.rank, encoding)
        gathered = self.comm.allgather(mine, "bench_part_allgather")
        return {
            f"{name} encode": lambda: ops.encode_list(tensors, self.workers, encoding),
            f"{name} reduce": lambda: ops.reduce_shards(received, sent, tensors, self.workers, self.rank, encoding),
            f"{name} decode": lambda: ops.decode_list([gathered], tensors, self.workers, encoding),
        }

    def _transport(self, name: str) -> dict[str, Callable[[], object]]:
        """Alltoall and allgather in one piece; the bytes are as many with every data type."""
        encoding = self._encoding(name)
        payload, splits = ops.encode_list(self.encoded, self.workers, encoding)
        received, sent = self.comm.alltoall(payload, splits, "bench_part_alltoall")
        mine = ops.reduce_shards(received, sent, self.encoded, self.workers, self.rank, encoding)
        return {
            "alltoall": lambda: self.comm.alltoall(payload, splits, "bench_part_alltoall"),
            "allgather": lambda: self.comm.allgather(mine, "bench_part_allgather"),
        }

    def _without_communication(self, name: str) -> Callable[[], object]:
        recorded = _Recorded(self.comm)

        def exchange():
            return path.exchange(
                self.encoded, self._encoding(name), recorded, factor=1.0, name="bench_recorded", mode=self._mode()
            )

        exchange()
        recorded.over = True

        @tf.function(autograph=False)
        def replay():
            outputs = exchange()
            # TensorFlow would leave out what nobody uses.
            return outputs, recorded.given

        return lambda: replay()

    def _sliced(self, name: str, slices: int) -> Callable[[], object]:
        @tf.function(autograph=False)
        def exchange(tensors):
            return path.exchange(tensors, self._encoding(name), self.comm, factor=1.0, name=f"bench_slices_{slices}")

        with _number_of_slices(slices):
            exchange.get_concrete_function(self.encoded)
        return lambda: exchange(self.encoded)

    def _in_mode(self, name: str, mode: str) -> Callable[[], object]:
        @tf.function(autograph=False)
        def exchange(tensors):
            return path.exchange(tensors, self._encoding(name), self.comm, factor=1.0, name=f"bench_{mode}", mode=mode)

        return lambda: exchange(self.encoded)

    def _mode(self) -> str:
        """How `EightBit` would exchange them by itself."""
        sizes = tuple(x.shape.num_elements() for x in self.encoded)
        return modes.choose("auto", sizes, self.workers, self.settings.block_size)

    def _bare(self) -> Callable[[], object]:
        """The exchange's bytes in its slices, all enqueued at once, and nothing else."""
        sizes = [int(tf.size(x)) for x in self.encoded]
        if self._mode() == modes.ALLGATHER:
            everything = Layout(sizes, 1, self.settings.block_size).total_bytes()
            own = tf.constant(np.frombuffer(np.random.default_rng(self.rank).bytes(everything), np.uint8))

            @tf.function(autograph=False)
            def gather():
                return self.comm.allgather(own, "bench_bare_allgather_0")

            return lambda: gather()
        layout = Layout(sizes, self.workers, self.settings.block_size, self.slices)
        chunks = [[layout.chunk_bytes(k, s) for k in range(self.workers)] for s in range(self.slices)]
        random = np.random.default_rng(self.rank)
        payloads = [tf.constant(np.frombuffer(random.bytes(sum(sizes)), np.uint8)) for sizes in chunks]
        parts = [tf.constant(np.frombuffer(random.bytes(sizes[self.rank]), np.uint8)) for sizes in chunks]

        @tf.function(autograph=False)
        def move():
            brought = []
            for slice_, (payload, part, sizes) in enumerate(zip(payloads, parts, chunks)):
                received, _ = self.comm.alltoall(payload, tf.constant(sizes), f"bench_bare_alltoall_{slice_}")
                with tf.control_dependencies([received]):
                    gathered = self.comm.allgather(part, f"bench_bare_allgather_{slice_}")
                # TensorFlow would leave out an alltoall whose result nobody uses.
                brought += [received, gathered]
            return brought

        return lambda: move()

    # What was seen

    def records(self, samples: dict[str, timing.Samples], counted: dict[str, float]) -> Iterator[dict[str, Any]]:
        for name in self.settings.compressions:
            yield self._record(name, samples[name], samples, counted[name])
        for name in (BARE, NO_COMMUNICATION):
            if name in samples:
                yield self._record(name, samples[name], samples, None)
        for slices in self.settings.slices:
            yield {**self._record("slices", samples[f"slices {slices}"], samples, None), "slices": slices}
        for mode in self.settings.exchanges:
            yield {**self._record("exchanges", samples[f"exchange {mode}"], samples, None), "exchange": mode}

    def _record(
        self, name: str, sample: timing.Samples, samples: dict[str, timing.Samples], counted: float | None
    ) -> dict[str, Any]:
        sent = sample.bytes_sent if name != NO_COMMUNICATION else None
        eight_bit = name in DATA_TYPES

        def part(of: str) -> float | None:
            seen = samples.get(of if of in ("alltoall", "allgather") else f"{name} {of}")
            return seen.median_s if seen and eight_bit else None

        best = sent if sent is not None else counted
        return {
            "workers": self.workers,
            "tensors": len(self.shapes),
            "elements": self.elements,
            "compression": name,
            "workers_per_host": self.workers_per_host,
            "rate_bit_per_s": self.settings.rate_bit_per_s,
            "median_s": sample.median_s,
            "spread": sample.spread,
            "rounds": len(sample.seconds),
            "bytes_per_element": None if best is None else best / self.elements,
            "bytes_from": None if best is None else "payload" if sent is None else "interface",
            "payload_bytes_per_element": None if counted is None else counted / self.elements,
            **{f"{of}_s": part(of) for of in PARTS},
            "encoded_elements": self.encoded_elements if eight_bit else 0,
            "slices": self.slices if eight_bit or name in (BARE, NO_COMMUNICATION) else None,
            "block_size": self.settings.block_size if eight_bit else None,
            "exchange": self._mode() if eight_bit else None,
        }


class _Recorded:
    """A comm that keeps what the real one brings and, once `over`, brings that again without it.

    `given` holds what was to be sent since then.
    """

    def __init__(self, comm: HorovodComm):
        self._comm = comm
        self._brought: dict[str, Any] = {}
        self.over = False
        self.given: list[tf.Tensor] = []

    def size_tensor(self) -> tf.Tensor:
        return self._comm.size_tensor()

    def rank_tensor(self) -> tf.Tensor:
        return self._comm.rank_tensor()

    def alltoall(self, payload, splits, name: str):
        return self._bring(name, payload, lambda: self._comm.alltoall(payload, splits, name))

    def allgather(self, chunk, name: str):
        return self._bring(name, chunk, lambda: self._comm.allgather(chunk, name))

    def _bring(self, name: str, given: tf.Tensor, real: Callable[[], Any]):
        if not self.over:
            self._brought[name] = real()
            return self._brought[name]
        self.given.append(given)
        with tf.control_dependencies([given]):
            return tf.nest.map_structure(tf.identity, self._brought[name])


@contextlib.contextmanager
def _number_of_slices(slices: int) -> Iterator[None]:
    """Exchanges that are traced meanwhile have so many slices."""
    before = path.ELEMENTS_PER_SLICE, path.MAX_SLICES
    path.ELEMENTS_PER_SLICE, path.MAX_SLICES = 1, slices
    try:
        yield
    finally:
        path.ELEMENTS_PER_SLICE, path.MAX_SLICES = before


def _problem(name: str, sums: Sequence[np.ndarray], exact: Sequence[np.ndarray], bounds: Sequence[float]) -> str:
    """What is wrong with the sums, or ""."""
    for got, wanted, bound in zip(sums, exact, bounds):
        error = float(np.max(np.abs(got - wanted), initial=0.0))
        if not error <= bound:
            return f"a sum with {name} is wrong by {error:.3g}, more than {bound:.3g}: not timed"
    return ""


def _error_bound(name: str, maxima: Sequence[float]) -> float:
    """What a sum of numbers no larger than the workers' `maxima` may be off Horovod's float32 sum."""
    total = sum(maxima)
    float32 = 2 * len(maxima) * total * 2.0**-24  # both sums, in another order
    if name == "none":
        return float32
    if name == "fp16":
        # Each number is rounded to 11 bits, and so is each of the N - 1 sums.
        return float32 + len(maxima) * total * 2.0**-11
    # Each number is rounded by half a gap of the codebook at the most, and so is the sum; without blocks scales
    # are the maxima, with blocks they are no larger.
    half_gap = float(np.max(np.diff(codebook(name)))) / 2
    return float32 + half_gap * total + half_gap * total * (1 + half_gap)
