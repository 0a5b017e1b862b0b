"""A worker without a model: every step gives each running answer one token, which says what step it was.
Event loop only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from cluster.rpc import Connection, Server
from cluster.types.curves import Curve, Link, ServiceCurves
from cluster.types.members import Member, Role
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    FinishReason,
    LoadReport,
    Measured,
    Ping,
    Pong,
    StartDecode,
    TokenEvent,
    Tokens,
)

CURVES = ServiceCurves(
    prefill=Curve(1e-3, 1e-6), decode=Curve(1e-3, 1e-6), max_step_units=100_000, links={"": Link(1e-4, 1e10)}
)
AHEAD = 4  # tokens of each answer on their way: a door that is busy with a step finds the next ones waiting
POLL_S = 1e-3


class StubWorker:
    def __init__(self, address: str, token_ids: Sequence[int]):
        """`token_ids`: of the steps, in turn."""
        self._server = Server(address, "stub", self._on_connect, self._on_message, self._on_close)
        self._token_ids = token_ids
        self._left: dict[Connection, dict[str, int]] = {}  # door → tokens of each answer that are left
        self._num_steps = 0
        self._num_sent = 0  # tokens
        self.sent_at = [0.0] * len(token_ids)  # of the last step with this token

    @property
    def num_running(self) -> int:
        return sum(map(len, self._left.values()))

    async def start(self) -> Member:
        await self._server.start()
        return Member(
            replica_id="stub",
            role=Role.LANGUAGE,
            address=self._server.address,
            model="",
            layout="",
            num_blocks=1 << 20,
        )

    async def aclose(self) -> None:
        await self._server.aclose()

    async def run(self, interval_s: float) -> None:
        """Steps at fixed instants until it is cancelled. A step that comes late is not made up for."""
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        while True:
            due_at = max(due_at + interval_s, loop.time())
            await asyncio.sleep(due_at - loop.time())
            self._step()

    async def run_ahead(self, num_read: Callable[[], int]) -> None:
        """Steps as fast as clients read, until it is cancelled. `num_read`: tokens that they have read since
        the call."""
        sent_before = self._num_sent
        while True:
            while self._num_sent - sent_before - num_read() < AHEAD * self.num_running:
                self._step()
            await asyncio.sleep(POLL_S)

    def _step(self) -> None:
        if not self.num_running:
            return
        which = self._num_steps % len(self._token_ids)
        self._num_steps += 1
        self.sent_at[which] = time.monotonic()
        for door, left in self._left.items():
            events = _next_tokens(left, (self._token_ids[which],))
            self._num_sent += len(events)
            num = self.num_running
            door.send(Tokens(events, LoadReport(num_running=num, num_queued_units=num)))

    def _on_connect(self, connection: Connection) -> None:
        self._left[connection] = {}
        connection.send(Measured(CURVES))

    def _on_close(self, connection: Connection) -> None:
        del self._left[connection]

    def _on_message(self, connection: Connection, message: AnyMessage) -> None:
        match message:
            case Ping():
                connection.send(Pong())
            case StartDecode(request=request):
                self._left[connection][request.request_id] = request.stop.max_tokens
            case Cancel(request_id=request_id):
                self._left[connection].pop(request_id, None)


def _next_tokens(left: dict[str, int], token: tuple[int]) -> tuple[TokenEvent, ...]:
    """One token for each answer; those that end are no longer in `left`."""
    events = []
    for request_id, num in list(left.items()):
        events.append(TokenEvent(request_id, token, FinishReason.LENGTH if num == 1 else None))
        if num == 1:
            del left[request_id]
        else:
            left[request_id] = num - 1
    return tuple(events)
