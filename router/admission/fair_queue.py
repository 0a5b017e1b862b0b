"""The requests that wait at a door, and the order in which they start. Pure.

There are three levels. Between classes, and between the tenants of a class: start-time fair queueing (Goyal,
Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996). Within a tenant: earliest deadline first.

    a flow begins to wait        its start tag is S = max(V, F)
    the next flow                is the one with the smallest S
    one of its requests starts   V = max(V, S);  S = F = S + work_s / weight

V is the level's virtual time, F the flow's last finish tag.

A flow gets no credit for the time in which it did not wait. A flow that is passed over (`text_only`) keeps
its tag. While two flows wait, their shares differ from the ratio of their weights by at most one request of
each (theorem 1 there), however many requests either has.

Every level keeps text and media apart, so that text can be asked for alone. Sorted lists: a call costs O(log
n) and a short memory move.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

_Edit = Callable[[list["Waiting"], "Waiting"], None]


@dataclass(frozen=True, slots=True)
class AdmissionTicket:
    """What admission knows of a request. Instants are seconds of the caller's clock.

    tenant       requests of one tenant have one share together; "" is a tenant like any other
    is_text      no media
    work_s       predicted seconds of encoders and prefill workers together
    encode_s     predicted seconds of encoders alone
    num_blocks   KV blocks it is expected to hold at decode; not the most it might hold
    ttft_s       predicted seconds from admission to its first token; to meet targets, the upper end of the
                 interval
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
    latest_at: float  # when the request is too late to start
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
    """The waiting requests of one tenant in one class: a line for media (0) and one for text (1)."""

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
    """Finds the tenant with most tickets in line: tenants by number of tickets. O(1) a change."""

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
    """One class; its tenants get equal shares of work."""

    def __init__(self, weight: float):
        self.weight = weight
        self.start_tag = 0.0  # among the classes
        self.cost_s = [0.0, 0.0]  # of waiting requests: media, text
        self._virtual_s = 0.0
        self._flows: dict[str, _Flow] = {}
        self._order: tuple[list[_Rank], list[_Rank]] = ([], [])  # flows with media, with text
        self._lengths = _Lengths()
        self._num_waiting = 0
        # Of tenants with nothing in line, as long as the tag is beyond the virtual time. The heap has the
        # same tags.
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
        """The request will not start."""
        self._change(self._flows[waiting.ticket.tenant], waiting, _delete, -1)

    def take(self, waiting: Waiting) -> None:
        """The request starts, and its tenant is charged."""
        flow = self._flows[waiting.ticket.tenant]
        self._virtual_s = max(self._virtual_s, flow.start_tag)
        self._change(flow, waiting, _delete, -1, waiting.ticket.work_s)
        while self._finished and self._finished[0][0] <= self._virtual_s:
            finish_tag, tenant = heappop(self._finished)
            if self._finish_tags.get(tenant) == finish_tag:
                del self._finish_tags[tenant]

    def head(self, *, text_only: bool) -> Waiting | None:
        """The next request."""
        kinds = (1,) if text_only else (0, 1)
        rank = min((self._order[kind][0] for kind in kinds if self._order[kind]), default=None)
        if rank is None:
            return None
        lines = self._flows[rank[2]].lines
        return min((lines[kind][0] for kind in kinds if lines[kind]), key=_urgency)

    def least_urgent(self) -> Waiting:
        """The least urgent request of the tenant with most tickets. Raises StopIteration if none waits."""
        lines = self._flows[self._lengths.longest()].lines
        return max((line[-1] for line in lines if line), key=_urgency)

    def cost_ahead_s(self, tenant: str, is_text: bool, cost_s: float) -> float:
        """Cost of the requests of this kind that start before a new ticket: all of its own tenant's, and of
        every other tenant's as much as the own tenant gets in that time, but no more than there is."""
        flow = self._flows.get(tenant)
        own_s = flow.cost_s[is_text] if flow else 0.0
        is_new = flow is None or not flow.lines[is_text]
        num_flows = len(self._order[is_text]) + is_new
        return min(self.cost_s[is_text], (own_s + cost_s) * num_flows - cost_s)

    def _change(self, flow: _Flow, waiting: Waiting, edit: _Edit, step: int, work_s: float = 0.0) -> None:
        """Adds or removes a ticket (`step`) of a flow, whose start tag then moves by `work_s`."""
        kind, length = int(waiting.ticket.is_text), len(flow)
        for order in self._orders(flow):
            del order[bisect_left(order, flow.rank)]
        edit(flow.lines[kind], waiting)
        flow.start_tag += work_s
        for order in self._orders(flow):
            insort(order, flow.rank)
        flow.cost_s[kind] = flow.cost_s[kind] + step * waiting.cost_s if flow.lines[kind] else 0.0
        self.cost_s[kind] = self.cost_s[kind] + step * waiting.cost_s if self._order[kind] else 0.0
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
    """All classes; they share the work by weight."""

    def __init__(self, weights: Mapping[str, float]):
        """`weights`: of the classes. The last class is refused first when the queue is full."""
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
        """Returns the queue of a class, for reading."""
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
        """The next request, of all or of those without media."""
        heads = [(queue.start_tag, queue.head(text_only=text_only)) for queue in self._classes.values()]
        return min(
            ((tag, head) for tag, head in heads if head), key=lambda pair: pair[0], default=(0.0, None)
        )[1]

    def take(self, request_id: str) -> Waiting:
        """The request starts."""
        waiting = self._forget(request_id)
        queue = self._classes[waiting.ticket.class_name]
        queue.take(waiting)
        self._virtual_s = max(self._virtual_s, queue.start_tag)
        queue.start_tag += waiting.ticket.work_s / queue.weight
        return waiting

    def remove(self, request_id: str) -> Waiting:
        """The request will not start."""
        waiting = self._forget(request_id)
        self._classes[waiting.ticket.class_name].remove(waiting)
        return waiting

    def first_deadline(self) -> Waiting | None:
        return self._deadlines[0] if self._deadlines else None

    def displaced_by(self, ticket: AdmissionTicket) -> AdmissionTicket | None:
        """The ticket whose place a new ticket, which waits already, may take: the least urgent one of the
        tenant with most tickets, in the lowest class that has two tickets. In the new ticket's own class that
        tenant must have more tickets than its own. None: there is no such ticket."""
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
