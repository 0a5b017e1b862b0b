"""The processes of clusters on this machine: which there are, of which kind, and what they use. Reads /proc.

A kind is what a process is for users of these commands: `encode`, `prefill`, `decode` and `door` are replicas
of this application; the others belong to Ray (`KINDS`).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from deploy.serving import fork_server
from deploy.serving.launch import processes_of

PROC = Path("/proc")
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
    "forks": rf"\S+ -m {re.escape(fork_server.__name__)} ",
}
CONTROL = ("controller", "proxy", "haproxy", "gcs", "raylet", "agent")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LISTENS = "0A"
MIB = 1 << 20


class Processes:
    """The processes of the cluster in `folder`. A process that ends meanwhile is left out."""

    def __init__(self, folder: Path):
        self._folder = folder

    def pids(self) -> list[int]:
        """Processes with the cluster's folder in their environment, and their descendants: a long title
        overwrites the environment."""
        found = set(processes_of(self._folder))
        parents = {pid: int(fields[1]) for pid in _all_pids() if (fields := stat(pid))}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return sorted(found)

    def by_kind(self) -> dict[int, str]:
        """Process id → kind of all; "other" for what has none."""
        return {pid: kind_of(pid) for pid in self.pids()}

    def of(self, kind: str) -> list[int]:
        return [pid for pid, own in self.by_kind().items() if own == kind]

    def counts(self) -> Counter[str]:
        """The number of processes by kind, without zombies, which have no memory and only wait for their
        parent."""
        return Counter(kind for pid, kind in self.by_kind().items() if not is_zombie(pid))


def processes_at(url: str) -> Processes:
    """Those of the cluster of this user that listens at `url`. Raises LookupError."""
    port = urlsplit(url).port or 80
    for pid in _all_pids():
        if port in listening_ports(pid):
            with contextlib.suppress(OSError):
                variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
                folder = next((each for each in variables if each.startswith(b"RAY_TMPDIR=")), None)
                if folder is not None:
                    return Processes(Path(folder.partition(b"=")[2].decode()))
    raise LookupError(f"no local cluster of this user listens at {url}")


def command_of(pid: int) -> str:
    """The words of its command line, or its title. Raises OSError if the process has ended."""
    return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def kind_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = command_of(pid)
        return next((kind for kind, begin in KINDS.items() if re.match(begin, words)), "other")
    return "other"


def name_of(pid: int) -> str:
    """The kind of a process; without one, the program that runs. Raises OSError."""
    if (kind := kind_of(pid)) != "other":
        return kind
    words = command_of(pid).split()
    modules = [word for word in words if word.endswith(".py")]
    return Path((modules or words or ["?"])[0]).name


def stat(pid: int) -> list[str]:
    """Fields from the state on (the third): state, parent, group, session; empty if the process has
    ended."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return []


def is_zombie(pid: int) -> bool:
    fields = stat(pid)
    return not fields or fields[0] == "Z"


def started_at(pid: int) -> float | None:
    """The instant at which a process started, on the clock of `time.monotonic`, to 10 ms; None if it has
    ended."""
    fields = stat(pid)
    if not fields:
        return None
    since_boot = int(fields[19]) / TICKS_PER_S
    return since_boot - (time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic())


def cpu_s(pid: int) -> float:
    """CPU seconds so far; 0 if it has ended."""
    fields = stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def memory_mib(pid: int) -> tuple[float, float]:
    """(proportional, unique) resident memory: a page that n processes map is an n-th of it in each. Raises
    OSError."""
    text = (PROC / str(pid) / "smaps_rollup").read_text()
    sizes = {name: int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    return sizes["Pss"] / 1024, (sizes["Private_Clean"] + sizes["Private_Dirty"]) / 1024


def status_bytes(pid: int, name: str) -> int:
    """A size that the kernel reports of a process, such as VmRSS, and VmHWM, its peak. Raises OSError."""
    fields = dict(line.split(":", 1) for line in (PROC / str(pid) / "status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which the process accepts connections."""
    inodes = set()
    with contextlib.suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in (PROC / "net/tcp").read_text().splitlines()[1:]]
    ports = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS and row[9] in inodes}
    return sorted(ports)


def send_signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
