"""What is asked in each phase of the live measurements, and when.

balanced   text of 100 to 400 tokens; half with an image or two
skewed     small ones, a tenth of them prompts of thousands of tokens, a twentieth videos
slow       as balanced, while a prefill worker and an encoder take three times as long
grouped    groups that share a prefix and two images: the first of a group is cold, the others warm

Shapes and instants are functions of a seed and equal for all policies; the content is new in every block.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from bench.client import NO_END, ChatRequest, Endpoint
from bench.encoder.overlap import Texts
from bench.engine.prompts import Part, Prompts, user
from bench.router.client import Call

IMAGE_SIDE = 128  # pixels; 64 embedding rows in the demo model
VIDEO_FRAMES = 16
VIDEO_RATE = 2  # frames per second
ANSWER_TOKENS = 6
GROUP_SIZE = 6
PREFIX_TOKENS = 400
SLOWDOWN = 3.0


@dataclass(frozen=True)
class Shape:
    """A request without its content. Of a group: the prefix of that group stands before its own text, its
    images after that."""

    kind: str
    num_text_tokens: int
    num_images: int = 0
    num_videos: int = 0
    group: int | None = None


@dataclass(frozen=True)
class Phase:
    name: str
    shapes: Callable[[random.Random], Iterator[Shape]]  # without end
    slow: tuple[str, ...] = ()  # replica ids that are throttled


def balanced(rng: random.Random) -> Iterator[Shape]:
    while True:
        num_images = rng.choice((0, 0, 1, 2))
        yield Shape(f"{num_images} images", rng.randint(100, 400), num_images)


def skewed(rng: random.Random) -> Iterator[Shape]:
    while True:
        draw = rng.random()
        if draw < 0.10:
            yield Shape("long", rng.randint(1500, 3000))
        elif draw < 0.15:
            yield Shape("video", rng.randint(50, 150), num_videos=1)
        else:
            num_images = int(draw < 0.45)
            yield Shape(f"{num_images} images", rng.randint(50, 200), num_images)


def grouped(rng: random.Random) -> Iterator[Shape]:
    """Four groups at a time are mixed with each other."""
    first = 0
    while True:
        members = [group for group in range(first, first + 4) for _ in range(GROUP_SIZE)]
        rng.shuffle(members)
        seen: set[int] = set()
        for group in members:
            yield Shape("warm" if group in seen else "cold", rng.randint(20, 60), 2, group=group)
            seen.add(group)
        first += 4


PHASES = (
    Phase("balanced", balanced),
    Phase("skewed", skewed),
    Phase("slow", balanced, slow=("prefill-0", "encode-0")),
    Phase("grouped", grouped),
)


def arrivals(rate: float, count: int, rng: random.Random) -> list[float]:
    """Seconds from the start, ascending: a Poisson process."""
    instants, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        instants.append(now)
    return instants


class Composer:
    """Gives shapes their content, which no request had before: `key` names the block."""

    def __init__(self, model: str, model_id: str, seed: int):
        self._prompts = Prompts(seed)
        self._texts = Texts(model, seed)
        self._endpoint = Endpoint("", model_id, NO_END)

    def calls(self, shapes: Sequence[Shape], instants: Sequence[float], *key: object) -> list[Call]:
        prefixes: dict[int, str] = {}
        calls = []
        for number, (shape, at_s) in enumerate(zip(shapes, instants, strict=True)):
            text = self._texts.part(shape.num_text_tokens)["text"]
            media = self._media(shape, (*key, number if shape.group is None else f"group {shape.group}"))
            messages = [user(text, *media)]
            if shape.group is not None:
                if shape.group not in prefixes:
                    prefixes[shape.group] = self._texts.part(PREFIX_TOKENS)["text"]
                messages = [{"role": "system", "content": prefixes[shape.group]}, *messages]
            calls.append(self.call(at_s, shape.kind, messages))
        return calls

    def call(
        self,
        at_s: float,
        kind: str,
        messages: list[dict[str, Any]],
        more: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Call:
        """`more`: fields of the body."""
        body = self._endpoint.body(ChatRequest(messages, ANSWER_TOKENS, kind)) | dict(more or {})
        return Call(at_s, kind, json.dumps(body).encode(), ANSWER_TOKENS, headers or {})

    def _media(self, shape: Shape, key: tuple[object, ...]) -> list[Part]:
        images = [self._prompts.image(IMAGE_SIDE, *key, idx) for idx in range(shape.num_images)]
        videos = [
            self._prompts.video(VIDEO_FRAMES, IMAGE_SIDE, VIDEO_RATE, *key, idx)
            for idx in range(shape.num_videos)
        ]
        return [*images, *videos]


def first_shapes(phase: Phase, count: int, seed: object) -> list[Shape]:
    return list(islice(phase.shapes(random.Random(f"{phase.name} {seed}")), count))
