"""A request flow between workers that say what a test has them say, in virtual time. Keeps what workers are
sent and readers get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.config.settings import AdmissionArgs
from cluster.errors import ClusterError, UnavailableError, to_info
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.media import MediaGeometry, MediaItem, Modality, PlacedMedia
from cluster.types.members import Member, Role
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    Failed,
    FinishReason,
    LoadReport,
    Ping,
    PrefillAdmitted,
    TokenEvent,
    Tokens,
)
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from cluster.types.transfer import Contract, Grant
from router.admission.controller import AdmissionController
from router.admission.queue import AdmissionQueue, Capacity
from router.flow.outputs import CallDecode, Deliver, Drained, Output, Placed, Send
from router.flow.placer import Placer
from router.flow.request_flow import RequestFlow, Timeouts
from router.flow.state import Attempt, ClientRequest
from router.flow.watch import LONGEST_PAUSE_S
from router.policy import ClusterView, JointPolicy, Policy
from router.telemetry.timeline import RequestTimeline
from tests.fakes.clock import ManualClock
from tests.fakes.placement import EPD

FIRST_TOKEN_S, REQUEST_S = 20.0, 40.0
ITEM = MediaItem(Modality.IMAGE, b"png", "hash", MediaGeometry(3))
REQUEST = GenerateRequest(
    "r",
    Prompt((1, 2, 9, 9, 9, 3), (PlacedMedia(ITEM.modality, "hash", ((2, 3),), ITEM.geometry),)),
    (SamplingParams(),),
    StopParams(3),
)


def grant(lease_id: str) -> Grant:
    return Grant(lease_id, b"", 0, 8, Contract(0, "", 16, (), "raw", ""), (0,), (0,), 1.0)


@dataclass
class Reader:
    """One choice."""

    request_id: str
    choice_idx: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: ClusterError | None = None
    has_left: bool = False  # the client has closed the stream

    def get(self, event: TokenEvent | ClusterError) -> None:
        assert not self.has_ended, "an ended choice gets no more"
        if isinstance(event, ClusterError):
            self.error = event
        else:
            self.token_ids += event.token_ids
            self.finish_reason = event.finish_reason

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.has_left

    def check_error(self, kind: type[ClusterError], match: str) -> None:
        assert self.error is not None, "no error has come"
        with pytest.raises(kind, match=match):
            raise self.error


class ScriptedFlow:
    """One worker of each of the roles, named like it."""

    block_size = 16
    timeouts = Timeouts(FIRST_TOKEN_S, REQUEST_S)

    def __init__(
        self,
        policy: Policy | None = None,
        roles: Sequence[Role] = EPD,
        clock: ManualClock | None = None,
        codecs: Sequence[str] = ("raw",),
        **admission: Any,
    ):
        self.clock = clock or ManualClock(100.0)
        scheduling = SchedulingPolicy(5.0, 2000.0, 0.3)
        self.cluster = ClusterView(scheduling, kv_bytes_per_token=1.0, num_layers=2, codecs=codecs)
        self.queue = AdmissionQueue(AdmissionArgs(**admission), 0.3, Capacity(0, 0, 0))
        self.flow = RequestFlow(
            Placer(policy or JointPolicy(), self.cluster, self.block_size),
            AdmissionController(self.queue),
            self.timeouts,
        )
        self.messages: dict[str, list[AnyMessage]] = {}
        self.num_pings = 0
        self.calls: list[str] = []  # requests whose decode replica was called
        self.drained: list[str] = []
        self.readers: dict[str, list[Reader]] = {}
        self.items: list[MediaItem] = []  # of all requests
        self.cannot_send: Callable[[AnyMessage], bool] = lambda _: False
        for role in roles:
            self.join(role)

    @property
    def now(self) -> float:
        return self.clock.at

    # The driver

    def run(self, call: Callable[..., None], *args: Any) -> None:
        call(*args, self.now)
        while outputs := self.flow.take_outputs():
            for output in outputs:
                self._carry_out(output)

    def _carry_out(self, output: Output) -> None:
        match output:
            case Send(name, message, request_id):
                if self.cannot_send(message):
                    self.flow.on_send_failed(request_id, UnavailableError("frame too long"), self.now)
                elif isinstance(message, Ping):
                    self.num_pings += 1
                else:
                    self.messages[name].append(message)
            case Deliver(request_id, choice_idx, event):
                self.readers[request_id][choice_idx].get(event)
            case CallDecode(_, request_id):
                self.calls += [request_id] if request_id in self.flow.attempts else []
            case Placed(timeline):
                timeline.started(self.now)
            case Drained(name):
                self.drained.append(name)
                self.flow.on_lost(name, self.now)

    def wait(self, seconds: float) -> None:
        """Timers fire when they are due."""
        end = self.now + seconds
        while (at := self.flow.next_timer()) is not None and at <= end:
            self.clock.at = max(self.now, at)
            self.run(self.flow.on_timer)
        self.clock.at = end

    # Workers

    def join(self, role: Role, name: str = "", num_blocks: int = 8, **fields: Any) -> None:
        name = name or role.value
        self.messages.setdefault(name, [])
        member = Member(
            replica_id=name, role=role, address="", model="", layout="", num_blocks=num_blocks, **fields
        )
        self.run(self.flow.on_joined, member)

    def lose(self, name: str) -> None:
        self.run(self.flow.on_lost, name)

    def tell(self, name: str, message: AnyMessage) -> None:
        self.run(self.flow.on_message, name, message)

    def token(
        self,
        role: str,
        *token_ids: int,
        reason: FinishReason | None = None,
        name: str = "r",
        choice: int = 0,
    ) -> None:
        event = TokenEvent(name, token_ids, reason, choice_idx=choice)
        self.tell(role, Tokens((event,), LoadReport()))

    def fail(
        self, role: Role, error: ClusterError | None = None, item_idx: int | None = None, name: str = "r"
    ) -> None:
        self.tell(role, Failed(name, to_info(error or UnavailableError(f"{role} gave up")), item_idx))

    # Clients

    def submit(
        self,
        request: GenerateRequest,
        items: Sequence[MediaItem] = (),
        hashes: Sequence[bytes] = (),
        timeline: RequestTimeline | None = None,
    ) -> list[Reader]:
        readers = [Reader(request.request_id, idx) for idx in range(len(request.sampling))]
        self.readers[request.request_id] = readers
        self.items += items
        timeline = timeline or RequestTimeline(self.now)
        self.run(self.flow.submit, ClientRequest(request, items, hashes, timeline))
        return readers

    def start_media(self) -> Reader:
        """A request with a media item whose prompt has memory at prefill."""
        (reader,) = self.submit(REQUEST, [ITEM], [b"block"])
        self.tell(Role.PREFILL, PrefillAdmitted("r"))
        return reader

    def close(self, reader: Reader) -> None:
        """The client leaves."""
        reader.has_left = True
        self.run(self.flow.close, reader.request_id, reader.choice_idx)

    # What is there

    def attempt(self, request_id: str = "r") -> Attempt:
        attempt = self.flow.attempts.get(request_id)
        assert attempt is not None
        return attempt

    def num_requests(self, name: str) -> int:
        return next(worker.num_requests for worker in self.flow.workers if worker.replica_id == name)

    def units(self) -> dict[str, float]:
        """Work that counts as sent and is not known to be done."""
        pools = (self.cluster.encoders, self.cluster.prefills, self.cluster.decodes)
        return {pool.phase: float(pool.sent_units.sum()) for pool in pools}

    def sent(self, name: str) -> list[str]:
        return [type(message).__name__ for message in self.messages[name]]

    def audit(self) -> None:
        """Readers that have not ended leave; then nothing is held and every work is accounted for."""
        for readers in self.readers.values():
            for reader in readers:
                if not reader.has_ended:
                    self.close(reader)
        assert self.flow.is_idle and self.queue.is_idle and self.flow.num_running == 0
        assert all(worker.num_requests == 0 for worker in self.flow.workers)
        for pool in (self.cluster.encoders, self.cluster.prefills, self.cluster.decodes):
            assert not pool.sent_units.any() and not pool.sent_requests.any() and not pool.sent_blocks.any()
        media_hashes = {item.media_hash for item in self.items}
        num_encoders = len(self.cluster.encoders)
        assert not any(self.cluster.media.expecting(key, num_encoders).any() for key in media_hashes)
        assert not len(self.cluster.pending)
        for name, messages in self.messages.items():
            cancelled = [
                m.request_id for m in messages if isinstance(m, Cancel) and m == Cancel(m.request_id)
            ]
            assert len(cancelled) == len(set(cancelled)), f"{name} is told twice to let go"
        self.wait(1.0 + LONGEST_PAUSE_S)
        assert self.flow.next_timer() is None, "an idle door has no timer"
