"""The mixed requests of a run, made from a seed: every kind of media, several choices, guidance, sampling.

A request is sent several times in a run: once undisturbed, then under faults. Each time it has a cache salt
of its own, so that nothing of its prompt is in a cache and every stage takes part.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.workload import make_case

# kind → (kind of bench.workload, fields beside the common ones); "seed" is replaced
SAMPLED = {"temperature": 0.8, "seed": 0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("text", {}),
    "image": ("image", {}),
    "text, sampled": ("text", SAMPLED),
    "two images": ("two images", {}),
    "video": ("video", {}),
    "text, n = 2": ("text", {**SAMPLED, "n": 2}),
    "audio": ("audio", {}),
    "text, guided": ("text", {"guidance_scale": 1.5, "negative_prompt": "a list of numbers"}),
    "image and audio, sampled": ("image and audio", SAMPLED),
    "image, n = 2": ("image", {**SAMPLED, "n": 2}),
}
MIN_TOKENS, MAX_TOKENS = 50, 400
STREAMED_RATIO = 0.6


@dataclass(frozen=True)
class ChaosCall:
    """`fields`: the request's body without model and salt. Every choice has exactly `num_tokens` tokens."""

    number: int
    kind: str
    num_tokens: int
    fields: dict[str, Any]

    @property
    def is_streamed(self) -> bool:
        return self.fields["stream"]

    def body(self, model_id: str, salt: str) -> bytes:
        return json.dumps({"model": model_id, "cache_salt": salt, **self.fields}).encode()


def make_calls(seed: int, num_calls: int) -> list[ChaosCall]:
    """The kinds take turns."""
    rng = random.Random(seed)
    return [
        _make_call(rng, i, kind) for i, kind in zip(range(num_calls), itertools.cycle(KINDS), strict=False)
    ]


def _make_call(rng: random.Random, number: int, kind: str) -> ChaosCall:
    media_kind, extra = KINDS[kind]
    num_tokens = rng.randint(MIN_TOKENS, MAX_TOKENS)
    is_streamed = rng.random() < STREAMED_RATIO
    fields = {
        "messages": make_case(rng, media_kind).messages,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": is_streamed,
        **extra,
    }
    if "seed" in extra:
        fields["seed"] = rng.randrange(1 << 31)
    if is_streamed:
        fields["stream_options"] = {"include_usage": True}
    return ChaosCall(number, kind, num_tokens, fields)


def endless(calls: Sequence[ChaosCall], seed: int) -> Iterator[ChaosCall]:
    """All calls in a random order, then all again in another."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(calls, len(calls))
