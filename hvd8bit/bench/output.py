"""What the benchmarks show of their records: tables for the terminal, and plots.

Columns are listed once, here, for the terminal, for HTML and for Markdown; everything takes records as they are in the
JSON files.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, Callable, TypeVar

from hvd8bit.speedup import units

Record = Mapping[str, Any]
_R = TypeVar("_R", bound=Record)
Columns = Sequence[tuple[str, Callable[[Record], str]]]

COLOURS = {
    "none": "#c44e52",
    "fp16": "#dd8452",
    "dynamic_tree": "#1f5fa8",
    "eightbit": "#1f5fa8",
    "static_tree": "#4c9bd6",
    "mantissa": "#55a868",
    "linear": "#8172b3",
    "bare": "#444444",
    "alone": "#444444",
    "no_communication": "#999999",
    "avx512": "#1f5fa8",
    "avx2": "#4c9bd6",
    "scalar": "#8172b3",
}
EIGHT_BIT = ("dynamic_tree", "static_tree", "mantissa", "linear")
DASHED = ("bare", "no_communication")


def _seconds(key: str) -> Callable[[Record], str]:
    return lambda r: "" if r.get(key) is None else units.show_seconds(r[key])


def _plain(key: str) -> Callable[[Record], str]:
    return lambda r: "" if r.get(key) is None else str(r[key])


def _number(key: str, form: str) -> Callable[[Record], str]:
    return lambda r: "" if r.get(key) is None else form.format(r[key])


def rate(record: Record) -> str:
    bits = record.get("rate_bit_per_s")
    return "not limited" if bits is None else units.show_bits_per_s(bits / 8)


EXCHANGE: Columns = (
    ("compression", _plain("compression")),
    ("elements", _number("elements", "{:,}")),
    ("time", _seconds("median_s")),
    ("of none", _number("of_none", "{:.2f}")),
    ("of bare", _number("of_bare", "{:.2f}")),
    ("spread", _number("spread", "{:.0%}")),
    ("B/element", _number("bytes_per_element", "{:.4f}")),
    ("encode", _seconds("encode_s")),
    ("alltoall", _seconds("alltoall_s")),
    ("reduce", _seconds("reduce_s")),
    ("allgather", _seconds("allgather_s")),
    ("decode", _seconds("decode_s")),
    ("slices", _plain("slices")),
)
EXCHANGE_OF_A_RUN: Columns = tuple(column for column in EXCHANGE if column[0] != "elements")
"""Where a heading says how many elements."""
SLICES: Columns = (
    ("slices", _plain("slices")),
    *(column for column in EXCHANGE if column[0] in ("time", "of none", "of bare", "spread", "B/element")),
)
MODES: Columns = (("exchange", _plain("exchange")), *SLICES[1:])
TRIALS = {"slices": SLICES, "exchanges": MODES}
"""What `bench exchange` tries beside the default, by these records' `compression`, which is also their list's name in
the file."""
TRAIN: Columns = (
    ("compression", _plain("compression")),
    ("optimizer", _plain("optimizer")),
    ("images/s", _number("images_per_s", "{:.1f}")),
    ("step", _seconds("step_s")),
    ("of alone", _number("of_alone", "{:.0%}")),
    ("spread", _number("spread", "{:.0%}")),
    ("gradient bytes/step", _number("gradient_bytes_per_step", "{:,}")),
    ("at the interface", _number("interface_bytes_per_step", "{:,.0f}")),
    ("beside", lambda r: "" if r.get("weights_finite", True) else "weights became infinite"),
)
HYBRID: Columns = (
    ("compression", _plain("compression")),
    ("sub-batches", _plain("sub_batches")),
    ("step", _seconds("step_s")),
    ("of none", _number("of_none", "{:.2f}")),
    ("computation", _seconds("computation_s")),
    ("exchange", _seconds("exchange_s")),
    ("their sum", _seconds("sum_s")),
    ("step / sum", _number("of_sum", "{:.2f}")),
    ("spread", _number("spread", "{:.0%}")),
    ("bytes/step", _number("sent_bytes_per_step", "{:,}")),
    ("at the interface", _number("interface_bytes_of_step", "{:,.0f}")),
)
CODEC: Columns = (
    ("kernel", _plain("kernel")),
    ("back end", _plain("backend")),
    ("data type", _plain("data_type")),
    ("elements", _number("elements", "{:,}")),
    ("placement", _plain("placement")),
    ("threads", _plain("threads")),
    ("ns/element", _number("ns_per_element", "{:.3f}")),
    ("spread", _number("spread", "{:.0%}")),
    ("GB/s", _number("gb_per_s", "{:.1f}")),
    ("of memcpy", _number("of_memcpy", "{:.2f}")),
    ("of the floor", _number("share_of_floor", "{:.0%}")),
    ("of the kernel", _number("of_kernel", "{:.2f}")),
)
NETLAB: Columns = (
    ("host", _plain("host")),
    ("sent", _number("sent_bytes", "{:,} B")),
    ("received", _number("received_bytes", "{:,} B")),
    ("frames sent", _number("sent_frames", "{:,}")),
    ("frames received", _number("received_frames", "{:,}")),
)
COLUMNS = {"exchange": EXCHANGE, "train": TRAIN, "hybrid": HYBRID, "codec": CODEC, "netlab": NETLAB}


def with_ratios(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The records of `bench exchange` with their time over that of `none` and of `bare` in the same run."""
    medians = {(*run_of(r), r["compression"]): r["median_s"] for r in sums(records)}
    found = []
    for r in records:
        more = {}
        for other in ("none", "bare"):
            base = medians.get((*run_of(r), other))
            more[f"of_{other}"] = r["median_s"] / base if base else None
        found.append({**r, **more})
    return found


