"""Policies, splits and overload in the simulator, what a decision costs, and how near the simulator is to a
live run. See README.md.

python -m bench.router simulate --out R.jsonl [--only policies,splits,groups,overload] [--seeds 5]
python -m bench.router report   R.jsonl
python -m bench.router decide   [--workers 16,64,256]
python -m bench.router scale    --replicas 1000 --requests 1000000
python -m bench.router scaling  --out R.jsonl [--seeds 5] [--devices 5,7,8]
python -m bench.router replay   TRACE [--out records.jsonl]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench import records
from bench.arguments import numbers, parser_of, words
from bench.router import decisions, report, scaling
from bench.router.cases import NUM_SEEDS, all_cases, names
from bench.router.overheads import measure
from bench.router.recording import read
from bench.router.replay import NUM_RUNS, replay, table
from bench.router.run import run
from bench.router.scale import scale

KINDS = ("policies", "splits", "groups", "overload")


def main(arguments: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(arguments)
    return COMMANDS[args.command](args)


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    simulate = commands.add_parser("simulate", help="run all cases; a line of JSON each")
    simulate.add_argument("--out", type=Path, required=True, help="JSON lines; appended to")
    simulate.add_argument("--only", type=words, default=list(KINDS))
    simulate.add_argument("--seeds", type=int, default=NUM_SEEDS)
    simulate.add_argument("--first-seed", type=int, default=0)
    simulate.add_argument("--processes", type=int, default=2)
    decide = commands.add_parser("decide", help="what a decision costs")
    decide.add_argument("--workers", type=numbers, default=[16, 64, 256])
    tables = commands.add_parser("report", help="tables in Markdown")
    tables.add_argument("files", nargs="+", type=Path)
    big = commands.add_parser("scale", help="how long a large cluster takes to simulate")
    big.add_argument("--replicas", type=int, default=1000)
    big.add_argument("--requests", type=int, default=1_000_000)
    big.add_argument("--policy", default="joint")
    big.add_argument("--media", action="store_true", help="an image in every prompt; else text alone")
    big.add_argument("--seed", type=int, default=0)
    pools = commands.add_parser("scaling", help="a day with pools that are scaled, and with fixed ones")
    pools.add_argument("--out", type=Path, required=True, help="JSON lines; appended to")
    pools.add_argument("--seeds", type=int, default=NUM_SEEDS)
    pools.add_argument("--devices", type=numbers, default=[5, 7, 8])
    again = commands.add_parser(
        "replay", help="a recorded live run (bench.router.live --record-for-simulator)"
    )
    again.add_argument("trace", type=Path)
    again.add_argument("--out", type=Path, help="every compared request, as a line of JSON")
    again.add_argument(
        "--recorded-placements", action="store_true", help="where and when the live door placed requests"
    )
    return parser


def _simulate(args: argparse.Namespace) -> int:
    cases = [case for case in all_cases(args.seeds, args.first_seed) if names(case)["type"] in args.only]
    records.append(args.out, run(cases, args.processes))
    return 0


def _decide(args: argparse.Namespace) -> int:
    found = [each for num_workers in args.workers for each in decisions.decisions(num_workers)]
    print("\n".join(decisions.table(found)))
    return 0


def _report(args: argparse.Namespace) -> int:
    found = records.read(args.files)
    print("\n".join(report.tables(found)))
    return 0


def _scale(args: argparse.Namespace) -> int:
    print(json.dumps(scale(args.replicas, args.requests, args.policy, args.media, args.seed), indent=2))
    return 0


def _scaling(args: argparse.Namespace) -> int:
    records.append(args.out, scaling.runs(args.seeds, args.devices))
    print("\n".join(scaling.table(records.read([args.out]))))
    return 0


def _replay(args: argparse.Namespace) -> int:
    try:
        recording = read(args.trace)
        overheads = measure(recording, [block for block in recording.blocks if block.repetition == 0])
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    runs = (replay(recording, overheads, seed, args.recorded_placements) for seed in range(NUM_RUNS))
    found = [each for run in runs for each in run if each.is_compared]
    if args.out:
        args.out.write_text("".join(json.dumps(each.fields()) + "\n" for each in found))
    told = ", ".join(f"{name[:-2]} {1e3 * seconds:.2f}" for name, seconds in asdict(overheads).items())
    print(
        f"Overheads in ms, measured on the first repetition: {told}. Compared: the other repetitions, "
        f"simulated {NUM_RUNS} times.\n"
    )
    print("\n".join(table(found)))
    return 0


COMMANDS = {
    "simulate": _simulate,
    "report": _report,
    "decide": _decide,
    "scale": _scale,
    "scaling": _scaling,
    "replay": _replay,
}

if __name__ == "__main__":
    sys.exit(main())
