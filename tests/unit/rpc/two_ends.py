"""A server that notes what happens to it, and how tests wait and dial."""

from __future__ import annotations

import asyncio

from cluster.rpc import Connection, Server


class Worker:
    """A server that notes what happens to it."""

    def __init__(self, address: str, secret: str | None = None):
        self.connections: list[Connection] = []
        self.messages: list = []
        self.closed: list[Connection] = []
        self.server = Server(
            address, "worker", self.connections.append, lambda _, message: self.messages.append(message),
            self.closed.append, secret=secret,
        )  # fmt: skip


def ignore(*_):
    pass


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    return await asyncio.open_connection(host, int(port))
