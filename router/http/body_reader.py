"""From a request's body to what its endpoint makes of it. Runs on the door's event loop; large bodies are
parsed on a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from router.http.bodies import check_json_type, read_body
from router.http.body_parser import BIG_BYTES, BodyParser
from router.http.disconnect import until_disconnect
from router.http.edge import lease_of, tenant_of
from router.http.limits import Limits

Parsed = TypeVar("Parsed")


class BodyReader:
    def __init__(self, limits: Limits, timeout_s: float):
        """`timeout_s`: until a body is complete; extended as bytes arrive."""
        self._limits = limits
        self._timeout_s = timeout_s
        self._parser = BodyParser()

    async def read(
        self, request: Request, parse: Callable[[bytes], Parsed], *, is_json: bool = True
    ) -> Parsed:
        """`parse`: pure; may run on a thread. `is_json`: false for a form. Raises what `parse` raises,
        RequestError, OverloadedError and ClientGoneError."""
        if is_json:
            check_json_type(request)
        lease = lease_of(request)
        body = await read_body(request, self._limits, lease, self._timeout_s, is_json=is_json)
        if not is_json:
            lease.grow(len(body) // 3)  # a form's file becomes base64
        if len(body) < BIG_BYTES:
            return parse(body)
        return await until_disconnect(request, self._parser.parse(tenant_of(request), parse, body))
