"""Serves one call: reads it from a request, starts it at the door, and collects its choices into a body or
merges them into a stream. Every generation is closed in the end. Errors name fields as the endpoint does.
Runs on the door's event loop; large bodies are translated on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import ClusterError, InternalError
from router.api.body import RequestBody, parse
from router.api.names import naming
from router.api.protocol import Answers, CallContext, DoorProtocol, Generation, Generations, Ledger
from router.calls import Call, TextDelta
from router.http.body_parser import BodyReader
from router.http.disconnect import until_disconnect
from router.http.edge import permit_of, tenant_of, trace_parent_of
from router.http.event_stream import EventStream

log = logging.getLogger(__name__)
# Header. In a request it asks for the timeline; in the answer it has the durations until the first token
LEDGER = "x-epdg-ledger"
Body = TypeVar("Body", bound=RequestBody)
Translated = TypeVar("Translated")
AnyCall = TypeVar("AnyCall", bound=Call)
Start = Callable[[], Awaitable[Generations]]  # of a call
StartCall = Callable[[AnyCall], Awaitable[Generations]]
_OF_WORKERS = ("placement", "alternatives")  # fields of a timeline
MAX_WRITE_BYTES = 16 << 10  # of events that are sent together: some 80 tokens, 1.5 ms of work


class AnswerFormat(Protocol):
    """An endpoint's bodies and events, as `chat.render` and `responses.render` write them."""

    media_type: str  # of a body

    def body(self, answers: Answers, generations: Generations, ledger: Ledger = ()) -> Iterator[bytes]:
        """Writes a whole answer in pieces, each of which takes a bounded time; one may be empty."""
        ...

    def first(self, index: int, generation: Generation, *, has_notes: bool) -> bytes: ...

    def text(self, index: int, delta: TextDelta, generation: Generation) -> bytes: ...

    def finish(self, index: int, delta: TextDelta, generation: Generation) -> bytes:
        """Writes the events at a choice's end. `delta`: its last one."""
        ...

    def ledger(self, ledger: Ledger) -> bytes: ...

    def end(self, generations: Generations) -> bytes:
        """Writes the last events of a stream that has not failed; may be empty."""
        ...

    def error_event(self, error: ClusterError) -> bytes:
        """Writes the last event of a stream that fails after its first one."""
        ...

    def name_of(self, param: str) -> str:
        """Returns the endpoint's own name of a field of a chat request."""
        ...


class TimelineReport:
    """Reports the timelines of a request whose client asked for them."""

    def __init__(self, headers: MutableMapping[str, str], num_choices: int, *, shows_workers: bool):
        """`headers`: of the answer; `LEDGER` is set before the first byte. `num_choices`: the choices of each
        prompt. `shows_workers`: names workers."""
        self._headers = headers
        self._num_choices = num_choices
        self._hidden = () if shows_workers else _OF_WORKERS

    def begin(self, generation: Generation) -> None:
        """Is called when the first token has come."""
        self._headers.setdefault(LEDGER, generation.timeline.header())

    def fields(self, generations: Generations) -> list[dict[str, Any]]:
        """Returns one timeline per prompt."""
        return [
            {name: value for name, value in generation.timeline.fields().items() if name not in self._hidden}
            for generation in generations[:: self._num_choices]
        ]


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
        """Returns what `translate`, which is pure, makes of the request's body. Raises what it raises, and
        what `BodyReader.read` does."""
        return await self._bodies.read(
            request, lambda body: translate(body, self._context(request)), is_json=is_json
        )

    async def parse(
        self, request: Request, model: type[Body], translate: Callable[[Body, CallContext], Translated]
    ) -> Translated:
        """Returns what `translate` makes of the request's body, which is a `model` as JSON. Raises as `read`
        does."""
        return await self.read(request, lambda body, context: translate(parse(model, body), context))

    async def answer(
        self, request: Request, call: AnyCall, start: StartCall[AnyCall], answer: AnswerFormat
    ) -> Response:
        headers: dict[str, str] = {}
        if call.stream:
            events = self.events(request, call, start, answer, headers)
            return EventStream(events, headers, answer.error_event)
        begin, report = _starting(request, call, start), self._report(request, call, headers)
        body = await until_disconnect(request, whole(begin, answer, report))
        return Response(body, headers=headers, media_type=answer.media_type)

    def events(
        self,
        request: Request,
        call: AnyCall,
        start: StartCall[AnyCall],
        answer: AnswerFormat,
        headers: MutableMapping[str, str],
    ) -> AsyncGenerator[bytes, None]:
        """Yields the events of a call that is streamed. `headers`: those of the answer; they may grow until
        the first event."""
        begin, report = _starting(request, call, start), self._report(request, call, headers)
        return stream(begin, answer, report)

    def _context(self, request: Request) -> CallContext:
        door = self._door
        return CallContext(
            door.models, door.defaults, tenant_of(request), trace_parent_of(request), door.limits
        )

    def _report(
        self, request: Request, call: Call, headers: MutableMapping[str, str]
    ) -> TimelineReport | None:
        if LEDGER not in request.headers:
            return None
        return TimelineReport(headers, len(call.sampling), shows_workers=self._door.limits.shows_workers)


