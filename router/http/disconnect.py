"""Ends the work for a client that has closed its connection. Runs on the door's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client has closed its connection."""


async def until_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """Run `work`. If the client disconnects first, cancel it and raise ClientGoneError. Read the body
    first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