def run_of(record: Record) -> tuple:
    """What the records that were measured in turns have in common."""
    keys = ("workers", "elements", "tensors", "gradients_of", "rate_bit_per_s")
    return tuple(record.get(key) for key in keys)


def sums(records: Sequence[_R]) -> list[_R]:
    """Those of `bench exchange` that are no trials."""
    return [record for record in records if record["compression"] not in TRIALS]


def split(records: Sequence[Record]) -> list[tuple[Columns, list[Record]]]:
    """An exchange's records of one run: the sums; and the trials, where there were any."""
    parts = [(columns, [r for r in records if r["compression"] == kind]) for kind, columns in TRIALS.items()]
    return [(EXCHANGE_OF_A_RUN, sums(records)), *(part for part in parts if part[1])]


def cells(records: Sequence[Record], columns: Columns) -> tuple[list[str], list[list[str]]]:
    """Heads and rows, without the columns that would be empty."""
    rows = [[show(record) for _, show in columns] for record in records]
    used = [k for k in range(len(columns)) if any(row[k] for row in rows)]
    return [columns[k][0] for k in used], [[row[k] for k in used] for row in rows]


def table(records: Sequence[Record], columns: Columns, title: str, show: Any) -> None:
    """Prints the records to the rich console `show`."""
    from rich.table import Table

    heads, rows = cells(records, columns)
    show.print(title)  # as the table's own title it would be broken at the table's width
    shown = Table(show_edge=False, pad_edge=False)
    for number, head in enumerate(heads):
        shown.add_column(head, justify="right" if number and head not in _WORDS else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    show.print(shown)


_WORDS = ("compression", "optimizer", "kernel", "back end", "data type", "placement", "host")


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a page of the documentation."""
    rules = [":---" if head in _WORDS else "---:" for head in heads]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rules, *rows]) + "\n"


# Plots


def exchange_plot(records: Sequence[Record]) -> Any:
    """Time over the number of elements, or bars of the parts where there is one size only."""
    sizes = sorted({r["elements"] for r in records})
    return _exchange_bars(records) if len(sizes) == 1 else _exchange_lines(records)


def _exchange_lines(records: Sequence[Record]) -> Any:
    figure, axes = _figure()
    for name in dict.fromkeys(r["compression"] for r in records):
        ours = sorted((r for r in records if r["compression"] == name), key=lambda r: r["elements"])
        axes.plot(
            [r["elements"] for r in ours],
            [r["median_s"] for r in ours],
            "--" if name in DASHED else "-",
            marker="o",
            markersize=4,
            color=COLOURS.get(name),
            label=name,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("float32 elements")
    axes.set_ylabel("seconds")
    axes.set_title(_title(records[0]))
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=9)
    return figure


def _exchange_bars(records: Sequence[Record]) -> Any:
    figure, axes = _figure()
    bars(axes, [(r["compression"], r["median_s"], r["compression"]) for r in records], units.show_seconds)
    axes.set_xlabel("seconds")
    axes.set_title(f"{_title(records[0])}, {records[0]['elements']:,} elements")
    return figure


def train_plot(records: Sequence[Record]) -> Any:
    """Images per second."""
    figure, axes = _figure(len(records))
    bars(axes, [(r["compression"], r["images_per_s"], r["compression"]) for r in records], "{:.1f}".format)
    axes.set_xlabel("images per second, all workers")
    axes.set_title(f"{records[0]['model']}, {_title(records[0])}")
    return figure


def hybrid_plot(records: Sequence[Record]) -> Any:
    """A step's time, that of its computation, and of its exchange."""
    figure, axes = _figure(3 * len(records))
    parts = ("step", "computation", "exchange")
    entries = [
        (f"{r['compression']}, {r['sub_batches']} sub-batches: {part}", r[f"{part}_s"], r["compression"])
        for r in records
        for part in parts
    ]
    bars(axes, entries, units.show_seconds)
    axes.set_xlabel("seconds")
    axes.set_title(f"hybrid step, {_title(records[0])}")
    return figure


def codec_plot(records: Sequence[Record]) -> Any:
    """Nanoseconds per element of each kernel and back end, in cache and out of it."""
    placements = list(dict.fromkeys(r["placement"] for r in records))
    figure, all_axes = _figures(len(placements), len(records) / len(placements))
    for axes, placement in zip(all_axes, placements):
        entries = [
            (
                " ".join(filter(None, (r["kernel"], r["data_type"], r["backend"], _threads(r)))),
                r["ns_per_element"],
                r["backend"],
            )
            for r in records
            if r["placement"] == placement
        ]
        bars(axes, entries, "{:.2f}".format)
        axes.set_title(placement)
        axes.set_xlabel("ns per element")
    return figure


def _threads(record: Record) -> str:
    return f"{record['threads']} threads" if record.get("threads", 1) > 1 else ""


def bars(axes: Any, entries: Sequence[tuple[str, float, str]], form: Callable[[float], str]) -> None:
    """Horizontal bars, (label, value, key of the colour), the first one on top."""
    colours = [COLOURS.get(key, "#999999") for _, _, key in entries]
    drawn = axes.barh(range(len(entries)), [value for _, value, _ in entries], color=colours)
    axes.bar_label(drawn, [form(value) for _, value, _ in entries], padding=3, fontsize=9)
    axes.set_yticks(range(len(entries)), [label for label, _, _ in entries], fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


PLOTS = {"exchange": exchange_plot, "train": train_plot, "hybrid": hybrid_plot, "codec": codec_plot}


def _title(record: Record) -> str:
    return f"{record['workers']} workers, link {rate(record)}"


def _figure(rows: float = 8) -> Any:
    figure, axes = _figures(1, rows)
    return figure, axes[0]


def _figures(count: int, rows: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: pip install matplotlib ({error})") from error
    height = count * max(2.6, min(1.2 + 0.3 * rows, 9.0))
    figure = Figure(figsize=(6.4, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(count, 1, squeeze=False)[:, 0]


def save(figure: Any, path: str) -> None:
    """As PNG."""
    figure.savefig(path, dpi=130, format="png")


def data_uri(figure: Any) -> str:
    """The figure as an SVG that a page carries along."""
    out = io.BytesIO()
    # No date: the same figures give the same page.
    figure.savefig(out, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()
