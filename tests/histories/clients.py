"""Requests that are drawn from a seed, the clients that read their answers, and what each client has seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from cluster.errors import ClusterError
from cluster.kvcache.hashing import block_hashes
from cluster.types.media import MediaGeometry, MediaItem, Modality, PlacedMedia
from cluster.types.messages import FinishReason
from cluster.types.request import GenerateRequest, Guidance, Prompt, SamplingParams, StopParams
from router.flow.outputs import Deliver
from router.flow.state import ClientRequest
from router.telemetry.timeline import RequestTimeline
from tests.histories.doors import SimulatedDoor, run
from tests.histories.model import BLOCK_SIZE, answer

PLACEHOLDER = 9


def make_item(name: str, num_rows: int, num_frames: int | None = None) -> MediaItem:
    """With frames, it can be encoded in pieces."""
    grid = None if num_frames is None else (num_frames, 2, 2 * num_rows // num_frames)
    modality = Modality.IMAGE if num_frames is None else Modality.VIDEO
    return MediaItem(modality, name.encode(), name, MediaGeometry(num_rows, grid))


ITEMS = [make_item("a", 3), make_item("b", 4), make_item("c", 9), make_item("clip", 12, 6), make_item("d", 1)]


def make_prompt(token_ids: Sequence[int], items: Sequence[MediaItem] = (), salt: str = "") -> Prompt:
    """An item behind every second token, the rest at the end."""
    tokens: list[int] = []
    media: list[PlacedMedia] = []
    left = list(items)
    for idx, token_id in enumerate(token_ids):
        tokens.append(token_id)
        if left and idx % 2 == 1:
            item = left.pop(0)
            num_rows = item.geometry.num_tokens
            placed = PlacedMedia(item.modality, item.media_hash, ((len(tokens), num_rows),), item.geometry)
            media.append(placed)
            tokens += [PLACEHOLDER] * num_rows
    assert not left
    tokens.append(7)
    return Prompt(tuple(tokens), tuple(media), salt)


def draw_request(
    rng: Random, request_id: str, max_tokens: int = 9
) -> tuple[GenerateRequest, list[MediaItem]]:
    """Prompts begin alike, so that blocks and items are shared."""
    items = rng.choices(ITEMS, k=rng.choice([0, 0, 0, 1, 1, 2, 3]))
    num_tokens = max(2 * len(items), rng.choice([1, 3, 4, 8, rng.randint(1, 20)]))
    family = 100 * rng.choice([1, 1, 1, 2, 3])
    tokens = [family + idx for idx in range(num_tokens)]
    if rng.random() < 0.3:
        tokens[-1] += 50
    prompt = make_prompt(tokens, items, request_id if rng.random() < 0.1 else "")
    guidance = None
    if rng.random() < 0.15:
        guidance = Guidance(2.0, Prompt(tuple(300 + idx for idx in range(rng.choice([1, 5])))))
    num_choices = rng.choice([1, 1, 1, 2, 3])
    sampling = tuple(SamplingParams(temperature=1.0, seed=rng.randrange(1000)) for _ in range(num_choices))
    stop = StopParams(
        rng.choice([1, max_tokens // 4, max_tokens // 2, rng.randint(1, max_tokens), max_tokens])
    )
    request = GenerateRequest(request_id, prompt, sampling, stop, guidance, priority=rng.choice([0, 0, 0, 1]))
    if rng.random() < 0.2:  # a token that comes in the middle of the answer ends it
        stop = StopParams(stop.max_tokens, (rng.choice(answer(request, 0)),))
        request = GenerateRequest(request_id, prompt, sampling, stop, guidance, request.priority)
    return request, items


def next_turn(rng: Random, request_id: str, request: GenerateRequest) -> GenerateRequest:
    """A request whose prompt is that of `request` with a part of its answer, known to the oracle before it is
    given: so blocks of an answer are looked up while it runs."""
    tokens = answer(request, 0)
    said = tuple(tokens[: rng.randint(1, len(tokens))])
    prompt = msgspec.structs.replace(request.prompt, token_ids=(*request.prompt.token_ids, *said, 7))
    sampling = (SamplingParams(temperature=1.0, seed=rng.randrange(1000)),)
    return GenerateRequest(request_id, prompt, sampling, StopParams(rng.choice([1, 4, 9])))


@dataclass
class Line:
    """What the client has seen of one choice."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: ClusterError | None = None
    has_left: bool = False  # the client does not read it any more
    num_ends: int = 0  # terminal events that the door has delivered
    num_unread: int = 0  # events that the door has delivered and the client has not read

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.has_left


@dataclass
class Story:
    """What one request has come to."""

    request: GenerateRequest
    items: Sequence[MediaItem]
    door: SimulatedDoor
    lines: list[Line]
    streams: Sequence[Any] = ()
    is_tainted: bool = False  # a late write that was not known yet was read for it
    submitted_at: float = 0.0

    @property
    def is_cut(self) -> bool:
        """Its door has died with its connection."""
        return self.door.process.is_dead

    @property
    def is_over(self) -> bool:
        return self.is_cut or all(line.is_over for line in self.lines)

    @property
    def has_ended(self) -> bool:
        """Its door has nothing more to do for it."""
        return all(line.num_ends or line.has_left for line in self.lines)


class Clients:
    def __init__(self, read_delay_s: Callable[[], float]):
        self.stories: dict[str, Story] = {}
        self._read_delay_s = read_delay_s

    def submit(self, door: SimulatedDoor, request: GenerateRequest, items: Sequence[MediaItem]) -> Story:
        """On the door's event loop."""
        story = Story(request, items, door, [Line() for _ in request.sampling])
        self.stories[request.request_id] = story
        story.submitted_at = door.scheduler.now
        hashes = block_hashes(request.prompt, BLOCK_SIZE)
        timeline = RequestTimeline(door.clock.now())
        story.streams = door.dispatcher.generate(ClientRequest(request, items, hashes, timeline))
        door.dispatcher.submit(request.request_id)
        return story

    def leave(self, story: Story, choice_idx: int) -> None:
        """The client closes one stream."""
        line = story.lines[choice_idx]
        if not line.is_over and not story.is_cut:
            line.has_left = True
            run(story.streams[choice_idx].aclose())

    def on_deliver(self, door: SimulatedDoor, output: Deliver) -> None:
        story, event = self.stories[output.request_id], output.event
        line = story.lines[output.choice_idx]
        line.num_unread += 1
        line.num_ends += isinstance(event, ClusterError) or event.finish_reason is not None
        door.later(self._read_delay_s(), self._read, story, output.choice_idx)

    def _read(self, story: Story, choice_idx: int) -> None:
        line, stream = story.lines[choice_idx], story.streams[choice_idx]
        while line.num_unread and not stream.is_closed:
            line.num_unread -= 1
            try:
                event = run(anext(stream))
            except ClusterError as error:
                line.error = error
            else:
                line.tokens += event.token_ids
                line.finish_reason = event.finish_reason
