"""The real request flow between the rig's engines, message by message: over ordered channels that a test
empties when it likes.

Placements are fixed, admission is open and timers do not fire, so that a test alone decides what happens and
when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from cluster.config.settings import AdmissionArgs
from cluster.errors import ClusterError, UnavailableError
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.media import MediaItem
from cluster.types.members import Member, Role
from cluster.types.messages import AnyMessage, BlocksChanged, Failed, FinishReason, TokenEvent
from cluster.types.request import GenerateRequest
from cluster.worker.blame import UNEXPECTED
from cluster.worker.outbox import Outbox
from router.admission.controller import AdmissionController
from router.admission.queue import AdmissionQueue, Capacity
from router.flow.outputs import Deliver, Send
from router.flow.placer import Placer
from router.flow.request_flow import RequestFlow, Timeouts
from router.flow.state import ClientRequest
from router.policy import ClusterView, Decision, ItemPrediction, ItemView, Placement, Prediction, RequestView
from router.telemetry.timeline import RequestTimeline
from tests.fakes.engines import BLOCK_SIZE, MARGIN_S, TIMEOUT_S, Rig

ROLES = {"encoder": Role.ENCODE, "prefill": Role.PREFILL, "decode": Role.DECODE}


@dataclass
class Line:
    """What one choice has come to."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class Story:
    """What one request has come to, over all its attempts."""

    request: GenerateRequest
    lines: list[Line]
    error: str | None = None
    is_closed: bool = False

    @property
    def is_over(self) -> bool:
        return all(line.finish_reason is not None for line in self.lines)

    @property
    def is_open(self) -> bool:
        return not self.is_closed and self.error is None and not self.is_over

    @property
    def tokens(self) -> list[int]:
        return self.lines[0].tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.lines[0].finish_reason


class FixedPolicy:
    """The one worker of each role. `replica_ids`: what it is called now."""

    def __init__(self, replica_ids: dict[str, str], codec: str):
        self.local: set[str] = set()  # requests whose prompt decode computes
        self._replica_ids = replica_ids
        self._codec = codec

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        ids = self._replica_ids
        is_local = request.request_id.partition(".")[0] in self.local
        items = tuple(ItemPrediction() for _ in request.media)
        placement = Placement(
            (ids["encoder"],) * len(items),
            ids["decode" if is_local else "prefill"],
            ids["decode"],
            self._codec,
        )
        return Decision(placement, Prediction(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, items), ())

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        if self._replica_ids["encoder"] in excluded:
            raise UnavailableError("no encode worker is ready")
        return self._replica_ids["encoder"]


