"""The door's part of a request, message by message, over ordered channels that a test empties when it likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.types.media import MediaItem
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    DecodeGranted,
    DecodeTarget,
    EncodeTarget,
    Failed,
    FeatureGranted,
    FinishReason,
    ReturnGrant,
    Tokens,
)  # fmt: skip
from cluster.types.request import GenerateRequest
from tests.fakes.engines import Rig


@dataclass
class Story:
    """What one request has come to."""

    early: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    has_first: bool = False
    is_open: bool = True


class Relay:
    def __init__(self, rig: Rig):
        self.rig = rig
        self.to_worker: dict[str, deque[AnyMessage]] = {name: deque() for name in rig.workers}
        self.stories: dict[str, Story] = {}

    def start(self, request: GenerateRequest, items: Sequence[MediaItem] = ()) -> Story:
        self.stories[request.request_id] = story = Story()
        for name, message in self.rig.launch(request, items):
            self.to_worker[name].append(message)
        return story

    def send_one(self, name: str) -> None:
        if self.to_worker[name]:
            self.rig.receive(name, self.to_worker[name].popleft())

    def hear_one(self, name: str) -> None:
        said = self.rig.workers[name].said
        if said:
            self._hear(name, said.popleft())

    def land(self, request_id: str) -> None:
        if self.stories[request_id].is_open:
            self.stories[request_id].is_open = False
            for channel in self.to_worker.values():
                channel.append(Cancel(request_id))

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

    def _hear(self, name: str, message: AnyMessage) -> None:
        if isinstance(message, Tokens):
            for event in message.events:
                self._token(name, event.request_id, list(event.token_ids), event.finish_reason)
            return
        story = self.stories[message.request_id]
        if isinstance(message, DecodeGranted | FeatureGranted) and not story.is_open:
            self.to_worker[name].append(ReturnGrant(message.grant.lease_id))
        elif isinstance(message, DecodeGranted):
            self.to_worker["prefill"].append(DecodeTarget(message.request_id, message.grant))
        elif isinstance(message, FeatureGranted):
            target = EncodeTarget(message.request_id, message.item_idx, message.grant)
            self.to_worker["encoder"].append(target)
        elif isinstance(message, Failed) and story.is_open:
            story.error = message.error.message
            self.land(message.request_id)

    def _token(self, name: str, request_id: str, token_ids: list[int], reason: FinishReason | None) -> None:
        story = self.stories[request_id]
        if not story.is_open or reason is FinishReason.CANCELLED:
            return
        story.has_first |= name == "prefill"
        (story.tokens if name == "prefill" else story.early).extend(token_ids)
        story.finish_reason = story.finish_reason or reason
        if story.has_first:
            story.tokens += story.early
            story.early.clear()
            if story.finish_reason is not None:
                self.land(request_id)
