"""`hvd8bit predict`: how much faster a cluster gets, with 32, 16 and 8 bit."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hvd8bit.commands import common

if TYPE_CHECKING:
    from hvd8bit.speedup import Calibration, Cluster, Coding, Verdict, Workload
    from hvd8bit.speedup.predict import Scheme

DEFAULT_WORKERS = [2, 4, 8, 16, 32, 64]
DEFAULT_LATENCY_S = 30e-6
DEFAULT_LATENCY_WITHIN_S = 5e-6


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "predict",
        help="how much faster a cluster gets with 32, 16 and 8 bit, and where compression stops paying",
        description="Bandwidths are in bit/s or B/s (bytes) with k, M, G, T (10^3 … 10^12) or Ki, Mi, Gi, "
        "Ti (2^10 … 2^40) before it: 10Gbit/s is 1.25GB/s, and 1.25GiB/s is more. Times are in ns, us, ms, "
        "s or min. Exit status 1 if --paper does not reproduce a printed speedup.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--paper", action="store_true", help="the paper's own model and data: its 28 speedups")
    what.add_argument(
        "--model",
        metavar="MODEL",
        help="alexnet, vgg16, resnet50, bert-base, gpt2-small, a .yaml file of layers, keras:NAME of "
        "keras.applications, or a saved Keras model",
    )
    _add_cluster(parser.add_argument_group("the cluster"))
    _add_training(parser.add_argument_group("the training"))
    common.add_outputs(parser, "the speedup over the number of workers")
    parser.set_defaults(run=run)


def _add_cluster(group: Any) -> None:
    add = group.add_argument
    listed = ",".join(map(str, DEFAULT_WORKERS))
    add("--workers", type=common.counts, metavar="N,N,…", help=f"(default: {listed})")
    add("--bandwidth", type=common.bandwidth, metavar="RATE", help="of a node's link: 10Gbit/s, 1.25GB/s, …")
    add("--latency", type=common.seconds_or_zero, metavar="TIME", help="of a message there (default: 30us)")
    add("--workers-per-node", type=common.count, metavar="W", help="share a link (default: 1)")
    add("--within", type=common.bandwidth, metavar="RATE", help="of a worker's link inside its node")
    add("--within-latency", type=common.seconds_or_zero, metavar="TIME", help="there (default: 5us)")
    add("--hierarchical", action="store_true", help="exchange inside the nodes first, then between them")
    add(
        "--coding",
        type=_coding,
        metavar="cpu|paper|none|TIME,TIME,TIME",
        help="per element: encode, decode and add, decode; cpu (the default) is one core with AVX-512, "
        "paper a GTX Titan; beside --profile only where that has none",
    )
    add(
        "--block-size",
        type=common.block_size,
        default=argparse.SUPPRESS,  # None is a value
        metavar="B|none",
        help="elements per scale; none: one scale per chunk (default: 1024)",
    )
    add(
        "--profile",
        nargs="+",
        metavar="FILE",
        help="JSON of hvd8bit bench exchange, and of bench train: take what was measured for what is assumed",
    )


def _add_training(group: Any) -> None:
    add = group.add_argument
    add("--step-time", type=common.seconds, metavar="TIME", help="of one worker's step alone: 180ms, …")
    add(
        "--samples",
        type=common.count,
        metavar="N",
        help="of a worker in a step (default: the measured step's, or the workload's)",
    )
    add("--scheme", choices=("data", "hybrid", "pipeline"), help="(default: data)")
    add("--no-overlap", action="store_true", help="exchange gradients after the backward pass, not during it")
    add("--sub-batches", type=common.count, metavar="K", help="of the hybrid scheme (default: one per worker)")
    add("--stages", type=common.count, metavar="S", help="of the pipeline (default: one per worker)")
    add("--micro-batches", type=common.count, metavar="M", help="of the pipeline (default: 8)")


def _coding(text: str) -> str | tuple[float, ...]:
    if text in ("cpu", "paper", "none"):
        return text
    try:
        encode, reduce, decode = map(common.seconds_or_zero, text.split(","))
    except (argparse.ArgumentTypeError, ValueError) as error:
        why = f" ({error})" if isinstance(error, argparse.ArgumentTypeError) and "," in text else ""
        raise argparse.ArgumentTypeError(
            f"must be cpu, paper, none or three times such as 0.5ns,0.2ns,0.25ns, got {text!r}{why}"
        ) from error
    return encode, reduce, decode


def run(args: argparse.Namespace) -> int:
    from hvd8bit import tables

    _refuse_what_would_be_ignored(args)
    args.workers = args.workers or DEFAULT_WORKERS
    args.workers_per_node = args.workers_per_node or 1
    args.scheme = args.scheme or "data"
    show = tables.console(to_stderr=args.json == "-")
    return _paper(args, show) if args.paper else _cluster_of_workers(args, show)


def _refuse_what_would_be_ignored(args: argparse.Namespace) -> None:
    """Raises UsageError where an option is given that has no meaning beside the others."""
    if args.paper:
        if args.plot is not None:
            raise common.UsageError("--plot goes with --model; of the paper's table there is no picture")
        ours = ("paper", "model", "json", "plot", "run", "on_workers")
        _refuse(args, [name for name in vars(args) if name not in ours], "--model: the paper's cluster is fixed")
    if args.scheme != "hybrid":
        _refuse(args, ["sub_batches"], "--scheme hybrid")
    if args.scheme != "pipeline":
        _refuse(args, ["stages", "micro_batches"], "--scheme pipeline")
    else:
        _refuse(args, ["no_overlap"], "--scheme data or hybrid")
    if (args.workers_per_node or 1) == 1:
        _refuse(args, ["within", "within_latency", "hierarchical"], "--workers-per-node 2 or more")


def _refuse(args: argparse.Namespace, names: Sequence[str], without: str) -> None:
    for name in names:
        value = getattr(args, name)
        if name == "block_size" or not (value is None or value is False):
            raise common.UsageError(f"--{name.replace('_', '-')} goes with {without}; leave it out otherwise")


# ---------------------------------------------------------------------------------------------- the paper


def _paper(args: argparse.Namespace, show: Any) -> int:
    from hvd8bit import tables
    from hvd8bit.speedup import paper

    rows = paper.rows()
    tables.paper_table(rows, show)
    if args.json:
        measured, source = paper.measured()
        document = common.document(
            [dataclasses.asdict(row) for row in rows],
            measured={"speedup": measured, "source": source},
            disagreements=[dataclasses.asdict(item) for item in paper.disagreements()],
        )
        common.write_json(args.json, document)
    return 0 if all(row.holds for row in rows) else 1


# ---------------------------------------------------------------------------------------------- a cluster


def _cluster_of_workers(args: argparse.Namespace, show: Any) -> int:
    from hvd8bit import plots, tables
    from hvd8bit.speedup import compare, units

    calibration = common.checked(lambda: _calibration(args))
    workload = common.checked(lambda: _workload(args, calibration))
    clusters = common.checked(lambda: [_cluster(args, calibration, workers) for workers in args.workers])
    verdicts = common.checked(lambda: [compare(workload, cluster, _scheme(args)) for cluster in clusters])

    if calibration is not None:
        tables.residual_table(calibration, show)
    tables.prediction_table(workload, verdicts, args.scheme, clusters[-1], show)
    if calibration is None:
        show.print(
            "Without --profile the transport is taken to use all of the bandwidth and to add 16-bit numbers "
            "for nothing, which Gloo does not."
        )
    else:
        for caveat in _caveats(args, calibration, workload):
            show.print(caveat)
    if args.json:
        common.write_json(args.json, common.document(_records(args, workload, clusters, verdicts, calibration)))
    if args.plot:
        link = clusters[-1].between or clusters[-1].within
        rate = units.show_bandwidth(link.bandwidth_bytes_per_s) if link else "no link"
        plots.predictions(args.plot, verdicts, f"{workload.name}, {args.scheme} parallel, {rate}")
    return 0


def _caveats(args: argparse.Namespace, calibration: Calibration, workload: Workload) -> Iterator[str]:
    """What of a prediction is not measured, a sentence each."""
    from hvd8bit import keras_workload
    from hvd8bit.speedup import BITS, units

    if any(calibration.extrapolated(workers) for workers in args.workers if workers > 1):
        measured = ", ".join(map(str, calibration.workers))
        yield f"The profile has {measured} workers; for other numbers its figures are extrapolated."
    for bits in (bits for bits in BITS if bits not in calibration.bits):
        yield f"The profile has no exchange in {bits} bit, so {bits} bit is neither predicted nor compared."
    if not calibration.coding_is_measured:
        yield f"The profile has no coding rates; those of --coding {args.coding or 'cpu'} stand for them."
    step = None if args.step_time else calibration.step
    names = {_plain(workload.name), _plain(args.model.removeprefix(keras_workload.PREFIX))}
    if step is not None and step.model is not None and _plain(step.model) not in names:
        yield (
            f"The profile's step, {units.show_seconds(step.compute_s)}, is {step.model}'s and not {workload.name}'s; "
            "give its own by --step-time."
        )


def _plain(name: str) -> str:
    """ResNet-50 and resnet50 are the same model."""
    return "".join(filter(str.isalnum, name)).lower()


def _calibration(args: argparse.Namespace) -> Calibration | None:
    from hvd8bit.speedup import calibrate
    from hvd8bit.speedup.calibrate import results_of

    if not args.profile:
        return None
    results = []
    for path in args.profile:
        try:
            with open(path, encoding="utf-8") as text:
                profile = json.load(text)
            results += results_of(profile)
        except ValueError as error:
            raise ValueError(f"--profile must be JSON of hvd8bit bench, got {path}: {error}") from error
    try:
        calibration = calibrate({"results": results}, coding=_coding_of(args))
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"--profile {' '.join(args.profile)} cannot be used: {error}") from error
    if args.coding and calibration.coding_is_measured:
        raise common.UsageError("--coding and --profile exclude each other: this profile has coding rates")
    return calibration


def _workload(args: argparse.Namespace, calibration: Calibration | None) -> Workload:
    from hvd8bit import keras_workload
    from hvd8bit.speedup import load

    if keras_workload.is_keras(args.model):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        with common.quiet():
            workload = keras_workload.load(args.model)
    else:
        workload = load(args.model)
    if args.step_time:
        return workload.timed(args.step_time, args.samples)
    step = calibration.step if calibration else None
    if step is None:
        raise common.UsageError("--step-time is needed, of one worker's step alone: --step-time 180ms, say")
    if args.samples and step.samples and args.samples != step.samples:
        raise common.UsageError(
            f"--samples must be those of the profile's step, {step.samples}, got {args.samples}: leave it out, or give "
            "the step of so many by --step-time"
        )
    return workload.timed(step.compute_s, args.samples or step.samples)


def _cluster(args: argparse.Namespace, calibration: Calibration | None, workers: int) -> Cluster:
    from hvd8bit.speedup import Cluster, Link

    latency_s = DEFAULT_LATENCY_S if args.latency is None else args.latency
    within_latency_s = DEFAULT_LATENCY_WITHIN_S if args.within_latency is None else args.within_latency
    nodes = {
        "workers_per_node": args.workers_per_node,
        "within": Link(args.within, within_latency_s) if args.within else None,
        "hierarchical": args.hierarchical,
    }
    if min(workers, args.workers_per_node) > 1 and args.within is None:
        raise common.UsageError(
            f"--within is needed, of a worker's link inside its node, with --workers-per-node {args.workers_per_node}: "
            "--within 10GB/s, say"
        )
    if calibration is not None:
        if args.bandwidth is None and calibration.bandwidth_bytes_per_s is None:
            raise common.UsageError(
                "--bandwidth is needed, of a node's link: --bandwidth 10Gbit/s, say; the profile was measured on links "
                "of known rates, and the model predicts for any"
            )
        cluster = calibration.cluster(
            workers, args.bandwidth, latency_s=args.latency, default_latency_s=DEFAULT_LATENCY_S, **nodes
        )
        return dataclasses.replace(cluster, coding=_in_blocks(cluster.coding, args))
    between = None
    if args.bandwidth is not None:
        between = Link(args.bandwidth, latency_s)
    elif workers > args.workers_per_node:
        raise common.UsageError("--bandwidth is needed, of a node's link: --bandwidth 10Gbit/s, say")
    return Cluster(workers, between=between, coding=_coding_of(args), **nodes)


def _coding_of(args: argparse.Namespace) -> Coding:
    from hvd8bit.speedup import CPU_CODING, PAPER_CODING, Coding

    named = {None: CPU_CODING, "cpu": CPU_CODING, "paper": PAPER_CODING, "none": Coding()}
    coding = Coding(*args.coding) if isinstance(args.coding, tuple) else named[args.coding]
    return _in_blocks(coding, args)


def _in_blocks(coding: Coding, args: argparse.Namespace) -> Coding:
    return dataclasses.replace(coding, block_size=args.block_size) if "block_size" in args else coding


def _scheme(args: argparse.Namespace) -> Scheme:
    from hvd8bit.speedup import DataParallel, Hybrid, Pipeline

    if args.scheme == "hybrid":
        return Hybrid(args.sub_batches, overlap=not args.no_overlap)
    if args.scheme == "pipeline":
        return Pipeline(args.stages, args.micro_batches or Pipeline.micro_batches)
    return DataParallel(overlap=not args.no_overlap)


def _records(
    args: argparse.Namespace,
    workload: Workload,
    clusters: Sequence[Cluster],
    verdicts: Sequence[Verdict],
    calibration: Calibration | None,
) -> list[dict[str, Any]]:
    """A record per number of workers and bits. JSON has no infinity: null stands for "pays at any higher
    bandwidth"."""
    records = []
    for cluster, verdict in zip(clusters, verdicts):
        below = verdict.pays_below_bytes_per_s
        shared = {
            "best_bits": verdict.best_bits,
            "eight_bit_pays_below_bytes_per_s": None if below == float("inf") else below,
            "reason": verdict.reason,
            "model": workload.name,
            "scheme": args.scheme,
            "step_time_s": workload.step_s,
            "step_of": calibration.step.model if calibration and calibration.step and not args.step_time else None,
            "samples": workload.samples,
            "bandwidth_bytes_per_s": cluster.between.bandwidth_bytes_per_s if cluster.between else None,
            "extrapolated": calibration is not None and calibration.extrapolated(verdict.workers),
        }
        for bits, prediction in verdict.predictions.items():
            records.append({"workers": verdict.workers, "bits": bits, **dataclasses.asdict(prediction), **shared})
    return records
