"""Which processes belong to a server and what they cost. Linux: reads /proc.

Every server is started as the leader of a session and with a mark in its environment; its children inherit
both. Ray's daemons leave the session and keep the mark; vllm's processes write their title over their
environment and keep the session.

A process's role is taken from its command line, which Ray replaces by a title:
`ray::ServeReplica:<application>:<deployment>`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "BENCH_ENGINE_SERVER"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")
ROLES = ("door", "encode", "prefill", "decode", "ray", "other")  # ray: its daemons, controller and proxies
_REPLICA = re.compile(r"^ray::ServeReplica:[^:]*:(\w+)")


@dataclass(frozen=True)
class ProcessMark:
    """What distinguishes the processes of one server from all others."""

    token: str  # value of VARIABLE
    session_id: int


@dataclass(frozen=True)
class CpuUsage:
    """CPU seconds so far."""

    at: float  # monotonic clock
    server_s: Mapping[str, float]  # by role
    client_s: float
    machine_s: float  # all programs, without waiting and without what the hypervisor took

    @classmethod
    def now(cls, mark: ProcessMark) -> CpuUsage:
        return cls(time.monotonic(), cpu_by_role(pids_of(mark)), time.process_time(), machine_cpu_s())


@dataclass(frozen=True)
class CpuCost:
    """CPU seconds between two readings."""

    wall_s: float
    server_cpu_by_role_s: Mapping[str, float]
    client_cpu_s: float
    # Used by neither server nor client. If it is not near 0, other programs used the machine.
    other_cores: float

    @classmethod
    def between(cls, before: CpuUsage, after: CpuUsage) -> CpuCost:
        wall_s, client_s = after.at - before.at, after.client_s - before.client_s
        roles = [role for role in ROLES if role in before.server_s or role in after.server_s]
        server_s = {role: after.server_s.get(role, 0.0) - before.server_s.get(role, 0.0) for role in roles}
        other_s = after.machine_s - before.machine_s - sum(server_s.values()) - client_s
        return cls(wall_s, server_s, client_s, max(0.0, other_s) / wall_s)

    @property
    def server_cpu_s(self) -> float:
        return sum(self.server_cpu_by_role_s.values())


def pids_of(mark: ProcessMark) -> list[int]:
    """Processes of this server that are alive."""
    wanted = f"{VARIABLE}={mark.token}".encode()
    found = []
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                is_marked = wanted in (folder / "environ").read_bytes().split(b"\0")
                state, session_id = _stat(folder)[0], int(_stat(folder)[3])
                if state != "Z" and (is_marked or session_id == mark.session_id):
                    found.append(int(folder.name))
    return found


def cpu_by_role(pids: list[int]) -> dict[str, float]:
    """CPU seconds so far of the processes that are still alive."""
    ticks: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            folder = PROC / str(pid)
            role, fields = role_of((folder / "cmdline").read_bytes()), _stat(folder)
            ticks[role] = ticks.get(role, 0) + int(fields[11]) + int(fields[12])
    return {role: count / TICKS_PER_S for role, count in ticks.items()}


def role_of(command_line: bytes) -> str:
    """One of ROLES. `command_line`: as /proc has it, words separated by zeros."""
    text = command_line.decode(errors="replace").replace("\0", " ")
    replica = _REPLICA.match(text)
    if replica is not None and replica[1].lower() in ROLES:
        return replica[1].lower()
    return "ray" if text.startswith("ray::") or "/ray/" in text else "other"


def _stat(folder: Path) -> list[str]:
    """The fields after the process's name: state, parent, group, session, …"""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def machine_cpu_s() -> float:
    """user, nice, system, irq and softirq of /proc/stat."""
    fields = [int(field) for field in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:7])) / TICKS_PER_S


def end_all(mark: ProcessMark, patience_s: float = 5.0) -> None:
    """SIGTERM, then SIGKILL to every process with the mark that is left. Blocks; may be repeated."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + patience_s
        while (pids := pids_of(mark)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.2)