class Relay:
    def __init__(self, rig: Rig, expects_faults: bool = False):
        """`expects_faults`: requests may fail because engines meet errors of their own."""
        self.rig = rig
        self._expects_faults = expects_faults
        self.to_worker: dict[str, deque[AnyMessage]] = {name: deque() for name in rig.workers}
        self.stories: dict[str, Story] = {}
        self._replica_ids: dict[str, str] = {}
        self._num_joined = 0
        self._policy = FixedPolicy(self._replica_ids, rig.codec)
        cluster = ClusterView(SchedulingPolicy(5.0, 2000.0, 0.3), 1.0, 1, codecs=("raw", rig.codec))
        queue = AdmissionQueue(AdmissionArgs(max_outstanding_s=1e9), 0.3, Capacity(0, 0, 0))
        self.flow = RequestFlow(
            Placer(self._policy, cluster, BLOCK_SIZE), AdmissionController(queue), Timeouts(TIMEOUT_S, inf)
        )
        for name in rig.workers:
            self._join(name)

    def start(
        self, request: GenerateRequest, items: Sequence[MediaItem] = (), prefills_locally: bool = False
    ) -> Story:
        request_id = request.request_id
        self.stories[request_id] = story = Story(request, [Line() for _ in request.sampling])
        if prefills_locally:
            self._policy.local.add(request_id)
        now = self.rig.clock.at
        timeline = RequestTimeline(now - request.waited_s)
        self.flow.submit(ClientRequest(request, items, (), timeline), now)
        self._carry_out()
        return story

    def send_one(self, name: str) -> None:
        if self.to_worker[name]:
            self.rig.receive(name, self.to_worker[name].popleft())

    def hear_one(self, name: str) -> None:
        said = self.rig.workers[name].said
        if said:
            message = said.popleft()
            self._check(name, message)
            self.flow.on_message(self._replica_ids[name], message, self.rig.clock.at)
            self._carry_out()

    def land(self, request_id: str) -> None:
        """The client leaves."""
        story = self.stories[request_id]
        if story.is_open:
            story.is_closed = True
            for choice_idx in range(len(story.lines)):
                self.flow.close(request_id, choice_idx, self.rig.clock.at)
            self._carry_out()

    def play(self, rounds: int = 60) -> None:
        """Everything happens at once, `rounds` times."""
        for _ in range(rounds):
            for name in self.rig.workers:
                while self.to_worker[name]:
                    self.send_one(name)
            self.rig.turn()
            for name in self.rig.workers:
                while self.rig.workers[name].said:
                    self.hear_one(name)

    def finish(self) -> None:
        """All clients leave; what is under way ends, by its deadline if need be; then nothing is held."""
        for request_id in list(self.stories):
            self.land(request_id)
        self.play(20)
        self.rig.clock.at += TIMEOUT_S + MARGIN_S
        self.play(5)
        self.rig.audit()
        assert self.flow.is_idle and self.flow.num_crashed == 0

    def lose(self, name: str, *, dies: bool) -> None:
        """A worker's connection ends, with its process or alone; the next one is there before."""
        self.to_worker[name].clear()
        if dies:
            self.rig.start_worker(name)
        else:
            self.rig.reconnect(name)
        lost = self._replica_ids[name]
        self._join(name)
        self.flow.on_lost(lost, self.rig.clock.at)
        if not dies:
            self.flow.quarantine.came_back(lost)
        self._carry_out()

    def _join(self, name: str) -> None:
        """Under a name of its own: the flow knows the earlier worker for a while."""
        self._num_joined += 1
        self._replica_ids[name] = f"{name}#{self._num_joined}"
        processes = (self.rig.workers[name].process,)
        member = Member(
            replica_id=self._replica_ids[name],
            role=ROLES[name],
            address="",
            model="",
            layout="",
            num_blocks=10**9,
            processes=processes,
        )
        self.flow.on_joined(member, self.rig.clock.at)

    def _carry_out(self) -> None:
        for output in self.flow.take_outputs():
            if isinstance(output, Send):
                name = output.replica_id.partition("#")[0]
                if self._replica_ids[name] == output.replica_id:
                    self.to_worker[name].append(output.message)
            elif isinstance(output, Deliver):
                self._deliver(self.stories[output.request_id], output.choice_idx, output.event)

    @staticmethod
    def _deliver(story: Story, choice_idx: int, event: TokenEvent | ClusterError) -> None:
        line = story.lines[choice_idx]
        assert line.finish_reason is None, "a choice has one end"
        if isinstance(event, ClusterError):
            story.error = event.message
        else:
            line.tokens += event.token_ids
            line.finish_reason = event.finish_reason

    def _check(self, name: str, message: AnyMessage) -> None:
        if isinstance(message, Failed) and not self._expects_faults and message.error.message == UNEXPECTED:
            raise AssertionError(f"{message.request_id} met an error in the {name} engine")


def cached_at(outbox: Outbox) -> set[bytes]:
    """The blocks that doors know to be cached at a worker, from now on; the set follows what they hear."""
    known: set[bytes] = set()
    said = outbox._deliver

    def hear(batch):
        for _, message in batch:
            if isinstance(message, BlocksChanged):
                known.update(message.added)
                known.difference_update(message.evicted)
        said(batch)

    outbox._deliver = hear
    return known
