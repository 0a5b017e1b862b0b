"""Requests as the simulator sees them: when they come, how long they are, and what they share. Deterministic
by seed.

A prompt is its number of tokens and one key for each full block; prompts of one stream share the keys of
their common prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from cluster.types.media import Modality
from deploy.simulator.hardware import BLOCK_SIZE

TAIL_TOKENS = 16  # of the question and the template's end, after the media


@dataclass(frozen=True, slots=True)
class Item:
    """One media item of a prompt: [start, end) are its tokens, one for each embedding that travels."""

    media_hash: str
    modality: Modality
    num_rows: int  # that the encoder computes
    start: int
    num_pooled: int = 0  # embeddings; 0: one for each row

    @property
    def num_tokens(self) -> int:
        return self.num_pooled or self.num_rows

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(eq=False, slots=True)
class SimRequest:
    request_id: str
    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_keys: Sequence[bytes]  # one for each full block; equal ones have equal prompts so far
    media: tuple[Item, ...] = ()
    tenant: str = ""
    priority: int = 0
    kind: str = "text"


@dataclass(frozen=True, slots=True)
class Draft:
    """A request without its instant."""

    num_prompt_tokens: int
    num_output_tokens: int
    stream: int  # whose prefix it shares
    num_shared_tokens: int = 0
    media: tuple[Item, ...] = ()
    priority: int = 0
    tenant: str = ""
    kind: str = "text"


Drafts = Callable[[Random], Iterator[Draft]]


@dataclass(frozen=True)
class Workload:
    """`burstiness`: squared coefficient of variation of the gaps, which are gamma distributed; 1: Poisson."""

    name: str
    drafts: Drafts = field(repr=False)
    burstiness: float = 1.0

    def requests(self, rate: float, num_requests: int, seed: int) -> Iterator[SimRequest]:
        """The requests in order of arrival, `rate` a second on average."""
        gaps, content = Random(f"gaps {seed}"), Random(f"content {seed}")
        now, shape = 0.0, 1 / self.burstiness
        for number, draft in enumerate(islice(self.drafts(content), num_requests)):
            now += gaps.gammavariate(shape, self.burstiness / rate)
            yield SimRequest(
                f"r{number}",
                now,
                draft.num_prompt_tokens,
                draft.num_output_tokens,
                block_keys(draft, number),
                draft.media,
                draft.tenant,
                draft.priority,
                draft.kind,
            )


def block_keys(draft: Draft, number: int) -> list[bytes]:
    """One for each full block: of the stream while the block lies in what is shared, else of the request
    alone."""
    num_blocks, num_shared = draft.num_prompt_tokens // BLOCK_SIZE, draft.num_shared_tokens // BLOCK_SIZE
    shared, unique = (draft.stream << 20), (1 << 63) | (number << 20)
    return [((shared if i < num_shared else unique) | i).to_bytes(8, "big") for i in range(num_blocks)]


def heavy_tailed(rng: Random, median: float, sigma: float, minimum: int, maximum: int) -> int:
    """Log-normal, cut."""
    return int(min(maximum, max(minimum, median * math.exp(rng.gauss(0.0, sigma)))))


def images(first: int, count: int, num_rows: int, start: int) -> tuple[Item, ...]:
    """So many images one after the other, from the token `start` on; their hashes count from `first`."""
    return tuple(
        Item(f"image-{first + i}", Modality.IMAGE, num_rows, start + i * num_rows) for i in range(count)
    )


def text(
    median_tokens: float = 1000, sigma: float = 0.8, num_output: float = 200, num_tenants: int = 1
) -> Drafts:
    """Prompts and answers with heavy tails; a fifth of them of the lower class."""

    def drafts(rng: Random) -> Iterator[Draft]:
        while True:
            tokens = heavy_tailed(rng, median_tokens, sigma, 16, 32_000)
            output = heavy_tailed(rng, num_output, 0.6, 2, 2000)
            priority = int(rng.random() < 0.2)
            yield Draft(tokens, output, 0, priority=priority, tenant=f"tenant-{rng.randrange(num_tenants)}")

    return drafts


def fixed_text(num_tokens: int, num_output: int) -> Drafts:
    """All alike."""

    def drafts(rng: Random) -> Iterator[Draft]:
        while True:
            yield Draft(num_tokens, num_output, 0)

    return drafts


def image_prompts(count: int, text_tokens: int, num_rows: int = 400, num_output: int = 150) -> Drafts:
    """vLLM's set-up for encoder disaggregation: new images of 640 × 640, 400 rows each, after the text."""

    def drafts(rng: Random) -> Iterator[Draft]:
        number = 0
        while True:
            media = images(number, count, num_rows, text_tokens)
            number += count
            tokens = text_tokens + count * num_rows + TAIL_TOKENS
            yield Draft(tokens, num_output, 0, media=media, kind=f"{count} images")

    return drafts


