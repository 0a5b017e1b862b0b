"""Whether a process that could write to this one's memory has ended.

A broken connection proves nothing: its process may live and write on. Only the kernel that runs both
processes can prove the end of one. So it is known for writers on this host, in a pid namespace that is
visible here, and for no others.
"""

from __future__ import annotations

import os
import select
from functools import cache
from pathlib import Path

from cluster.types.members import ProcessId

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def process_id(pid: int) -> ProcessId | None:
    """The identity of a process in this one's pid namespace. None: this system does not say."""
    started_at = _started_at(pid)
    return None if started_at is None else ProcessId(*_here(), pid, started_at)


def has_ended(process: ProcessId) -> bool:
    """Whether all threads of the process are gone, and so all its writes except those that a network or a
    socket still holds.

    False: it runs, or its end cannot be known here.
    """
    if not process.boot_id or (process.boot_id, process.namespace) != _here():
        return False
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # a system without pidfd, or no descriptors left
        return False
    try:
        if _started_at(process.pid) not in (process.started_at, None):
            return True  # another process has its number
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)


@cache
def _here() -> tuple[str, int]:
    try:
        return _BOOT_ID.read_text().strip(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return "", 0


def _started_at(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the fields after the command's name, which may hold anything
    return int(stat.rpartition(")")[2].split()[19])
