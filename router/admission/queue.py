"""Admission at the door: who goes into the cluster, who waits here, who is refused. Pure and event driven; `now` is passed in.

Queueing belongs here, where the order can still be changed: workers get as much as keeps them busy (`max_outstanding_s` of predicted
work each, or two requests), and KV blocks as long as there are any. What waits is ordered by `router.admission.fair_queue`. Who is predicted to
wait too long or to miss the target of its class is refused at once, and told when there will be room.

A request's life: offer → waiting → admitted → (encoded) → done → left, or refused from `offer`, or from waiting (`expired`): its time is over,
or a full queue gave its place away. It may leave from everywhere.

    predicted wait = cluster time of what goes before it / speed
    cluster time   = max(encode_s / encoders, prefill_s / prefill workers)
    speed          = cluster time of what has lately gone from this class and lane per second in which some of it waited; begins at 1

The speed has in it whatever slows a class down: other classes, other doors, decode's memory, predictions that are too low.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil, exp

from cluster.config.settings import AdmissionArgs
from cluster.errors import OverloadedError
from router.admission.fair_queue import AdmissionTicket, FairQueue, Waiting

REQUESTS_PER_WORKER = 2  # one in work and one ready behind it, whatever they cost
SPEED_WINDOW_S = 10.0  # e-folding time of what is known about speeds
SHORTEST_S = 1e-3  # so that nothing is divided by zero
# Of the time that a request can afford to wait, the part that may be planned: more urgent ones will come. Larger shares make more requests wait
# in vain, smaller ones leave no queue that bridges a lull
PLANNED_SHARE = 0.8
MAX_PROMISE_S = 60.0  # Retry-After looks so far beyond the present queue


class RefusalReason(StrEnum):
    WAIT = "wait"  # would wait, or has waited, longer than its class allows
    TARGET = "target"  # would miss, or cannot meet any more, the target of its class
    FULL = "full"  # too many requests wait at this door
    DISPLACED = (
        "displaced"  # a full queue gave its place to a more important class or a tenant with fewer requests
    )


_MESSAGES = {
    RefusalReason.WAIT: "the server is busy: this request would wait too long",
    RefusalReason.TARGET: "the server is busy: the first token of this request would come too late",
    RefusalReason.FULL: "the server is busy: too many requests are waiting",
    RefusalReason.DISPLACED: "the server is busy: this request made room for others",
}


@dataclass(frozen=True, slots=True)
class Admitted:
    pass


@dataclass(frozen=True, slots=True)
class Queued:
    pass


@dataclass(frozen=True, slots=True)
class Refusal:
    retry_after_s: int  # then there is room, should as much come as goes
    reason: RefusalReason

    def to_error(self) -> OverloadedError:
        """What the client gets."""
        return OverloadedError(_MESSAGES[self.reason], retry_after_s=self.retry_after_s)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of the whole cluster, as this door sees it."""

    num_encoders: int
    num_prefills: int
    num_blocks: int  # of all decode workers


@dataclass(frozen=True, slots=True)
class Reported:
    """What workers say they have in work, for all doors."""

    encode_s: float = 0.0  # predicted seconds of all encoders' queues together
    prefill_s: float = 0.0
    num_blocks: int = 0  # used, of all decode workers


class _Load:
    """Requests that a pool has not finished."""

    __slots__ = ("num_requests", "work_s")

    def __init__(self) -> None:
        self.num_requests = 0
        self.work_s = 0.0

    def change(self, work_s: float, step: int) -> None:
        """A request more (`step` 1) or less (-1)."""
        self.num_requests += step
        self.work_s = self.work_s + step * work_s if self.num_requests else 0.0

    def is_below(self, max_outstanding_s: float, num_workers: float, reported_s: float = 0.0) -> bool:
        if self.num_requests < max(1.0, REQUESTS_PER_WORKER * num_workers):
            return True
        return max(self.work_s, reported_s) < max_outstanding_s * num_workers


