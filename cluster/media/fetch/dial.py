"""HTTP sessions that never connect to an address which `may_dial` refuses.

There are three checks:

* Resolver: if one of a name's addresses is refused, the name is refused, so the choice among them does not
  matter.
* Socket: it is made only for an allowed address, because aiohttp passes address literals without the
  resolver.
* Request: nothing is sent before the peer of the connected socket is checked.

After the check a name is not resolved again.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

Lookup = Callable[[str], Awaitable[Sequence[str]]]  # a name to its addresses; raises OSError
MayDial = Callable[[str], bool]


class AddressRefusedError(OSError):
    """An address that may not be dialled. Never shown, because it would show a client how names inside the
    cluster resolve."""


def system_lookup(threads: Executor) -> Lookup:
    """The system's resolver on its own threads: a lookup that hangs delays only other lookups."""

    def addresses(host: str) -> list[str]:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        return [str(sockaddr[0]) for *_, sockaddr in found]

    async def lookup(host: str) -> Sequence[str]:
        return await asyncio.get_running_loop().run_in_executor(threads, addresses, host)

    return lookup


def open_session(
    may_dial: MayDial, lookup: Lookup, connect_timeout_s: float, tls: ssl.SSLContext | None
) -> aiohttp.ClientSession:
    """Call it on the event loop. The session keeps no cookies, decompresses nothing and ignores the
    environment."""
    connector = aiohttp.TCPConnector(
        resolver=_Resolver(lookup, may_dial),
        socket_factory=lambda info: _checked_socket(may_dial, info),
        use_dns_cache=False,
        limit=0,  # the downloader limits their number
        ssl=True if tls is None else tls,
    )
    return aiohttp.ClientSession(
        connector=connector,
        request_class=_request_class(may_dial),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity", "User-Agent": "epdg"},
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_s),
        auto_decompress=False,
        trust_env=False,
    )


class _Resolver(AbstractResolver):
    def __init__(self, lookup: Lookup, may_dial: MayDial):
        self._lookup = lookup
        self._may_dial = may_dial

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = list(dict.fromkeys(await self._lookup(host)))
        if not addresses:
            raise OSError("the name has no address")
        if not all(map(self._may_dial, addresses)):
            raise AddressRefusedError
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=family, proto=0, flags=socket.AI_NUMERICHOST
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """The resolver owns nothing."""


def _checked_socket(may_dial: MayDial, info: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, sockaddr = info
    if not may_dial(str(sockaddr[0])):
        raise AddressRefusedError
    return socket.socket(family, kind, protocol)


def _request_class(may_dial: MayDial) -> type[aiohttp.ClientRequest]:
    class CheckedRequest(aiohttp.ClientRequest):
        async def send(self, conn: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
            peer = None if conn.transport is None else conn.transport.get_extra_info("peername")
            if peer is None or not may_dial(peer[0]):
                raise AddressRefusedError
            return await super().send(conn)

    return CheckedRequest


def was_refused(error: BaseException | None) -> bool:
    """Whether one of the checks caused this error of aiohttp."""
    return any(isinstance(cause, AddressRefusedError) for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
