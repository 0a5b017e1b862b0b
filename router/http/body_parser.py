"""Reads a request's body and gives it to its endpoint's parser. Large bodies are parsed on threads, so that
streams continue.

A parse waits for a slot among those of all tenants. A client that leaves while it waits takes it back; once
it runs it goes on to its end, and has its slot until then. Belongs to the door's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from cluster import overload
from cluster.errors import OverloadedError
from cluster.media.slots import FairSlots
from router.http.bodies import check_json_type, read_body
from router.http.disconnect import until_disconnect
from router.http.edge import lease_of, tenant_of
from router.http.limits import Limits

BIG_BYTES = 64 << 10  # from this size on a thread parses a body
NUM_THREADS = 3
NUM_THREADS_PER_TENANT = 2
WAIT_TIMEOUT_S = 60.0  # for a slot
RETRY_AFTER_S = 5.0
Parsed = TypeVar("Parsed")


class BodyParser:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="parse")
        self._slots = FairSlots(NUM_THREADS, NUM_THREADS_PER_TENANT)

    async def parse(self, tenant: str, parse: Callable[[bytes], Parsed], body: bytes) -> Parsed:
        """Raises what `parse` raises, and OverloadedError. May be cancelled."""
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S) as waiting, self._slots.slot(tenant):
                waiting.reschedule(None)
                work = asyncio.get_running_loop().run_in_executor(self._threads, parse, body)
                try:
                    return await asyncio.shield(work)
                finally:
                    await asyncio.wait((work,))
        except TimeoutError:
            limits = (NUM_THREADS, NUM_THREADS_PER_TENANT)
            text = overload.no_slot("threads that parse large bodies", WAIT_TIMEOUT_S, *limits)
            raise OverloadedError(text, retry_after_s=RETRY_AFTER_S) from None


class BodyReader:
    def __init__(self, limits: Limits, timeout_s: float):
        """`timeout_s`: the time until a body is complete; it is extended as bytes arrive."""
        self._limits = limits
        self._timeout_s = timeout_s
        self._parser = BodyParser()

    async def read(
        self, request: Request, parse: Callable[[bytes], Parsed], *, is_json: bool = True
    ) -> Parsed:
        """Returns what `parse` makes of the body. `parse` is pure and may run on a thread. `is_json`: false
        for a form. Raises what `parse` raises, RequestError, OverloadedError and ClientGoneError."""
        if is_json:
            check_json_type(request)
        lease = lease_of(request)
        body = await read_body(request, self._limits, lease, self._timeout_s, is_json=is_json)
        if not is_json:
            lease.grow(len(body) // 3)  # a form's file becomes base64
        if len(body) < BIG_BYTES:
            return parse(body)
        return await until_disconnect(request, self._parser.parse(tenant_of(request), parse, body))
