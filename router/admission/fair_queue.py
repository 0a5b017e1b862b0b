"""Requests that wait at a door, and who of them goes next. Pure.

Three levels. Between classes and, within a class, between tenants: start-time fair queueing (Goyal, Vin and Cheng, "Start-time
Fair Queueing", SIGCOMM 1996). Within a tenant: the earliest deadline first.

    start tag  of a flow that starts to wait   S = max(V, F)      V: the level's virtual time, F: the flow's last finish tag
    who goes                                   the smallest S
    when it goes                               V = max(V, S);  S = F = S + work_s / weight

A flow has no credit for the time it did not wait, and a flow that is kept from going (`text_only`) keeps its tag. While two flows wait, what
they get differs from their weights' ratio by at most one request of each (theorem 1 there), however many requests either has.

Every level keeps text and media apart, so that text can be asked for alone. Sorted lists: O(log n) and a short memory move a call.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

_Edit = Callable[[list["Waiting"], "Waiting"], None]


@dataclass(frozen=True, slots=True)
class AdmissionTicket:
    """What the door must know of a request to decide when it goes. Instants are seconds of the caller's clock.

    tenant       who pays: requests of one tenant share one share; "" is a tenant like any other
    is_text      no media
    work_s       predicted seconds of encoders and prefill workers together …
    encode_s     … and how many of them are encoders'
    num_blocks   KV blocks it is expected to hold at decode, not the most it might come to hold
    ttft_s       predicted seconds from admission to its first token; the upper end of its interval where targets are to be met
    arrived_at   when the client asked
    """

    request_id: str
    tenant: str
    class_name: str
    is_text: bool
    work_s: float
    num_blocks: int
    ttft_s: float
    arrived_at: float
    encode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A ticket in the queue."""

    ticket: AdmissionTicket
    latest_at: float  # until when going is of use
    cost_s: float  # of the whole cluster's time
    number: int  # order of arrival at the queue


def _urgency(waiting: Waiting) -> tuple[float, int]:
    return waiting.latest_at, waiting.number


def _insert(line: list[Waiting], waiting: Waiting) -> None:
    insort(line, waiting, key=_urgency)


def _delete(line: list[Waiting], waiting: Waiting) -> None:
    del line[bisect_left(line, _urgency(waiting), key=_urgency)]


_Rank = tuple[float, int, str]  # start tag, arrival of the flow, tenant


class _Flow:
    """What waits of one tenant in one class: a line each for media (0) and text (1)."""

    __slots__ = ("cost_s", "lines", "number", "start_tag", "tenant")

    def __init__(self, tenant: str, start_tag: float, number: int):
        self.tenant = tenant
        self.start_tag = start_tag
        self.number = number
        self.lines: tuple[list[Waiting], list[Waiting]] = ([], [])
        self.cost_s = [0.0, 0.0]

    def __len__(self) -> int:
        return len(self.lines[0]) + len(self.lines[1])

    @property
    def rank(self) -> _Rank:
        return self.start_tag, self.number, self.tenant


class _Lengths:
    """Which tenant has most tickets in line: tenants by how many they have. O(1) a change."""

    def __init__(self) -> None:
        self._tenants: list[dict[str, None]] = [{}]  # [length] → tenants

    def change(self, tenant: str, old: int, new: int) -> None:
        """`new` is one more or one less."""
        self._tenants[old].pop(tenant, None)
        if new == len(self._tenants):
            self._tenants.append({})
        if new:
            self._tenants[new][tenant] = None
        while len(self._tenants) > 1 and not self._tenants[-1]:
            self._tenants.pop()

    def longest(self) -> str:
        return next(iter(self._tenants[-1]))


