"""What one GPU does with this product, in one command: at most eight minutes, without the network, with
random weights.

    python -m bench.gpu all --out results.jsonl              # every part in a process of its own
    python -m bench.gpu all --out results.jsonl --parts machine wire
    python -m bench.gpu all --out results.jsonl --rehearse   # on the CPU, tiny: shows that it runs
    python -m bench.gpu table results.jsonl
    python -m bench.gpu part steps-7b                        # one part, to the terminal

A part that fails, or outlasts its limit and is killed, is a line of the results, and the next part begins.
When the time of the whole run is over, the part that runs is killed and those after it do not begin. Results
are appended to the file as they come. The end is a table of each step's kernels (`bench.gpu.kernels`) and one
of goals (`bench.gpu.goals`): met, missed or not measured. Longer looks, which have no common limit:
`--parts tests steps-0.5b steps-7b attention`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import torch

from bench.gpu.goals import judged
from bench.gpu.kernels import kernel_table
from bench.gpu.parts import PARTS, RUN, RUN_S

LEAST_S = 10.0  # a part that has less time does not begin
LAST_LINES = 12  # of what a failed part has said
OF_A_PART = (sys.executable, "-m", "bench.gpu", "part")


def run_all(
    names: Sequence[str],
    limits: Mapping[str, float],
    command: Sequence[str],
    out: Path,
    whole_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """`command`: of a part; its name follows. `whole_s`: that all parts may take together. Returns how many
    parts failed or did not begin."""
    num_failed, end_at = 0, clock() + whole_s
    for name in names:
        with out.open("a") as results:
            left_s = end_at - clock()
            if left_s < LEAST_S:
                end: dict[str, object] = {"ok": False, "s": 0.0, "why": "no time left"}
            else:
                end = _run([*command, name], min(limits[name], left_s), results)
            num_failed += not end["ok"]
            _note(json.dumps({"part": name, "what": "end", **end}), results)
    return num_failed


def _run(command: Sequence[str], limit_s: float, results: IO[str]) -> dict[str, object]:
    began, was_killed = time.monotonic(), threading.Event()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
        )

        def kill() -> None:
            was_killed.set()
            os.killpg(process.pid, signal.SIGKILL)

        limit = threading.Timer(limit_s, kill)
        limit.start()
        for line in process.stdout or ():
            if line.startswith("{"):
                _note(line.rstrip(), results)
        code = process.wait()
        limit.cancel()
        said.seek(0)
        why = "time limit" if was_killed.is_set() else said.read().splitlines()[-LAST_LINES:]
    end: dict[str, object] = {"ok": code == 0, "s": time.monotonic() - began}
    return end if code == 0 else {**end, "why": why}


def _note(line: str, results: IO[str]) -> None:
    results.write(line + "\n")
    results.flush()
    print(line, flush=True)


def table(file: Path) -> str:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    lines = []
    for record in records:
        if "kernels_of" in record:
            continue
        told = (f"{key} {_short(value)}" for key, value in record.items() if key not in ("part", "what"))
        lines.append(f"{record['part']:17} {record['what']:62} {', '.join(told)}")
    steps = [{"what": record["what"], **record["kernels_of"]} for record in records if "kernels_of" in record]
    return "\n".join((*lines, "", *([kernel_table(steps), ""] if steps else []), judged(records)))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    every = commands.add_parser("all")
    every.add_argument("--out", type=Path, required=True)
    every.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(RUN))
    one = commands.add_parser("part")
    one.add_argument("name", choices=list(PARTS))
    for command in (every, one):
        command.add_argument("--rehearse", action="store_true")
    commands.add_parser("table").add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "table":
        print(table(args.file))
        return 0
    if not args.rehearse and not torch.cuda.is_available():
        print("no GPU here; --rehearse runs tiny shapes on the CPU")
        return 1
    if args.command == "part":
        for measurement in PARTS[args.name].run(args.rehearse):
            print(json.dumps({"part": args.name, **measurement}), flush=True)
        return 0
    part = (*OF_A_PART, *(["--rehearse"] if args.rehearse else []))
    limits = {name: each.limit_s for name, each in PARTS.items()}
    whole_s = RUN_S if set(args.parts) <= RUN.keys() else math.inf
    num_failed = run_all(args.parts, limits, part, args.out, whole_s)
    print(table(args.out))
    return 1 if num_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
