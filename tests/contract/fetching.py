"""A fetcher that trusts a host on loopback, for the tests of the fetcher."""

from __future__ import annotations

import asyncio

from cluster.media.fetch import Fetcher, FetchPolicy
from cluster.media.sources import MediaSource
from cluster.types.media import Modality
from tests.contract.fetch_host import Handler, MediaHost, Request
from tests.fakes.clock import ManualClock

MEBIBYTE = 2**20


def fetcher_of(host: MediaHost, clock: ManualClock | None = None, **policy) -> Fetcher:
    return Fetcher(FetchPolicy(internal_hosts=(host.at,), **policy), clock or ManualClock())


async def read(fetcher: Fetcher, url: str, max_bytes: int = MEBIBYTE, item_idx: int = 2, tenant: str = ""):
    source = MediaSource(Modality.IMAGE, url, "messages.0")
    return await fetcher.read(source, max_bytes, item_idx=item_idx, tenant=tenant)


def dripping(head: bytes, drop: bytes) -> Handler:
    """Returns a handler whose answer never ends."""

    async def drip(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while not writer.is_closing():
            writer.write(drop)
            await asyncio.sleep(0.01)
        raise ConnectionResetError

    return drip


drip_body = dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"x")
