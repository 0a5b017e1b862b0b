"""Results as JSON lines: every record says what was measured, when, where and with which commit."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import REPOSITORY

Record = dict[str, Any]


def origin() -> Record:
    """Fields that all records of one command share."""
    return {"machine": _machine(), "commit": _commit(), "date": time.strftime("%Y-%m-%d")}


def append(path: Path, records: Iterable[Record]) -> None:
    """Writes each record as soon as it comes, so that a stopped run keeps its records."""
    shared = origin()
    with path.open("a") as file:
        for record in records:
            line = json.dumps(record | shared)
            print(line, file=file, flush=True)
            print(json.dumps(record), flush=True)


def read(paths: Sequence[Path]) -> list[Record]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def _machine() -> str:
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = cpus[0].partition(":")[2].strip() if cpus else "unknown"
    return f"{len(os.sched_getaffinity(0))} cores, {name}"


def _commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
