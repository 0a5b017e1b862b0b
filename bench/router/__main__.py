"""Policies, splits and overload in the simulator, and what a decision costs. See README.md.

python -m bench.router simulate --out R.jsonl [--only policies,splits,groups,overload] [--seeds 5]
python -m bench.router report   R.jsonl [--svg R.svg]
python -m bench.router decide   [--workers 16,64,256]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import records
from bench.router import decisions, report
from bench.router.cases import NUM_SEEDS, all_cases, names
from bench.router.run import run

KINDS = ("policies", "splits", "groups", "overload")


def main(arguments: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(arguments)
    return COMMANDS[args.command](args)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.router",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    simulate = commands.add_parser("simulate", help="run all cases; a line of JSON each")
    simulate.add_argument("--out", type=Path, required=True, help="JSON lines; appended to")
    simulate.add_argument("--only", type=lambda text: text.split(","), default=list(KINDS))
    simulate.add_argument("--seeds", type=int, default=NUM_SEEDS)
    simulate.add_argument("--processes", type=int, default=2)
    decide = commands.add_parser("decide", help="what a decision costs")
    decide.add_argument(
        "--workers", type=lambda text: [int(each) for each in text.split(",")], default=[16, 64, 256]
    )
    tables = commands.add_parser("report", help="tables in Markdown, and a plot")
    tables.add_argument("files", nargs="+", type=Path)
    tables.add_argument("--svg", type=Path)
    return parser


def _simulate(args: argparse.Namespace) -> int:
    cases = [case for case in all_cases(args.seeds) if names(case)["type"] in args.only]
    records.append(args.out, run(cases, args.processes))
    return 0


def _decide(args: argparse.Namespace) -> int:
    found = [each for num_workers in args.workers for each in decisions.decisions(num_workers)]
    print("\n".join(decisions.table(found)))
    return 0


def _report(args: argparse.Namespace) -> int:
    found = records.read(args.files)
    print("\n".join(report.tables(found)))
    if args.svg:
        args.svg.write_text(report.plot(found))
    return 0


COMMANDS = {"simulate": _simulate, "report": _report, "decide": _decide}

if __name__ == "__main__":
    sys.exit(main())
