"""The command line: python -m experiments list | run | status | quick."""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import sys

from experiments import configuration, results


def main(arguments: list[str] | None = None) -> int:
    """0: all that was asked for has its row; 1: something is left; 2: usage, or missing data."""
    options = _parser().parse_args(arguments)
    try:
        return {"list": _list, "status": _status, "run": _run, "quick": _quick}[options.command](options)
    except ValueError as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description="The paper's experiments, run again.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what there is to run")
    for name, text in (("status", "what has been run"), ("run", "run what has no row yet")):
        command = commands.add_parser(name, help=text)
        command.add_argument("what", help="SUITE or SUITE/EXPERIMENT", nargs="?" if name == "status" else None)
        command.add_argument("--arms", help="some arms only, e.g. none,dynamic_tree/1024")
        command.add_argument("--seeds", help="some seeds only, e.g. 0..4")
        command.add_argument("--results", type=pathlib.Path, default=results.FOLDER, help="folder of the CSV files")
    quick = commands.add_parser("quick", help="make some runs of a table's row anew and compare: about 10 minutes")
    # The table's rows were made with one thread: on the same processor the weights are theirs.
    for train, threads in ((command, 0), (quick, 1)):
        train.add_argument(
            "--data_dir",
            default="~/tensorflow_datasets",
            help="where tensorflow-datasets has prepared MNIST and CIFAR-10 (default: %(default)s)",
        )
        train.add_argument(
            "--threads", type=int, default=threads, help="of TensorFlow; 0: one for each core (default: %(default)s)"
        )
        train.add_argument(
            "--minutes",
            type=float,
            default=math.inf,
            help="start no run after so many minutes; not under horovodrun",
        )
    return parser


def _list(options) -> int:
    for suite in configuration.suites():
        for experiment in configuration.load(suite):
            seeds = f"seeds {experiment.seeds[0]}..{experiment.seeds[-1]}"
            print(f"{experiment.id}: {experiment.title}; {experiment.epochs} epochs, {seeds}")
            print(f"    {', '.join(experiment.arms)}")
    return 0


def _status(options) -> int:
    missing = 0
    for what in [options.what] if options.what else configuration.suites():
        runs = configuration.select(what, options.arms, options.seeds)
        finished = results.Results(runs[0].experiment.suite, options.results).finished()
        for experiment in dict.fromkeys(run.experiment for run in runs):
            mine = [run for run in runs if run.experiment == experiment]
            done = sum(run.key in finished for run in mine)
            missing += len(mine) - done
            print(f"{experiment.id}: {done} of {len(mine)} runs done")
    return 1 if missing else 0


def _run(options) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    runs = configuration.select(options.what, options.arms, options.seeds)
    workers = int(os.environ.get("HOROVOD_SIZE", 0))
    real = [run for run in runs if run.experiment.exchange == "real"]
    if workers and any(run.experiment.workers != workers for run in real):
        raise ValueError(f"{real[0].experiment.id} needs horovodrun -np {real[0].experiment.workers}, got {workers}")
    if not workers:
        for name, needed in sorted({(run.experiment.id, run.experiment.workers) for run in real}):
            print(f"left out: {name} needs horovodrun -np {needed} python -m experiments run {name}", flush=True)
    runs = real if workers else [run for run in runs if run.experiment.exchange == "rounding"]
    if not runs:
        raise ValueError(f"{options.what}: nothing that {'horovodrun' if workers else 'one process'} can run")

    import tensorflow as tf

    # It warns of functions that are traced again and again: each training is a new one.
    tf.get_logger().setLevel("ERROR")
    if options.threads:
        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
        tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    from experiments import data, runner
    from experiments.training import Worker

    worker = None
    if workers:
        import horovod.tensorflow as hvd

        hvd.init()
        worker = Worker(hvd.rank(), hvd.size())
    store = results.Results(runs[0].experiment.suite, options.results)
    try:
        missing = runner.run_all(runs, store, options.data_dir, worker=worker, limit_s=60 * options.minutes)
    except data.MissingDataError as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2
    if missing:
        print(f"{missing} runs left; the same command goes on")
    return 1 if missing else 0


def _quick(options) -> int:
    from experiments import quick

    options.what, options.arms, options.seeds = quick.WHAT, ",".join(quick.ARMS), quick.SEEDS
    options.results = quick.folder()
    status = _run(options)
    if status:
        return status
    lines, good = quick.compare(results.Results(options.what.partition("/")[0], options.results))
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