async def whole(
    start: Start,
    answer: AnswerFormat,
    report: TimelineReport | None = None,
) -> bytes:
    """Returns the body of a response that is not streamed. With a `report` it contains the timelines, too."""
    with naming(answer.name_of):
        generations = await start()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_collect(generation)) for generation in generations]
        except ExceptionGroup as errors:  # the client gets an expected one, if there is one
            known = (error for error in errors.exceptions if isinstance(error, ClusterError))
            raise next(known, errors.exceptions[0]) from errors
        finally:
            await close_all(generations)
        ledger: Ledger = ()
        if report is not None:
            report.begin(generations[0])
            ledger = report.fields(generations)
        answers = [task.result() for task in tasks]
        written: list[bytes] = []
        for piece in answer.body(answers, generations, ledger):
            if written:
                await asyncio.sleep(0)  # other requests go on
            written.append(piece)
        return b"".join(written)


async def stream(
    start: Start,
    answer: AnswerFormat,
    report: TimelineReport | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events: those of deltas that are there already come together, so that a door that
    falls behind has less to do for each. The caller answers errors that are raised before the first event,
    and sends later ones as events. With a `report`, the timelines are an event after the choices."""
    with naming(answer.name_of):
        generations = await start()
        started: set[int] = set()
        has_begun = False
        events = b""
        try:
            async with contextlib.aclosing(_merged(generations)) as deltas:
                async for index, delta in deltas:
                    generation = generations[index]
                    if index not in started:
                        events += answer.first(index, generation, has_notes=not started)
                        started.add(index)
                    if not delta.is_empty:
                        events += answer.text(index, delta, generation)
                    if delta.finish_reason is not None:
                        events += answer.finish(index, delta, generation)
                    if events and (len(events) >= MAX_WRITE_BYTES or not generation.has_next):
                        if report is not None and not has_begun:
                            has_begun = True
                            report.begin(generation)
                        yield events
                        events = b""
            if report is not None:
                yield answer.ledger(report.fields(generations))
            yield answer.end(generations)
        finally:
            await close_all(generations)


def _starting(request: Request, call: AnyCall, start: StartCall[AnyCall]) -> Start:
    """Returns a start of the call whose tokens are the request's."""
    permit = permit_of(request)

    async def begin() -> Generations:
        generations = await start(call)
        permit.watch(lambda: num_tokens(generations, len(call.sampling)))
        return generations

    return begin


def num_tokens(generations: Generations, num_choices: int) -> int:
    """Counts the tokens so far. `num_choices`: the choices of each prompt, which counts once."""
    usages = [generation.usage for generation in generations]
    num_prompts = sum(usage.prompt_tokens for usage in usages[::num_choices])
    return num_prompts + sum(usage.completion_tokens for usage in usages)


async def close_all(generations: Generations) -> None:
    """Closes generations, also if this task is being cancelled, so that the pools stop working."""
    await asyncio.shield(_close_all(generations))


async def _close_all(generations: Generations) -> None:
    results = await asyncio.gather(
        *(generation.aclose() for generation in generations), return_exceptions=True
    )
    for result in results:
        if isinstance(result, Exception):
            log.error("closing a generation failed", exc_info=result)


async def _collect(generation: Generation) -> list[TextDelta]:
    deltas: list[TextDelta] = []
    async for delta in generation:
        deltas.append(delta)
        if delta.finish_reason is not None:
            return deltas
    raise InternalError("a generation ended without a finish reason")


async def _merged(generations: Generations) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yields deltas of all choices as they come, each up to its finish reason. The first error ends all
    choices."""
    if len(generations) == 1:  # the usual case; it needs no queue and no task
        async for delta in generations[0]:
            yield 0, delta
            if delta.finish_reason is not None:
                return
        raise InternalError("a generation ended without a finish reason")
    queue: asyncio.Queue[tuple[int, TextDelta | BaseException]] = asyncio.Queue(maxsize=4 * len(generations))
    tasks = [
        asyncio.ensure_future(_pump(idx, generation, queue.put)) for idx, generation in enumerate(generations)
    ]
    try:
        num_open = len(tasks)
        while num_open:
            idx, delta = await queue.get()
            if isinstance(delta, BaseException):
                raise delta
            num_open -= delta.finish_reason is not None
            yield idx, delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    idx: int, generation: Generation, put: Callable[[tuple[int, TextDelta | BaseException]], Awaitable[None]]
) -> None:
    try:
        async for delta in generation:
            await put((idx, delta))
            if delta.finish_reason is not None:
                return
        raise InternalError("a generation ended without a finish reason")
    except Exception as error:
        await put((idx, error))
