"""`hvd8bit.summary`: what a compressor will do with a model's gradients, before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd8bit import collectives, modes, planning
from hvd8bit.compression import EightBit, check_compression
from hvd8bit.encoding import Encoding
from hvd8bit.layout import ring_bytes
from hvd8bit.variables import name_of, unique


def summary(model_or_variables, compression=EightBit, workers: int | None = None) -> list[dict[str, Any]]:
    """Prints what hvd8bit's optimizer and tape will compress of a model, how, and the bytes it saves in each step.

    Bytes are what each worker sends, mean over the workers; float32 stands for a ring allreduce of the numbers as they
    are, whatever their dtype. Gradients count as dense. What travels together has its headers on a line of its own.

    Args:
      model_or_variables: a built Keras model, or variables in any nest.
      compression: `EightBit`, or a configured copy of it.
      workers: how many; default: as many as Horovod runs, or 2 where it does not.

    Returns:
      A record for each variable: variable, shape, dtype, elements, treatment ("8 bit" or "exact"), reason, data_type,
      block_size, rounding, exchange, bytes, float32_bytes, saved_bytes. The last one, variable "total", has the sums,
      headers included.

    Raises:
      TypeError: `compression` is no compressor, or something given is no variable. ValueError: workers is below 2,
      or the model is not built.
    """
    check_compression(compression)
    workers = max(collectives.running_workers(), 2) if workers is None else workers
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 2:
        raise ValueError(f"workers must be an integer of at least 2, got {workers!r}")
    variables = _variables(model_or_variables)
    names = unique(name_of(variable) for variable in variables)
    specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
    plan = planning.make(specs, names, variables, compression, sparse_as_dense=False)
    records = _records(plan, compression, workers)
    _print(records, f"{compression!r}, {workers} workers")
    return records


def _variables(model_or_variables) -> list:
    if not getattr(model_or_variables, "built", True):
        raise ValueError(
            f"model_or_variables must be a built model, got {model_or_variables.name!r} of type "
            f"{type(model_or_variables).__name__}, which has no variables yet; give it an Input, or call it once"
        )
    found = getattr(model_or_variables, "trainable_variables", None)
    variables = tf.nest.flatten(model_or_variables) if found is None else list(found)
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise TypeError(f"model_or_variables must be a model or variables, got {variable!r}")
    return variables


def _records(plan: Sequence[planning.Gradient], compression, workers: int) -> list[dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    for gradient in plan:
        plain = ring_bytes(gradient.elements or 0, workers, gradient.tensor.dtype.size)
        rows[gradient.position] = _row(gradient, plain, treatment="exact", reason=gradient.reason, bytes_=plain)
    headers = 0.0
    if hasattr(compression, "select"):
        for bucket in planning.encoded_buckets(plan, compression, workers, workers):
            sizes = tuple(gradient.elements or 0 for gradient in bucket.gradients)
            block_size = bucket.encoding.block_size
            if bucket.mode is None:
                for gradient in bucket.gradients:
                    rows[gradient.position]["reason"] = f"no fewer bytes in 8 bits with {workers} workers"
                continue
            whole = modes.wire_bytes(sizes, workers, block_size, bucket.mode)
            copies = workers - 1 if bucket.mode == modes.ALLGATHER else 2 * (workers - 1) / workers
            for gradient in bucket.gradients:
                elements = gradient.elements or 0
                blocks = -(-elements // block_size) if block_size else min(elements, 1)
                bytes_ = copies * (elements + 4 * blocks)
                plain = rows[gradient.position]["float32_bytes"]
                rows[gradient.position] = _row(
                    gradient, plain, treatment="8 bit", bytes_=bytes_, encoding=bucket.encoding, exchange=bucket.mode
                )
                whole -= bytes_
            headers += whole
    records = [rows[position] for position in sorted(rows)]
    if headers:
        records.append({**_empty(), "variable": "headers and padding", "bytes": headers, "saved_bytes": -headers})
    total = {name: sum(r[name] for r in records) for name in ("elements", "bytes", "float32_bytes", "saved_bytes")}
    return [*records, {**_empty(), "variable": "total", **total}]


def _empty() -> dict[str, Any]:
    return {
        "variable": "",
        "shape": None,
        "dtype": None,
        "elements": 0,
        "treatment": None,
        "reason": "",
        "data_type": None,
        "block_size": None,
        "rounding": None,
        "exchange": None,
        "bytes": 0.0,
        "float32_bytes": 0.0,
        "saved_bytes": 0.0,
    }


def _row(
    gradient, plain: float, *, treatment, bytes_: float, reason="", encoding=None, exchange=None
) -> dict[str, Any]:
    return {
        **_empty(),
        "variable": gradient.name,
        "shape": tuple(gradient.tensor.shape),
        "dtype": gradient.tensor.dtype.name,
        "elements": gradient.elements or 0,
        "treatment": treatment,
        "reason": reason,
        "data_type": encoding and encoding.data_type,
        "block_size": encoding and encoding.block_size,
        "rounding": encoding and encoding.rounding,
        "exchange": exchange,
        "bytes": bytes_,
        "float32_bytes": plain,
        "saved_bytes": plain - bytes_,
    }


def _print(records: Sequence[dict[str, Any]], title: str) -> None:
    heads = ("variable", "shape", "dtype", "treatment", "how, or why not", "bytes", "saved")
    rows = []
    for record in records:
        how = record["reason"]
        if record["treatment"] == "8 bit":
            how = f"{record['data_type']}, block {record['block_size']}, {record['exchange']}"
            how += "" if record["rounding"] == Encoding.rounding else f", {record['rounding']}"
        shape = "" if record["shape"] is None else "×".join(map(str, record["shape"])) or "scalar"
        rows.append(
            (
                record["variable"],
                shape,
                record["dtype"] or "",
                record["treatment"] or "",
                how,
                f"{record['bytes']:,.0f}",
                f"{record['saved_bytes']:,.0f}",
            )
        )
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_style="")
        for head in heads:
            table.add_column(head, justify="right" if head in ("bytes", "saved") else "left")
        for row in rows:
            table.add_row(*row)
        Console(highlight=False).print(table)
        return
    print(title)
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    for row in [heads, *rows]:
        cells = [text.rjust(w) if i >= 5 else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())