class _QueueRate:
    """One class's requests with or without media: how fast they go, and which room is promised to refused ones."""

    __slots__ = ("_advanced_at", "_gone_s", "_waited_s", "promised_until")

    def __init__(self) -> None:
        self.promised_until = 0.0
        self._advanced_at = 0.0
        self._gone_s = 0.0
        self._waited_s = 0.0

    def advance(self, now: float, *, is_waiting: bool) -> None:
        """`is_waiting`: somebody has waited since the last call."""
        passed_s = now - self._advanced_at
        kept = exp(-passed_s / SPEED_WINDOW_S)
        self._gone_s *= kept
        self._waited_s = self._waited_s * kept + passed_s * is_waiting
        self._advanced_at = now

    def goes(self, cost_s: float) -> None:
        self._gone_s += cost_s

    @property
    def speed(self) -> float:
        """Where less than the window was seen, the rest counts as 1."""
        unseen_s = max(SPEED_WINDOW_S - self._waited_s, SHORTEST_S)
        return (self._gone_s + unseen_s) / (self._waited_s + unseen_s)


@dataclass(slots=True)
class _Holding:
    """What an admitted request still has."""

    ticket: AdmissionTicket
    encodes: bool
    prefills: bool = True


class AdmissionQueue:
    def __init__(self, args: AdmissionArgs, text_share: float, capacity: Capacity):
        """`text_share`: of the work in prefill and of the blocks, for requests without media while they can use it."""
        self._args = args
        self._text_share = text_share
        self._capacity = capacity
        self._reported = Reported()
        self._classes = {each.name: each for each in args.classes}
        self._queue = FairQueue({each.name: each.weight for each in args.classes})
        self._lanes = {
            (each.name, is_text): _QueueRate() for each in args.classes for is_text in (False, True)
        }
        self._holdings: dict[str, _Holding] = {}
        self._encode, self._prefill, self._media_prefill = _Load(), _Load(), _Load()
        self._num_blocks = 0
        self._num_text_blocks = 0
        self._refused: list[tuple[AdmissionTicket, Refusal]] = []  # from the queue, not yet told
        self._refused_at = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Nobody waits and nothing is held."""
        return not self._queue and not self._holdings

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._queue

    def is_admitted(self, request_id: str) -> bool:
        return request_id in self._holdings

    def class_name(self, priority: int) -> str:
        """The class of a request's priority."""
        bounds = ((each.name, each.max_priority) for each in self._args.classes)
        return next(name for name, bound in bounds if bound is None or priority <= bound)

    def resize(self, capacity: Capacity) -> None:
        """Workers came or went; `freed` says who goes now."""
        self._capacity = capacity

    def report(self, reported: Reported) -> None:
        """Workers' own word. Of two numbers, this door's part of it and what it has sent, the larger counts; `freed` says who goes now."""
        doors = self._args.num_doors
        parts = (reported.encode_s / doors, reported.prefill_s / doors, ceil(reported.num_blocks / doors))
        self._reported = Reported(*parts)

    def offer(self, ticket: AdmissionTicket, now: float) -> Admitted | Queued | Refusal:
        """Raises ValueError if the request is here already."""
        if ticket.request_id in self._holdings or ticket.request_id in self._queue:
            raise ValueError(f"request {ticket.request_id} is here already")
        if not self._queue and self._prefill.num_requests == 0 and self._has_blocks(ticket):
            self._admit(ticket)
            return Admitted()
        self._expire(now)
        self._advance(ticket, now)
        latest_at = self._latest_at(ticket, now)
        wait_s = self._wait_s(ticket)
        excess_s = wait_s - (latest_at - now) * (PLANNED_SHARE if latest_at > now else 1.0)
        if excess_s > 0:
            return self._refusal(ticket, self._reason(ticket, latest_at), excess_s, now)
        self._queue.push(ticket, latest_at, self._cost_s(ticket))
        head = self._next()
        if head is not None and head.ticket is ticket:
            self._go(head)
            return Admitted()
        if len(self._queue) > self._args.max_queued and not self._displace(ticket, now):
            self._queue.remove(ticket.request_id)
            return self._refusal(ticket, RefusalReason.FULL, wait_s, now)
        return Queued()

    def freed(self, now: float) -> list[AdmissionTicket]:
        """Who goes now; after first tokens, ends and reports."""
        self._expire(now)
        going: list[AdmissionTicket] = []
        while (head := self._next()) is not None:
            self._advance(head.ticket, now)
            self._go(head)
            going.append(head.ticket)
        return going

    def encoded(self, request_id: str) -> None:
        """All its media is encoded. Unknown requests are ignored, here and below; calls may repeat."""
        holding = self._holdings.get(request_id)
        if holding is not None:
            self._free_encode(holding)

    def done(self, request_id: str) -> None:
        """Its first token is out: what is left is decode's memory."""
        holding = self._holdings.get(request_id)
        if holding is not None:
            self._free_encode(holding)
            self._free_prefill(holding)

    def leave(self, request_id: str) -> None:
        """It has ended, or its client has gone, wherever it was."""
        if request_id in self._queue:
            self._queue.remove(request_id)
        holding = self._holdings.pop(request_id, None)
        if holding is not None:
            self._free_encode(holding)
            self._free_prefill(holding)
            self._change_blocks(holding.ticket, -1)

    def expired(self, now: float) -> list[tuple[AdmissionTicket, Refusal]]:
        """Who was queued and is refused after all, each told once; its client may have gone meanwhile."""
        self._expire(now)
        refused, self._refused = self._refused, []
        return refused

    def next_deadline(self) -> float | None:
        """When `expired` has something to tell if nothing happens before."""
        if self._refused:
            return self._refused_at
        first = self._queue.first_deadline()
        return None if first is None else first.latest_at

    def _next(self) -> Waiting | None:
        """Who is next and fits. Nobody overtakes, but text may pass media that must wait: for what text does not use, or, while text
        holds less than its share of them, for blocks."""
        head = self._queue.head()
        if head is None or self._fits(head.ticket):
            return head
        if head.ticket.is_text:
            return None
        text = self._queue.head(text_only=True)
        has_share = self._num_text_blocks < self._text_share * self._blocks_limit
        may_pass = has_share or self._has_blocks(head.ticket)
        return text if text is not None and may_pass and self._fits(text.ticket) else None

    def _fits(self, ticket: AdmissionTicket) -> bool:
        longest_s, doors = self._args.max_outstanding_s, self._args.num_doors
        encoders, prefills = self._capacity.num_encoders / doors, self._capacity.num_prefills / doors
        has_prefill = self._prefill.is_below(longest_s, prefills, self._reported.prefill_s)
        if not has_prefill or not self._has_blocks(ticket):
            return False
        if ticket.is_text:
            return True
        if not self._media_prefill.is_below(longest_s, prefills * (1 - self._text_share)):
            return False
        return ticket.encode_s == 0 or self._encode.is_below(longest_s, encoders, self._reported.encode_s)

    def _has_blocks(self, ticket: AdmissionTicket) -> bool:
        """A request that is larger than all memory is let in alone: the cluster knows whether it can be served."""
        used = max(self._num_blocks, self._reported.num_blocks)
        return self._num_blocks == 0 or used + ticket.num_blocks <= self._blocks_limit

    @property
    def _blocks_limit(self) -> float:
        return self._capacity.num_blocks / self._args.num_doors

    def _go(self, waiting: Waiting) -> None:
        self._queue.take(waiting.ticket.request_id)
        self._lane(waiting.ticket).goes(waiting.cost_s)
        self._admit(waiting.ticket)

    def _admit(self, ticket: AdmissionTicket) -> None:
        self._holdings[ticket.request_id] = _Holding(ticket, encodes=ticket.encode_s > 0)
        if ticket.encode_s > 0:
            self._encode.change(ticket.encode_s, 1)
        self._change_prefill(ticket, 1)
        self._change_blocks(ticket, 1)

    def _free_encode(self, holding: _Holding) -> None:
        if holding.encodes:
            holding.encodes = False
            self._encode.change(holding.ticket.encode_s, -1)

    def _free_prefill(self, holding: _Holding) -> None:
        if holding.prefills:
            holding.prefills = False
            self._change_prefill(holding.ticket, -1)

    def _change_prefill(self, ticket: AdmissionTicket, step: int) -> None:
        for load in (self._prefill,) if ticket.is_text else (self._prefill, self._media_prefill):
            load.change(ticket.work_s - ticket.encode_s, step)

    def _change_blocks(self, ticket: AdmissionTicket, step: int) -> None:
        self._num_blocks += step * ticket.num_blocks
        self._num_text_blocks += step * ticket.num_blocks * ticket.is_text

    def _expire(self, now: float) -> None:
        while (first := self._queue.first_deadline()) is not None and first.latest_at <= now:
            self._drop(first.ticket, self._reason(first.ticket, first.latest_at), now)

    def _displace(self, ticket: AdmissionTicket, now: float) -> bool:
        """Whether a full queue keeps a new ticket; a class has room for one at all times."""
        victim = self._queue.displaced_by(ticket)
        if victim is not None:
            self._drop(victim, RefusalReason.DISPLACED, now)
        return victim is not None or len(self._queue.of_class(ticket.class_name)) == 1

    def _drop(self, ticket: AdmissionTicket, reason: RefusalReason, now: float) -> None:
        """Refuse a queued ticket."""
        self._advance(ticket, now)
        self._queue.remove(ticket.request_id)
        self._refused_at = now
        self._refused.append((ticket, self._refusal(ticket, reason, self._wait_s(ticket), now)))

    def _refusal(
        self, ticket: AdmissionTicket, reason: RefusalReason, excess_s: float, now: float
    ) -> Refusal:
        """In `excess_s` the queue has fallen enough, and every refused request is told the time at which those that were refused before
        it have come back and gone in."""
        lane = self._lane(ticket)
        longest_s = max(excess_s, MAX_PROMISE_S)
        in_s = min(max(excess_s, lane.promised_until - now), longest_s)
        lane.promised_until = now + in_s + self._cost_s(ticket) / lane.speed
        return Refusal(max(1, ceil(in_s)), reason)

    def _latest_at(self, ticket: AdmissionTicket, now: float) -> float:
        """Until when it may wait. A target that it would miss on an idle cluster does not count: it could never be served."""
        limits = self._classes[ticket.class_name]
        is_within_reach = now + ticket.work_s < ticket.arrived_at + limits.target_ttft_s
        latest_at = now + limits.max_wait_s
        return min(latest_at, self._start_for_target(ticket)) if is_within_reach else latest_at

    def _start_for_target(self, ticket: AdmissionTicket) -> float:
        return ticket.arrived_at + self._classes[ticket.class_name].target_ttft_s - ticket.ttft_s

    def _reason(self, ticket: AdmissionTicket, latest_at: float) -> RefusalReason:
        return RefusalReason.TARGET if latest_at == self._start_for_target(ticket) else RefusalReason.WAIT

    def _cost_s(self, ticket: AdmissionTicket) -> float:
        capacity = self._capacity
        encode_s = ticket.encode_s / max(1, capacity.num_encoders)
        return max(encode_s, (ticket.work_s - ticket.encode_s) / max(1, capacity.num_prefills))

    def _wait_s(self, ticket: AdmissionTicket) -> float:
        """Predicted, for a newcomer."""
        queue = self._queue.of_class(ticket.class_name)
        ahead_s = queue.cost_ahead_s(ticket.tenant, ticket.is_text, self._cost_s(ticket))
        return ahead_s / self._lane(ticket).speed

    def _lane(self, ticket: AdmissionTicket) -> _QueueRate:
        return self._lanes[ticket.class_name, ticket.is_text]

    def _advance(self, ticket: AdmissionTicket, now: float) -> None:
        is_waiting = self._queue.of_class(ticket.class_name).has_waiting(ticket.is_text)
        self._lane(ticket).advance(now, is_waiting=is_waiting)
