"""The paper's own predictive model, with its own data: 4 GPUs in a node, and 96 GPUs on 32 nodes.

Source: Dettmers 2016, appendix, tables 3 to 7; the data are in paper.yaml. All times in milliseconds, as
there.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

from hvd8bit.speedup.workload import read_yaml

TOLERANCE = 0.01
KERNELS = ("NervanaGPU", "convnet2")


@dataclasses.dataclass(frozen=True)
class Row:
    """One of the 28 speedups that the paper prints.

    Attributes:
      kernels: whose convolution kernels, "NervanaGPU" or "convnet2".
      gpus: 4 (one node) or 96.
      sub_batch: samples in a sub-batch; None for the 4 GPUs of one node, which have one, of 128.
      bits: 32 or 8.
      speedup: from the formula, over one GPU.
      printed: in the paper.
      decimals: of the printed number.
    """

    kernels: str
    gpus: int
    sub_batch: int | None
    bits: int
    speedup: float
    printed: float
    decimals: int

    @property
    def holds(self) -> bool:
        """Within 1 % of the printed number, or equal to it when rounded like it."""
        close = abs(self.speedup - self.printed) <= TOLERANCE * self.printed
        return close or round(self.speedup, self.decimals) == self.printed


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """Where the paper's own numbers do not add up: what is printed, what comes out, and which one is used."""

    what: str
    printed: float
    recomputed: float
    used: str


@functools.cache
def data() -> dict[str, Any]:
    return read_yaml(pathlib.Path(__file__).with_name("paper.yaml"))


def measured() -> tuple[float, str]:
    """A speedup that was measured on 4 GPUs, and by whom."""
    return float(data()["measured"]["speedup"]), data()["measured"]["source"]


def rows() -> list[Row]:
    """All 28 speedups: 4 of one node, then 24 of the cluster."""
    node, cluster = data()["single_node"], data()["cluster"]
    out = [
        _row(kernels, node["gpus"], None, bits, single_node(kernels, bits), node["printed"])
        for kernels in KERNELS
        for bits in (32, 8)
    ]
    for sub_batch in cluster["sub_batches"]:
        for kernels in KERNELS:
            for bits in (32, 8):
                speedup = on_cluster(kernels, sub_batch["size"], bits)
                out.append(_row(kernels, cluster["gpus"], sub_batch["size"], bits, speedup, sub_batch["printed"]))
    return out


def single_node(kernels: str, bits: int, *, printed_penalty: bool = True) -> float:
    """Speedup of 4 GPUs: data-parallel convolutions, split fully connected layers, 4 sub-batches.

        speedup = GPUs total / ((total - fc) + conv penalty + sub-batches * parallel fc + fc penalty)

    The conv penalty is the first layer's synchronisation, the only one that nothing hides. Appendix, tables 3
    and 4.

    Args:
      printed_penalty: take the fc penalty as printed; False adds its printed terms up.
    """
    node, total = data()["single_node"], data()["totals"][kernels]
    penalty = node["fc_penalty"][bits]["printed"] if printed_penalty else fc_penalty_ms(bits)
    step = total - node["fc"] + node["conv_penalty"] + node["sub_batches"] * node["parallel_fc"] + penalty
    return node["gpus"] * total / step


def fc_penalty_ms(bits: int) -> float:
    """What sticks out of the fully connected layers' exchanges: sum of times * (sync - hidden)."""
    terms = data()["single_node"]["fc_penalty"][bits]["terms"]
    return sum(times * (sync - hidden) for sync, hidden, times in terms)


def on_cluster(kernels: str, sub_batch: int, bits: int, *, printed_full: bool | None = None) -> float:
    """Speedup of 96 GPUs.

        speedup = GPUs total / ((total - fc) + fwd(s) + full(s))

    Appendix, tables 5 to 7.

    Args:
      printed_full: take full(s) as printed, or by `full_ms`; by default as printed only where the paper has
        it by another formula (32 bit, 12288).
    """
    cluster, total = data()["cluster"], data()["totals"][kernels]
    of = _sub_batch(sub_batch)
    if printed_full is None:
        printed_full = (bits, sub_batch) == (32, 12288)
    full = of["full"][bits] if printed_full else full_ms(sub_batch, bits)
    return cluster["gpus"] * total / (total - cluster["fc"] + of["fwd"] + full)


def full_ms(sub_batch: int, bits: int) -> float:
    """Exchange of all sub-batches, as far as it sticks out.

        full(s) = max(sync(s), (nodes - 1) (sync(s) - hidden))

    A sub-batch's matrix product hides 1.3 ms of the next exchange, and 31 exchanges follow the first.
    Appendix.
    """
    cluster = data()["cluster"]
    sync = _sub_batch(sub_batch)["sync"][bits]
    return max(sync, (cluster["nodes"] - 1) * (sync - cluster["hidden"]))


def disagreements() -> list[Disagreement]:
    """Where the paper's printed sums and its printed terms differ."""
    node, sync = data()["single_node"], _sub_batch(12288)["sync"][32]
    layers = sum(sum(layer["one_gpu"]) for layer in node["layers"])
    return [
        Disagreement(
            "time of all layers on one GPU, NervanaGPU, ms: the printed rows add up to less than the printed total",
            data()["totals"]["NervanaGPU"],
            layers,
            "every printed speedup uses 104.1, and so does this table",
        ),
        Disagreement(
            "fc penalty of 4 GPUs, 32 bit, ms: the printed terms add up to more than the printed sum",
            node["fc_penalty"][32]["printed"],
            fc_penalty_ms(32),
            "the speedups use the printed sum; with the terms' they are "
            + " and ".join(f"{single_node(kernels, 32, printed_penalty=False):.2f} ({kernels})" for kernels in KERNELS),
        ),
        Disagreement(
            f"full(12288), 32 bit, ms: printed is 31 * {sync:g}, without the {data()['cluster']['hidden']} "
            "ms that are hidden in all other rows",
            _sub_batch(12288)["full"][32],
            full_ms(12288, 32),
            "the speedups use the printed one; with the formula's they are "
            + " and ".join(
                f"{on_cluster(kernels, 12288, 32, printed_full=False):.2f} ({kernels})" for kernels in KERNELS
            ),
        ),
    ]


def _sub_batch(size: int) -> dict[str, Any]:
    for sub_batch in data()["cluster"]["sub_batches"]:
        if sub_batch["size"] == size:
            return sub_batch
    sizes = ", ".join(str(sub_batch["size"]) for sub_batch in data()["cluster"]["sub_batches"])
    raise ValueError(f"sub_batch must be one of {sizes}, got {size}")


def _row(kernels: str, gpus: int, sub_batch: int | None, bits: int, speedup: float, printed: Any) -> Row:
    text = printed[kernels][bits]
    return Row(kernels, gpus, sub_batch, bits, speedup, float(text), len(text.partition(".")[2]))
