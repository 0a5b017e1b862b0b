"""A worker without a model: every step gives each running answer one token, which says what step it was.
Event loop only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

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


class StubWorker:
    def __init__(self, address: str, token_ids: Sequence[int]):
        """`token_ids`: of the steps, in turn."""
        self._server = Server(address, "stub", self._on_connect, self._on_message, self._on_close)
        self._token_ids = token_ids
        self._door: Connection | None = None
        self._left: dict[str, int] = {}  # tokens of each answer that are left
        self._num_steps = 0
        self.sent_at = [0.0] * len(token_ids)  # of the last step with this token

    @property
    def num_running(self) -> int:
        return len(self._left)

    async def start(self) -> Member:
        await self._server.start()
        return Member("stub", Role.LANGUAGE, self._server.address, "", "", 1 << 20)

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

    def _step(self) -> None:
        if self._door is None or not self._left:
            return
        which = self._num_steps % len(self._token_ids)
        self._num_steps += 1
        events, token = [], (self._token_ids[which],)
        for request_id, left in list(self._left.items()):
            events.append(TokenEvent(request_id, token, FinishReason.LENGTH if left == 1 else None))
            if left == 1:
                del self._left[request_id]
            else:
                self._left[request_id] = left - 1
        num = len(self._left)
        self.sent_at[which] = time.monotonic()
        self._door.send(Tokens(tuple(events), LoadReport(num_running=num, num_queued_units=num)))

    def _on_connect(self, connection: Connection) -> None:
        self._door = connection
        connection.send(Measured(CURVES))

    def _on_close(self, connection: Connection) -> None:
        self._door = None
        self._left.clear()

    def _on_message(self, connection: Connection, message: AnyMessage) -> None:
        match message:
            case Ping():
                connection.send(Pong())
            case StartDecode(request=request):
                self._left[request.request_id] = request.stop.max_tokens
            case Cancel(request_id=request_id):
                self._left.pop(request_id, None)
