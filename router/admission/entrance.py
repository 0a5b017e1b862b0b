"""Admission on the event loop: a request that fits is admitted at once; another one gets a future, which ends
when `AdmissionQueue` admits or refuses it.

Runs on the door's event loop. Its only timer is for the next request whose waiting time ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from cluster.clock import Clock
from cluster.errors import InternalError
from router.admission.queue import AdmissionQueue, AdmissionTicket, Admitted, Capacity, Refusal, Reported

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # after an error in admission


class Entrance:
    def __init__(self, queue: AdmissionQueue, clock: Clock):
        self._queue = queue
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and self._queue.is_idle

    def class_name(self, priority: int) -> str:
        return self._queue.class_name(priority)

    def enter(self, ticket: AdmissionTicket) -> asyncio.Future[None] | None:
        """None: the request is admitted. Else a future that ends at its admission or raises OverloadedError.
        Raises OverloadedError if the request is refused at once."""
        answer = self._queue.offer(ticket, self._clock.now())
        if isinstance(answer, Refusal):
            raise answer.to_error()
        if isinstance(answer, Admitted):
            return None
        future = self._waiting[ticket.request_id] = asyncio.get_running_loop().create_future()
        self._settle()
        return future

    def report(self, capacity: Capacity, reported: Reported) -> None:
        """The cluster's present capacity and load."""
        self._queue.resize(capacity)
        self._queue.report(reported)
        self._settle()

    def encoded(self, request_id: str) -> None:
        """All media of the request is encoded, or needs no encoder."""
        self._queue.encoded(request_id)
        self._settle()

    def done(self, request_id: str) -> None:
        """The request's first token is out."""
        self._queue.done(request_id)
        self._settle()

    def leave(self, request_id: str) -> None:
        """The request has ended, admitted or not. Unknown requests are ignored."""
        future = self._waiting.pop(request_id, None)
        if future is not None:
            future.cancel()
        try:
            self._queue.leave(request_id)
        finally:
            self._settle()

    def _settle(self) -> None:
        """Ends the futures of requests that are admitted or refused now. Raises nothing, because the caller's
        request did not cause an error in here."""
        if not self._waiting:
            return self._set_timer(None)
        now = self._clock.now()
        try:
            self._refuse(self._queue.expired(now))
            for ticket in self._queue.freed(now):
                future = self._waiting.pop(ticket.request_id, None)
                if future is not None and not future.done():
                    future.set_result(None)
            self._refuse(self._queue.expired(now))
            deadline = self._queue.next_deadline()
        except Exception:
            logger.exception("an error in admission")
            self._reconcile()
            deadline = now + RETRY_S
        self._set_timer(deadline)

    def _reconcile(self) -> None:
        """After an error: a waiting request starts if the queue has admitted it, and fails if it is lost."""
        for request_id, future in list(self._waiting.items()):
            if self._queue.is_waiting(request_id):
                continue
            del self._waiting[request_id]
            if future.done():
                continue
            if self._queue.is_admitted(request_id):
                future.set_result(None)
            else:
                future.set_exception(InternalError("admission failed; see the door's log"))

    def _refuse(self, refused: Sequence[tuple[AdmissionTicket, Refusal]]) -> None:
        for ticket, answer in refused:
            future = self._waiting.pop(ticket.request_id, None)
            if future is not None and not future.done():
                future.set_exception(answer.to_error())

    def _set_timer(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._settle)
