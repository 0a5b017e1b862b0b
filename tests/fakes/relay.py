"""The real request flow between the rig's engines, message by message: a worker is handed its next message,
and the door hears the next one, when a test likes.

Placements are fixed, admission is open and timers do not fire, so that a test alone decides what happens and
when.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

from cluster.errors import UnavailableError
from cluster.types.media import MediaItem
from cluster.types.members import Role
from cluster.types.messages import AnyMessage, BlocksChanged, Failed, FinishReason
from cluster.types.request import GenerateRequest
from cluster.worker.blame import UNEXPECTED
from router.flow.request_flow import Timeouts
from router.policy import ClusterView, Decision, ItemPrediction, ItemView, Placement, Prediction, RequestView
from router.telemetry.timeline import RequestTimeline
from tests.fakes.engines import BLOCK_SIZE, MARGIN_S, TIMEOUT_S, Rig
from tests.fakes.scripted_flow import Reader, ScriptedFlow
from tests.fakes.workers import Worker

ROLES = {"encoder": Role.ENCODE, "prefill": Role.PREFILL, "decode": Role.DECODE}


@dataclass
class Story:
    """What one request has come to, over all its attempts."""

    request: GenerateRequest
    lines: list[Reader]

    @property
    def error(self) -> str | None:
        return next((line.error.message for line in self.lines if line.error is not None), None)

    @property
    def is_over(self) -> bool:
        return all(line.finish_reason is not None for line in self.lines)

    @property
    def is_open(self) -> bool:
        return not all(line.has_ended for line in self.lines)

    @property
    def tokens(self) -> list[int]:
        return self.lines[0].token_ids

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


class Relay(ScriptedFlow):
    """Its workers are the rig's."""

    block_size = BLOCK_SIZE
    timeouts = Timeouts(TIMEOUT_S, inf)

    def __init__(self, rig: Rig, expects_faults: bool = False):
        """`expects_faults`: requests may fail because engines meet errors of their own."""
        self.rig = rig
        self._expects_faults = expects_faults
        self.stories: dict[str, Story] = {}
        self._replica_ids: dict[str, str] = {}
        self._num_joined = 0
        self._policy = FixedPolicy(self._replica_ids, rig.codec)
        super().__init__(self._policy, (), rig.clock, ("raw", rig.codec), max_outstanding_s=1e9)
        for name in rig.workers:
            self._join(name)

    @property
    def to_worker(self) -> dict[str, list[AnyMessage]]:
        """What the door has sent to each worker and the worker has not received."""
        return {name: self.messages[replica_id] for name, replica_id in self._replica_ids.items()}

    def start(
        self, request: GenerateRequest, items: Sequence[MediaItem] = (), prefills_locally: bool = False
    ) -> Story:
        if prefills_locally:
            self._policy.local.add(request.request_id)
        lines = self.submit(request, items, timeline=RequestTimeline(self.now - request.waited_s))
        self.stories[request.request_id] = story = Story(request, lines)
        return story

    def send_one(self, name: str) -> None:
        if self.to_worker[name]:
            self.rig.receive(name, self.to_worker[name].pop(0))

    def hear_one(self, name: str) -> None:
        said = self.rig.workers[name].said
        if said:
            message = said.popleft()
            self._check(name, message)
            self.tell(self._replica_ids[name], message)

    def land(self, request_id: str) -> None:
        """The client leaves."""
        for line in self.stories[request_id].lines:
            if not line.has_ended:
                self.close(line)

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
        for request_id in self.stories:
            self.land(request_id)
        self.play(20)
        self.rig.clock.at += TIMEOUT_S + MARGIN_S
        self.play(5)
        self.rig.audit()
        self.audit()
        assert self.flow.num_crashed == 0

    def lose_worker(self, name: str, *, dies: bool) -> None:
        """A worker's connection ends, with its process or alone; the next one is there before."""
        if dies:
            self.rig.start_worker(name)
        else:
            self.rig.reconnect(name)
        lost = self._replica_ids[name]
        self._join(name)
        self.lose(lost)
        if not dies:
            self.flow.quarantine.came_back(lost)

    def _join(self, name: str) -> None:
        """Under a name of its own: the flow knows the earlier worker for a while."""
        self._num_joined += 1
        self._replica_ids[name] = f"{name}#{self._num_joined}"
        processes = (self.rig.workers[name].process,)
        self.join(ROLES[name], self._replica_ids[name], num_blocks=10**9, processes=processes)

    def _check(self, name: str, message: AnyMessage) -> None:
        if isinstance(message, Failed) and not self._expects_faults and message.error.message == UNEXPECTED:
            raise AssertionError(f"{message.request_id} met an error in the {name} engine")


def cached_at(worker: Worker) -> set[bytes]:
    """The blocks that doors know to be cached at a worker, from now on; the set follows what they hear."""
    known: set[bytes] = set()

    def hear(message: AnyMessage) -> None:
        if isinstance(message, BlocksChanged):
            known.update(message.added)
            known.difference_update(message.evicted)

    worker.listeners.append(hear)
    return known