def video_mix(text_per_video: int = 31, video_rows: int = 7680) -> Drafts:
    """One video among many short text prompts."""

    def drafts(rng: Random) -> Iterator[Draft]:
        number = 0
        while True:
            if rng.randrange(text_per_video + 1):
                yield Draft(heavy_tailed(rng, 500, 0.6, 16, 8000), 150, 0)
                continue
            number += 1
            media = (Item(f"video-{number}", Modality.VIDEO, video_rows, 32),)
            yield Draft(32 + video_rows + TAIL_TOKENS, 150, 0, media=media, kind="video")

    return drafts


def conversations(num_open: int = 200, num_turns: int = 6, image_share: float = 0.3) -> Drafts:
    """Turns of many dialogues in random order; a turn repeats all before it. Some begin with an image."""

    def drafts(rng: Random) -> Iterator[Draft]:
        num_begun = 0
        open_ones: list[list[int]] = []  # stream, tokens so far, turns so far, has an image
        while True:
            while len(open_ones) < num_open:
                num_begun += 1
                open_ones.append([num_begun, 256, 0, int(rng.random() < image_share)])
            place = rng.randrange(num_open)
            stream, before, turn, has_image = open_ones[place]
            asked = heavy_tailed(rng, 120, 0.8, 16, 4000) + (400 if turn == 0 and has_image else 0)
            output = heavy_tailed(rng, 150, 0.5, 8, 1000)
            media = (Item(f"image-{stream}", Modality.IMAGE, 400, 256),) if has_image else ()
            yield Draft(
                before + asked, output, stream, before, media, kind="image turn" if has_image else "text turn"
            )
            open_ones[place] = [stream, before + asked, turn + 1, has_image]
            if turn + 1 == num_turns:
                open_ones[place] = open_ones[-1]
                open_ones.pop()

    return drafts


def grouped(num_groups: int = 600, per_group: int = 5, num_output: int = 300) -> Drafts:
    """llm-d's set-up for cache-aware routing: groups of prompts about the same 3 images of 720p (920 rows
    each), with 1,300 tokens of text, of which the last 100 are each prompt's own. Prompts of all groups in
    random order."""

    def drafts(rng: Random) -> Iterator[Draft]:
        turn = 0
        while True:
            order = [group for group in range(num_groups) for _ in range(per_group)]
            rng.shuffle(order)
            for group in order:
                stream = turn * num_groups + group + 1
                shared = 3 * 920 + 1200
                media = images(3 * stream, 3, 920, 0)
                yield Draft(shared + 100, num_output, stream, shared, media, kind="grouped")
            turn += 1

    return drafts


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("text", text()),
        Workload("bursty-text", text(), burstiness=4.0),
        Workload("tenants", text(num_tenants=10)),
        Workload("1-image", image_prompts(1, 400)),
        Workload("4-image", image_prompts(4, 400)),
        Workload("1-image-2000", image_prompts(1, 2000)),
        Workload("4-image-2000", image_prompts(4, 2000)),
        Workload("video-mix", video_mix()),
        Workload("multi-turn", conversations()),
        Workload("grouped", grouped()),
        Workload("text-400", fixed_text(400, 150)),
        Workload("text-2000", fixed_text(2000, 150)),
    )
}
