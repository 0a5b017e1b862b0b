"""Admission control: a request is admitted at once, waits, or is refused. `AdmissionQueue` decides; this
object limits an error in the queue to one request.

Workers report their load hundreds of times a second. What all reports together say is worked out at most
every REPORT_EVERY_S, and only while requests wait (`takes_load`).

Pure: `now` is an argument. `settle` returns the requests whose wait has ended; `deadline` is the instant of
its next call.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from math import inf

from cluster.errors import ClusterError, InternalError
from router.admission.queue import (
    AdmissionQueue,
    AdmissionRefusal,
    AdmissionTicket,
    Admitted,
    Capacity,
    RefusalReason,
    Reported,
)

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # after an error in the queue
REPORT_EVERY_S = 0.02

Settled = tuple[str, ClusterError | None]  # a request that waits no longer; None: it is admitted


class AdmissionTotals:
    """What arrived since the door's start, and what was refused: for metrics and for scaling. `encode_s`,
    `prefill_s`: predicted work of all requests that arrived, admitted or not; `…_s2`: the sums of the squares
    of each request's. A request that is offered again, because there was no worker for it, counts again."""

    def __init__(self) -> None:
        self.num_offered: Counter[str] = Counter()  # by class
        self.num_refused: Counter[tuple[str, RefusalReason]] = Counter()  # by class and reason
        self.encode_s = self.prefill_s = 0.0
        self.encode_s2 = self.prefill_s2 = 0.0

    def offered(self, ticket: AdmissionTicket) -> None:
        self.num_offered[ticket.class_name] += 1
        prefill_s = ticket.work_s - ticket.encode_s
        self.encode_s += ticket.encode_s
        self.prefill_s += prefill_s
        self.encode_s2 += ticket.encode_s**2
        self.prefill_s2 += prefill_s**2

    def refused(self, ticket: AdmissionTicket, reason: RefusalReason) -> None:
        self.num_refused[ticket.class_name, reason] += 1


class AdmissionController:
    def __init__(self, queue: AdmissionQueue):
        self._queue = queue
        self._waiting: dict[str, AdmissionTicket] = {}  # in order of arrival
        self.totals = AdmissionTotals()
        self._is_changed = False  # since the last `settle`
        self._is_load_new = False  # since the last `report`
        self._load_taken_at = -inf
        self._deadline: float | None = None  # of the next waiting request

    @property
    def deadline(self) -> float | None:
        """When `takes_load` and `settle` are to be called if nothing happens before."""
        if not (self._is_load_new and self._waiting):
            return self._deadline
        load_at = self._load_taken_at + REPORT_EVERY_S
        return load_at if self._deadline is None else min(load_at, self._deadline)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Collection[AdmissionTicket]:
        return self._waiting.values()

    @property
    def is_idle(self) -> bool:
        return not self._waiting and self._queue.is_idle

    def class_name(self, priority: int) -> str:
        return self._queue.class_name(priority)

    def offer(self, ticket: AdmissionTicket, now: float) -> bool:
        """True: admitted. False: it waits, until `settle` names it. Raises OverloadedError."""
        self._is_changed = True
        self.totals.offered(ticket)
        answer = self._queue.offer(ticket, now)
        if isinstance(answer, AdmissionRefusal):
            self.totals.refused(ticket, answer.reason)
            raise answer.to_error()
        if isinstance(answer, Admitted):
            return True
        self._waiting[ticket.request_id] = ticket
        return False

    def load_changed(self) -> None:
        """A worker has reported its load."""
        self._is_load_new = True

    def takes_load(self, now: float) -> bool:
        """True: `report` is to be called before `settle`. The answer counts as that call."""
        is_due = self._is_load_new and bool(self._waiting) and now >= self._load_taken_at + REPORT_EVERY_S
        if is_due:
            self._is_load_new, self._load_taken_at = False, now
        return is_due

    def report(self, capacity: Capacity, reported: Reported) -> None:
        """The cluster's present capacity and load."""
        self._is_changed, self._is_load_new = True, False
        self._queue.resize(capacity)
        self._queue.report(reported)

    def encoded(self, request_id: str) -> None:
        """All media of the request is encoded, or needs no encoder."""
        self._is_changed = True
        self._queue.encoded(request_id)

    def done(self, request_id: str) -> None:
        """The first token of the request is out."""
        self._is_changed = True
        self._queue.done(request_id)

    def leave(self, request_id: str) -> None:
        """The request has ended, admitted or not. Unknown requests are ignored."""
        self._is_changed = True
        self._waiting.pop(request_id, None)
        self._queue.leave(request_id)

    def settle(self, now: float) -> list[Settled]:
        """The requests that wait no longer. To be called after the calls above, and at `deadline`. Raises
        nothing, because one request did not cause an error in the queue."""
        is_due = self._deadline is not None and self._deadline <= now
        if not self._is_changed and not is_due:
            return []
        self._is_changed, self._deadline = False, None
        if not self._waiting:
            return []
        settled: list[Settled] = []
        try:
            self._refuse(now, settled)
            for ticket in self._queue.freed(now):
                self._settle(ticket.request_id, None, settled)
            self._refuse(now, settled)
            self._deadline = self._queue.next_deadline()
        except Exception:
            logger.exception("an error in admission")
            self._reconcile(settled)
            self._deadline = now + RETRY_S
        return settled

    def _refuse(self, now: float, settled: list[Settled]) -> None:
        for ticket, answer in self._queue.expired(now):
            self.totals.refused(ticket, answer.reason)
            self._settle(ticket.request_id, answer.to_error(), settled)

    def _settle(self, request_id: str, error: ClusterError | None, settled: list[Settled]) -> None:
        if request_id in self._waiting:
            del self._waiting[request_id]
            settled.append((request_id, error))

    def _reconcile(self, settled: list[Settled]) -> None:
        """After an error: a waiting request starts if the queue has admitted it, and fails if it is lost."""
        for request_id in list(self._waiting):
            if self._queue.is_admitted(request_id):
                self._settle(request_id, None, settled)
            elif not self._queue.is_waiting(request_id):
                self._settle(request_id, InternalError("admission failed; see the door's log"), settled)
