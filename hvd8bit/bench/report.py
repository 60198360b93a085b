"""Renders the JSON results of a folder: one HTML page that needs nothing else, or tables in a Markdown page."""

from __future__ import annotations

import contextlib
import dataclasses
import html as escape_html
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hvd8bit.bench import output
from hvd8bit.speedup import units

BENCHMARKS = {
    "exchange": "Sums over all workers",
    "train": "Training",
    "hybrid": "Steps of the hybrid scheme",
    "codec": "The codec",
    "netlab": "Traffic of the hosts",
}
"""What has columns and plots of its own, in the page's order; other files become plain tables."""

_MARK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Document:
    """One JSON file.

    Attributes:
      name: of the file, without .json.
      benchmark: which, or "" for what is none of `hvd8bit bench`.
      results, machine, versions: as in the file.
    """

    name: str
    benchmark: str
    results: list[dict[str, Any]]
    machine: dict[str, Any]
    versions: dict[str, Any]


@contextlib.contextmanager
def _as_written(name: str) -> Iterator[None]:
    """Whatever a file's content lets fail becomes a ValueError that names the file: anything may be in a folder."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        wrong = f"a result lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{name}.json must be as hvd8bit's commands write it by --json, and is not ({wrong}); write it again, or "
            "take it out of the folder"
        ) from error


def read(folder: str) -> list[Document]:
    """The folder's JSON files that have results, by benchmark and name.

    Raises:
      ValueError: there are none, or a file is not JSON, or not as hvd8bit wrote it.
    """
    found = []
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        results = content.get("results") if isinstance(content, dict) else None
        if not isinstance(results, list) or not results or not all(isinstance(r, dict) for r in results):
            continue
        benchmark = content.get("benchmark", "")
        with _as_written(path.stem):
            found.append(
                Document(
                    path.stem,
                    benchmark if benchmark in BENCHMARKS else "",
                    [*results, *(record for kind in output.TRIALS for record in content.get(kind, []))],
                    dict(content.get("machine", {})),
                    dict(content.get("versions", {})),
                )
            )
    if not found:
        raise ValueError(f"no results in {folder}: it must hold .json files that hvd8bit's commands wrote by --json")
    order = [*BENCHMARKS, ""]
    return sorted(found, key=lambda document: (order.index(document.benchmark), document.name))


def runs(document: Document) -> list[list[dict[str, Any]]]:
    """An exchange's records by list of tensors, with ratios; other documents as they are."""
    if document.benchmark != "exchange":
        return [document.results]
    by_run: dict[tuple, list] = {}
    for record in output.with_ratios(document.results):
        by_run.setdefault(output.run_of(record), []).append(record)
    return list(by_run.values())


def summary(documents: Sequence[Document]) -> list[dict[str, str]]:
    """A row for each sum that was measured with float32 and 8 bit: what the speed is judged by."""
    rows = []
    for document in documents:
        if document.benchmark == "exchange":
            with _as_written(document.name):
                rows += _summary(document)
    return rows


def _summary(document: Document) -> list[dict[str, str]]:
    rows = []
    for records in runs(document):
        by_name = {r["compression"]: r for r in output.sums(records)}
        ours = next((by_name[name] for name in output.EIGHT_BIT if name in by_name), None)
        if ours is None or "none" not in by_name:
            continue
        row = {
            "tensors": ours["gradients_of"] or "one",
            "elements": f"{ours['elements']:,}",
            "workers": str(ours["workers"]),
            "link": output.rate(ours),
            "float32": units.show_seconds(by_name["none"]["median_s"]),
            "fp16": units.show_seconds(by_name["fp16"]["median_s"]) if "fp16" in by_name else "",
            "8 bit": units.show_seconds(ours["median_s"]),
        }
        for other, head in (("none", "float32"), ("fp16", "fp16"), ("bare", "bare")):
            ratio = ours["median_s"] / by_name[other]["median_s"] if other in by_name else None
            row[f"8 bit / {head}"] = "" if ratio is None else f"{ratio:.2f}"
        rows.append({**row, "B/element": f"{ours['bytes_per_element']:.4f}"})
    return rows


# HTML


def html(documents: Sequence[Document]) -> str:
    """The page."""
    parts = ["<h1>hvd8bit: measurements</h1>", _machines(documents)]
    rows = summary(documents)
    if rows:
        parts += ["<section><h2>8 bit beside float32 and fp16</h2>", _table(list(rows[0]), rows), "</section>"]
    previous = None
    for document in documents:
        if document.benchmark != previous:
            parts.append(f"<h2>{BENCHMARKS.get(document.benchmark, 'Other results')}</h2>")
            previous = document.benchmark
        with _as_written(document.name):
            parts += _document(document)
    return _PAGE.format(body="\n".join(parts))


def _document(document: Document) -> Iterator[str]:
    yield f"<section><h3>{_text(document.name)}</h3>"
    if document.benchmark == "exchange":
        yield from _exchange(document)
    else:
        if document.benchmark in output.PLOTS:
            yield _image(output.PLOTS[document.benchmark](document.results), document.name)
        yield _records(document.results, output.COLUMNS.get(document.benchmark))
    yield "</section>"


