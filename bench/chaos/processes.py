"""The processes of a cluster on this machine by kind, from /proc. Linux only.

A kind is what a process is for users of this command: `encode`, `prefill`, `decode` and `door` are replicas
of this application; the others belong to Ray (`KINDS`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from deploy.serving.launch import processes_of

REPLICAS = ("encode", "prefill", "decode", "door")
# Kind → how its command line begins, or the title that Ray has given it
KINDS: dict[str, str] = {
    **{kind: rf"ray::ServeReplica:[^:]*:{kind.capitalize()}\b" for kind in REPLICAS},
    "controller": r"ray::ServeController",
    "proxy": r"ray::HAProxyManager",
    "fallback": r"ray::ProxyActor",
    "haproxy": r"\S*/haproxy -db ",
    "gcs": r"\S*/gcs_server ",
    "raylet": r"\S*/raylet/raylet ",
    "agent": r"ray::DashboardAgent",
    "forks": r"\S+ -m cluster\.serving\.fork_server ",
}
CONTROL = ("controller", "proxy", "haproxy", "gcs", "raylet", "agent")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LISTENS = "0A"


class Processes:
    """The processes of the cluster in `folder`. A process that ends meanwhile is left out."""

    def __init__(self, folder: Path):
        self._folder = folder

    def by_kind(self) -> dict[int, str]:
        """Process id → kind of all; "other" for what has none."""
        found = self._marked()
        return {pid: kind_of(pid) for pid in sorted(found)}

    def of(self, kind: str) -> list[int]:
        return [pid for pid, own in self.by_kind().items() if own == kind]

    def counts(self) -> Counter[str]:
        """The number of processes by kind, without zombies, which have no memory and only wait for their
        parent."""
        return Counter(kind for pid, kind in self.by_kind().items() if not is_zombie(pid))

    def _marked(self) -> set[int]:
        """Processes with the cluster's folder in their environment, and their descendants: a long title
        overwrites the environment."""
        found = set(processes_of(self._folder))
        parents = {pid: parent for pid in _all_pids() if (parent := parent_of(pid))}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found


def kind_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return next((kind for kind, begin in KINDS.items() if re.match(begin, words)), "other")
    return "other"


def parent_of(pid: int) -> int:
    """0 if it has ended."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def is_zombie(pid: int) -> bool:
    fields = _stat(pid)
    return not fields or fields[0] == "Z"


def started_at(pid: int) -> float | None:
    """The instant at which a process started, on the clock of `time.monotonic`, to 10 ms; None if it has
    ended."""
    fields = _stat(pid)
    if not fields:
        return None
    since_boot = int(fields[19]) / TICKS_PER_S
    return since_boot - (time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic())


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which the process accepts connections."""
    inodes = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS and row[9] in inodes}
    return sorted(ports)


def send_signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Fields from the state on (the third); empty if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
