"""Listening and dialling. A worker listens, a door dials; both get `Connection`s.

The event loop that runs `start` or `connect` runs every callback. A server owns its listening socket and the
connections that it has accepted; `aclose` ends them all.

A new connection is pending until its handshake is over, for at most `HANDSHAKE_TIMEOUT_S`. A server keeps at
most `MAX_PENDING` pending connections. One more ends the oldest of them and not itself. Peers that connect
and say nothing therefore cannot keep out a door, whose handshake takes milliseconds.
"""

from __future__ import annotations

import asyncio
import socket

from cluster.errors import ClusterError, ConfigError, UnavailableError
from cluster.rpc.address import make_private, parse_tcp, parse_unix, watch_host
from cluster.rpc.connection import (
    HANDSHAKE_TIMEOUT_S,
    MAX_BUFFERED_BYTES,
    Connection,
    OnConnection,
    OnMessage,
)
from cluster.rpc.handshake import Handshake, LastRead, nothing_read

MAX_PENDING = 64


def _nothing(connection: Connection) -> None:
    pass


def _key(address: str, secret: str | None) -> bytes | None:
    """The key of the handshake; None on a Unix socket. Raises ConfigError for TCP without a secret."""
    if parse_unix(address) is not None:
        return None
    if not secret:
        raise ConfigError(
            "side channels over TCP need a cluster secret: set EPDG_CLUSTER_SECRET on every host"
        )
    return secret.encode()


def _watch_peer(connection: Connection) -> None:
    sock = connection.transport.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX:
        watch_host(sock)


class Server:
    """Calls `on_connect(connection)` once per peer that passed the handshake, then `on_message`, then
    `on_close`."""

    def __init__(
        self,
        address: str,
        name: str,
        on_connect: OnConnection,
        on_message: OnMessage,
        on_close: OnConnection = _nothing,
        *,
        secret: str | None = None,
        last_read: LastRead = nothing_read,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ):
        """`last_read` is called when a peer has said its name, before its connection is open."""
        self.address = address  # after `start`: with the actual port
        self._name = name
        self._key = _key(address, secret)
        self._on_connect = on_connect
        self._on_message = on_message
        self._on_close = on_close
        self._last_read = last_read
        self._handshake_timeout_s = handshake_timeout_s
        self._connections: set[Connection] = set()
        self._pending: dict[Connection, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Binds and accepts from now on. Raises ConfigError or OSError if the address cannot be used."""
        loop = asyncio.get_running_loop()
        path = parse_unix(self.address)
        if path is not None:
            make_private(path.parent)
            self._server = await loop.create_unix_server(self._accept, str(path))
            return
        host, port = parse_tcp(self.address)
        self._server = await loop.create_server(self._accept, host, port)
        self.address = f"tcp:{host}:{self._server.sockets[0].getsockname()[1]}"

    async def aclose(self) -> None:
        """Stops listening, then flushes and closes every connection. May be repeated."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for connection in self._pending:
            connection.abort()
        if self._connections:
            await asyncio.gather(*(connection.aclose() for connection in list(self._connections)))
        path = parse_unix(self.address)
        if path is not None:
            path.unlink(missing_ok=True)

    def _accept(self) -> Connection:
        if len(self._pending) == MAX_PENDING:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.abort()
        connection = Connection(
            Handshake(
                self._name,
                is_server=True,
                address=self.address,
                secret=self._key,
                last_read=self._last_read,
            ),
            on_open=self._opened,
            on_message=self._on_message,
            on_close=self._closed,
            handshake_timeout_s=self._handshake_timeout_s,
        )
        self._pending[connection] = None
        connection.when_greeted(lambda: self._pending.pop(connection, None))
        return connection

    def _opened(self, connection: Connection) -> None:
        self._pending.pop(connection, None)
        if self._server is None:
            connection.abort()
        _watch_peer(connection)
        self._connections.add(connection)
        self._on_connect(connection)

    def _closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._on_close(connection)


async def connect(
    address: str,
    name: str,
    on_message: OnMessage,
    on_close: OnConnection = _nothing,
    timeout_s: float = 2.0,
    *,
    secret: str | None = None,
    last_read: str | None = None,
    wanted: str = "",
    max_buffered_bytes: int = MAX_BUFFERED_BYTES,
) -> Connection:
    """Dials a worker. `last_read`: see `Hello`. `wanted`: the name of the only process that is accepted;
    empty: any. `on_message` may be called before this returns, because the first messages may come in the
    same read as the end of the handshake. Raises UnavailableError if there is no answer in time, or of
    another process, and ConfigError for a peer of another version or cluster."""
    loop = asyncio.get_running_loop()
    key = _key(address, secret)

    def make() -> Connection:
        return Connection(
            Handshake(
                name,
                is_server=False,
                address=address,
                secret=key,
                last_read=lambda peer_name: last_read,
                wanted=wanted,
            ),
            on_open=_watch_peer,
            on_message=on_message,
            on_close=on_close,
            max_buffered_bytes=max_buffered_bytes,
        )

    connection: Connection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            path = parse_unix(address)
            if path is not None:
                _, connection = await loop.create_unix_connection(make, str(path))
            else:
                _, connection = await loop.create_connection(make, *parse_tcp(address))
            await connection.wait_open()
            return connection
    except (OSError, TimeoutError) as error:
        if connection is not None:
            connection.abort()
        raise UnavailableError(f"cannot reach {address}: {str(error) or 'no answer in time'}") from error
    except (ClusterError, asyncio.CancelledError):
        if connection is not None:
            connection.abort()
        raise
