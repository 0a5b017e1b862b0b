"""A cluster behind an `AdmissionQueue` in virtual time: encoders, then prefill workers, or workers that do
both, each first come first served, then decode's memory for a while. Drives the queue as a door does and
notes what becomes of every request."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.config.settings import AdmissionArgs, AdmissionClassArgs
from router.admission.queue import AdmissionQueue, AdmissionRefusal, AdmissionTicket, Admitted, Capacity
from tests.histories.scheduler import Scheduler


@dataclass(frozen=True)
class Arrival:
    at: float
    prefill_s: float
    class_name: str = "interactive"
    tenant: str = ""
    encode_s: float = 0.0
    num_blocks: int = 0
    decode_s: float = 0.0

    @property
    def stages_s(self) -> tuple[float, float]:
        return self.encode_s, self.prefill_s


@dataclass
class Story:
    """What became of one request."""

    arrival: Arrival
    ticket: AdmissionTicket
    admitted_at: float | None = None
    first_token_at: float | None = None
    refused_at: float | None = None
    refused: AdmissionRefusal | None = None

    @property
    def offered_at(self) -> float:
        return self.arrival.at

    @property
    def ttft_s(self) -> float:
        assert self.first_token_at is not None
        return self.first_token_at - self.ticket.arrived_at

    @property
    def wait_s(self) -> float:
        assert self.admitted_at is not None
        return self.admitted_at - self.offered_at


class _Pool:
    """Workers that serve one queue in order of arrival."""

    def __init__(self, num_workers: int):
        self.num_workers = self.num_free = num_workers
        self.waiting: deque[tuple[int, Story]] = deque()  # with the stage
        self.outstanding_s = 0.0


class DoorWorld:
    def __init__(
        self,
        *classes: AdmissionClassArgs,
        num_prefills: int = 2,
        num_encoders: int = 1,
        num_whole: int = 0,
        num_blocks: int = 10**9,
        slowdown: float = 1.0,
        **args: float,
    ):
        """`num_whole`: workers that encode and prefill, in place of the others. `slowdown`: how much longer
        everything takes than is predicted."""
        self.stories: list[Story] = []
        self._slowdown = slowdown
        whole = _Pool(num_whole)
        self._pools = (whole, whole) if num_whole else (_Pool(num_encoders), _Pool(num_prefills))
        self._scheduler = Scheduler()
        self._scheduler.after_event = self._settle
        self._running: dict[str, Story] = {}
        settings = AdmissionArgs.model_validate({"classes": classes, **args} if classes else args)
        num_encoders, num_prefills = (pool.num_workers for pool in self._pools)
        self.queue = AdmissionQueue(
            settings, 0.3, Capacity(num_encoders, num_prefills, num_blocks, num_whole)
        )

    def run(self, arrivals: Iterable[Arrival]) -> list[Story]:
        """Until all has ended; every request has ended exactly once."""
        for arrival in arrivals:
            self._scheduler.at(arrival.at, None, "", self._arrive, arrival)
        while self._scheduler.next_at is not None or self.queue.num_waiting:
            next_at, deadline = self._scheduler.next_at, self.queue.next_deadline()
            if deadline is not None and (next_at is None or deadline < next_at):
                self._scheduler.run_until(deadline)
                self._settle()
            else:
                self._scheduler.run_next()
        assert self.queue.is_idle and not self._running
        return self.stories

    def _arrive(self, arrival: Arrival) -> None:
        work_s = sum(arrival.stages_s)
        queued_s = max(
            pool.outstanding_s / pool.num_workers
            for pool, stage_s in zip(self._pools, arrival.stages_s, strict=True)
            if stage_s
        )
        now = self._scheduler.now
        ticket = AdmissionTicket(
            f"r{len(self.stories)}", arrival.tenant, arrival.class_name, arrival.encode_s == 0, work_s,
            arrival.num_blocks, queued_s + work_s, now, arrival.encode_s,
        )  # fmt: skip
        story = self._running[ticket.request_id] = Story(arrival, ticket)
        self.stories.append(story)
        answer = self.queue.offer(ticket, now)
        if isinstance(answer, Admitted):
            self._admit(story)
        elif isinstance(answer, AdmissionRefusal):
            self._refuse(story, answer)

    def _settle(self) -> None:
        for ticket in self.queue.freed(self._scheduler.now):
            self._admit(self._running[ticket.request_id])
        for ticket, refused in self.queue.expired(self._scheduler.now):
            self._refuse(self._running[ticket.request_id], refused)

    def _refuse(self, story: Story, refused: AdmissionRefusal) -> None:
        assert story.admitted_at is None and story.refused is None
        story.refused, story.refused_at = refused, self._scheduler.now
        del self._running[story.ticket.request_id]

    def _admit(self, story: Story) -> None:
        assert story.admitted_at is None and story.refused is None
        story.admitted_at = self._scheduler.now
        for pool, stage_s in zip(self._pools, story.arrival.stages_s, strict=True):
            pool.outstanding_s += stage_s
        self._enter(0 if story.arrival.encode_s else 1, story)

    def _enter(self, stage: int, story: Story) -> None:
        self._pools[stage].waiting.append((stage, story))
        self._start(self._pools[stage])

    def _start(self, pool: _Pool) -> None:
        while pool.num_free and pool.waiting:
            stage, story = pool.waiting.popleft()
            pool.num_free -= 1
            seconds = story.arrival.stages_s[stage] * self._slowdown
            self._scheduler.after(seconds, None, "", self._finish, stage, story)

    def _finish(self, stage: int, story: Story) -> None:
        pool = self._pools[stage]
        pool.num_free += 1
        pool.outstanding_s -= story.arrival.stages_s[stage]
        if stage == 0:
            self.queue.encoded(story.ticket.request_id)
            self._enter(1, story)
        else:
            story.first_token_at = self._scheduler.now
            self.queue.done(story.ticket.request_id)
            self._scheduler.after(story.arrival.decode_s, None, "", self._leave, story)
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
