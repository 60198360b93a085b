"""`hvd8bit errors`: what rounding to 8 bits does to numbers."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from hvd8bit.commands import common


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "errors",
        help="what rounding to 8 bits does to numbers, beside the paper's figures",
        description="The paper's table 2, the mean relative error of four data types on four distributions, "
        "and scaling by blocks of 64 to 4096 numbers. Exit status 1 if a figure is above the paper's, or if "
        "dynamic_tree is not the lowest on each distribution.",
    )
    parser.add_argument("--input", metavar="FILE.npy", help="measure these numbers, your own gradients, say")
    parser.add_argument(
        "--samples",
        type=common.count,
        metavar="N",
        help="numbers per cell (default: 25,000,000 for the paper's table and 1,000,000, which is also the "
        "least, for the blocks)",
    )
    parser.add_argument("--seed", type=int, help="of the random numbers, 0 or more (default: 0)")
    common.add_outputs(parser, "the codebooks, and the relative error over the magnitude")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from hvd8bit import plots, tables

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # the op library may be used
    for name in ("samples", "seed"):
        if args.input is not None and getattr(args, name) is not None:
            raise common.UsageError(
                f"--{name} is of random numbers and does not go with --input; leave one of them out"
            )
    args.seed = args.seed or 0
    if args.seed < 0:
        raise common.UsageError(f"--seed must be 0 or more, got {args.seed}")
    show = tables.console(to_stderr=args.json == "-")
    cells, missed = _file(args, show) if args.input else _distributions(args, show)
    if args.json:
        records = [dataclasses.asdict(cell) for cell in cells]
        common.write_json(args.json, common.document(records, missed=missed))
    if args.plot:
        plots.errors(args.plot)
    return 1 if missed else 0


def _file(args: argparse.Namespace, show: Any) -> tuple[list, list[str]]:
    from hvd8bit import errors, tables

    array = common.checked(lambda: errors.load(args.input))
    name = os.path.basename(args.input)
    numbers = errors.ARRAY_SCALINGS * array.size
    with common.quiet():
        roundtrip = errors.codec(numbers)
    with tables.progress(numbers, "numbers coded") as advance:
        cells = common.checked(lambda: errors.of_array(array, name, roundtrip=roundtrip, progress=advance))
    tables.error_table(cells, f"What 8 bits do to the {array.size:,} numbers of {name}", show)
    return cells, []


def _distributions(args: argparse.Namespace, show: Any) -> tuple[list, list[str]]:
    from hvd8bit import errors, tables

    samples = args.samples or errors.TABLE_SAMPLES
    in_sweep = max(args.samples or 0, errors.SWEEP_SAMPLES)
    numbers = errors.TABLE_CELLS * samples + errors.SWEEP_CELLS * in_sweep
    with common.quiet():
        roundtrip = errors.codec(numbers)
    with tables.progress(numbers, "numbers coded") as advance:
        table = errors.paper_table(samples, args.seed, roundtrip=roundtrip, progress=advance)
        sweep = errors.block_sweep(in_sweep, args.seed, roundtrip=roundtrip, progress=advance)
    tables.error_table(table, f"Dettmers 2016, table 2: {samples:,} samples, seed {args.seed}", show)
    show.print()
    tables.sweep_table(sweep, in_sweep, show)
    show.print()
    missed = errors.missed(table)
    for text in missed:
        show.print(f"MISSED: {text}")
    if not missed:
        show.print(f"All {len(table)} are at or below the paper's; dynamic_tree is the lowest on each distribution.")
    return table + sweep, missed
