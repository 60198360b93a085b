"""What `hvd8bit errors` and `hvd8bit predict` print: tables, made with rich from finished numbers."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvd8bit.errors import DISTRIBUTIONS, Cell
from hvd8bit.speedup import BITS, Calibration, Cluster, Link, Verdict, Workload, paper, units


def console(*, to_stderr: bool = False) -> Console:
    """Standard output, or standard error while JSON goes to standard output."""
    shown = Console(stderr=to_stderr, highlight=False)
    # Piped, tables are read by programs and by grep: no lines broken at 80 columns.
    return shown if shown.is_terminal else Console(stderr=to_stderr, width=1000, highlight=False)


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; where that is no terminal, a line at each quarter."""
    if sys.stderr.isatty():
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, advance=done)
        return
    so_far = 0

    def line(done: int) -> None:
        nonlocal so_far
        before, so_far = so_far, so_far + done
        if 4 * before // total != 4 * so_far // total:
            print(f"{what}: {100 * so_far // total} %", file=sys.stderr, flush=True)

    yield line


# --------------------------------------------------------------------------------------------- hvd8bit errors


def error_table(cells: Sequence[Cell], title: str, show: Console) -> None:
    """Every cell in full, beside the paper's figure where it has one."""
    with_paper = any(cell.paper_percent is not None for cell in cells)
    table = _table(
        title,
        *("data", "data type", "scaling"),
        numbers=(
            "mean relative error %",
            *(("paper %",) if with_paper else ()),
            *("mean absolute error", "RMS error", "RMS error / RMS", "bias", "flushed to 0", "saturated"),
        ),
    )
    previous = ""
    for cell in cells:
        if previous and previous != cell.data_type + cell.data and not with_paper:
            table.add_section()
        if with_paper and previous and not previous.endswith(cell.data):
            table.add_section()
        previous = cell.data_type + cell.data
        paper_percent = () if not with_paper else (_percent(cell.paper_percent),)
        table.add_row(
            cell.data,
            cell.data_type,
            cell.scaling,
            f"{cell.mean_relative_error_percent:.3f}",
            *paper_percent,
            f"{cell.mean_absolute_error:.3g}",
            f"{cell.rms_error:.3g}",
            f"{cell.rms_error_over_rms:.5f}",
            f"{cell.bias:+.1e}",
            _share(cell.flushed_to_zero_share),
            _share(cell.saturated_share),
        )
    show.print(table)


def sweep_table(cells: Sequence[Cell], samples: int, show: Console) -> None:
    """A row per data type and block size: relative error on the four distributions, the rest on N(0,1)."""
    names = [distribution.name for distribution in DISTRIBUTIONS]
    table = _table(
        f"Block scaling by the absolute maximum, {samples:,} samples: mean relative error %, and more on N(0,1)",
        *("data type", "scaling"),
        numbers=(*names, "mean absolute error", "RMS error / RMS", "bias", "flushed to 0"),
    )
    rows: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.data_type, cell.scaling), {})[cell.data] = cell
    previous = ""
    for (data_type, scaling), row in rows.items():
        if previous and previous != data_type:
            table.add_section()
        previous = data_type
        normal = row["N(0,1)"]
        table.add_row(
            data_type,
            scaling,
            *(f"{row[name].mean_relative_error_percent:.3f}" for name in names),
            f"{normal.mean_absolute_error:.3g}",
            f"{normal.rms_error_over_rms:.5f}",
            f"{normal.bias:+.1e}",
            _share(normal.flushed_to_zero_share),
        )
    show.print(table)


# -------------------------------------------------------------------------------------------- hvd8bit predict


def paper_table(rows: Sequence[paper.Row], show: Console) -> None:
    """The paper's 28 speedups, recomputed and printed, and where its own sums disagree."""
    table = _table(
        "Speedup over one GPU, AlexNet (Dettmers 2016, appendix)",
        *("GPUs", "kernels", "sub-batch"),
        numbers=("bits", "model", "paper", "off by"),
    )
    measured, source = paper.measured()
    for row in rows:
        table.add_row(
            str(row.gpus),
            row.kernels,
            str(row.sub_batch or "128, one node"),
            str(row.bits),
            f"{row.speedup:.{row.decimals + 1}f}",
            f"{row.printed:.{row.decimals}f}",
            f"{100 * (row.speedup / row.printed - 1):+.2f} %" + ("" if row.holds else "  MISSED"),
        )
    show.print(table)
    show.print(f"measured: {measured:.2f} ({source})")
    show.print("\nWhere the paper's own numbers disagree:")
    for item in paper.disagreements():
        show.print(Text(f"  {item.what}: {item.printed:g}, recomputed {item.recomputed:.6g}; {item.used}"))


