"""Kills and stops every kind of process of a running cluster under load, and compares every answer with the
undisturbed one. Linux only.

    python -m bench.chaos --out FOLDER                               a short run: one kill of each kind
    python -m bench.chaos --signals kill stop --times 3 --requests 34          800 requests and more
    python -m bench.chaos --kinds controller proxy haproxy gcs raylet agent    Ray's processes
    python -m bench.chaos --table FILE                               the tables of a record

Starts its clusters by `epdg serve`'s own code. Writes records (JSON lines) and tables. Exit status 1 if an
answer was wrong, something was held or a request was lost that a fault of its kind must not cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from bench import records
from bench.arguments import parser_of
from bench.chaos import report
from bench.chaos.run import SIGNALS, Plan, measure, running
from bench.processes import CONTROL, REPLICAS
from bench.records import Record

CLUSTERS = ("2+2+2+2", "1+1+1+1")
# A connection ends with the process that has it open; GCS and raylet end the whole cluster of one machine.
COSTS_OPEN = ("door", "haproxy", "proxy")
ENDS_CLUSTER = ("gcs", "raylet", "agent")


def main() -> int:
    options = _parser().parse_args()
    if options.table:
        print(report.tables(records.read(options.table)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "chaos.jsonl"
    found: list[Record] = []
    for counts in options.clusters:
        found += _run(_plan(options, counts), path)
    table = report.tables(found)
    (options.out / "chaos.md").write_text(table + "\n")
    print(table)
    return 0 if all(map(_is_good, found)) else 1


def _run(plan: Plan, path: Path) -> list[Record]:
    """A cluster that has ended is replaced for the next fault."""
    found: list[Record] = []
    origin = records.origin()

    def keep(record: Record) -> None:
        found.append(record)
        with path.open("a") as file:
            print(json.dumps(record | origin), file=file)
        print(report.tables([record]), file=sys.stderr, flush=True)

    next_fault = 0
    while next_fault < len(plan.faults):
        with running(plan) as cluster:
            next_fault = asyncio.run(measure(cluster, plan, next_fault, keep))
    return found


def _is_good(record: Record) -> bool:
    kind = record["fault"].partition(" ")[0]
    if record["wrong"] or record["held"]:
        return False
    if kind in ENDS_CLUSTER:
        return True
    return (
        not record["lost_later"] and (not record["lost_open"] or kind in COSTS_OPEN) and not record["notes"]
    )


def _plan(options: argparse.Namespace, counts: str) -> Plan:
    faults = [(k, s) for _ in range(options.times) for s in options.signals for k in options.kinds]
    numbers = tuple(map(int, counts.split("+")))
    if len(numbers) != len(REPLICAS):
        raise SystemExit(f"{counts}: expected a number for each of {', '.join(REPLICAS)}")
    return Plan(
        counts=numbers,
        faults=faults,
        num_requests=options.requests,
        concurrency=options.concurrency,
        seed=options.seed,
        stopped_s=options.stopped_s,
        whole_s=options.whole_s,
        deadline_s=options.deadline_s,
        num_calls=options.calls,
        threads=options.threads,
    )


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("chaos"), help="folder of records and tables")
    parser.add_argument("--table", type=Path, nargs="+", help="print the tables of these records only")
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), metavar="E+P+D+DOORS")
    parser.add_argument("--kinds", nargs="+", default=list(REPLICAS), choices=[*REPLICAS, *CONTROL])
    parser.add_argument("--signals", nargs="+", default=["kill"], choices=list(SIGNALS))
    parser.add_argument("--times", type=int, default=1, help="each fault")
    parser.add_argument("--requests", type=int, default=20, help="of each fault at least")
    parser.add_argument(
        "--calls", type=int, default=20, help="different requests, each asked undisturbed first"
    )
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--stopped-s", type=float, default=8.0, help="until a stopped process goes on")
    parser.add_argument("--whole-s", type=float, default=120.0, help="limit of a recovery")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="of a request, at the client")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
