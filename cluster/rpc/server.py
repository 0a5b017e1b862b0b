"""Listening and dialling. A worker listens, a door dials; both get `Connection`s.

The event loop that runs `start` or `connect` runs every callback. A server owns its listening socket and the
connections it has accepted; `aclose` ends them all.

A connection is a stranger's until its handshake is over, for which it has `HANDSHAKE_TIMEOUT_S`. A server keeps at most
`MAX_STRANGERS` of them. One more ends the oldest, not itself: strangers that say nothing cannot keep a door out, whose
handshake takes milliseconds.
"""

from __future__ import annotations

import asyncio
import socket

from cluster.errors import ClusterError, ConfigError, UnavailableError
from cluster.rpc.address import make_private, parse_tcp, parse_unix
from cluster.rpc.connection import (
    HANDSHAKE_TIMEOUT_S,
    MAX_BUFFERED_BYTES,
    Connection,
    OnConnection,
    OnMessage,
)
from cluster.rpc.handshake import Handshake

# A host that vanishes sends no end-of-file: probe an idle link after 2 s, give it up after 3 more seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
_UNACKNOWLEDGED_MS = 5000
MAX_STRANGERS = 64


def _nothing(connection: Connection) -> None:
    pass


def _key(address: str, secret: str | None) -> bytes | None:
    """The handshake's key, None on a Unix socket. Raises ConfigError for TCP without a secret."""
    if parse_unix(address) is not None:
        return None
    if not secret:
        raise ConfigError(
            "side channels over TCP need a cluster secret: set EPDG_CLUSTER_SECRET on every host"
        )
    return secret.encode()


def _watch_peer(connection: Connection) -> None:
    sock = connection._transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


class Server:
    """`on_connect(connection)` once per peer that passed the handshake, then messages, then `on_close`."""

    def __init__(
        self,
        address: str,
        name: str,
        on_connect: OnConnection,
        on_message: OnMessage,
        on_close: OnConnection = _nothing,
        *,
        secret: str | None = None,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ):
        self.address = address  # after `start`: with the real port
        self._name = name
        self._key = _key(address, secret)
        self._on_connect = on_connect
        self._on_message = on_message
        self._on_close = on_close
        self._max_buffered_bytes = max_buffered_bytes
        self._handshake_timeout_s = handshake_timeout_s
        self._connections: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and accept from now on. Raises ConfigError or OSError when the address cannot be had."""
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
        """Stop listening, flush and close every connection. May be repeated."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for stranger in self._strangers:
            stranger.abort()
        if self._connections:
            await asyncio.gather(*(connection.aclose() for connection in list(self._connections)))
        path = parse_unix(self.address)
        if path is not None:
            path.unlink(missing_ok=True)

    def _accept(self) -> Connection:
        if len(self._strangers) == MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.abort()
        stranger = Connection(
            Handshake(self._name, is_server=True, address=self.address, secret=self._key),
            on_open=self._opened,
            on_message=self._on_message,
            on_close=self._closed,
            max_buffered_bytes=self._max_buffered_bytes,
            handshake_timeout_s=self._handshake_timeout_s,
        )
        self._strangers[stranger] = None
        stranger.when_greeted(lambda: self._strangers.pop(stranger, None))
        return stranger

    def _opened(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
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
    max_buffered_bytes: int = MAX_BUFFERED_BYTES,
) -> Connection:
    """Dial a worker. The first messages may be delivered before this returns: they are in the same read as the
    handshake's end. Raises UnavailableError when nobody answers in time, ConfigError for a peer of another version
    or cluster."""
    loop = asyncio.get_running_loop()
    key = _key(address, secret)

    def make() -> Connection:
        return Connection(
            Handshake(name, is_server=False, address=address, secret=key),
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