def residual_table(calibration: Calibration, show: Console) -> None:
    """Measured exchanges beside the calibrated model."""
    table = _table(
        "Calibration: measured and modelled exchanges",
        "compression",
        numbers=("workers", "elements", "rate", "measured", "model", "error"),
    )
    for item in calibration.residuals:
        rate = "unknown" if item.rate_bit_per_s is None else units.show_bits_per_s(item.rate_bit_per_s / 8)
        table.add_row(
            item.compression,
            str(item.workers),
            f"{item.elements:,}",
            rate,
            units.show_seconds(item.measured_s),
            units.show_seconds(item.predicted_s),
            f"{item.error_percent:+.1f} %",
        )
    show.print(table)
    errors = sorted(abs(item.error_percent) for item in calibration.residuals)
    show.print(f"error of {len(errors)} exchanges: median {errors[len(errors) // 2]:.1f} %, largest {errors[-1]:.1f} %")
    for bits in BITS:
        if bits in calibration.bits:
            latency = calibration.latency_s(bits)
            transports = [calibration.transport(bits, workers) for workers in calibration.workers]
            message = "" if latency is None else f", {units.show_seconds(latency)} per message"
            rates = (f"{t.efficiency:.2f} with {n} workers" for t, n in zip(transports, calibration.workers))
            show.print(
                f"{bits:2} bit: {units.show_seconds(transports[0].call_s)} per exchange{message}; "
                f"efficiency {', '.join(rates)}"
            )
    coding = calibration.coding
    show.print(
        f"coding, ns per element: encode {1e9 * coding.encode_s_per_element:.3g}, reduce "
        f"{1e9 * coding.reduce_s_per_element:.3g}, decode {1e9 * coding.decode_s_per_element:.3g}\n"
    )


def prediction_table(
    workload: Workload, verdicts: Sequence[Verdict], scheme: str, cluster: Cluster, show: Console
) -> None:
    """Speedups, the best setting, up to which bandwidth 8 bit pays, and why."""
    show.print(
        Text(
            f"{workload.name}: {workload.parameters:,} parameters = "
            f"{units.show_bytes(4 * workload.parameters)} of float32 gradients; "
            f"{units.show_seconds(workload.step_s or 0)} per step of {workload.samples} samples on one "
            "worker"
        )
    )
    show.print(Text(_setting(scheme, cluster)))
    table = _table(
        "Speedup over one worker",
        numbers=(
            "workers",
            *(f"{bits} bit" for bits in verdicts[0].predictions),
            *(f"step, {bits} bit" for bits in (32, 8)),
        ),
        last=("largest part, 8 bit", "best", "8 bit pays below", "why"),
    )
    for verdict in verdicts:
        p = verdict.predictions
        table.add_row(
            str(verdict.workers),
            *(f"{of.speedup:.3g}" if of.speedup < 100 else f"{of.speedup:.0f}" for of in p.values()),
            *(units.show_seconds(p[bits].step_s) for bits in (32, 8)),
            p[8].dominated_by,
            f"{verdict.best_bits} bit",
            _pays_below(verdict.pays_below_bytes_per_s),
            Text(verdict.reason),
        )
    show.print(table)
    show.print(Text(_conclusion(verdicts)))


def _setting(scheme: str, cluster: Cluster) -> str:
    """What was assumed, with units."""
    parts = [f"{scheme} parallel"]
    if cluster.between is not None:
        parts.append("between nodes " + _link(cluster.between, cluster))
    if cluster.within is not None:
        parts.append(f"inside a node of {cluster.local} " + _link(cluster.within, cluster))
    coding = cluster.coding
    rates = (coding.encode_s_per_element, coding.reduce_s_per_element, coding.decode_s_per_element)
    parts.append("coding " + " + ".join(map(units.show_seconds, rates)) + " per element")
    return "; ".join(parts) + "  (G, M, k are 10^9, 10^6, 10^3)"


def _link(link: Link, cluster: Cluster) -> str:
    """Bandwidth and latency; a profile's latencies, one for each number of bits, are in its own table."""
    latency = "" if cluster.transports else f", {units.show_seconds(link.latency_s)}"
    return units.show_bandwidth(link.bandwidth_bytes_per_s) + latency


def _conclusion(verdicts: Sequence[Verdict]) -> str:
    pays = [str(verdict.workers) for verdict in verdicts if verdict.best_bits == 8]
    slower = [str(verdict.workers) for verdict in verdicts if verdict.eight_bit_gain < -0.01]
    parts = [
        f"8 bit is the best setting with {', '.join(pays)} workers."
        if pays
        else "8 bit is the best setting nowhere here."
    ]
    if slower:
        parts.append(f"It is slower than another setting with {', '.join(slower)}.")
    alone = [str(v.workers) for v in verdicts if max(p.speedup for p in v.predictions.values()) < 1]
    if alone:
        parts.append(f"One worker alone is faster than any setting with {', '.join(alone)}.")
    return " ".join(parts)


def _pays_below(bytes_per_s: float) -> str:
    if bytes_per_s == 0:
        return "never"
    return "no limit" if math.isinf(bytes_per_s) else units.show_bits_per_s(bytes_per_s)


# --------------------------------------------------------------------------------------------- parts


def _table(title: str, *words: str, numbers: Sequence[str] = (), last: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    for name in last:
        table.add_column(name, overflow="fold")
    return table


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}"
