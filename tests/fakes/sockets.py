"""What listens on this machine, as the kernel lists it: TCP sockets that accept, UDP sockets that receive
from anywhere, Unix sockets with a path."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TCP_LISTEN, UDP_UNCONNECTED = "0A", "07"
STATES = {"tcp": TCP_LISTEN, "tcp6": TCP_LISTEN, "udp": UDP_UNCONNECTED, "udp6": UDP_UNCONNECTED}


@dataclass(frozen=True)
class Listener:
    process: str
    kind: str
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int

    @property
    def is_local(self) -> bool:
        mapped = self.address.ipv4_mapped if isinstance(self.address, ipaddress.IPv6Address) else None
        return (mapped or self.address).is_loopback

    def __str__(self) -> str:
        return f"{self.process}: {self.kind} {self.address} port {self.port}"


def listeners_of(pids: Iterable[int]) -> list[Listener]:
    """Of each process; a socket that several processes share is listed for each."""
    return [
        Listener(_title(pid), kind, *_endpoint(fields[1]))
        for pid in pids
        for kind, state in STATES.items()
        for fields in _table(pid, kind)
        if fields[3] == state and fields[9] in _inodes(pid)
    ]


def unix_paths_of(pids: Iterable[int]) -> set[Path]:
    """Paths of the Unix sockets that these processes listen on or receive at."""
    return {
        Path(fields[7])
        for pid in pids
        for fields in _table(pid, "unix")
        if len(fields) > 7 and fields[7].startswith("/") and fields[6] in _inodes(pid)
    }


def with_descendants(pids: Iterable[int]) -> set[int]:
    """These processes and all that they started, and those started."""
    parents = {int(entry.name): _parent(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _table(pid: int, kind: str) -> list[list[str]]:
    with contextlib.suppress(OSError):  # it has ended
        return [line.split() for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]]
    return []


def _inodes(pid: int) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry.path).removeprefix("socket:[").removesuffix("]"))
    return found


def _endpoint(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """The kernel prints an address as 32-bit words in the machine's byte order."""
    words, _, port = text.partition(":")
    packed = b"".join(int(words[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(words), 8))
    return ipaddress.ip_address(packed), int(port, 16)


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _title(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        command = "ended"
    return f"{pid} {command.strip()[:300]}"
