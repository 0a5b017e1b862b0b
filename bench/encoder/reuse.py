"""Repeated questions about the same media: time to first token of the first turn and of later ones.

cold           the media were never sent
encoder cache  another beginning of the prompt and another question: embeddings are cached, KV is not
prefix cache   the beginning of the turn before, another question: the KV of the media is cached, too
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.client import ChatRequest, endpoint
from bench.encoder.clients import at_once, request, required, text_part
from bench.engine.prompts import Part, Prompts
from bench.metrics import grown, page
from bench.records import Record

CACHED_TOKENS, ENCODER_ITEMS = "epdg_prompt_tokens_cached_total", "epdg_encoder_items_total"
# the beginning of each turn's prompt
TURNS = {"cold": "first", "encoder cache": "second", "prefix cache": "second"}
WORDS = 16  # before the media, and of a question


@dataclass(frozen=True)
class Media:
    """The media of a conversation."""

    num_frames: int
    frame_side: int
    num_images: int
    image_side: int

    def parts(self, prompts: Prompts, *key: object) -> Mapping[str, list[Part]]:
        images = [prompts.image(self.image_side, *key, idx) for idx in range(self.num_images)]
        return {
            "video": [prompts.video(self.num_frames, self.frame_side, 2, *key)],
            f"{self.num_images} images": images,
        }


def turn(prompts: Prompts, name: str, media: list[Part], *key: object) -> ChatRequest:
    beginning = text_part(prompts.text(WORDS, *key, TURNS[name]))
    question = text_part(prompts.text(WORDS, *key, "question", name))
    return request(name, 1, beginning, *media, question)


def measure(url: str, media: Media, repeats: int, seed: int) -> Iterator[Record]:
    """One request at a time. Raises RuntimeError if one fails."""
    prompts, server = Prompts(seed), endpoint(url)
    for parts in media.parts(prompts, "warm-up").values():
        required(at_once(server, [request("warm-up", 1, *parts)]))
    for repetition, kind in itertools.product(range(repeats), media.parts(prompts, "names")):
        parts = media.parts(prompts, repetition)[kind]
        for name in TURNS:
            before = page(url)
            (record,) = required(at_once(server, [turn(prompts, name, parts, repetition, kind)]))
            after = page(url)
            yield {
                "type": "reuse",
                "model": server.model_id,
                "media": kind,
                "turn": name,
                "repetition": repetition,
                "ttft_s": record.ttft_s,
                "prompt_tokens": record.num_prompt_tokens,
                "prefix_tokens": grown(before, after, CACHED_TOKENS),
                "items_encoded": grown(before, after, ENCODER_ITEMS, result="encoded"),
            }