class ClassQueue:
    """One class: fair between its tenants, by work."""

    def __init__(self, weight: float):
        self.weight = weight
        self.start_tag = 0.0  # among the classes
        self.cost_s = [0.0, 0.0]  # that waits: media, text
        self._virtual_s = 0.0
        self._flows: dict[str, _Flow] = {}
        self._order: tuple[list[_Rank], list[_Rank]] = ([], [])  # flows with media, with text
        self._lengths = _Lengths()
        self._num_waiting = 0
        # of tenants with nothing in line, while beyond the virtual time; once more as a heap
        self._finish_tags: dict[str, float] = {}
        self._finished: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return self._num_waiting

    def num_waiting(self, tenant: str) -> int:
        return len(self._flows.get(tenant, ()))

    def has_waiting(self, is_text: bool) -> bool:
        return bool(self._order[is_text])

    def push(self, waiting: Waiting) -> None:
        tenant = waiting.ticket.tenant
        flow = self._flows.get(tenant)
        if flow is None:
            start_tag = max(self._virtual_s, self._finish_tags.pop(tenant, 0.0))
            flow = self._flows[tenant] = _Flow(tenant, start_tag, waiting.number)
        self._change(flow, waiting, _insert, 1)

    def remove(self, waiting: Waiting) -> None:
        """It does not go any more."""
        self._change(self._flows[waiting.ticket.tenant], waiting, _delete, -1)

    def take(self, waiting: Waiting) -> None:
        """It goes, at its tenant's expense."""
        flow = self._flows[waiting.ticket.tenant]
        self._virtual_s = max(self._virtual_s, flow.start_tag)
        self._change(flow, waiting, _delete, -1, waiting.ticket.work_s)
        while self._finished and self._finished[0][0] <= self._virtual_s:
            finish_tag, tenant = heappop(self._finished)
            if self._finish_tags.get(tenant) == finish_tag:
                del self._finish_tags[tenant]

    def head(self, *, text_only: bool) -> Waiting | None:
        """Who goes next."""
        lanes = (1,) if text_only else (0, 1)
        rank = min((self._order[lane][0] for lane in lanes if self._order[lane]), default=None)
        if rank is None:
            return None
        lines = self._flows[rank[2]].lines
        return min((lines[lane][0] for lane in lanes if lines[lane]), key=_urgency)

    def least_urgent(self) -> Waiting:
        """Of the tenant that has most tickets in line. Raises StopIteration if nobody waits."""
        lines = self._flows[self._lengths.longest()].lines
        return max((line[-1] for line in lines if line), key=_urgency)

    def cost_ahead_s(self, tenant: str, is_text: bool, cost_s: float) -> float:
        """What goes before a new ticket of this lane: all that its tenant has there, and of every other tenant as much as
        its own share until then, but no more than there is."""
        flow = self._flows.get(tenant)
        own_s = flow.cost_s[is_text] if flow else 0.0
        is_new = flow is None or not flow.lines[is_text]
        num_flows = len(self._order[is_text]) + is_new
        return min(self.cost_s[is_text], (own_s + cost_s) * num_flows - cost_s)

    def _change(self, flow: _Flow, waiting: Waiting, edit: _Edit, step: int, work_s: float = 0.0) -> None:
        """One ticket more or less (`step`) in a flow that then has a start tag `work_s` later."""
        lane, length = int(waiting.ticket.is_text), len(flow)
        for order in self._orders(flow):
            del order[bisect_left(order, flow.rank)]
        edit(flow.lines[lane], waiting)
        flow.start_tag += work_s
        for order in self._orders(flow):
            insort(order, flow.rank)
        flow.cost_s[lane] = flow.cost_s[lane] + step * waiting.cost_s if flow.lines[lane] else 0.0
        self.cost_s[lane] = self.cost_s[lane] + step * waiting.cost_s if self._order[lane] else 0.0
        self._num_waiting += step
        self._lengths.change(flow.tenant, length, length + step)
        if not len(flow):
            self._close(flow)

    def _orders(self, flow: _Flow) -> list[list[_Rank]]:
        return [order for order, line in zip(self._order, flow.lines, strict=True) if line]

    def _close(self, flow: _Flow) -> None:
        del self._flows[flow.tenant]
        if flow.start_tag > self._virtual_s:
            self._finish_tags[flow.tenant] = flow.start_tag
            heappush(self._finished, (flow.start_tag, flow.tenant))


class FairQueue:
    """All classes; fair between them, by work and weight."""

    def __init__(self, weights: Mapping[str, float]):
        """`weights` of the classes, the one that is shed last first."""
        self._classes = {name: ClassQueue(weight) for name, weight in weights.items()}
        self._waiting: dict[str, Waiting] = {}
        self._deadlines: list[Waiting] = []
        self._virtual_s = 0.0
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def of_class(self, name: str) -> ClassQueue:
        """For reading."""
        return self._classes[name]

    def push(self, ticket: AdmissionTicket, latest_at: float, cost_s: float) -> None:
        self._num_pushed += 1
        waiting = Waiting(ticket, latest_at, cost_s, self._num_pushed)
        self._waiting[ticket.request_id] = waiting
        _insert(self._deadlines, waiting)
        queue = self._classes[ticket.class_name]
        if not len(queue):
            queue.start_tag = max(queue.start_tag, self._virtual_s)
        queue.push(waiting)

    def head(self, *, text_only: bool = False) -> Waiting | None:
        """Who goes next, of all or of those without media."""
        heads = [(queue.start_tag, queue.head(text_only=text_only)) for queue in self._classes.values()]
        return min(
            ((tag, head) for tag, head in heads if head), key=lambda pair: pair[0], default=(0.0, None)
        )[1]

    def take(self, request_id: str) -> Waiting:
        """It goes."""
        waiting = self._forget(request_id)
        queue = self._classes[waiting.ticket.class_name]
        queue.take(waiting)
        self._virtual_s = max(self._virtual_s, queue.start_tag)
        queue.start_tag += waiting.ticket.work_s / queue.weight
        return waiting

    def remove(self, request_id: str) -> Waiting:
        """It does not go any more."""
        waiting = self._forget(request_id)
        self._classes[waiting.ticket.class_name].remove(waiting)
        return waiting

    def first_deadline(self) -> Waiting | None:
        return self._deadlines[0] if self._deadlines else None

    def displaced_by(self, ticket: AdmissionTicket) -> AdmissionTicket | None:
        """Whose place a new ticket, which waits already, may take: that of the least urgent request in the longest line of the lowest
        class that has two; in the ticket's own class the line must be longer than its tenant's. None: nobody's."""
        for name, queue in reversed(self._classes.items()):
            if len(queue) > 1:
                victim = queue.least_urgent().ticket
                is_longer = queue.num_waiting(victim.tenant) > queue.num_waiting(ticket.tenant)
                if name != ticket.class_name or is_longer:
                    return victim
            if name == ticket.class_name:
                return None
        return None

    def _forget(self, request_id: str) -> Waiting:
        waiting = self._waiting.pop(request_id)
        _delete(self._deadlines, waiting)
        return waiting
