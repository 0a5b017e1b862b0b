"""How a cluster becomes whole again after a fault, watched from outside.

Stages of a replica's replacement, in seconds after the fault:

* detected: Serve's controller writes that the replica has failed.
* started: the process of the next replica begins (the kernel's start time).
* imported: Ray has given it its title: imports are over and its constructor runs.
* loaded: its side channel listens; of a door: its HTTP port.
* joined: every door lists all workers, and none of them as silent.

`joined` of a process of Ray: there is one again, and the doors are as above.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import aiohttp

from bench import metrics
from bench.processes import REPLICAS, Processes, is_zombie, listening_ports, started_at

PERIOD_S = 0.2
ASK_TIMEOUT_S = 2.0
WORKERS = re.compile(r'^epdg_worker_running\{pool="(\w+)"', re.MULTILINE)
SILENT = re.compile(r"^epdg_door_silent_workers\{.*\} ([0-9.e+-]+)$", re.MULTILINE)
DETECTED = re.compile(
    r"^WARNING (\S+ \S+) .*(?:marking it unhealthy|failed health check, stopping|unhealthy\. Shutting down)",
    re.MULTILINE,
)
STAGES = ("detected", "started", "imported", "loaded", "joined")


@dataclass(frozen=True)
class Fault:
    """`resumed_at`: of a stopped process; until then the cluster does not count as whole."""

    kind: str
    signal: str
    pid: int
    at: float
    resumed_at: float | None = None

    @property
    def name(self) -> str:
        return f"{self.kind} {self.signal}"


@dataclass
class Recovery:
    """Seconds after the fault; None: not seen. `gone_s`: the killed process had no connection any more."""

    stages: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(STAGES))
    gone_s: float = 0.0
    is_gone: bool = False

    def note(self, stage: str, seconds: float) -> None:
        if self.stages[stage] is None:
            self.stages[stage] = round(seconds, 2)

    @property
    def is_whole(self) -> bool:
        return self.stages["joined"] is not None


class Doors:
    """The doors' own ports, past the front."""

    def __init__(self, processes: Processes, session: aiohttp.ClientSession):
        self._processes, self._session = processes, session
        self._urls: dict[int, str] = {}

    async def pages(self) -> dict[int, str]:
        """Process id → /metrics of each door; empty text for a door that does not answer."""
        pids = self._processes.of("door")
        return dict(zip(pids, await asyncio.gather(*(self._page(pid) for pid in pids)), strict=True))

    async def held(self) -> dict[str, float]:
        """What the doors and, as each of them sees it, the workers hold."""
        return {
            f"{name} at door {pid}": value
            for pid, page in (await self.pages()).items()
            for name, value in metrics.held(page).items()
        }

    async def _page(self, pid: int) -> str:
        ports = [self._urls[pid]] if pid in self._urls else map(str, listening_ports(pid))
        for port in ports:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError):
                timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
                url = f"http://127.0.0.1:{port}/metrics"
                async with self._session.get(url, timeout=timeout) as response:
                    if response.status == 200 and "epdg_door_flights" in (text := await response.text()):
                        self._urls[pid] = port
                        return text
        return ""


class Watch:
    """Watches the cluster during one fault. `expected`: replicas by kind."""

    def __init__(self, folder: Path, doors: Doors, processes: Processes, expected: Mapping[str, int]):
        self._folder, self._doors, self._processes, self._expected = folder, doors, processes, expected
        self._before = processes.by_kind()
        self._sockets = self._side_channels()
        self._log_sizes = {path: path.stat().st_size for path in self._controller_logs()}

    async def whole(
        self, fault: Fault, recovery: Recovery, timeout_s: float, has_ended: Callable[[], bool]
    ) -> None:
        """Notes the stages until the cluster is whole or has ended, or the time is over."""
        while time.monotonic() < fault.at + timeout_s and not recovery.is_whole and not has_ended():
            self._note_detected(fault, recovery)
            if fault.signal == "kill" and not recovery.is_gone:
                recovery.gone_s, recovery.is_gone = time.monotonic() - fault.at, is_zombie(fault.pid)
            kinds = self._processes.by_kind()
            fresh = [pid for pid, kind in kinds.items() if kind == fault.kind and pid not in self._before]
            if fresh:
                self._note_process(fault, recovery, fresh[-1])
            is_running = fault.resumed_at is None or time.monotonic() >= fault.resumed_at
            if is_running and self._are_all_there(fault, kinds) and await self.are_all_joined():
                recovery.note("joined", time.monotonic() - fault.at)
                recovery.note("loaded", time.monotonic() - fault.at)  # between two looks
            await asyncio.sleep(PERIOD_S)

    async def are_all_joined(self) -> bool:
        pages = list((await self._doors.pages()).values())
        return len(pages) == self._expected["door"] and all(map(self._is_complete, pages))

    def _are_all_there(self, fault: Fault, kinds: Mapping[int, str]) -> bool:
        """Whether as many processes of the kind live as before."""
        dead = {fault.pid} if fault.signal == "kill" else set()
        living = [pid for pid, kind in kinds.items() if kind == fault.kind and not is_zombie(pid)]
        return len(set(living) - dead) >= list(self._before.values()).count(fault.kind)

    def _is_complete(self, page: str) -> bool:
        listed = WORKERS.findall(page)
        workers = [kind for kind in REPLICAS if kind != "door"]
        is_silent = any(float(value) for value in SILENT.findall(page))
        return not is_silent and all(listed.count(kind) == self._expected[kind] for kind in workers)

    def _note_process(self, fault: Fault, recovery: Recovery, pid: int) -> None:
        recovery.note("imported", time.monotonic() - fault.at)
        if (began_at := started_at(pid)) is not None:
            recovery.note("started", began_at - fault.at)
        is_loaded = listening_ports(pid) if fault.kind == "door" else self._side_channels() - self._sockets
        if is_loaded:
            recovery.note("loaded", time.monotonic() - fault.at)

    def _note_detected(self, fault: Fault, recovery: Recovery) -> None:
        """Notes when the death was detected: the time in the log's line, which is the wall clock's."""
        for path in self._controller_logs():
            with path.open() as log:
                log.seek(self._log_sizes.get(path, 0))
                for instant in DETECTED.findall(log.read()):
                    written_at = datetime.strptime(instant, "%Y-%m-%d %H:%M:%S,%f").timestamp()
                    recovery.note("detected", written_at - time.time() + time.monotonic() - fault.at)

    def _controller_logs(self) -> list[Path]:
        return list(self._folder.glob("ray/session_latest/logs/serve/controller_*.log"))

    def _side_channels(self) -> set[str]:
        return {path.name for path in (self._folder / "s").glob("*.sock")}
