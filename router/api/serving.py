"""Runs one call against the door: collects it into a body or merges its choices into a stream, and always
closes every generation. Errors name fields as the endpoint does. Plain coroutines on the door's event loop;
`call_server` owns HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any, Protocol

from cluster.errors import ClusterError, InternalError
from router.api.names import naming
from router.api.protocol import Generation
from router.calls import TextDelta, Usage

log = logging.getLogger(__name__)
Start = Callable[[], Awaitable[Sequence[Generation]]]  # of a call
_OF_WORKERS = ("placement", "alternatives")  # fields of a timeline


class AnswerFormat(Protocol):
    """An endpoint's bodies and events, as `chat.render` and `responses.render` write them."""

    media_type: str  # of a body
    end: bytes  # the last event of a stream that has not failed

    def body(
        self,
        answers: Sequence[Sequence[TextDelta]],
        generations: Sequence[Generation],
        num_choices: int,
        timelines: Sequence[dict[str, Any]] = (),
    ) -> Iterator[bytes]:
        """In pieces, each of which takes a bounded time; one may be empty. `answers`: all deltas of each; the
        last one has the finish reason."""
        ...

    def first(self, index: int, generation: Generation, *, has_notes: bool) -> bytes: ...

    def text(self, index: int, delta: TextDelta, generation: Generation) -> bytes: ...

    def finish(self, index: int, delta: TextDelta, generation: Generation) -> bytes:
        """`delta`: the choice's last one."""
        ...

    def timelines(self, timelines: Sequence[dict[str, Any]]) -> bytes: ...

    def usage(self, usages: Sequence[Usage], num_choices: int) -> bytes:
        """`usages`: of all choices, `num_choices` of each prompt."""
        ...

    def error_event(self, error: ClusterError) -> bytes:
        """The last event of a stream that fails after its first one."""
        ...

    def name_of(self, param: str) -> str:
        """A field of a chat request, as the endpoint names it."""
        ...


class TimelineReport:
    """Reports the timelines of a request whose client asked for them."""

    def __init__(self, headers: MutableMapping[str, str], name: str, *, shows_workers: bool):
        """`headers`: of the answer; `name` is set before the first byte. `shows_workers`: names workers."""
        self._headers = headers
        self._name = name
        self._hidden = () if shows_workers else _OF_WORKERS

    def begin(self, generation: Generation) -> None:
        """The first token has come."""
        self._headers.setdefault(self._name, generation.timeline.header())

    def fields(self, generations: Sequence[Generation], num_choices: int) -> list[dict[str, Any]]:
        """One per prompt."""
        return [
            {name: value for name, value in generation.timeline.fields().items() if name not in self._hidden}
            for generation in generations[::num_choices]
        ]


async def whole(
    start: Start,
    answer: AnswerFormat,
    num_choices: int,
    report: TimelineReport | None = None,
) -> bytes:
    """The body of a response that is not streamed. With a `report` it contains the timelines, too."""
    with naming(answer.name_of):
        generations = await start()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_collect(generation)) for generation in generations]
        except ExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            await close_all(generations)
        timelines = []
        if report is not None:
            report.begin(generations[0])
            timelines = report.fields(generations, num_choices)
        answers = [task.result() for task in tasks]
        written: list[bytes] = []
        for piece in answer.body(answers, generations, num_choices, timelines):
            if written:
                await asyncio.sleep(0)  # other requests go on
            written.append(piece)
        return b"".join(written)


async def stream(
    start: Start,
    answer: AnswerFormat,
    num_choices: int,
    include_usage: bool,
    report: TimelineReport | None = None,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events. The caller answers errors that are raised before the first event, and sends later
    ones as events. With a `report`, the timelines are an event after the choices."""
    with naming(answer.name_of):
        generations = await start()
        started: set[int] = set()
        has_told = False
        try:
            async with contextlib.aclosing(_merged(generations)) as deltas:
                async for index, delta in deltas:
                    generation, events = generations[index], b""
                    if index not in started:
                        events = answer.first(index, generation, has_notes=not started)
                        started.add(index)
                    if not delta.is_empty:
                        events += answer.text(index, delta, generation)
                    if delta.finish_reason is not None:
                        events += answer.finish(index, delta, generation)
                    if events:
                        if report is not None and not has_told:
                            has_told = True
                            report.begin(generation)
                        yield events
            if report is not None:
                yield answer.timelines(report.fields(generations, num_choices))
            if include_usage:
                yield answer.usage([generation.usage for generation in generations], num_choices)
            yield answer.end
        finally:
            await close_all(generations)


async def close_all(generations: Sequence[Generation]) -> None:
    """Closes them also if this task is being cancelled, so that the pools stop working."""
    await asyncio.shield(_close_all(generations))


async def _close_all(generations: Sequence[Generation]) -> None:
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


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Deltas of all choices as they come, each up to its finish reason. The first error ends all choices."""
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


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The error for the client: an expected one if there is one."""
    leaves = list(_leaves(errors))
    return next((error for error in leaves if isinstance(error, ClusterError)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
