"""The door's part of a request, message by message, over ordered channels that a test empties when it likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.types.media import MediaItem
from cluster.types.messages import (
    AnyMessage,
    BlocksChanged,
    CacheChanged,
    Cancel,
    DecodeGranted,
    DecodeTarget,
    EncoderLost,
    EncodeTarget,
    Failed,
    FeatureGranted,
    FeatureShared,
    FinishReason,
    GrantPassed,
    Measured,
    Preempted,
    PrefillAdmitted,
    ReturnGrant,
    StartDecode,
    StartEncode,
    TokenEvent,
    Tokens,
)  # fmt: skip
from cluster.types.request import GenerateRequest
from cluster.worker.blame import UNEXPECTED
from tests.fakes.engines import MARGIN_S, TIMEOUT_S, Rig


@dataclass
class Line:
    """What one choice has come to, over all its attempts."""

    early: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    has_first: bool = False
    num_tokens_before: int = 0  # of earlier attempts
    is_preempted: bool = False  # and waits for its first token to be resumed


@dataclass
class Story:
    """What one request has come to."""

    request: GenerateRequest
    items: Sequence[MediaItem]
    lines: list[Line]
    error: str | None = None
    is_open: bool = True
    shared_items: set[int] = field(default_factory=set)  # that come for another request
    targets: dict[int, str] = field(
        default_factory=dict
    )  # items whose encoder was told where to write: leases
    has_decode_spoken: bool = False
    flown_on: set[int] = field(default_factory=set)  # choices that go on as requests of their own
    prefills_locally: bool = False  # decode computes the prompt

    @property
    def is_over(self) -> bool:
        return all(
            idx in self.flown_on or (line.has_first and line.finish_reason is not None)
            for idx, line in enumerate(self.lines)
        )

    @property
    def tokens(self) -> list[int]:
        return self.lines[0].tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.lines[0].finish_reason


class Relay:
    def __init__(self, rig: Rig, expects_faults: bool = False):
        """`expects_faults`: requests may fail because engines meet errors of their own."""
        self.rig = rig
        self._expects_faults = expects_faults
        self.to_worker: dict[str, deque[AnyMessage]] = {name: deque() for name in rig.workers}
        self.stories: dict[str, Story] = {}
        self.num_resumed = 0

    def start(
        self,
        request: GenerateRequest,
        items: Sequence[MediaItem] = (),
        lines: list[Line] | None = None,
        prefills_locally: bool = False,
    ) -> Story:
        lines = lines or [Line() for _ in request.sampling]
        for line in lines:
            line.has_first = prefills_locally  # there is no other's to wait for
        self.stories[request.request_id] = story = Story(
            request, items, lines, prefills_locally=prefills_locally
        )
        for name, message in self.rig.launch(request, items, prefills_locally):
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

    def finish(self) -> None:
        """Whoever is left lands; whatever is under way ends, by its deadline if need be; then nothing is held."""
        for request_id in list(self.stories):
            self.land(request_id)
        self.play(20)
        self.rig.clock.at += TIMEOUT_S + MARGIN_S
        self.play(5)
        self.rig.audit()

    def _hear(self, name: str, message: AnyMessage) -> None:
        if isinstance(message, Tokens):
            for event in message.events:
                self._token(name, event)
            return
        if isinstance(message, CacheChanged | BlocksChanged | Measured):
            return
        story = self.stories[message.request_id]
        if isinstance(message, DecodeGranted | FeatureGranted) and not story.is_open:
            self.to_worker[name].append(ReturnGrant(message.grant.lease_id))
        elif isinstance(message, PrefillAdmitted) and story.is_open:
            self.to_worker["decode"].append(StartDecode(story.request, TIMEOUT_S, codec=self.rig.codec))
        elif isinstance(message, DecodeGranted):
            self.to_worker["prefill"].append(DecodeTarget(message.request_id, message.grant))
            self._pass_grant("decode", message.grant.lease_id, "prefill")
        elif isinstance(message, FeatureShared) and story.is_open:
            story.shared_items.add(message.item_idx)
            self.to_worker["encoder"].append(Cancel(message.request_id, item_idx=message.item_idx))
        elif isinstance(message, FeatureGranted):
            if message.item_idx in story.shared_items | story.targets.keys():  # it did not come
                story.shared_items.discard(message.item_idx)
                self._encode(story, message.item_idx)
            story.targets[message.item_idx] = message.grant.lease_id
            target = EncodeTarget(message.request_id, message.item_idx, message.grant)
            self.to_worker["encoder"].append(target)
            self._pass_grant("prefill", message.grant.lease_id, "encoder")
        elif isinstance(message, Preempted) and story.is_open:
            for idx, line in enumerate(story.lines):
                line.is_preempted = line.finish_reason is None
                self._resume_if_known(story, idx)
        elif isinstance(message, Failed) and not self._expects_faults and message.error.message == UNEXPECTED:
            raise AssertionError(f"{message.request_id} met an error in the {name} engine")
        elif isinstance(message, Failed) and story.is_open and message.item_idx not in story.shared_items:
            story.error = message.error.message
            self.land(message.request_id)

    def _encode(self, story: Story, item_idx: int) -> None:
        start = StartEncode(story.request.request_id, item_idx, story.items[item_idx], TIMEOUT_S)
        self.to_worker["encoder"].append(start)

    def _pass_grant(self, owner: str, lease_id: str, writer: str) -> None:
        self.to_worker[owner].append(GrantPassed(lease_id, (self.rig.workers[writer].process,)))

    def lose(self, name: str, *, dies: bool) -> None:
        """A worker's connection ends, because its process does or by itself; the next one is there at once."""
        self.to_worker[name].clear()
        if dies:
            self.rig.start_worker(name)
        else:
            self.rig.reconnect(name)
        for story in [story for story in self.stories.values() if story.is_open]:
            if name == "encoder":
                self._lose_encoder(story)
            elif name == "decode" or not (story.prefills_locally or self._is_with_decode(story)):
                story.error = f"the {name} worker was lost"
                self.land(story.request.request_id)

    @staticmethod
    def _is_with_decode(story: Story) -> bool:
        return story.has_decode_spoken and all(line.has_first for line in story.lines)

    def _lose_encoder(self, story: Story) -> None:
        if any(line.has_first for line in story.lines):
            return
        for item_idx in set(range(len(story.items))) - story.shared_items:
            lease_id = story.targets.pop(item_idx, None)
            if lease_id is not None:
                self.to_worker["prefill"].append(EncoderLost(story.request.request_id, item_idx, lease_id))
            self._encode(story, item_idx)

    def _token(self, name: str, event: TokenEvent) -> None:
        story = self.stories[event.request_id]
        if not story.is_open or event.finish_reason is FinishReason.CANCELLED:
            return
        line = story.lines[event.choice_idx]
        (line.tokens if name == "prefill" else line.early).extend(event.token_ids)
        line.has_first |= name == "prefill"
        story.has_decode_spoken |= name == "decode"
        assert line.finish_reason is None or event.finish_reason is None, "a choice has one end"
        line.finish_reason = line.finish_reason or event.finish_reason
        if line.has_first:
            line.tokens += line.early
            line.early.clear()
            self._resume_if_known(story, event.choice_idx)
        if story.is_over:
            self.land(event.request_id)

    def _resume_if_known(self, story: Story, choice_idx: int) -> None:
        line = story.lines[choice_idx]
        if not (line.is_preempted and line.has_first):
            return
        new = tuple(line.tokens[line.num_tokens_before :])
        self.num_resumed += 1
        request = story.request.resumed(f"resumed{self.num_resumed}", choice_idx, new, 0.0)
        line.is_preempted = False
        line.num_tokens_before = len(line.tokens)
        story.flown_on.add(choice_idx)
        self.start(request, story.items, [line], story.prefills_locally)
        if story.is_over:
            self.land(story.request.request_id)
