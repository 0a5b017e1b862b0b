"""Ports for the processes of a private cluster."""

from __future__ import annotations

import contextlib
import random
import socket

# Below the ports that Serve gives to doors (from 30,000) and the system to connections.
FREE_PORTS, AGENT_PORTS = range(20_000, 28_000), range(28_000, 30_000)


def free_port() -> int:
    """A port on which no process listens, in a range that the system gives to no connection. Raises OSError
    if there is none."""
    return _free_ports(FREE_PORTS, 1)[0]


def agent_ports(number: int) -> list[int]:
    """`free_port`, but different ones, which `free_port` gives to no other process of this cluster."""
    return _free_ports(AGENT_PORTS, number)


def _free_ports(among: range, number: int) -> list[int]:
    found = []
    for port in random.SystemRandom().sample(among, len(among)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
            found.append(port)
        if len(found) == number:
            return found
    raise OSError(f"no port is free between {among[0]} and {among[-1]}")
