"""`EightBit`, Horovod's Compressor contract in front of the exchange.

Horovod calls `compress(tensor)`, allreduces what that returns, and calls `decompress(result, context)`. Codes cannot be
added, so `compress` hands Horovod a probe of four numbers instead, and the exchange runs in `decompress`:

* The probe is [1, rank, rank², h(rank)] with a function h that scatters. Whatever Horovod does to it (Sum, Average,
  predivide, pre- and postscale) is linear, so what comes of the 1 is the factor for the sum of the tensors. In eager
  mode the others betray a reduction that is not linear, or not over the expected workers, before the exchange starts;
  in a graph the reduction's own op tells.
* It stems from stateful ops. Horovod's allreduce op is not stateful: TensorFlow's optimizer would run one with a
  constant input once and keep the result.
* It is named after the tensor, and the exchange's collectives after it: workers whose graphs differ elsewhere
  still meet.
* The first `decompress` of a call takes in all tensors compressed before it: those of a group travel together.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import weakref

import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from hvd8bit import collectives, modes
from hvd8bit.collectives import HorovodComm, one_when_run
from hvd8bit.encoding import Encoding
from hvd8bit.exchange import differentiable_exchange
from hvd8bit.feedback import ErrorFeedback, feedback_of
from hvd8bit.graphs import let_branches_overlap
from hvd8bit.logs import log_once
from hvd8bit.selection import ENCODABLE, Selection


class EightBitCompressor(Compressor):
    """8 bits per element for Horovod's `compression=` arguments; `EightBit` is the instance to use.

    Calling it returns a configured copy: `EightBit(data_type="linear")`. Copies with the same settings are equal.
    All settings must be the same on all workers. float16, bfloat16, float32 and float64 tensors are encoded and come
    back in their own dtype, the same bits on every worker; others, and small ones, travel as they are, exactly.
    With one worker nothing is touched. A block that holds a NaN or an Inf comes back as NaN everywhere.

    Args:
      data_type: "dynamic_tree", "static_tree", "mantissa" or "linear" (Dettmers 2016, sec. 3.1).
      block_size: elements that share a scale: a multiple of 64 in [64, 65536], or None: one scale for each tensor's
        part of a chunk, as in the paper.
      scaling: "absmax", or a power of ten: the paper's exponent offset.
      rounding: "nearest", or "stochastic": up or down at random, so that the mean is the number.
      exchange: "scatter_reduce": two rounds, in which each worker sends a quarter of what float32 takes, whatever the
        number of workers; "allgather": one round, in which everyone sends everything to everyone: sooner there for
        little data, with one rounding less; "auto": which of them, by the amount of data and the number of workers
        (`hvd8bit.modes`).
      select: a `Selection`: which tensors are encoded. `min_elements=` is accepted directly, too.
      error_feedback: True, or an `hvd8bit.ErrorFeedback`: what rounding takes from a gradient goes into the next one.
        In hvd8bit's own wrappers alone, which know the variables.
      process_set: the `horovod.tensorflow.ProcessSet` that Horovod reduces over; None: all workers. It must be the
        one that the call gets.
      seed: of stochastic rounding: the same program rounds alike when it is run again. The same on all workers, which
        round differently all the same. None: TensorFlow's generator decides.

    Raises:
      ValueError or TypeError: an argument is not one of the above; the message names it.
    """

    def __init__(
        self,
        data_type: str = Encoding.data_type,
        block_size: int | None = Encoding.block_size,
        scaling=Encoding.scaling,
        rounding: str = Encoding.rounding,
        exchange: str = "auto",
        select: Selection | None = None,
        error_feedback: bool | ErrorFeedback = False,
        process_set=None,
        min_elements: int | None = None,
        seed: int | None = Encoding.seed,
    ):
        self.encoding = Encoding(data_type, block_size, scaling, rounding, seed)
        if exchange not in modes.EXCHANGES:
            raise ValueError(f"exchange must be one of {', '.join(modes.EXCHANGES)}, got {exchange!r}")
        self.exchange = exchange
        if select is not None and not isinstance(select, Selection):
            raise TypeError(f"select must be an hvd8bit.Selection, got {type(select).__name__}")
        if select is not None and min_elements is not None:
            raise ValueError("give select or min_elements, not both: select=Selection(min_elements=...)")
        self.select = select or Selection()
        if min_elements is not None:
            self.select = Selection(min_elements=min_elements)
        self.feedback = feedback_of(error_feedback)
        self.process_set = collectives.checked_process_set(process_set)

    def __call__(self, **changes) -> EightBitCompressor:
        """A copy with other settings."""
        if changes.get("min_elements") is not None and "select" not in changes:
            changes["select"] = dataclasses.replace(self.select, min_elements=changes.pop("min_elements"))
        return EightBitCompressor(**{**self._settings(), **changes})

    def _settings(self) -> dict:
        return {
            "data_type": self.encoding.data_type,
            "block_size": self.encoding.block_size,
            "scaling": self.encoding.scaling,
            "rounding": self.encoding.rounding,
            "exchange": self.exchange,
            "select": self.select,
            "error_feedback": self.feedback or False,
            "process_set": self.process_set,
            "seed": self.encoding.seed,
        }

    def _key(self) -> tuple:
        # Horovod caches its reduce functions by the equality of their arguments.
        process_set_id = getattr(self.process_set, "process_set_id", 0)
        return (self.encoding, self.exchange, self.select, self.feedback, process_set_id)

    def __eq__(self, other):
        return isinstance(other, EightBitCompressor) and self._key() == other._key()

    def __hash__(self):
        return hash(self._key())

    def __repr__(self):
        settings = self._settings()
        if self.select == Selection(self.select.min_elements):
            settings["min_elements"] = settings.pop("select").min_elements
        # Workers compare this text.
        settings["error_feedback"] = bool(settings["error_feedback"])
        for name, default in (("error_feedback", False), ("process_set", None), ("seed", None)):
            if settings[name] is default:
                del settings[name]
        shown = {name: repr(value) for name, value in settings.items()}
        if "process_set" in shown:
            shown["process_set"] = f"ranks {_short(HorovodComm(self.process_set).ranks())}"
        return f"EightBit({', '.join(f'{name}={text}' for name, text in shown.items())})"

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor):
        """What Horovod is to reduce for `tensor`, and a context for `decompress`."""
        self.refuse_rules_of_wrappers()
        let_branches_overlap()
        tensor = tf.convert_to_tensor(tensor)
        comm = HorovodComm(self.process_set)
        # In an elastic job the number of workers may grow under a graph that one worker alone has built.
        workers = comm.size()
        if workers == 1 and (tf.executing_eagerly() or not collectives.elastic()):
            return self._pass(tensor)
        elements = tensor.shape.num_elements()
        mode = self._mode((elements,), comm)
        workers = collectives.workers_to_judge_by(comm)
        reason = self.select.reason_to_pass(tensor.dtype.name, elements, workers, self.encoding, mode)
        if reason is not None:
            log_once(f"sent as they are: tensors with {reason}", logging.INFO)
            passed, context = self._pass(tensor)
            comm.count_ring([passed], passed.dtype.size)
            return passed, context
        handle = _Handle(tensor, self, comm)
        _pending().append(handle)
        return handle.probe(), handle

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor, ctx):
        """The reduced tensor, from Horovod's result for what `compress` returned with `ctx`."""
        if ctx is None:
            return tensor
        if isinstance(ctx, tf.DType):
            return tf.cast(tensor, ctx)
        if ctx.output is None:
            ctx.check(tensor)
            group = _pending().group_of(ctx)
            factor = tf.cast(tensor[0] if ctx.graph is None else tensor, tf.float64)
            # In no name scope of its own: that would count the calls, and workers may make them in any order.
            outputs = differentiable_exchange(
                [handle.tensor for handle in group],
                self.encoding,
                ctx.comm_beside(tensor),
                factor=factor,
                name=ctx.collective_name(tensor),
                mode=self._mode(tuple(handle.tensor.shape.num_elements() for handle in group), ctx.comm),
            )
            for handle, output in zip(group, outputs):
                handle.output = output
        return ctx.output

    def _mode(self, sizes: tuple[int | None, ...], comm: HorovodComm) -> str:
        return modes.choose(self.exchange, sizes, collectives.workers_to_choose_by(comm), self.encoding.block_size)

    def refuse_rules_of_wrappers(self) -> None:
        """Raises ValueError if there is something that only wrappers can keep: rules by variable, error feedback."""
        if self.feedback is not None:
            raise ValueError(
                "error_feedback must be False here, got True: Horovod gives its compressor single tensors without "
                "their variables; use hvd8bit.keras.DistributedOptimizer (without groups) or "
                "hvd8bit.DistributedGradientTape"
            )
        rules = self.select.for_wrappers()
        if rules:
            raise ValueError(
                f"{', '.join(rules)} of {self.select} cannot be kept here: Horovod gives its compressor single tensors "
                "without their variables; use hvd8bit.keras.DistributedOptimizer (without groups) or "
                "hvd8bit.DistributedGradientTape, or leave all but min_elements out"
            )

    @staticmethod
    def _pass(tensor):
        # A group must have one dtype, and probes are float32.
        if tensor.dtype in (tf.float16, tf.bfloat16):
            return tf.cast(tensor, tf.float32), tensor.dtype
        return tensor, None


