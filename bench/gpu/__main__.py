"""What one GPU does with this product, in one command: at most eight minutes, without the network, with
random weights.

    python -m bench.gpu all --out results.jsonl
    python -m bench.gpu all --out results.jsonl --parts machine wire
    python -m bench.gpu all --out results.jsonl --rehearse   # on the CPU, tiny: shows that it runs
    python -m bench.gpu table results.jsonl
    python -m bench.gpu part steps-7b                        # one part, to the terminal

Parts are forks of one process, so all that they import is imported once. A part that fails, or outlasts its
limit and is killed, is a line of the results, and the next part begins.
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
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

import torch

from bench.gpu.goals import judged
from bench.gpu.kernels import kernel_table
from bench.gpu.parts import PARTS, RUN, RUN_S

LEAST_S = 10.0  # a part that has less time does not begin
LAST_LINES = 12  # of what a failed part has said


def run_all(
    names: Sequence[str],
    limits: Mapping[str, float],
    run: Callable[[str], None],
    out: Path,
    whole_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """run(name): prints a part's measurements, in a process of its own. `whole_s`: that all parts may take
    together. Returns how many parts failed or did not begin."""
    num_failed, end_at = 0, clock() + whole_s
    for name in names:
        with out.open("a") as results:
            left_s = end_at - clock()
            if left_s < LEAST_S:
                end: dict[str, object] = {"ok": False, "s": 0.0, "why": "no time left"}
            else:
                end = _run(partial(run, name), min(limits[name], left_s), results)
            num_failed += not end["ok"]
            _note(json.dumps({"part": name, "what": "end", **end}), results)
    return num_failed


def _run(work: Callable[[], object], limit_s: float, results: IO[str]) -> dict[str, object]:
    began, was_killed = time.monotonic(), threading.Event()
    with tempfile.TemporaryFile("w+") as said:
        reader, writer = os.pipe()  # which no program that a part starts inherits
        child = os.fork()
        if child == 0:
            _be_child(work, writer, said.fileno())
        os.close(writer)

        def kill() -> None:
            was_killed.set()
            os.killpg(child, signal.SIGKILL)

        limit = threading.Timer(limit_s, kill)
        limit.start()
        with open(reader) as lines:
            for line in lines:
                if line.startswith("{"):
                    _note(line.rstrip(), results)
        _, status = os.waitpid(child, 0)
        limit.cancel()
        said.seek(0)
        why = "time limit" if was_killed.is_set() else said.read().splitlines()[-LAST_LINES:]
    end: dict[str, object] = {"ok": status == 0, "s": time.monotonic() - began}
    return end if status == 0 else {**end, "why": why}


def _be_child(work: Callable[[], object], told: int, said: int) -> NoReturn:
    """Works in a session of its own; ends the process. told, said: descriptors of its output and errors."""
    code = 1
    os.setsid()
    os.dup2(said, 2)
    with (
        open(told, "w", buffering=1) as output,
        open(said, "w", closefd=False) as errors,
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        output.flush()
        errors.flush()
        os._exit(code)


def has_gpu() -> bool:
    """Asked in a process of its own: one that has asked cannot be forked."""
    if (child := os.fork()) == 0:
        os._exit(not torch.cuda.is_available())
    return os.waitpid(child, 0)[1] == 0


def run_part(name: str, rehearse: bool) -> None:
    for measurement in PARTS[name].run(rehearse):
        print(json.dumps({"part": name, **measurement}), flush=True)


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
    if not args.rehearse and not has_gpu():
        print("no GPU here; --rehearse runs tiny shapes on the CPU")
        return 1
    if args.command == "part":
        run_part(args.name, args.rehearse)
        return 0
    limits = {name: each.limit_s for name, each in PARTS.items()}
    whole_s = RUN_S if set(args.parts) <= RUN.keys() else math.inf
    run = partial(run_part, rehearse=args.rehearse)
    num_failed = run_all(args.parts, limits, run, args.out, whole_s)
    print(table(args.out))
    return 1 if num_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
