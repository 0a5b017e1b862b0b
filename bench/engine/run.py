"""`python -m bench.engine run`: every server alone on the same cores, one after the other, in several
repetitions.

A repetition starts each server once per model, so the figures of one row and repetition are minutes apart for
all systems. Each repetition begins with another server. Results are appended as JSON lines as they come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.engine.measure import RowResult, measure_row, warm_up
from bench.engine.prompts import Prompts
from bench.engine.rows import ROWS, LoadRow
from bench.engine.servers import OURS, ServerError, Setup, make_plan, running
from bench.engine.special import SPECIALS
from bench.records import origin


def run(
    setup: Setup,
    out: Path,
    *,
    names: Sequence[str],
    servers: Sequence[str],
    concurrencies: Sequence[int],
    repeat: int,
    seed: int,
) -> None:
    """`names`: rows and special measurements. A server that does not start is reported and skipped in that
    repetition.
    """
    prompts = Prompts(seed)
    rows = [row for row in ROWS if row.name in names]
    models = list(dict.fromkeys(row.model for row in rows))
    for repetition in range(repeat):
        for model in models:
            chosen = [row for row in rows if row.model == model]
            for name in rotated(servers, repetition):
                try:
                    run_server(setup, out, name, model, chosen, prompts, concurrencies, repetition)
                except ServerError as error:
                    write(
                        out, setup, {"type": "failure", "server": name, "model": model, "message": str(error)}
                    )
        for name in names:
            if name in SPECIALS and OURS in servers:
                print(f"{time.strftime('%H:%M:%S')} {OURS} {name}: starting", flush=True)
                try:
                    for finding in SPECIALS[name](setup, prompts, repetition):
                        write(out, setup, {"type": "finding", **asdict(finding)})
                except (ServerError, TimeoutError) as error:
                    write(
                        out, setup, {"type": "failure", "server": OURS, "model": name, "message": repr(error)}
                    )


def run_server(
    setup: Setup,
    out: Path,
    name: str,
    model: str,
    rows: Sequence[LoadRow],
    prompts: Prompts,
    concurrencies: Sequence[int],
    repetition: int,
) -> None:
    """One server from its start to its end: warm-up, then every row at every concurrency."""
    print(f"{time.strftime('%H:%M:%S')} {name} {model}: starting", flush=True)
    with running(make_plan(setup, name, model)) as server:
        print(f"  ready in {server.start_s:.0f} s", flush=True)
        warm_up(server, rows, prompts)
        for row in rows:
            for concurrency in concurrencies:
                result = measure_row(server, row, prompts, concurrency, repetition)
                write(out, setup, {"type": "row", **asdict(result)})
                print(f"  {line(result)}", flush=True)


def rotated(servers: Sequence[str], repetition: int) -> list[str]:
    first = repetition % len(servers)
    return [*servers[first:], *servers[:first]]


def line(result: RowResult) -> str:
    failed = f"  {result.num_failed} FAILED: {'; '.join(result.failures)}" if result.num_failed else ""
    return (
        f"{result.row} @{result.concurrency}: {result.tokens_per_s:.1f} tok/s, "
        f"TTFT p50 {1e3 * result.ttft_p50_s:.0f} ms, ITL p50 {1e3 * result.itl_p50_s:.1f} ms, "
        f"others {result.other_cores:.2f} cores{failed}"
    )


def write(out: Path, setup: Setup, record: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps({**record, "isa": setup.isa, **origin()}) + "\n")
    if record["type"] != "row":
        print(f"  {json.dumps(record)}", flush=True)