def check_compression(compression) -> None:
    """Raises TypeError unless `compression` is something that Horovod takes for its argument of this name."""
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(
            "compression must be hvd8bit.EightBit, a copy of it such as hvd8bit.EightBit(data_type='linear'), or one "
            f"of hvd.Compression, got {compression!r}"
        )


def check_process_set(compression, comm: HorovodComm) -> None:
    """Raises ValueError if the compressor has a process set that is not the call's."""
    own = getattr(compression, "process_set", None)
    if own is not None and own.process_set_id != comm.process_set_id:
        raise ValueError(
            f"process_set differs: {comm.process_set_id} in the call, {own.process_set_id} in {compression!r}; "
            "leave it out of EightBit, the call's is used"
        )


EightBit = EightBitCompressor()
"""8 bits per gradient element, for any `compression=` argument of Horovod."""


class _Handle:
    """A tensor between `compress` and `decompress`."""

    def __init__(self, tensor, compressor: EightBitCompressor, comm: HorovodComm):
        self.tensor = tensor
        self.compressor = compressor
        self.comm = comm
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.output = None

    def probe(self):
        # On the CPU: nothing on a GPU's stream has to wait for these numbers.
        with tf.device("CPU:0"):
            dtype = tf.float64 if self.tensor.dtype == tf.float64 else tf.float32
            if self.graph is not None:
                # Checked by the op that reduces it.
                name = "hvd8bit_" + re.sub("[^a-zA-Z0-9_]", "_", self.tensor.name)
                return tf.cast(one_when_run(self.comm), dtype, name=name)
            rank = self.comm.global_rank_tensor()
            scattered = tf.cast(_scattered(rank), dtype)
            rank = tf.cast(rank, dtype)
            return tf.stack([tf.ones((), dtype), rank, rank * rank, scattered])

    def check(self, result) -> None:
        """Raises ValueError if Horovod did something else to the probe than a sum over our workers."""
        (self._check_values if self.graph is None else self._check_op)(result)

    def _check_values(self, result) -> None:
        ranks = self.comm.ranks()
        columns = [(1, rank, rank * rank, _scattered(rank)) for rank in ranks]
        expected = [sum(column) / len(ranks) for column in zip(*columns)]
        if result.shape == (4,):
            values = [float(value) for value in result]
            # Sums of N float32 values, each multiplied a few times: N + 8 roundings.
            tolerance = (len(ranks) + 8) * 2.0**-23
            if all(abs(v - values[0] * e) <= tolerance * abs(values[0] * e) for v, e in zip(values, expected)):
                return
        raise ValueError(
            f"compression={self.compressor!r} needs a sum or an average over the {len(ranks)} workers {_short(ranks)}, "
            f"got something else (a probe came back as {result.numpy().tolist()}): Min, Max, Product, Adasum and "
            "reducescatter cannot be compressed: use compression=hvd.Compression.none there; with a process set, give "
            "the same one to the call and to EightBit(process_set=...); a worker that has called hvd.join takes no "
            "part in exchanges: give all workers the same number of steps"
        )

    def _check_op(self, result) -> None:
        import horovod.tensorflow as hvd

        op = result.op
        if op.type not in ("HorovodAllreduce", "HorovodGroupedAllreduce"):
            raise ValueError(
                f"compression={self.compressor!r} works with allreduce and grouped_allreduce, not with {op.type}: use "
                "compression=hvd.Compression.none there"
            )
        names = {hvd.Average: "Average", hvd.Sum: "Sum", hvd.Adasum: "Adasum", hvd.Min: "Min", hvd.Max: "Max"}
        reduce_op = op.get_attr("reduce_op")
        if reduce_op not in (hvd.Average, hvd.Sum):
            raise ValueError(
                f"op must be Average or Sum with compression={self.compressor!r}, got "
                f"{names.get(reduce_op, 'Product')} for {self.tensor.name}: use compression=hvd.Compression.none there"
            )
        if op.type == "HorovodAllreduce":
            log_once(
                "tensors of hvd.allreduce travel one by one; grouped_allreduce, or groups=1 in Horovod's optimizers "
                "and gradient tape, sends them as one buffer",
                logging.INFO,
            )
        process_set_id = op.get_attr("process_set_id")
        if process_set_id != self.comm.process_set_id:
            raise ValueError(
                f"process_set differs: Horovod reduces {self.tensor.name} over process set {process_set_id}, "
                f"compression={self.compressor!r} exchanges over process set {self.comm.process_set_id}; give "
                "the same one to the call and to EightBit(process_set=...)"
            )

    def comm_beside(self, result) -> HorovodComm:
        """Our workers, whose collectives look at name scopes if the probe's did: names that told probes apart, of two
        calls of a function, say, tell the exchanges apart."""
        if self.graph is None:
            return self.comm
        return HorovodComm(self.compressor.process_set, result.op.get_attr("ignore_name_scope"))

    def collective_name(self, result) -> str:
        """Prefix of the exchange's collectives: after the probe's, so that they match where it does."""
        if self.graph is None:
            return "hvd8bit_eager"  # eager calls wait for one another
        return "hvd8bit_" + result.op.name.rsplit("/", 1)[-1]


class _Pending(threading.local):
    """Handles of this thread whose call has not come to `decompress`.

    Weakly held: when a call raises, Horovod drops its handles, and nobody sends them later.
    """

    def __init__(self):
        self.handles: list[weakref.ref[_Handle]] = []

    def append(self, handle: _Handle) -> None:
        self.handles = [ref for ref in self.handles if ref() is not None]
        self.handles.append(weakref.ref(handle))

    def group_of(self, first: _Handle) -> list[_Handle]:
        """`first` and what the same call compressed after it; older ones belong to a call that did not end."""
        handles = [handle for handle in (ref() for ref in self.handles) if handle is not None]
        if first not in handles:
            return [first]
        group = [
            handle
            for handle in handles[handles.index(first) :]
            if handle.graph is first.graph and handle.compressor == first.compressor
        ]
        self.handles = []
        return group


_pending_of_thread = _Pending()


def _pending() -> _Pending:
    return _pending_of_thread


def _scattered(rank):
    """A number below 2^12 in no order: by it differ sets of workers whose ranks and squares have equal means."""
    return (rank * 1597 + 51749) % 244944 % 4093


def _short(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"


assert set(ENCODABLE) == {"float32", "float64", "float16", "bfloat16"}
