"""A boundary: a place in a model where numbers pass between workers, with what is said about it."""

from __future__ import annotations

import collections
import functools
import re

import tensorflow as tf

from hvd8bit import activations, collectives
from hvd8bit.collectives import HorovodComm
from hvd8bit.compression import EightBitCompressor
from hvd8bit.encoding import Encoding
from hvd8bit.selection import ENCODABLE, Selection, pays


class Boundary:
    """Who exchanges, how it is encoded, under which name.

    Args:
      name: of the boundary: the same on all workers. Collectives are named after it, without the numbers that Keras
        puts behind names of layers: they count what a process has built.
      compression: `EightBit`, a configured copy of it, or None: exact. The same on all workers.
      process_set: the `horovod.tensorflow.ProcessSet` of the workers that exchange; None: all workers, or those of
        `EightBit(process_set=...)`. Also a comm: `HorovodComm`, `LoopbackComm`.

    Raises:
      TypeError: compression is something else.
      ValueError: the name is empty, two process sets are given, this worker is not one of them, or the job is elastic.
    """

    def __init__(self, name: str, compression, process_set=None):
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be a string that is the same on all workers, got {name!r}")
        self.name = name
        self.compression = check_activation_compression(compression)
        self.comm = comm_of(process_set, self.compression)
        self.workers = self.comm.size()
        if not self.comm.includes_this_worker():
            raise ValueError(
                f"process_set of {name!r} must include this worker, got ranks {self.comm.ranks()}: only its workers "
                "may call it"
            )
        if self.workers > 1 and collectives.elastic():
            raise ValueError(
                f"{name!r} needs a fixed number of workers, got an elastic job: weights are cut for a number of "
                "workers; run model parallelism without --min-np and --host-discovery-script"
            )

    @property
    def rank(self) -> int:
        """This worker's rank among those that exchange."""
        return self.comm.rank()

    @property
    def encoding(self) -> Encoding:
        """How numbers are encoded, where they are."""
        assert self.compression is not None
        return self.compression.encoding

    def collective(self, direction: str) -> str:
        """A name for the next exchange: the same on all workers, unique among those in flight."""
        base = re.sub(r"_\d+(?=/|$)", "", self.name)
        name = "hvd8bit_" + re.sub("[^a-zA-Z0-9_]", "_", base) + ("" if direction == "forward" else "_grad")
        if tf.executing_eagerly():
            return name  # eager calls wait for one another
        uses = _uses(_outermost_graph())
        uses[name] += 1
        return name if uses[name] == 1 else f"{name}_{uses[name]}"

    def encodes_parts(self, shapes, dtype):
        """Whether parts of these shapes travel in 8 bits: a bool, or a bool scalar where the batch is not known.

        It depends on nothing that may differ between workers, not even on what is known statically.
        """
        if self.compression is None or dtype.name not in ENCODABLE:
            return False
        settings = (self.compression.select, dtype.size, self.compression.encoding)
        return _largest([activations.elements(shape) for shape in shapes], _smallest_part(*settings))

    def encodes_sum(self, tensor):
        """Whether the tensor is added up in 8 bits, as `encodes_parts`."""
        if self.compression is None or tensor.dtype.name not in ENCODABLE:
            return False
        settings = (self.compression.select, self.workers, self.compression.encoding)
        shape = activations.shape_of_part(tensor, None, None)
        return _largest([activations.elements(shape)], _smallest_sum(*settings))


def check_activation_compression(compression) -> EightBitCompressor | None:
    """The compression of a boundary, or None. Raises TypeError unless it is `EightBit` or a copy of it.

    Raises ValueError for one with error feedback.
    """
    if getattr(compression, "feedback", None) is not None:
        raise ValueError(
            "error_feedback must be False for activations, got True: there is no next one of the same activation; it "
            "is for gradients"
        )
    if compression is None or isinstance(compression, EightBitCompressor):
        return compression
    raise TypeError(
        "compression must be hvd8bit.EightBit, a copy of it such as hvd8bit.EightBit(data_type='linear'), or None for "
        f"exact activations, got {compression!r}"
    )


def comm_of(process_set, compression: EightBitCompressor | None = None):
    """The workers that exchange: those of `process_set`, else of the compression, else all."""
    if hasattr(process_set, "allgather"):
        return process_set
    own = None if compression is None else compression.process_set
    if process_set is not None and own is not None and own.process_set_id != process_set.process_set_id:
        raise ValueError(
            f"process_set differs: {process_set.process_set_id} in the call, {own.process_set_id} in {compression!r}; "
            "give it once"
        )
    return HorovodComm(process_set if process_set is not None else own)


def _largest(counts: list, threshold: int):
    """Whether the largest count reaches the threshold."""
    if all(isinstance(count, int) for count in counts):
        return max(counts) >= threshold
    return tf.reduce_max([tf.cast(count, tf.int64) for count in counts]) >= threshold


@functools.lru_cache(maxsize=256)
def _smallest_part(select: Selection, element_bytes: int, encoding) -> int:
    """From how many elements on a part is encoded: `min_elements`, and fewer bytes than as it is. 0: always."""
    if select.min_elements == 0:
        return 0
    count = select.min_elements
    while activations.coded_bytes(count, encoding) >= element_bytes * count:
        count += 1
    return count


@functools.lru_cache(maxsize=256)
def _smallest_sum(select: Selection, workers: int, encoding) -> int:
    """From how many elements on a tensor is added up in 8 bits: `min_elements`, and where it pays. 0: always."""
    if select.min_elements == 0:
        return 0
    low, high = select.min_elements, select.min_elements
    while not pays((high,), workers, encoding.block_size):
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        if pays((middle,), workers, encoding.block_size):
            high = middle
        else:
            low = middle + 1
    return high


def _outermost_graph():
    """The graph that a call builds: functions and branches inside it belong to it."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "outer_graph"):
        graph = graph.outer_graph
    return graph


def _uses(graph) -> collections.Counter:
    if not hasattr(graph, "_hvd8bit_uses"):
        graph._hvd8bit_uses = collections.Counter()
    return graph._hvd8bit_uses
