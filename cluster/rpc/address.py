"""Names of sockets: "unix:/path" inside a host, "tcp:host:port" between hosts.

A Unix socket lies in a directory that only its owner may enter, so the file system authenticates the peer. A
TCP socket needs the cluster secret (see `handshake`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Literal

from cluster.errors import ConfigError

MAX_UNIX_PATH_BYTES = 107  # sun_path of struct sockaddr_un without its terminating zero
# A host that fails sends no end-of-file: an idle link is probed after 2 s and given up 3 s later.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
_UNACKNOWLEDGED_MS = 5000


def new_address(kind: Literal["unix", "tcp"], *, name: str, directory: Path, host: str) -> str:
    """The address on which the replica `name` will listen. When the server starts, it replaces the TCP port 0
    by a free one."""
    return f"unix:{directory / name}.sock" if kind == "unix" else f"tcp:{host}:0"


def parse_unix(address: str) -> Path | None:
    """The socket's path, or None for a TCP address. Raises ConfigError for an address or path that a socket
    cannot have."""
    kind, _, rest = address.partition(":")
    if kind == "tcp":
        return None
    if kind != "unix" or not rest.startswith("/"):
        raise ConfigError(f'"{address}" is not an address; expected "unix:/path" or "tcp:host:port"')
    if len(os.fsencode(rest)) > MAX_UNIX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {rest} is longer than {MAX_UNIX_PATH_BYTES} bytes; set EPDG_SOCKET_DIR to a "
            "shorter one"
        )
    return Path(rest)


def parse_tcp(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f'"{address}" is not an address; expected "unix:/path" or "tcp:host:port"')
    return host, int(port)


def watch_host(connection: socket.socket) -> None:
    """Makes this TCP connection end some seconds after the peer's host has vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


def make_private(directory: Path) -> None:
    """Creates the directory, or checks that the existing one belongs to this user alone. Other users may know
    its name and could have put a link there, so a link is refused as well."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700, parents=True)
    status = directory.lstat()
    is_private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
    if not (stat.S_ISDIR(status.st_mode) and is_private):
        raise ConfigError(
            f"{directory} must be a directory of this user with mode 0700; set EPDG_SOCKET_DIR to another "
            "place"
        )
