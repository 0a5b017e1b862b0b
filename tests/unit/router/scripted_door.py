"""A dispatcher between workers that say what a test has them say and keep what they are sent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from cluster.errors import UnavailableError, to_info
from cluster.types.media import MediaGeometry, MediaItem, Modality, PlacedMedia
from cluster.types.members import Member, Role
from cluster.types.messages import Failed, FinishReason, LoadReport, Ping, PrefillAdmitted, TokenEvent, Tokens
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from router.flow.dispatch import Dispatcher
from router.members import Peer
from router.policy import ClusterView
from router.telemetry.timeline import RequestTimeline

ITEM = MediaItem(Modality.IMAGE, b"png", "hash", MediaGeometry(3))
REQUEST = GenerateRequest(
    "r",
    Prompt((1, 2, 9, 9, 9, 3), (PlacedMedia(ITEM.modality, "hash", ((2, 3),), ITEM.geometry),)),
    (SamplingParams(),),
    StopParams(3),
)


class FakeConnection:
    def __init__(self):
        self.sent: list = []

    def send(self, message) -> None:
        if not isinstance(message, Ping):  # comes when a test takes its time
            self.sent.append(message)


class FakeMembers:
    """The part of the member table that a dispatcher uses."""

    def __init__(self):
        self.peers = {role: Peer(Member(role.value, role, "", "", "", 8)) for role in Role}
        self.connections = {role: FakeConnection() for role in Role}
        self.drained: list[Peer] = []
        for role, peer in self.peers.items():
            peer.attach(self.connections[role])

    def peer(self, replica_id):
        return self.peers[Role(replica_id)]

    def close_if_drained(self, peer):
        self.drained.append(peer)


@dataclass
class Door:
    dispatcher: Dispatcher
    members: FakeMembers
    cluster: ClusterView
    calls: dict[str, asyncio.Future] = field(default_factory=dict)

    def tell(self, role: Role, message) -> None:
        self.dispatcher.on_message(self.members.peers[role], message)

    def token(
        self,
        role: Role,
        *token_ids: int,
        reason: FinishReason | None = None,
        name: str = "r",
        choice: int = 0,
    ) -> None:
        event = TokenEvent(name, token_ids, reason, choice_idx=choice)
        self.tell(role, Tokens((event,), LoadReport()))

    def fail(self, role: Role, error=None, item_idx=None) -> None:
        self.tell(role, Failed("r", to_info(error or UnavailableError(f"{role} gave up")), item_idx))

    def generate(self, request, items, hashes=()):
        return self.dispatcher.generate(request, items, hashes, RequestTimeline(self.dispatcher._clock.now()))

    def units(self) -> dict[Role, float]:
        """Work that counts as sent and is not known to be done."""
        pools = (self.cluster.encoders, self.cluster.prefills, self.cluster.decodes)
        return {pool.role: float(pool.sent_units.sum()) for pool in pools}

    def sent(self, role: Role) -> list[str]:
        return [type(message).__name__ for message in self.members.connections[role].sent]

    async def start(self) -> tuple[asyncio.Task, list[int]]:
        got: list[int] = []

        async def read() -> FinishReason | None:
            (stream,) = self.generate(REQUEST, [ITEM], [b"block"])
            async for event in stream:
                got.extend(event.token_ids)
                if event.finish_reason is not None:
                    return event.finish_reason
            return None

        task = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.tell(Role.PREFILL, PrefillAdmitted("r"))
        await asyncio.sleep(0)
        return task, got
