"""`hvd8bit bench`: what compression costs and gives, measured."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from hvd8bit.commands import common

_CODEC_SIZES = {"in cache": 65_536, "out of cache": 25_000_000}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure the codec, the exchange, training; hosts in a box; a report",
        description="Each benchmark verifies results before it times anything.",
    )
    benches = parser.add_subparsers(title="benchmarks", required=True, metavar="benchmark")
    for add_bench in (_add_codec, _add_exchange, _add_train, _add_hybrid, _add_netlab, _add_report):
        add_bench(benches)


def _compressions(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def rate(text: str) -> float:
    """Bits per second, from `1Gbit/s`, `125MB/s`, and as tc writes it: `1gbit`."""
    as_tc = re.fullmatch(r"([0-9.]+)([kmgt]?)bit", text)
    if as_tc:
        text = f"{as_tc[1]}{as_tc[2].upper().replace('K', 'k')}bit/s"
    return 8 * common.bandwidth(text)


def _elements(text: str) -> list[int]:
    """Numbers of elements: 25000000, 25M (10^6) or 64Mi (2^20)."""
    factors = {"": 1, "k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20}
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(|k|M|Ki|Mi)", part)
        if match is None or int(match[1]) == 0:
            raise argparse.ArgumentTypeError(
                "must be numbers of elements, such as 1000,25M,64Mi (k, M: 10^3, 10^6; Ki, Mi: 2^10, 2^20), got "
                f"{part!r}"
            )
        found.append(int(match[1]) * factors[match[2]])
    return found


def _add_rounds(parser: Any, rounds: int, seconds: float) -> None:
    parser.add_argument(
        "--rounds", type=common.count, default=rounds, metavar="N", help=f"at the most (default: {rounds})"
    )
    parser.add_argument(
        "--budget",
        type=common.seconds,
        default=seconds,
        metavar="TIME",
        help=f"for the rounds, which are at least 3 (default: {seconds:g}s)",
    )
    parser.add_argument(
        "--rate",
        type=rate,
        metavar="RATE",
        help="of each host's link, for the records: 10Gbit/s, … (default: what bench netlab limits it to)",
    )


# ---------------------------------------------------------------------------------------------- codec


def _add_codec(benches: Any) -> None:
    parser = benches.add_parser(
        "codec",
        help="the codec's CPU back ends on one core, kernel by kernel, beside memcpy",
        description="Needs no Horovod. Every back end's bytes are compared with the reference's first.",
    )
    parser.add_argument(
        "--data-types",
        type=_compressions,
        default=("dynamic_tree",),
        metavar="T,T,…",
        help="(default: dynamic_tree)",
    )
    parser.add_argument("--block-size", type=common.block_size, default=1024, metavar="B|none", help="(default: 1024)")
    parser.add_argument("--elements", type=common.count, metavar="N", help="one size (default: 65,536 and 25,000,000)")
    parser.add_argument(
        "--rounds", type=common.count, default=15, metavar="N", help="measurements of each (default: 15)"
    )
    common.add_outputs(parser, "bars of the times")
    parser.set_defaults(run=_codec)


def _codec(args: argparse.Namespace) -> int:
    from hvd8bit import datatypes, tables
    from hvd8bit.bench import codec, output

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for name in args.data_types:
        common.checked(functools.partial(datatypes.data_type_id, name))
    # 1 MB is about a core's second cache.
    placement = "in cache" if (args.elements or 0) <= 200_000 else "out of cache"
    sizes = {placement: args.elements} if args.elements else _CODEC_SIZES
    with common.quiet():
        from hvd8bit import native

        native.load()
    timings = codec.run(sizes, args.data_types, args.block_size, args.rounds, _progress)
    records = [dataclasses.asdict(timing) for timing in timings]
    output.table(
        records,
        output.CODEC,
        "CPU time; by the clock where there are several threads",
        tables.console(to_stderr=args.json == "-"),
    )
    _write(args, "codec", records)
    return 0


# ---------------------------------------------------------------------------------------------- exchange


def _add_exchange(benches: Any) -> None:
    parser = benches.add_parser(
        "exchange",
        help="the sum over all workers, for each compression, part by part; under horovodrun",
        description="Run it on every worker: horovodrun -np 4 hvd8bit bench exchange, or hvd8bit bench netlab "
        "-n 4 --rate 1gbit -- hvd8bit bench exchange. Rank 0 prints and writes. 'bare' is the same bytes in the same "
        "slices without any coding, 'no_communication' the coding without the bytes.",
    )
    parser.add_argument(
        "--elements",
        type=_elements,
        metavar="N,N,…",
        help="float32 elements: 1000, 25M, 64Mi (default: 1Ki … 64Mi, which are 4 kB to 256 MB)",
    )
    parser.add_argument(
        "--gradients-of",
        metavar="MODEL",
        help="sum the gradients of a model of keras.applications (ResNet50, …), or of a workload of hvd8bit "
        "predict (alexnet, …)",
    )
    parser.add_argument(
        "--compressions",
        type=_compressions,
        metavar="C,C,…",
        help="of none, fp16, dynamic_tree, static_tree, mantissa, linear (default: all)",
    )
    parser.add_argument("--block-size", type=common.block_size, default=1024, metavar="B|none", help="(default: 1024)")
    parser.add_argument(
        "--slices", type=common.counts, default=[], metavar="S,S,…", help="numbers of slices to try, too"
    )
    parser.add_argument(
        "--exchanges",
        type=_compressions,
        default=(),
        metavar="M,M",
        help="of scatter_reduce, allgather: modes of the exchange to time, too; with both, says up to which size an "
        "allgather is no slower, which is what exchange='auto' goes by",
    )
    parser.add_argument("--sums-only", action="store_true", help="leave out the parts, 'bare' and 'no_communication'")
    _add_rounds(parser, rounds=20, seconds=20.0)
    common.add_outputs(parser, "the time over the number of elements")
    parser.set_defaults(run=_exchange, on_workers=True)


def _exchange(args: argparse.Namespace) -> int:
    with _worker("exchange", args) as (rank, say):
        from hvd8bit import tables
        from hvd8bit.bench import exchange, output, timing

        settings = common.checked(
            lambda: exchange.Settings(
                compressions=args.compressions or exchange.COMPRESSIONS,
                block_size=args.block_size,
                rounds=args.rounds,
                budget_s=args.budget,
                rate_bit_per_s=timing.rate_bit_per_s(args.rate),
                slices=tuple(args.slices),
                sums_only=args.sums_only,
                exchanges=args.exchanges,
            )
        )
        lists: list[tuple[str | None, Sequence[tuple[int, ...]]]] = []
        if args.gradients_of:
            lists += [(args.gradients_of, common.checked(lambda: exchange.gradient_shapes(args.gradients_of)))]
        if args.elements or not lists:
            lists += [(None, [(n,)]) for n in args.elements or exchange.SIZES]
        show = tables.console(to_stderr=args.json == "-")
        records = []
        for model, shapes in lists:
            title = f"{model}'s gradients" if model else f"{shapes[0][0]:,} elements"
            say(title)
            found = exchange.run(shapes, settings, _titled(say, title), model)
            records += found
            if rank == 0:
                about = f"{title}, {found[0]['workers']} workers, link {output.rate(found[0])}"
                for columns, part in output.split(output.with_ratios(found)):
                    output.table(part, columns, about, show)
                    show.print()
        if rank == 0:
            trials = {kind: [r for r in records if r["compression"] == kind] for kind in output.TRIALS}
            extra: dict[str, Any] = {kind: found for kind, found in trials.items() if found}
            found_rule = exchange.rule(records)
            if found_rule:
                extra["rule"] = found_rule
                show.print(
                    f"{found_rule['workers']} workers: an allgather was no slower than a scatter-reduce up to "
                    f"{found_rule['largest_elements']:,} elements, where it sends {found_rule['more_bytes']:,.0f} "
                    "bytes more"
                )
            _write(args, "exchange", output.sums(records), **extra)
    return 0


# ---------------------------------------------------------------------------------------------- train


def _add_train(benches: Any) -> None:
    parser = benches.add_parser(
        "train",
        help="images per second of a model of keras.applications, for each compression; under horovodrun",
        description="Run it on every worker: horovodrun -np 4 hvd8bit bench train --model ResNet50. Rank 0 prints and "
        "writes. 'alone' is the same step without any exchange. Images are random, weights too.",
    )
    parser.add_argument("--model", default="MobileNetV2", help="of keras.applications (default: MobileNetV2)")
    parser.add_argument("--image-size", type=common.count, metavar="N", help="(default: the model's own)")
    parser.add_argument(
        "--batch-size",
        type=common.count,
        default=8,
        metavar="N",
        help="images per step and worker (default: 8)",
    )
    parser.add_argument(
        "--compressions",
        type=_compressions,
        metavar="C,C,…",
        help="of none, fp16, eightbit (default: all)",
    )
    parser.add_argument(
        "--optimizer",
        default="hvd8bit",
        metavar="O",
        help="hvd8bit, or with Keras 2 (TF_USE_LEGACY_KERAS=1) Horovod's own: horovod, gradients one by one, or "
        "horovod_group, with groups=1 (default: hvd8bit)",
    )
    _add_rounds(parser, rounds=20, seconds=60.0)
    common.add_outputs(parser, "bars of the images per second")
    parser.set_defaults(run=_train, on_workers=True)


def _train(args: argparse.Namespace) -> int:
    with _worker("train", args) as (rank, say):
        from hvd8bit import tables
        from hvd8bit.bench import output, timing, train

        settings = common.checked(
            lambda: train.Settings(
                model=args.model,
                image_size=args.image_size,
                batch_size=args.batch_size,
                compressions=args.compressions or train.COMPRESSIONS,
                optimizer=args.optimizer,
                rounds=args.rounds,
                budget_s=args.budget,
                rate_bit_per_s=timing.rate_bit_per_s(args.rate),
            )
        )
        records = train.run(settings, say)
        if rank == 0:
            first = records[0]
            about = (
                f"{first['model']}, {first['parameters']:,} parameters, {first['workers']} workers × "
                f"{first['batch_size']} images, link {output.rate(first)}"
            )
            output.table(records, output.TRAIN, about, tables.console(to_stderr=args.json == "-"))
            _write(args, "train", records)
    return 0


# ---------------------------------------------------------------------------------------------- hybrid


def _add_hybrid(benches: Any) -> None:
    parser = benches.add_parser(
        "hybrid",
        help="a step of HybridModel, its computation and its exchange: what overlaps; under horovodrun",
        description="Run it on every worker: hvd8bit bench netlab -n 2 --rate 100mbit -- hvd8bit bench hybrid. Rank 0 "
        "prints and writes. A small convolutional net below, fully connected layers above. 'computation' is the step "
        "with what collectives bring put in from memory, 'exchange' its collectives alone.",
    )
    parser.add_argument(
        "--batch-size", type=common.count, default=128, metavar="N", help="images of all workers (default: 128)"
    )
    parser.add_argument(
        "--sub-batches", type=common.counts, default=[4], metavar="K,K,…", help="one after another (default: 4)"
    )
    parser.add_argument(
        "--units", type=common.counts, default=[4096, 4096, 1000], metavar="U,U,…", help="(default: 4096,4096,1000)"
    )
    parser.add_argument("--compressions", type=_compressions, metavar="C,C", help="of none, eightbit (default: both)")
    _add_rounds(parser, rounds=20, seconds=60.0)
    common.add_outputs(parser, "bars of the three times")
    parser.set_defaults(run=_hybrid, on_workers=True)


def _hybrid(args: argparse.Namespace) -> int:
    with _worker("hybrid", args) as (rank, say):
        from hvd8bit import tables
        from hvd8bit.bench import hybrid, output, timing

        settings = common.checked(
            lambda: hybrid.Settings(
                batch_size=args.batch_size,
                sub_batches=tuple(args.sub_batches),
                units=tuple(args.units),
                compressions=args.compressions or hybrid.COMPRESSIONS,
                rounds=args.rounds,
                budget_s=args.budget,
                rate_bit_per_s=timing.rate_bit_per_s(args.rate),
            )
        )
        records = common.checked(lambda: hybrid.run(settings, say))
        if rank == 0:
            about = f"{records[0]['workers']} workers, {args.batch_size} images, link {output.rate(records[0])}"
            output.table(records, output.HYBRID, about, tables.console(to_stderr=args.json == "-"))
            _write(args, "hybrid", records)
    return 0


# ---------------------------------------------------------------------------------------------- netlab


def _add_netlab(benches: Any) -> None:
    parser = benches.add_parser(
        "netlab",
        help="run a Horovod command on several hosts that this machine plays, with links of a given rate",
        description="N hosts as network namespaces on one switch; each can send, and receive, at RATE. Needs Linux, "
        "root and iproute2. Latency is not shaped: that would take the kernel's netem module, which many lack. The "
        "hosts share this machine's cores. Rank 0's output is shown. Exit status 1 if the command fails on a worker. "
        "Everything is taken down at the end, and what a killed run left behind when the next one starts.",
    )
    parser.add_argument("-n", "--hosts", type=common.count, default=2, metavar="N", help="(default: 2)")
    parser.add_argument(
        "--rate",
        type=rate,
        metavar="RATE",
        help="of each host's link, which its workers share: 1gbit, 100Mbit/s, … (default: no limit)",
    )
    parser.add_argument("--slots", type=common.count, default=1, metavar="W", help="workers per host (default: 1)")
    parser.add_argument(
        "--ssh",
        action="store_true",
        help="by horovodrun over ssh (needs openssh-server); else by horovodrun's environment variables",
    )
    parser.add_argument(
        "--timeout", type=common.seconds, default=3600.0, metavar="TIME", help="ends the job (default: 60min)"
    )
    parser.add_argument("--json", metavar="PATH", help="write what each host sent to PATH, - for standard output")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …", help="what each worker runs")
    parser.set_defaults(run=_netlab)


def _netlab(args: argparse.Namespace) -> int:
    from hvd8bit.bench import netlab

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise common.UsageError("a command is needed: hvd8bit bench netlab -n 4 --rate 1gbit -- python train.py")
    if args.hosts > netlab.MAX_HOSTS:
        raise common.UsageError(f"--hosts must be at most {netlab.MAX_HOSTS}, got {args.hosts}")
    reason = netlab.available(ssh=args.ssh, shaping=args.rate is not None)
    if reason:
        raise common.UsageError(f"hosts cannot be set up: {reason}")
    lab = common.checked(lambda: netlab.NetLab(args.hosts, args.rate))
    try:
        with lab:
            before = lab.traffic()
            if args.ssh:
                job = lab.horovodrun(command, slots=args.slots, timeout=args.timeout)
                sys.stdout.write(job.stdout[0])
            else:
                job = lab.run(command, slots=args.slots, timeout=args.timeout, show_rank_0=True)
            traffic = [after - earlier for after, earlier in zip(lab.traffic(), before)]
    except netlab.NetLabError as error:
        raise common.UsageError(f"hosts cannot be set up: {error}") from error
    failed = job.returncode != 0 or job.problem is not None
    if failed:
        print(f"hvd8bit: {job.describe()}", file=sys.stderr)
    records = [
        {"host": host.name, "rate_bit_per_s": args.rate, "seconds": job.seconds, **dataclasses.asdict(seen)}
        for host, seen in zip(lab.hosts, traffic)
    ]
    if args.json:
        content = common.document(records, benchmark="netlab", command=command, returncode=job.returncode)
        common.write_json(args.json, content)
    return 1 if failed else 0


# ---------------------------------------------------------------------------------------------- report


def _add_report(benches: Any) -> None:
    parser = benches.add_parser(
        "report",
        help="the JSON results of a folder as one HTML page",
        description="One file with tables, plots and machine details, and nothing to load: it can be mailed.",
    )
    parser.add_argument("folder", metavar="DIR", help="with the .json files of hvd8bit's commands")
    parser.add_argument("--output", metavar="PATH.html", help="(default: DIR/report.html)")
    parser.add_argument(
        "--markdown",
        metavar="PATH.md",
        help="write tables between the <!-- table NAME --> marks of this page, too",
    )
    parser.add_argument("--json", metavar="PATH", help="write all records as one list to PATH, - for standard output")
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> int:
    from hvd8bit.bench import report

    documents = common.checked(lambda: report.read(args.folder))
    path = args.output or os.path.join(args.folder, "report.html")
    page = common.checked(lambda: report.html(documents))
    with open(path, "w", encoding="utf-8") as out:
        out.write(page)
    print(f"{path}: {len(documents)} files", file=sys.stderr if args.json == "-" else sys.stdout)
    if args.markdown:
        common.checked(lambda: report.fill_markdown(args.markdown, documents))
    if args.json:
        records = [{"file": d.name, **record} for d in documents for record in d.results]
        common.write_json(args.json, common.document(records, benchmark="report"))
    return 0


# ---------------------------------------------------------------------------------------------- shared


@contextlib.contextmanager
def _worker(bench: str, args: argparse.Namespace) -> Iterator[tuple[int, Callable[[str], None]]]:
    """Horovod, started; gives this worker's rank, and a function that prints progress on rank 0.

    Raises:
      UsageError: there is one worker alone; on rank 0, which writes: what was asked for cannot be written.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with common.quiet():
        import horovod.tensorflow as hvd

        from hvd8bit.bench import timing

    timing.start()
    if hvd.size() == 1:
        raise common.UsageError(
            f"bench {bench} needs at least 2 workers: horovodrun -np 2 hvd8bit bench {bench}, or hvd8bit bench "
            f"netlab -n 2 -- hvd8bit bench {bench}"
        )
    if hvd.rank() == 0:  # others may be on hosts without its folders
        common.check_outputs(args)
    yield hvd.rank(), _progress if hvd.rank() == 0 else lambda text: None


def _titled(say: Callable[[str], None], title: str) -> Callable[[str], None]:
    return lambda text: say(f"{title}: {text}")


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write(args: argparse.Namespace, kind: str, records: list[dict[str, Any]], **more: Any) -> None:
    from hvd8bit.bench import output

    if args.json:
        common.write_json(args.json, common.document(records, benchmark=kind, **more))
    if args.plot:
        output.save(output.PLOTS[kind](records), args.plot)
