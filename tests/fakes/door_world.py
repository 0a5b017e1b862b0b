"""A cluster behind an `AdmissionQueue` in virtual time: encoders, then prefill workers, or workers that do
both, each first come first served, then decode's memory for a while. Drives the queue as a door does and
notes what becomes of every request."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from cluster.config.settings import AdmissionArgs, AdmissionClassArgs
from router.admission.queue import AdmissionQueue, AdmissionRefusal, AdmissionTicket, Admitted, Capacity


@dataclass
class Story:
    """What became of one request."""

    ticket: AdmissionTicket
    offered_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    refused_at: float | None = None
    refused: AdmissionRefusal | None = None

    @property
    def ttft_s(self) -> float:
        assert self.first_token_at is not None
        return self.first_token_at - self.ticket.arrived_at

    @property
    def wait_s(self) -> float:
        assert self.admitted_at is not None
        return self.admitted_at - self.offered_at


@dataclass(frozen=True)
class Arrival:
    at: float
    prefill_s: float
    class_name: str = "interactive"
    tenant: str = ""
    encode_s: float = 0.0
    num_blocks: int = 0
    decode_s: float = 0.0


class _Pool:
    """Workers that serve one queue in order of arrival."""

    def __init__(self, num_workers: int):
        self.free = num_workers
        self.num_workers = num_workers
        self.waiting: deque[tuple[int, Story, Arrival]] = deque()  # with the stage
        self.outstanding_s = 0.0


class DoorWorld:
    def __init__(
        self,
        *classes: AdmissionClassArgs,
        num_prefills: int = 2,
        num_encoders: int = 1,
        num_whole: int = 0,
        num_blocks: int = 10**9,
        text_share: float = 0.3,
        slowdown: float = 1.0,
        **args: float,
    ):
        """`num_whole`: workers that encode and prefill, in place of the others. `slowdown`: how much longer
        everything takes than is predicted."""
        self.now = 0.0
        self.stories: list[Story] = []
        self._slowdown = slowdown
        whole = _Pool(num_whole)
        self._pools = (whole, whole) if num_whole else (_Pool(num_encoders), _Pool(num_prefills))
        self._events: list[tuple[float, int, object]] = []
        self._numbers = count()
        self._running: dict[str, tuple[Story, Arrival]] = {}
        settings = AdmissionArgs.model_validate({"classes": classes, **args} if classes else args)
        num_encoders, num_prefills = (pool.num_workers for pool in self._pools)
        capacity = Capacity(num_encoders, num_prefills, num_blocks, num_whole)
        self.queue = AdmissionQueue(settings, text_share, capacity)

    def run(self, arrivals: Iterable[Arrival]) -> list[Story]:
        """Until all has ended; every request has ended exactly once."""
        for arrival in arrivals:
            self._at(arrival.at, lambda arrival=arrival: self._arrive(arrival))
        while self._events or self.queue.num_waiting:
            deadline = self.queue.next_deadline()
            if deadline is not None and (not self._events or deadline <= self._events[0][0]):
                self.now = max(self.now, deadline)
            else:
                self.now, _, action = heappop(self._events)
                action()  # type: ignore[operator]
            self._settle()
        assert self.queue.is_idle and not self._running
        return self.stories

    def _at(self, at: float, action: object) -> None:
        heappush(self._events, (at, next(self._numbers), action))

    def _arrive(self, arrival: Arrival) -> None:
        encoders, prefills = self._pools
        work_s = arrival.prefill_s + arrival.encode_s
        queued_s = prefills.outstanding_s / prefills.num_workers
        if arrival.encode_s:
            queued_s = max(queued_s, encoders.outstanding_s / encoders.num_workers)
        ticket = AdmissionTicket(
            f"r{len(self.stories)}", arrival.tenant, arrival.class_name, arrival.encode_s == 0, work_s,
            arrival.num_blocks, queued_s + work_s, self.now, arrival.encode_s,
        )  # fmt: skip
        story = Story(ticket, self.now)
        self.stories.append(story)
        self._running[ticket.request_id] = (story, arrival)
        answer = self.queue.offer(ticket, self.now)
        if isinstance(answer, Admitted):
            self._admit(story, arrival)
        elif isinstance(answer, AdmissionRefusal):
            self._refuse(story, answer)

    def _settle(self) -> None:
        for ticket in self.queue.freed(self.now):
            self._admit(*self._running[ticket.request_id])
        for ticket, refused in self.queue.expired(self.now):
            self._refuse(self._running[ticket.request_id][0], refused)

    def _refuse(self, story: Story, refused: AdmissionRefusal) -> None:
        assert story.admitted_at is None and story.refused is None
        story.refused, story.refused_at = refused, self.now
        del self._running[story.ticket.request_id]

    def _admit(self, story: Story, arrival: Arrival) -> None:
        assert story.admitted_at is None and story.refused is None
        story.admitted_at = self.now
        for pool, work_s in zip(self._pools, (arrival.encode_s, arrival.prefill_s), strict=True):
            pool.outstanding_s += work_s
        self._enter(0 if arrival.encode_s else 1, story, arrival)

    def _enter(self, stage: int, story: Story, arrival: Arrival) -> None:
        self._pools[stage].waiting.append((stage, story, arrival))
        self._start(self._pools[stage])

    def _start(self, pool: _Pool) -> None:
        while pool.free and pool.waiting:
            stage, story, arrival = pool.waiting.popleft()
            pool.free -= 1
            work_s = (arrival.encode_s, arrival.prefill_s)[stage]
            self._at(
                self.now + work_s * self._slowdown,
                lambda stage=stage, story=story, arrival=arrival, work_s=work_s: self._finish(
                    stage, story, arrival, work_s
                ),
            )

    def _finish(self, stage: int, story: Story, arrival: Arrival, work_s: float) -> None:
        pool = self._pools[stage]
        pool.free += 1
        pool.outstanding_s -= work_s
        if stage == 0:
            self.queue.encoded(story.ticket.request_id)
            self._enter(1, story, arrival)
        else:
            story.first_token_at = self.now
            self.queue.done(story.ticket.request_id)
            self._at(self.now + arrival.decode_s, lambda: self._leave(story))
        self._start(pool)

    def _leave(self, story: Story) -> None:
        self.queue.leave(story.ticket.request_id)
        del self._running[story.ticket.request_id]


def poisson(
    seed: int, rate: float, duration_s: float, mean_s: float, begin_at: float = 0.0, **fields
) -> list[Arrival]:
    """Arrivals at `rate` per second whose prefill takes a tenth to twice of `mean_s` (on average that)."""
    random_ = random.Random(seed)
    at, arrivals = begin_at, []
    while (at := at + random_.expovariate(rate)) < begin_at + duration_s:
        arrivals.append(Arrival(at, random_.uniform(0.1, 1.9) * mean_s, **fields))
    return arrivals


def one_class(**limits) -> AdmissionClassArgs:
    return AdmissionClassArgs(name="interactive", **limits)


def two_classes(**limits) -> tuple[AdmissionClassArgs, AdmissionClassArgs]:
    first = AdmissionClassArgs(name="interactive", max_priority=0, weight=8, **limits)
    return first, AdmissionClassArgs(name="batch", max_wait_s=300)
