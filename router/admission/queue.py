"""Admission control at the door: which requests start, which wait here, which are refused. Pure and event
driven; `now` is an argument.

Requests wait at the door because their order can still be changed here. `admitted` says whether a request
fits into the cluster, `fair_queue` orders the requests that wait. A request that is predicted to wait too
long, or to miss the target of its class, is refused at once, with the time after which there will be room.

A request's life: offer → waiting → admitted → (encoded) → done → left. It may leave in every state.
It is refused

* by `offer`, or
* while it waits (`expired`), if its time is over or a full queue gave its place to another request.

    predicted wait = cluster time of the requests ahead of it / speed
    cluster time   = max(encode_s / encoders, prefill_s / prefill workers, both / workers that do either)
    speed          = cluster time of the requests that lately started from this queue, per second in which
                   requests waited in it; begins at 1

A queue is one class's requests with media, or those without. Its speed contains everything that slows the
class down: other classes, other doors, decode's memory, predictions that are too low.
"""

from __future__ import annotations

from math import ceil, exp

from cluster import overload
from cluster.config.settings import AdmissionArgs
from router.admission.admitted import AdmittedWork
from router.admission.answers import AdmissionRefusal, Admitted, Capacity, Queued, RefusalReason, Reported
from router.admission.fair_queue import AdmissionTicket, FairQueue, Waiting

SPEED_WINDOW_S = 10.0  # time constant of the exponential average of speeds
SHORTEST_S = 1e-3  # avoids a division by zero
# The part of its longest wait that a request may be planned to wait, because more urgent requests will come.
# With a larger part more requests wait in vain; with a smaller one the queue is too short to bridge a lull.
PLANNED_SHARE = 0.8
MAX_PROMISE_S = 60.0  # how far Retry-After looks beyond the present queue


class _QueueRate:
    """The speed of one queue, and the room promised to requests that it refused."""

    __slots__ = ("_advanced_at", "_started_s", "_waited_s", "promised_until")

    def __init__(self) -> None:
        self.promised_until = 0.0
        self._advanced_at = 0.0
        self._started_s = 0.0
        self._waited_s = 0.0

    def advance(self, now: float, *, is_waiting: bool) -> None:
        """`is_waiting`: whether requests have waited since the last call."""
        kept = exp(-(now - self._advanced_at) / SPEED_WINDOW_S)
        self._started_s *= kept
        # Time fades while it passes: the longest wait counts as SPEED_WINDOW_S.
        self._waited_s = self._waited_s * kept + SPEED_WINDOW_S * (1 - kept) * is_waiting
        self._advanced_at = now

    def started(self, cost_s: float) -> None:
        self._started_s += cost_s

    @property
    def speed(self) -> float:
        """The part of the window that was not observed counts as speed 1."""
        unseen_s = max(SPEED_WINDOW_S - self._waited_s, SHORTEST_S)
        return (self._started_s + unseen_s) / (self._waited_s + unseen_s)


