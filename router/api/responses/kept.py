"""Background responses: they are generated whether or not a client is connected, and kept for a while.

A `KeptResponse` collects the events of one response; any number of clients read them, from any event on, as
fast as they take them. Its task holds what its request was let in with (the permit of its key and the lease
of its body) until the answer has ended. `KeptResponses` finds them by id for the tenant that asked, and
forgets them in time.

Every byte counts before it is kept. A tenant holds at most as many as stay free, as with request bodies, so
its answers never push out another's. If it has no room left, its own oldest answers that have ended and are
not being read are forgotten; if there are none, the response fails and says so in a last event without
output, for which there has been room since it began.

Belongs to the door's event loop. Another door knows nothing of them, so a cluster with several has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial

from cluster import overload
from cluster.errors import ClusterError, OverloadedError, RequestError
from router.api.responses.render import ResponsesFormat
from router.http.bodies import BodyBudget
from router.http.errors import public_error

log = logging.getLogger(__name__)
MAX_BYTES = 64 << 20  # of all events and answers that are kept
MAX_READERS = 32  # of one tenant at once, besides those that began the response
PIECE_BYTES = 64 << 10  # that a reader gets at once
RETRY_AFTER_S = 5.0
_EVENT_END = b"\n\n"


class ResponseNotFoundError(RequestError):
    status = 404
    code = "response_not_found"


class KeptResponse:
    def __init__(self, answer: ResponsesFormat, tenant: str, take: Callable[[KeptResponse, int], None]):
        """`take`: counts bytes of this response. Raises OverloadedError, as `take` does, if there is no room
        for them."""
        self.answer = answer
        self.tenant = tenant
        self.is_over = False
        self.num_bytes = 0
        self.num_readers = 0
        self._take = take
        self._num_whole = 0  # bytes of the answer that has ended, which count
        self._is_forgotten = False
        self._events: list[bytes] = []  # the place of each is its sequence number
        self._news = asyncio.Event()  # another one from event to event
        self._task: asyncio.Task[None] | None = None
        events = answer.queued()
        take(self, 2 * len(events))  # its fields are kept, too, and a last event may have to repeat them
        self._put(events)

    def begin(self, events: AsyncGenerator[bytes, None], held: contextlib.ExitStack) -> asyncio.Task[None]:
        """Starts the response's task. `held` is closed when the answer has ended."""
        self._task = asyncio.create_task(self._collect(events))
        self._task.add_done_callback(lambda task: self._end(task, held))  # also if it never ran
        return self._task

    async def read(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yields events after number `after`, until the last one. Raises ResponseNotFoundError if the
        response is forgotten meanwhile."""
        idx, begin = after + 1, 0  # the next event, and how much of it is out
        self.num_readers += 1
        try:
            yield b""  # the answer's status waits for no event: the response exists
            while True:
                news = self._news
                if self._is_forgotten:
                    raise ResponseNotFoundError("the response has been deleted", param="response_id")
                if idx < len(self._events):
                    piece, idx, begin = self._piece(idx, begin)
                    yield piece
                    await asyncio.sleep(0)  # a fast reader leaves the loop to others, too
                elif self.is_over:
                    return
                else:
                    await news.wait()
        finally:
            self.num_readers -= 1

    async def cancel(self) -> None:
        """Ends the response. Has no effect on an answer that has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def forget(self) -> None:
        """Ends the response and its readers. The caller has freed `num_bytes`."""
        self._is_forgotten = True
        self._events.clear()
        if self._task is not None:
            self._task.cancel()
        self._news.set()

    async def _collect(self, events: AsyncGenerator[bytes, None]) -> None:
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    self._add(event)
        except Exception as error:
            if not isinstance(error, ClusterError):
                log.error("response %s failed unexpectedly", self.answer.response_id, exc_info=error)
            if self.answer.num_events > len(self._events):
                self.answer.drop_output(len(self._events))  # there was no room for the last ones
            known = public_error(error)
            self._conclude(lambda: self.answer.error_event(known))

    def _end(self, task: asyncio.Task[None], held: contextlib.ExitStack) -> None:
        held.close()
        if task.cancelled():
            self._conclude(self.answer.cancel)
        self.is_over = True
        self._news.set()

    def _conclude(self, write: Callable[[], bytes]) -> None:
        """`write` ends the answer. It does so without output if there is no room for that."""
        try:
            self._add(write())
        except OverloadedError:
            self.answer.drop_output(len(self._events))
            self._put(write())

    def _add(self, events: bytes) -> None:
        """Raises OverloadedError."""
        if not self._is_forgotten:
            num_whole = len(self.answer.whole or b"")
            self._take(self, len(events) + num_whole - self._num_whole)
            self._num_whole = num_whole
            self._put(events)

    def _put(self, events: bytes) -> None:
        self._events += (event + _EVENT_END for event in events.split(_EVENT_END) if event)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _piece(self, idx: int, begin: int) -> tuple[bytes, int, int]:
        """Returns the bytes from byte `begin` of event `idx` on, and where the next piece begins."""
        parts: list[bytes] = []
        num_left = PIECE_BYTES
        while num_left and idx < len(self._events):
            event = self._events[idx]
            parts.append(event[begin : begin + num_left])
            num_left -= len(parts[-1])
            begin += len(parts[-1])
            if begin == len(event):
                idx, begin = idx + 1, 0
        return b"".join(parts), idx, begin


class KeptResponses:
    def __init__(self, keep_s: float, max_bytes: int = MAX_BYTES):
        """`keep_s`: seconds from the end of an answer on."""
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._room = BodyBudget(max_bytes)  # they share as bodies do
        self._kept: dict[str, KeptResponse] = {}
        self._num_readers: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._room.num_held

    def add(self, answer: ResponsesFormat, tenant: str) -> KeptResponse:
        """Returns a response that is to be begun. Raises OverloadedError."""
        kept = KeptResponse(answer, tenant, self._take)
        self._kept[answer.response_id] = kept
        return kept

    def begin(
        self, kept: KeptResponse, events: AsyncGenerator[bytes, None], held: contextlib.ExitStack
    ) -> None:
        forget = partial(self._forget, kept.answer.response_id)
        later = asyncio.get_running_loop().call_later
        kept.begin(events, held).add_done_callback(lambda _: later(self._keep_s, forget))

    def find(self, response_id: str, tenant: str) -> KeptResponse:
        """Raises ResponseNotFoundError."""
        kept = self._kept.get(response_id)
        if kept is None or kept.tenant != tenant:
            raise ResponseNotFoundError(
                f"no response {response_id[:100]!r} is kept. Only those with `background: true` are, for "
                f"{self._keep_s:.0f} s from their end on",
                param="response_id",
            )
        return kept

    async def delete(self, response_id: str, tenant: str) -> None:
        """Raises ResponseNotFoundError."""
        kept = self.find(response_id, tenant)
        self._forget(response_id)
        await kept.cancel()

    async def read(self, kept: KeptResponse, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Reads as `KeptResponse.read` does, for a client that has come back. Raises OverloadedError at
        first."""
        with self.reader(kept.tenant):
            async with contextlib.aclosing(kept.read(after)) as pieces:
                async for piece in pieces:
                    yield piece

    @contextlib.contextmanager
    def reader(self, tenant: str) -> Iterator[None]:
        """Raises OverloadedError if the tenant has as many as it may."""
        if self._num_readers[tenant] >= MAX_READERS:
            raise OverloadedError(overload.kept_readers(MAX_READERS), retry_after_s=RETRY_AFTER_S)
        self._num_readers[tenant] += 1
        try:
            yield
        finally:
            self._num_readers[tenant] -= 1
            if not self._num_readers[tenant]:
                del self._num_readers[tenant]

    def _take(self, kept: KeptResponse, num_bytes: int) -> None:
        """Raises OverloadedError."""
        while True:
            with contextlib.suppress(OverloadedError):
                self._room.take(kept.tenant, num_bytes)
                kept.num_bytes += num_bytes
                return
            own = [each for each in self._kept.values() if each.tenant == kept.tenant]
            oldest = next((each for each in own if each.is_over and not each.num_readers), None)
            if oldest is None:
                held = num_bytes + sum(each.num_bytes for each in own)
                free = self._max_bytes - self._room.num_held
                raise OverloadedError(
                    overload.kept_bytes(held, free, self._max_bytes), retry_after_s=RETRY_AFTER_S
                )
            self._forget(oldest.answer.response_id)

    def _forget(self, response_id: str) -> None:
        """May be repeated."""
        kept = self._kept.pop(response_id, None)
        if kept is not None:
            self._room.free(kept.tenant, kept.num_bytes)
            kept.forget()
