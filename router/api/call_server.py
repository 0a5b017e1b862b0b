"""Serves the calls of all endpoints over HTTP: reads a request's call, starts it and answers. Runs on the
door's event loop; large bodies are translated on a thread."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from router.api.context import CallContext
from router.api.protocol import DoorProtocol, Generation
from router.api.serving import AnswerFormat, Start, TimelineReport, stream, whole
from router.calls import Call
from router.http.body_reader import BodyReader
from router.http.disconnect import until_disconnect
from router.http.edge import permit_of, tenant_of, trace_parent_of
from router.http.event_stream import EventStream

# Header. In a request it asks for the timeline; in the answer it has the durations until the first token
LEDGER = "x-epdg-ledger"
Translated = TypeVar("Translated")
AnyCall = TypeVar("AnyCall", bound=Call)
StartCall = Callable[[AnyCall], Awaitable[Sequence[Generation]]]


class CallServer:
    def __init__(self, door: DoorProtocol, bodies: BodyReader):
        self._door = door
        self._bodies = bodies

    async def read(
        self,
        request: Request,
        translate: Callable[[bytes, CallContext], Translated],
        *,
        is_json: bool = True,
    ) -> Translated:
        """`translate`: pure; from a body. Raises what it raises, and what `BodyReader.read` does."""
        return await self._bodies.read(
            request, lambda body: translate(body, self._context(request)), is_json=is_json
        )

    async def answer(
        self, request: Request, call: AnyCall, start: StartCall[AnyCall], answer: AnswerFormat
    ) -> Response:
        headers: dict[str, str] = {}
        if call.stream:
            events = self.events(request, call, start, answer, headers)
            return EventStream(events, headers, answer.error_event)
        begin, report = _starting(request, call, start), self._report(request, headers)
        body = await until_disconnect(request, whole(begin, answer, len(call.sampling), report))
        return Response(body, headers=headers, media_type=answer.media_type)

    def events(
        self,
        request: Request,
        call: AnyCall,
        start: StartCall[AnyCall],
        answer: AnswerFormat,
        headers: MutableMapping[str, str],
    ) -> AsyncGenerator[bytes, None]:
        """A call that is streamed. `headers`: of the answer; they may grow until the first event."""
        begin, report = _starting(request, call, start), self._report(request, headers)
        return stream(begin, answer, len(call.sampling), call.include_usage, report)

    def _context(self, request: Request) -> CallContext:
        door = self._door
        return CallContext(
            door.model_id, door.defaults, tenant_of(request), trace_parent_of(request), door.limits
        )

    def _report(self, request: Request, headers: MutableMapping[str, str]) -> TimelineReport | None:
        if LEDGER not in request.headers:
            return None
        return TimelineReport(headers, LEDGER, shows_workers=self._door.limits.shows_workers)


def _starting(request: Request, call: AnyCall, start: StartCall[AnyCall]) -> Start:
    """`start` of the call; its tokens are the request's."""
    permit = permit_of(request)

    async def begin() -> Sequence[Generation]:
        generations = await start(call)
        permit.watch(generations, len(call.sampling))
        return generations

    return begin
