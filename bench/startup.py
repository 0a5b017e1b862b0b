"""Where the seconds of a start go: `epdg serve` is started, its processes are watched from outside, and one
worker of each pool is killed. Linux only.

    python -m bench.startup [CONFIG] [--kill]

A process's stages are read from /proc: its start, its name (Ray renames a worker with each actor) and the
first time that a library is mapped into it. CPU seconds are up to the first healthy answer; they depend less
on what else the machine does than seconds do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.arguments import parser_of
from bench.processes import REPLICAS, Processes, cpu_s, name_of
from bench.tables import head
from deploy.serving.command import DEFAULT_CONFIG
from deploy.serving.launch import LocalCluster, processes_of

PERIOD_S = 0.05
LIBRARIES = {
    "torch": "libtorch_cpu",
    "tokenizers": "/tokenizers",
    "kernels": "/_build/",
    "transport": "libucp",
}
REPLACEMENT_TIMEOUT_S = 180.0


@dataclass
class Watched:
    started_at: float
    name: str = ""
    cpu_s: float = 0.0
    mapped_at: dict[str, float] = field(default_factory=dict)


class Watcher(threading.Thread):
    """Samples all processes below a cluster's folder until `stop`. Times are seconds since it was made."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.processes: dict[int, Watched] = {}
        self._folder = folder
        self._zero = time.monotonic()
        self._is_stopped = threading.Event()

    def run(self) -> None:
        while not self._is_stopped.wait(PERIOD_S):
            for pid in processes_of(self._folder):
                with contextlib.suppress(OSError):  # it has just ended
                    self._sample(pid, time.monotonic() - self._zero)

    def stop(self) -> None:
        self._is_stopped.set()
        self.join()

    def _sample(self, pid: int, now: float) -> None:
        process = self.processes.setdefault(pid, Watched(now))
        process.cpu_s = cpu_s(pid) or process.cpu_s
        process.name = name_of(pid)
        missing = LIBRARIES.keys() - process.mapped_at.keys()
        maps = Path(f"/proc/{pid}/maps").read_text() if missing else ""
        process.mapped_at |= {name: now for name in missing if LIBRARIES[name] in maps}


def print_table(processes: dict[int, Watched]) -> None:
    print(*head("process", "started at s", "CPU s", *(f"{name} at s" for name in LIBRARIES)), sep="\n")
    for process in sorted(processes.values(), key=lambda each: each.started_at):
        mapped = (process.mapped_at.get(name) for name in LIBRARIES)
        cells = (f"{at:.1f}" if at is not None else "" for at in mapped)
        print(f"| {process.name} | {process.started_at:.1f} | {process.cpu_s:.2f} | {' | '.join(cells)} |")
    print(f"\nCPU s of all: {sum(process.cpu_s for process in processes.values()):.1f}\n")


def wait_for_health(url: str) -> None:
    """Waits until the door has connections to all pools. Raises TimeoutError."""
    deadline = time.monotonic() + REPLACEMENT_TIMEOUT_S
    while httpx.get(f"{url}/health", timeout=REPLACEMENT_TIMEOUT_S).status_code != 200:
        if time.monotonic() > deadline:
            raise TimeoutError("a killed worker was not replaced")
        time.sleep(PERIOD_S)


def kill_one_of_each(cluster: LocalCluster) -> None:
    """Kills one replica after the other and prints how long its pool was without it."""
    print(*head("killed", "process of the next after s", "ready after s"), sep="\n")
    processes = Processes(cluster.folder)
    pools = {kind: processes.of(kind) for kind in REPLICAS if kind != "door"}
    for name, pid in ((kind, pid) for kind, pids in sorted(pools.items()) for pid in pids):
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while not (found := [new for new in processes.of(name) if new != pid]):
            if time.monotonic() > killed_at + REPLACEMENT_TIMEOUT_S:
                raise TimeoutError(f"{name} was not replaced")
            time.sleep(PERIOD_S)
        seen_at = time.monotonic()
        wait_for_health(cluster.url)
        print(
            f"| {name} ({found[0]}) | {seen_at - killed_at:.1f} | {time.monotonic() - killed_at:.1f} |",
            flush=True,
        )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument("--kill", action="store_true", help="kill one worker of each pool afterwards")
    args = parser.parse_args()
    started_at = time.monotonic()
    cluster = LocalCluster(args.config, say=print)
    watcher = Watcher(cluster.folder)
    watcher.start()
    with cluster:
        cluster.wait_ready()
        ready_s = time.monotonic() - started_at
        watcher.stop()
        print_table(watcher.processes)
        print(f"ready after {ready_s:.1f} s")
        if args.kill:
            kill_one_of_each(cluster)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
