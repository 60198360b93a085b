"""Workers, the links between them, and what moving and coding numbers takes there.

The model of a link is the usual one: a message of b bytes takes latency + b / bandwidth (alpha + b * beta). N
is the number of workers, n the number of elements, w the workers of a node, M = N / w the nodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from hvd8bit.encoding import Encoding
from hvd8bit.layout import HEADER_BYTES, SCALE_BYTES

BITS = (32, 16, 8)
ELEMENTS_PER_SLICE = 2 * 2**20
MAX_SLICES = 16
"""How hvd8bit cuts an exchange into slices, each with collectives of its own.

`hvd8bit.exchange` owns the two numbers, but loads TensorFlow; a unit test compares them."""


def _not_negative(instance: object, *names: str) -> None:
    for name in names:
        value = getattr(instance, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or more, in seconds, got {value}")


@dataclasses.dataclass(frozen=True)
class Link:
    """A link: what one end can send per second, both ways at once, and what a message takes on top.

    Attributes:
      bandwidth_bytes_per_s: above 0. 10 Gbit/s is 1.25e9.
      latency_s: seconds per message, at least 0.
    """

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_bytes_per_s < math.inf:
            raise ValueError(
                "bandwidth_bytes_per_s must be above 0 and finite, in bytes (10 Gbit/s is 1.25e9), "
                f"got {self.bandwidth_bytes_per_s}"
            )
        _not_negative(self, "latency_s")


@dataclasses.dataclass(frozen=True)
class Coding:
    """Seconds per element that a worker spends on 8-bit codes, and how they are scaled.

    Attributes:
      encode_s_per_element: float32 to code.
      reduce_s_per_element: code of another worker to float32, added to the sum.
      decode_s_per_element: code to float32.
      block_size: elements that share a 4-byte scale; None for one scale per chunk.
      hidden_share: the part of the time, 0 to 1, that runs while other slices travel.
    """

    encode_s_per_element: float = 0.0
    reduce_s_per_element: float = 0.0
    decode_s_per_element: float = 0.0
    block_size: int | None = Encoding.block_size
    hidden_share: float = 0.0

    def __post_init__(self) -> None:
        _not_negative(self, "encode_s_per_element", "reduce_s_per_element", "decode_s_per_element")
        Encoding(block_size=self.block_size)  # raises, naming the rule
        if not 0 <= self.hidden_share <= 1:
            raise ValueError(f"hidden_share must lie in [0, 1], got {self.hidden_share}")

    def exchange_s(self, elements: float, workers: int) -> float:
        """Coding in an exchange: encode n, decode and add N chunks of n / N, encode the sum, decode n."""
        return elements * (
            self.encode_s_per_element * (1 + 1 / workers) + self.reduce_s_per_element + self.decode_s_per_element
        )


CPU_CODING = Coding(0.5e-9, 0.2e-9, 0.25e-9)
"""The op library on one core of a server with AVX-512 (2024), large gradients. Yours may differ: measure."""
PAPER_CODING = Coding(1.0e-9, 0.5e-9, 0.5e-9)
"""A GTX Titan (Dettmers 2016, sec. 3.2); adding while decoding taken as free."""


@dataclasses.dataclass(frozen=True)
class Transport:
    """What the software that moves the bytes makes of the links. The default is a perfect one.

    Attributes:
      efficiency: the share of the bandwidth that it uses.
      s_per_element: processor time per element (adding, copying) that no bandwidth shortens.
      call_s: seconds per exchange, whatever its size: what it takes the workers to agree that it is due. Slices are
        enqueued at once and add nothing.
      latency_s: seconds per message between nodes, in place of that link's own; None to take that.
    """

    efficiency: float = 1.0
    s_per_element: float = 0.0
    call_s: float = 0.0
    latency_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.efficiency < math.inf:
            raise ValueError(f"efficiency must be above 0, 1 is all of the bandwidth, got {self.efficiency}")
        _not_negative(self, "s_per_element", "call_s")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds that an exchange takes, by what takes them.

    Attributes:
      latency_s: messages, whatever their size.
      bandwidth_s: bytes on the links.
      transport_s: the transport's processor time.
      coding_s: encoding and decoding, as far as it is not hidden.
    """

    latency_s: float = 0.0
    bandwidth_s: float = 0.0
    transport_s: float = 0.0
    coding_s: float = 0.0

    @property
    def wire_s(self) -> float:
        """All but the coding."""
        return self.latency_s + self.bandwidth_s + self.transport_s

    @property
    def total_s(self) -> float:
        """All four."""
        return self.wire_s + self.coding_s

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.latency_s + other.latency_s,
            self.bandwidth_s + other.bandwidth_s,
            self.transport_s + other.transport_s,
            self.coding_s + other.coding_s,
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(self.latency_s * times, self.bandwidth_s * times, self.transport_s * times, self.coding_s * times)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Workers on nodes.

    Attributes:
      workers: N, at least 1.
      workers_per_node: w. A cluster of at most w workers is one node; a larger one has whole nodes.
      between: a node's link to the other nodes, which its w workers share; needed where there are several
        nodes.
      within: a worker's link to the others on its node; needed where a node holds several.
      coding: what 8-bit codes cost; by default on a CPU.
      transports: by bits (32, 16, 8); a perfect one where missing.
      bits: those that are known. A profile's cluster knows what was measured.
      hierarchical: first inside the nodes (in 32 bit), then between them; False is what hvd8bit does: all
        workers as equals.
    """

    workers: int
    workers_per_node: int = 1
    between: Link | None = None
    within: Link | None = None
    coding: Coding = CPU_CODING
    transports: Mapping[int, Transport] = dataclasses.field(default_factory=dict)
    hierarchical: bool = False
    bits: tuple[int, ...] = BITS

    def __post_init__(self) -> None:
        for name in ("workers", "workers_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.workers > self.workers_per_node and self.workers % self.workers_per_node:
            raise ValueError(
                f"workers must fill whole nodes: a multiple of workers_per_node={self.workers_per_node}, or "
                f"fewer, got {self.workers}"
            )
        if self.nodes > 1 and self.between is None:
            raise ValueError(f"between, the link between nodes, is needed for {self.nodes} nodes; give its Link")
        if self.local > 1 and self.within is None:
            raise ValueError(
                f"within, the link inside a node, is needed for workers_per_node={self.workers_per_node}; give its Link"
            )
        for name, bits in (("transports must be by bits", self.transports), ("bits must be", self.bits)):
            wrong = set(bits) - set(BITS)
            if wrong:
                raise ValueError(f"{name}, of {BITS}, got {sorted(wrong)}")

    @property
    def local(self) -> int:
        """Workers of a node, w."""
        return min(self.workers, self.workers_per_node)

    @property
    def nodes(self) -> int:
        """M."""
        return self.workers // self.local

    def of(self, workers: int) -> Cluster:
        """The same with another number of workers."""
        return dataclasses.replace(self, workers=workers)

    def transport(self, bits: int) -> Transport:
        """That of `bits`. Raises ValueError for others than `self.bits`."""
        if bits not in self.bits:
            of = "" if self.bits == BITS else ", which the cluster's profile has"
            raise ValueError(f"bits must be one of {', '.join(map(str, self.bits))}{of}, got {bits!r}")
        return self.transports.get(bits, Transport())

    def encodes(self, elements: float) -> bool:
        """Whether an 8-bit exchange of n elements is one, or float32 because 8 bits are no fewer bytes.

        That is hvd8bit's own rule (`hvd8bit.selection`): chunks have headers, and blocks scales, however few
        the codes.
        """
        workers = self.nodes if self._by_nodes else self.workers
        share = elements / self.local if self._by_nodes else elements
        return self.workers > 1 and workers * self.chunk_bytes(share / workers) < 4 * share

    def coding_s(self, elements: float) -> float:
        """Seconds of coding in an 8-bit exchange of n elements, hidden or not."""
        if not self.encodes(elements):
            return 0.0
        if self._by_nodes:
            return self.coding.exchange_s(elements / self.local, self.nodes)
        return self.coding.exchange_s(elements, self.workers)

    @property
    def _by_nodes(self) -> bool:
        """Whether exchanges take two steps, inside the nodes and between them."""
        return self.hierarchical and self.local > 1 and self.nodes > 1

    # ------------------------------------------------------------------------------------------- collectives

    def exchange(self, elements: float, bits: int) -> Cost:
        """The mean of n elements of every worker, on every worker.

        32 and 16 bit, a ring allreduce: 2 (N-1) messages of b n / N bytes, b = 4 or 2, which makes
        2 (N-1)/N b n bytes per worker. 8 bit, compressed scatter-reduce and allgather (Dettmers 2016, sec. 2
        and 3, by the exchange of hvd8bit): an alltoall and a ring allgather, N-1 messages each, of chunks of
        n / N codes with their scales, in slices, and the coding of `Coding.exchange_s`. Where 8 bits are no
        fewer bytes, float32 is sent: `encodes`.
        """
        transport = self.transport(bits)
        if self.workers == 1 or elements <= 0:
            return Cost()
        if bits == 8 and not self.encodes(elements):
            return self.exchange(elements, 32)
        if self._by_nodes:
            return self._hierarchical(elements, bits)
        overhead = Cost(transport_s=transport.call_s + transport.s_per_element * elements)
        if bits != 8:
            return overhead + self._ring(elements * bits / 8 / self.workers, bits) * 2
        count = slices(elements)
        chunk = self.chunk_bytes(elements / self.workers / count)
        coding = Cost(coding_s=self.coding_s(elements) * (1 - self.coding.hidden_share))
        return overhead + coding + (self._alltoall(chunk) + self._ring(chunk, bits)) * count

    def allgather(self, elements: float, bits: int) -> Cost:
        """n elements, of which every worker has n / N, to every worker: N-1 messages around a ring."""
        transport = self.transport(bits)
        if self.workers == 1 or elements <= 0:
            return Cost()
        share = elements / self.workers
        overhead = Cost(transport_s=transport.call_s + transport.s_per_element * elements)
        coding = share * self.coding.encode_s_per_element + elements * self.coding.decode_s_per_element
        return overhead + self._coded(bits, coding) + self._ring(self._bytes(share, bits), bits)

    def reduce_scatter(self, elements: float, bits: int) -> Cost:
        """The sum of n elements of every worker, of which every worker gets n / N.

        A ring in 32 and 16 bit, an alltoall of codes in 8 bit; N-1 messages either way.
        """
        transport = self.transport(bits)
        if self.workers == 1 or elements <= 0:
            return Cost()
        overhead = Cost(transport_s=transport.call_s + transport.s_per_element * elements)
        message = self._bytes(elements / self.workers, bits)
        wire = self._alltoall(message) if bits == 8 else self._ring(message, bits)
        coding = elements * (self.coding.encode_s_per_element + self.coding.reduce_s_per_element)
        return overhead + self._coded(bits, coding) + wire

    def send(self, elements: float, bits: int) -> Cost:
        """n elements from one worker to the next."""
        transport = self.transport(bits)
        if self.workers == 1:
            return Cost()
        hop = self._outside if self.nodes > 1 else self._inside
        coding = elements * (self.coding.encode_s_per_element + self.coding.decode_s_per_element)
        overhead = Cost(transport_s=transport.call_s + transport.s_per_element * elements)
        return overhead + self._coded(bits, coding) + hop(1, self._bytes(elements, bits), bits)

    def chunk_bytes(self, codes: float) -> float:
        """Bytes of a chunk (docs/wire-format.md): header, a byte per code, a scale per block begun."""
        block = self.coding.block_size
        scales = 1 if block is None else math.ceil(codes / block)
        return HEADER_BYTES + codes + SCALE_BYTES * scales

    def _bytes(self, elements: float, bits: int) -> float:
        return self.chunk_bytes(elements) if bits == 8 else elements * bits / 8

    def _coded(self, bits: int, seconds: float) -> Cost:
        return Cost(coding_s=seconds if bits == 8 else 0.0)

    def _outside(self, count: float, size: float, bits: int) -> Cost:
        """`count` messages of `size` bytes to other nodes, one after another."""
        assert self.between is not None
        latency_s = self.transport(bits).latency_s
        return self._messages(
            self.between, self.between.latency_s if latency_s is None else latency_s, count, size, bits
        )

    def _inside(self, count: float, size: float, bits: int) -> Cost:
        """`count` messages of `size` bytes inside a node, one after another."""
        assert self.within is not None
        return self._messages(self.within, self.within.latency_s, count, size, bits)

    def _messages(self, link: Link, latency_s: float, count: float, size: float, bits: int) -> Cost:
        return Cost(
            latency_s=count * latency_s,
            bandwidth_s=count * size / (link.bandwidth_bytes_per_s * self.transport(bits).efficiency),
        )

    def _ring(self, message: float, bits: int) -> Cost:
        """N-1 steps around a ring that enters and leaves each node once, each as long as its slowest hop."""
        hops = []
        if self.nodes > 1:
            hops.append(self._outside(self.workers - 1, message, bits))
        if self.local > 1:
            hops.append(self._inside(self.workers - 1, message, bits))
        return max(hops, key=lambda cost: cost.total_s)

    def _alltoall(self, message: float, bits: int = 8) -> Cost:
        """A message from every worker to every other.

        N-w of a worker's messages leave its node, whose w workers share the link; w-1 stay. Both run at once.
        With w > 1 the link between nodes carries w (N-w)/N n bytes, w times what a ring sends through it: a
        flat 8-bit exchange between nodes of several workers loses much of its gain there.
        """
        ways = []
        if self.nodes > 1:
            cost = self._outside(self.workers - self.local, message, bits)
            ways.append(dataclasses.replace(cost, bandwidth_s=cost.bandwidth_s * self.local))
        if self.local > 1:
            ways.append(self._inside(self.local - 1, message, bits))
        return max(ways, key=lambda cost: cost.total_s)

    def _hierarchical(self, elements: float, bits: int) -> Cost:
        """Scatter-reduce inside the nodes, exchange between them, gather inside.

        Inside, 32 bit (16 for 16 bit): 2 (w-1) messages of n / w. Between, each worker exchanges its n / w
        with its peers on the other M-1 nodes, w exchanges at once on a node's link.
        """
        share = elements / self.local
        wide = 4 if bits == 8 else bits / 8
        inside = self._inside(2 * (self.local - 1), share * wide, bits)
        peers = dataclasses.replace(self, workers=self.nodes, workers_per_node=1, within=None, hierarchical=False)
        between = peers.exchange(share, bits)
        return inside + dataclasses.replace(between, bandwidth_s=between.bandwidth_s * self.local)


def slices(elements: float) -> int:
    """How many slices hvd8bit cuts an exchange of n elements into."""
    return max(1, min(int(elements) // ELEMENTS_PER_SLICE, MAX_SLICES))
