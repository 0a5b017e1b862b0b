"""The endpoints of responses. Clients begin a response; they read a background response, take up its stream
again, cancel it and delete it. Runs on the door's event loop."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import ClusterError, RequestError
from router.api.names import new_id
from router.api.protocol import CallContext, DoorProtocol
from router.api.responses.kept import PIECE_BYTES, KeptResponse, KeptResponses
from router.api.responses.render import ResponsesFormat
from router.api.responses.schema import ResponsesRequest
from router.api.responses.translate import responses_call
from router.api.serving import CallServer
from router.calls import ChatCall
from router.http.edge import take_held, tenant_of
from router.http.errors import error_body, json_answer
from router.http.event_stream import EventStream

_PATH = "/v1/responses/{response_id}"


def mount_responses(api: FastAPI, door: DoorProtocol, calls: CallServer, kept: KeptResponses) -> None:
    @api.post("/v1/responses")
    async def respond(request: Request) -> Response:
        call, answer = await calls.parse(request, ResponsesRequest, _translated)
        if not answer.is_background:
            return await calls.answer(request, call, door.chat, answer)
        response = kept.add(answer, tenant_of(request))
        events = calls.events(request, call, door.chat, answer, {})
        kept.begin(response, events, take_held(request))
        return stream_kept(response.read()) if call.stream else json_answer(answer.now())


def _translated(asked: ResponsesRequest, context: CallContext) -> tuple[ChatCall, ResponsesFormat]:
    """Parsed values are many times as large as their body, so they do not live as long as the answer."""
    call = responses_call(asked, context)
    return call, ResponsesFormat(new_id("resp_"), int(time.time()), asked, call)


def mount_kept(api: FastAPI, kept: KeptResponses) -> None:
    @api.get(_PATH)
    async def get(
        request: Request,
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=0)] | None = None,
    ) -> Response:
        """`starting_after`: the sequence number of the last event that the client has."""
        response = kept.find(response_id, tenant_of(request))
        if starting_after is not None and not stream:
            raise RequestError("starting_after needs stream=true", param="starting_after")
        if stream:
            return stream_kept(kept.read(response, -1 if starting_after is None else starting_after))
        return _Body(response, kept)

    @api.delete(_PATH)
    async def delete(request: Request, response_id: str) -> Response:
        await kept.delete(response_id, tenant_of(request))
        return json_answer({"id": response_id, "object": "response", "deleted": True})

    @api.post(f"{_PATH}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        response = kept.find(response_id, tenant_of(request))
        await response.cancel()
        return _Body(response, kept)


def stream_kept(events: AsyncGenerator[bytes, None]) -> Response:
    return EventStream(events, {}, _error_event)


class _Body(Response):
    """The response as it is now, in pieces: a client that does not read leaves most of it where it is."""

    media_type = "application/json"

    def __init__(self, kept: KeptResponse, store: KeptResponses):
        super().__init__(kept.answer.now())
        self._kept = kept
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._store.reader(self._kept.tenant):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for begin in range(0, len(self.body), PIECE_BYTES):
                piece = bytes(self.body[begin : begin + PIECE_BYTES])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _error_event(error: ClusterError) -> bytes:
    """Writes an error of a reader; the response itself may be well."""
    return b"event: error\ndata: %b\n\n" % error_body(error)
