"""The command line: parses, calls, prints.

Exit status 0: done and nothing wrong; 1: a fault found or a bound missed; 2: usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import hvd8bit
from hvd8bit.commands import bench, common, errors, predict
from hvd8bit.commands.common import write_json


def _doctor(args: argparse.Namespace) -> int:
    from hvd8bit import doctor

    facts = doctor.gather()
    findings = doctor.judge(facts, multi_host=args.multi_host)
    # With the JSON on standard output, the table must not stand in its way.
    doctor.show(findings, to_stderr=args.json == "-")
    if args.json:
        write_json(args.json, doctor.report(facts, findings))
    return 1 if any(finding.status == doctor.FAULT for finding in findings) else 0


def _parser() -> argparse.ArgumentParser:
    parser = common.Parser(prog="hvd8bit", description="8-bit gradients for Horovod on TensorFlow")
    parser.add_argument("--version", action="version", version=f"hvd8bit {hvd8bit.__version__}")
    parser.set_defaults(on_workers=False)
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")

    doctor = commands.add_parser(
        "doctor",
        help="what is installed, how it was built, and what is wrong with it",
        description="Looks at Python, TensorFlow, Keras, Horovod, the op library, this host's name and CUDA. "
        "Exit status 1 when a fault is found.",
    )
    doctor.add_argument("--json", metavar="PATH", help="write the findings to PATH, - for standard output")
    doctor.add_argument(
        "--multi-host",
        action="store_true",
        help="jobs will span hosts: a host name that other hosts cannot reach is a fault, not a warning",
    )
    doctor.set_defaults(run=_doctor)
    errors.add(commands)
    predict.add(commands)
    bench.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        if not args.on_workers:
            common.check_outputs(args)
        return int(args.run(args))
    except (OSError, common.UsageError) as error:
        # A disk that is full, for one.
        print(f"hvd8bit: {error}", file=sys.stderr)
    except ImportError as error:
        # Those without a name are hvd8bit's and Horovod's own, and say what to do.
        remedy = "; python -m hvd8bit doctor says what to install, and how" if error.name else ""
        print(f"hvd8bit: {error}{remedy}", file=sys.stderr)
    return 2