class AdmissionQueue:
    def __init__(self, args: AdmissionArgs, text_share: float, capacity: Capacity):
        """`text_share`: the share of prefill work and of blocks that is kept for requests without media while
        they can use it."""
        self._args = args
        self._admitted = AdmittedWork(args.max_outstanding_s, args.num_doors, text_share, capacity)
        self._classes = {each.name: each for each in args.classes}
        self._queue = FairQueue({each.name: each.weight for each in args.classes})
        self._rates = {
            (each.name, is_text): _QueueRate() for each in args.classes for is_text in (False, True)
        }
        self._refused: list[
            tuple[AdmissionTicket, AdmissionRefusal]
        ] = []  # after having waited, not yet told
        self._refused_at = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """No request waits, and none holds anything."""
        return not self._queue and not self._admitted

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._queue

    def is_admitted(self, request_id: str) -> bool:
        return request_id in self._admitted

    def class_name(self, priority: int) -> str:
        """The class of a request's priority."""
        bounds = ((each.name, each.max_priority) for each in self._args.classes)
        return next(name for name, bound in bounds if bound is None or priority <= bound)

    def resize(self, capacity: Capacity) -> None:
        """Workers joined or left. `freed` then returns the requests that start."""
        self._admitted.capacity = capacity

    def report(self, reported: Reported) -> None:
        """The workers' own reports. `freed` then returns the requests that start."""
        self._admitted.report(reported)

    def offer(self, ticket: AdmissionTicket, now: float) -> Admitted | Queued | AdmissionRefusal:
        """Raises ValueError if the request is here already."""
        if ticket.request_id in self._admitted or ticket.request_id in self._queue:
            raise ValueError(f"request {ticket.request_id} is here already")
        if not self._queue and self._admitted.is_prefill_idle and self._admitted.has_blocks(ticket):
            self._admitted.add(ticket)
            return Admitted()
        self._expire(now)
        self._advance(ticket, now)
        latest_at = self._latest_at(ticket, now)
        wait_s = self._wait_s(ticket)
        planned_s = (latest_at - now) * (PLANNED_SHARE if latest_at > now else 1.0)
        if wait_s > planned_s:
            reason = self._reason(ticket, latest_at)
            message = self._would_wait(ticket, reason, wait_s, planned_s)
            return self._refusal(ticket, reason, message, wait_s - planned_s, now)
        self._queue.push(ticket, latest_at, self._cost_s(ticket))
        head = self._next()
        if head is not None and head.ticket is ticket:
            self._start(head)
            return Admitted()
        if len(self._queue) > self._args.max_queued and not self._displace(ticket, now):
            self._queue.remove(ticket.request_id)
            message = overload.queue_is_full(*self._in_line(ticket))
            return self._refusal(ticket, RefusalReason.FULL, message, wait_s, now)
        return Queued()

    def freed(self, now: float) -> list[AdmissionTicket]:
        """The requests that start now; to be called after first tokens, ends and reports."""
        self._expire(now)
        started: list[AdmissionTicket] = []
        while (head := self._next()) is not None:
            self._advance(head.ticket, now)
            self._start(head)
            started.append(head.ticket)
        return started

    def encoded(self, request_id: str) -> None:
        """All its media is encoded. Unknown requests are ignored, here and below; calls may repeat."""
        self._admitted.encoded(request_id)

    def done(self, request_id: str) -> None:
        """The request's first token is out. From now on it holds only decode's memory."""
        self._admitted.prefilled(request_id)

    def leave(self, request_id: str) -> None:
        """The request has ended or was cancelled, in whatever state."""
        if request_id in self._queue:
            self._queue.remove(request_id)
        self._admitted.remove(request_id)

    def expired(self, now: float) -> list[tuple[AdmissionTicket, AdmissionRefusal]]:
        """Requests that waited and are refused after all, each once. The client may be gone by then."""
        self._expire(now)
        refused, self._refused = self._refused, []
        return refused

    def next_deadline(self) -> float | None:
        """When `expired` will return something if nothing happens before."""
        if self._refused:
            return self._refused_at
        first = self._queue.first_deadline()
        return None if first is None else first.latest_at

    def _next(self) -> Waiting | None:
        """The next request, if it fits. No request overtakes another one, except that text may pass media
        that does not fit. Text then uses

        * what media cannot use, or
        * blocks, as long as text holds less than its share of them and leaves as many as the media needs.
        """
        head = self._queue.head()
        if head is None or self._admitted.fits(head.ticket):
            return head
        if head.ticket.is_text:
            return None
        text = self._queue.head(text_only=True)
        if text is None or not self._admitted.fits(text.ticket):
            return None
        may_pass = self._admitted.has_blocks(head.ticket) or self._admitted.may_pass(text.ticket, head.ticket)
        return text if may_pass else None

    def _start(self, waiting: Waiting) -> None:
        self._queue.take(waiting.ticket.request_id)
        self._rate(waiting.ticket).started(waiting.cost_s)
        self._admitted.add(waiting.ticket)

    def _expire(self, now: float) -> None:
        while (first := self._queue.first_deadline()) is not None and first.latest_at <= now:
            reason = self._reason(first.ticket, first.latest_at)
            self._drop(first.ticket, reason, self._has_waited(first, reason, now), now)

    def _displace(self, ticket: AdmissionTicket, now: float) -> bool:
        """Whether a full queue keeps a new ticket. A class always has room for one."""
        victim = self._queue.displaced_by(ticket)
        if victim is not None:
            message = overload.made_room(*self._in_line(victim))
            self._drop(victim, RefusalReason.DISPLACED, message, now)
        return victim is not None or len(self._queue.of_class(ticket.class_name)) == 1

    def _drop(self, ticket: AdmissionTicket, reason: RefusalReason, message: str, now: float) -> None:
        """Refuse a queued ticket."""
        self._advance(ticket, now)
        self._queue.remove(ticket.request_id)
        self._refused_at = now
        self._refused.append((ticket, self._refusal(ticket, reason, message, self._wait_s(ticket), now)))

    def _refusal(
        self, ticket: AdmissionTicket, reason: RefusalReason, message: str, excess_s: float, now: float
    ) -> AdmissionRefusal:
        """Makes the refusal of a request: after `excess_s` the queue is short enough for it. Requests that
        are refused one after the other get later and later times, so that each finds room when those before
        it have come back and started."""
        rate = self._rate(ticket)
        longest_s = max(excess_s, MAX_PROMISE_S)
        in_s = min(max(excess_s, rate.promised_until - now), longest_s)
        rate.promised_until = now + in_s + self._cost_s(ticket) / rate.speed
        return AdmissionRefusal(max(1, ceil(in_s)), reason, message)

    def _would_wait(
        self, ticket: AdmissionTicket, reason: RefusalReason, wait_s: float, planned_s: float
    ) -> str:
        """The text for a request that is not queued."""
        limits = self._classes[ticket.class_name]
        if reason is RefusalReason.TARGET:
            text, longest_s = overload.would_miss_target, limits.target_ttft_s
        else:
            text, longest_s = overload.would_wait, limits.max_wait_s
        message = text(wait_s, limits.name, longest_s, max(0.0, planned_s))
        return message + self._admitted.block_shortage(ticket)

    def _has_waited(self, waiting: Waiting, reason: RefusalReason, now: float) -> str:
        """The text for a request whose time is over."""
        ticket, limits = waiting.ticket, self._classes[waiting.ticket.class_name]
        if reason is RefusalReason.TARGET:
            waited_s, target_s = now - ticket.arrived_at, limits.target_ttft_s
            message = overload.has_missed_target(waited_s, ticket.ttft_s, limits.name, target_s)
        else:
            waited_s = now - waiting.latest_at + limits.max_wait_s
            message = overload.has_waited(waited_s, limits.name, limits.max_wait_s)
        return message + self._admitted.block_shortage(ticket)

    def _in_line(self, ticket: AdmissionTicket) -> tuple[int, str, int]:
        """For the texts of a full queue: requests of the ticket's tenant and class that wait, the class, and
        how many may wait in all."""
        num_of_tenant = self._queue.of_class(ticket.class_name).num_waiting(ticket.tenant)
        return num_of_tenant, ticket.class_name, self._args.max_queued

    def _latest_at(self, ticket: AdmissionTicket, now: float) -> float:
        """Returns until when the request may wait. A target that it would miss even on an idle cluster does
        not count, because otherwise the request could never be served."""
        limits = self._classes[ticket.class_name]
        is_within_reach = now + ticket.work_s < ticket.arrived_at + limits.target_ttft_s
        latest_at = now + limits.max_wait_s
        return min(latest_at, self._start_for_target(ticket)) if is_within_reach else latest_at

    def _start_for_target(self, ticket: AdmissionTicket) -> float:
        return ticket.arrived_at + self._classes[ticket.class_name].target_ttft_s - ticket.ttft_s

    def _reason(self, ticket: AdmissionTicket, latest_at: float) -> RefusalReason:
        return RefusalReason.TARGET if latest_at == self._start_for_target(ticket) else RefusalReason.WAIT

    def _cost_s(self, ticket: AdmissionTicket) -> float:
        return self._admitted.capacity.seconds(ticket.encode_s, ticket.work_s - ticket.encode_s)

    def _wait_s(self, ticket: AdmissionTicket) -> float:
        """Predicted wait of a new ticket."""
        queue = self._queue.of_class(ticket.class_name)
        ahead_s = queue.cost_ahead_s(ticket.tenant, ticket.is_text, self._cost_s(ticket))
        return ahead_s / self._rate(ticket).speed

    def _rate(self, ticket: AdmissionTicket) -> _QueueRate:
        return self._rates[ticket.class_name, ticket.is_text]

    def _advance(self, ticket: AdmissionTicket, now: float) -> None:
        is_waiting = self._queue.of_class(ticket.class_name).has_waiting(ticket.is_text)
        self._rate(ticket).advance(now, is_waiting=is_waiting)
