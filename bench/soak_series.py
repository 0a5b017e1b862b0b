"""What `bench.soak` watches while a cluster is loaded: series of samples, and a verdict for each of them.

    memory        resident bytes of the processes of a kind, together
    descriptors   their open files and sockets
    threads
    /dev/shm      bytes used on the machine
    TTFT, ITL     medians of the answers that ended between two samples

Kinds of processes: `bench.processes`; those that come and go with their work (media openers, Ray's idle
workers) are "other", and a kind without a process at some sample has no verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.client import TimedAnswer
from bench.flat import Trend, trend
from bench.processes import MIB
from bench.tables import head, row

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# What a series may rise within a run: a share of its median, and at least so much
TOLERATED = {
    "MiB": (0.02, 8.0),
    "descriptors": (0.02, 4.0),
    "threads": (0.02, 2.0),
    "ms": (0.2, 1.0),
}


@dataclass(frozen=True)
class Verdict:
    name: str
    unit: str
    trend: Trend

    @property
    def tolerated(self) -> float:
        share, least = TOLERATED[self.unit]
        return max(share * self.trend.median, least)

    @property
    def rises(self) -> bool:
        return self.trend.rises(self.tolerated)


class Latency:
    """The latency of the answers since the last sample."""

    def __init__(self) -> None:
        self._ttfts: list[float] = []
        self._gaps: list[float] = []

    def add_answer(self, answer: TimedAnswer) -> None:
        """A complete one; without text it has no times."""
        if answer.chunks_at:
            self._ttfts.append(answer.ttft_s)
            self._gaps.append(sum(answer.gaps_s) / max(1, len(answer.gaps_s)))

    def take(self) -> dict[str, float]:
        """Medians in ms. Empty: no answer has ended."""
        found = {"TTFT": self._ttfts, "ITL": self._gaps}
        self._ttfts, self._gaps = [], []
        return {name: 1000 * median(values) for name, values in found.items() if values}


class Sampler:
    def __init__(self, by_kind: Callable[[], Mapping[int, str]]):
        """`by_kind()`: id and kind of every process that is watched (`Processes.by_kind`)."""
        self.latency = Latency()
        self._by_kind = by_kind
        self._series: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self._num_samples = 0

    async def sample_every(self, seconds: float) -> None:
        """Samples until it is cancelled."""
        while True:
            await asyncio.sleep(seconds)
            self.sample(time.monotonic())

    def sample(self, now: float) -> None:
        self._num_samples += 1
        totals: dict[tuple[str, str], float] = defaultdict(float)
        for pid, kind in self._by_kind().items():
            for unit, value in usage_of(pid).items():
                totals[kind, unit] += value
        for (kind, unit), value in totals.items():
            self._series[kind, unit].append((now, value))
        shm = os.statvfs("/dev/shm")
        used = (shm.f_blocks - shm.f_bfree) * shm.f_frsize / MIB
        self._series["/dev/shm", "MiB"].append((now, used))
        for name, value in self.latency.take().items():
            self._series[name, "ms"].append((now, value))

    def verdicts(self) -> list[Verdict]:
        """The verdicts, of latency also where some samples are missing. Raises ValueError if the run was too
        short."""
        return [
            Verdict(name, unit, trend(*zip(*points, strict=True)))
            for (name, unit), points in sorted(self._series.items())
            if len(points) == self._num_samples or unit == "ms"
        ]


def usage_of(pid: int) -> dict[str, float]:
    """The usage of a process by unit. Empty if the process has ended."""
    with contextlib.suppress(OSError):
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        num_files = len(os.listdir(process / "fd"))
        num_threads = len(os.listdir(process / "task"))
        return {"MiB": pages * PAGE_BYTES / MIB, "descriptors": num_files, "threads": num_threads}
    return {}


def table(verdicts: Sequence[Verdict], unit_s: float) -> str:
    """Markdown. `unit_s`: seconds that 1,000 requests took."""
    rows = head("series", "unit", "median", "rise", "per 1,000 requests", "tolerated", "")
    for each in verdicts:
        numbers = (
            each.trend.median,
            each.trend.rise,
            each.trend.slope * unit_s,
            each.tolerated,
        )
        cells = (f"{number:.2f}" for number in numbers)
        rows.append(row([each.name, each.unit, *cells, "GROWS" if each.rises else "flat"]))
    return "\n".join(rows)
