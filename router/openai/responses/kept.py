"""Background responses: they are generated whether or not a client is connected, and kept for a while.

A `KeptResponse` collects the events of one response; any number of clients read them, from any event on. Its
task holds what its request was let in with (the permit of its key and the lease of its body) until the answer
has ended. `KeptResponses` finds them by id for the tenant that asked, and forgets them in time. Belongs to
the door's event loop. Another door knows nothing of them, so a cluster with several has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from cluster.errors import ClusterError, OverloadedError, RequestError
from router.openai.names import naming
from router.openai.render import public_error
from router.openai.responses.render import ResponsesFormat
from router.openai.responses.translate import responses_name

log = logging.getLogger(__name__)
MAX_BYTES = 64 << 20  # of all events that are kept
RETRY_AFTER_S = 5.0
_EVENT_END = b"\n\n"


class ResponseNotFoundError(RequestError):
    status = 404
    code = "response_not_found"


class KeptResponse:
    def __init__(self, answer: ResponsesFormat, tenant: str):
        self.answer = answer
        self.tenant = tenant
        self.is_over = False
        self.num_bytes = 0
        self._events: list[bytes] = []  # the place of each is its sequence number
        self._news = asyncio.Event()  # another one from event to event
        self._task: asyncio.Task[None] | None = None
        self._add(answer.queued())

    def begin(self, events: AsyncGenerator[bytes, None], held: contextlib.ExitStack) -> asyncio.Task[None]:
        """`held`: is closed when the answer has ended."""
        self._task = asyncio.create_task(self._collect(events))
        self._task.add_done_callback(lambda task: self._end(task, held))  # also if it never ran
        return self._task

    async def read(self, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Events behind number `after`, until the last one."""
        idx = after + 1
        yield b""  # the answer's status waits for no event: the response exists
        while True:
            news = self._news
            if idx < len(self._events):
                yield b"".join(self._events[idx:])
                idx = len(self._events)
            elif self.is_over:
                return
            else:
                await news.wait()

    async def cancel(self) -> None:
        """Without effect on an answer that has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _collect(self, events: AsyncGenerator[bytes, None]) -> None:
        try:
            with naming(responses_name):
                async with contextlib.aclosing(events):
                    async for event in events:
                        self._add(event)
        except Exception as error:
            if not isinstance(error, ClusterError):
                log.error("response %s failed unexpectedly", self.answer.response_id, exc_info=error)
            self._add(self.answer.error_event(public_error(error)))

    def _end(self, task: asyncio.Task[None], held: contextlib.ExitStack) -> None:
        held.close()
        if task.cancelled():
            self.answer.cancel()
        self.is_over = True
        self._news.set()

    def _add(self, events: bytes) -> None:
        self.num_bytes += len(events)
        self._events += (event + _EVENT_END for event in events.split(_EVENT_END) if event)
        news, self._news = self._news, asyncio.Event()
        news.set()


class KeptResponses:
    def __init__(self, keep_s: float, max_bytes: int = MAX_BYTES):
        """`keep_s`: from the end of an answer on."""
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._kept: dict[str, KeptResponse] = {}

    def begin(
        self,
        answer: ResponsesFormat,
        tenant: str,
        events: AsyncGenerator[bytes, None],
        held: contextlib.ExitStack,
    ) -> KeptResponse:
        kept = KeptResponse(answer, tenant)
        self._kept[answer.response_id] = kept
        kept.begin(events, held).add_done_callback(lambda _: self._forget_later(answer.response_id))
        return kept

    def make_room(self) -> None:
        """Before a response begins: the oldest answers that have ended go first. Raises OverloadedError if
        those that have not ended fill the room."""
        num_bytes = sum(kept.num_bytes for kept in self._kept.values())
        for response_id in [name for name, kept in self._kept.items() if kept.is_over]:
            if num_bytes < self._max_bytes:
                break
            num_bytes -= self._kept.pop(response_id).num_bytes
        if num_bytes >= self._max_bytes:
            raise OverloadedError(
                f"background responses hold {num_bytes} of {self._max_bytes} bytes at this door",
                retry_after_s=RETRY_AFTER_S,
            )

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
        del self._kept[response_id]
        await kept.cancel()

    def _forget_later(self, response_id: str) -> None:
        asyncio.get_running_loop().call_later(self._keep_s, self._kept.pop, response_id, None)