def _exchange(document: Document) -> Iterator[str]:
    found = runs(document)
    # One line over sizes for the runs that differ in the size alone.
    plain = [r for records in found for r in output.sums(records)]
    same = {(r["workers"], r["gradients_of"], r["rate_bit_per_s"]) for r in plain}
    if len(same) == 1 and len(found) > 1:
        yield _image(output.exchange_plot(plain), document.name)
    for records in found:
        first = records[0]
        what = f"{first['gradients_of']}'s gradients, " if first["gradients_of"] else ""
        yield (
            f"<h4>{_text(what)}{first['elements']:,} elements, {first['workers']} workers, link "
            f"{_text(output.rate(first))}</h4>"
        )
        if not (len(same) == 1 and len(found) > 1):
            yield _image(output.exchange_plot(output.sums(records)), document.name)
        for columns, part in output.split(records):
            yield _records(part, columns)


def _machines(documents: Sequence[Document]) -> str:
    """The machines and versions that the files tell of, each once; loads differ and are left to the files."""
    told = []
    for document in documents:
        machine = {key: value for key, value in document.machine.items() if key != "load_average"}
        if (machine, document.versions) not in told:
            told.append((machine, document.versions))
    boxes = []
    for machine, versions in told:
        facts = {**machine, **versions}
        if isinstance(facts.get("memory_bytes"), int):
            facts["memory"] = f"{facts.pop('memory_bytes') / 2**30:.1f} GiB"
        items = "".join(f"<dt>{_text(key)}</dt><dd>{_text(value)}</dd>" for key, value in facts.items())
        boxes.append(f"<dl>{items}</dl>")
    return "<section><h2>Measured on</h2>" + "".join(boxes) + "</section>"


def _records(records: Sequence[output.Record], columns: output.Columns | None) -> str:
    if columns is None:
        heads = [key for key in records[0] if not isinstance(records[0][key], (list, dict))]
        return _table(heads, [{key: _value(record.get(key)) for key in heads} for record in records])
    heads, rows = output.cells(records, columns)
    return _table(heads, [dict(zip(heads, row)) for row in rows])


def _value(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _table(heads: Sequence[str], rows: Sequence[dict[str, str]]) -> str:
    top = "".join(f"<th>{_text(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{_text(row.get(head, ''))}</td>" for head in heads) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _image(figure: Any, name: str) -> str:
    return f'<img alt="{_text(name)}" src="{output.data_uri(figure)}">'


def _text(value: Any) -> str:
    return escape_html.escape(str(value))


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>hvd8bit: measurements</title>
<style>
body {{ font: 16px/1.45 system-ui, "DejaVu Sans", sans-serif; color: #222; background: #fff;
  margin: 0 auto; padding: 1rem; max-width: 66rem; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.25rem; border-bottom: 2px solid #1f5fa8; margin-top: 2.2rem; }}
h3 {{ font-size: 1.05rem; margin: 1.4rem 0 .4rem; }} h4 {{ font-size: .95rem; margin: 1rem 0 .3rem; }}
img {{ display: block; width: 100%; max-width: 46rem; height: auto; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin-bottom: .8rem; font-size: .82rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; position: sticky; left: 0; background: #fff; }}
thead th {{ border-bottom: 2px solid #999; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .85rem; margin: .6rem 0; }}
dt {{ color: #666; }} dd {{ margin: 0; overflow-wrap: anywhere; }}
@media print {{
  @page {{ size: A4; margin: 12mm; }}
  body {{ font-size: 10pt; max-width: none; padding: 0; }}
  table {{ font-size: 6.6pt; }} th, td {{ padding: .1rem .25rem; }}
  .table {{ overflow: visible; }} img {{ max-width: 15cm; }}
  img, tr, dl {{ break-inside: avoid; }} h2, h3, h4 {{ break-after: avoid; }}
}}
</style>
</head>
<body>
{body}
</body>
</html>
"""


# Markdown


def fill_markdown(path: str, documents: Sequence[Document]) -> None:
    """Writes tables into a page: what stands between `<!-- table NAME -->` and `<!-- end of table -->`.

    NAME is a file's name without .json, or `summary`. Marks of files that the folder does not have keep what they
    have.

    Raises:
      ValueError: the page has none of the folder's tables.
    """
    page = pathlib.Path(path)
    before = page.read_text(encoding="utf-8")
    tables = {}
    for document in documents:
        with _as_written(document.name):
            tables[document.name] = _markdown(document)
    rows = summary(documents)
    if rows:
        heads = list(rows[0])
        tables["summary"] = output.markdown_table(heads, [[row[head] for head in heads] for row in rows])
    filled = []

    def fill(match: re.Match) -> str:
        start, name, end = match[1], match[2], match[3]
        if name not in tables:
            return match[0]
        filled.append(name)
        return f"{start}{tables[name]}{end}"

    after = _MARK.sub(fill, before)
    if not filled:
        raise ValueError(
            f"{path} has no mark <!-- table NAME --> … <!-- end of table --> for any of {', '.join(sorted(tables))}"
        )
    page.write_text(after, encoding="utf-8")


def _markdown(document: Document) -> str:
    columns = output.COLUMNS.get(document.benchmark)
    if columns is None:
        heads = [key for key in document.results[0] if not isinstance(document.results[0][key], (list, dict))]
        return output.markdown_table(heads, [[_value(r.get(key)) for key in heads] for r in document.results])
    records = [record for run in runs(document) for record in run if record.get("compression") != "slices"]
    return output.markdown_table(*output.cells(records, columns))
