"""What is to be generated: a valid prompt, and how to draw and stop. One value per generated choice."""

from __future__ import annotations

import msgspec

from cluster.types.media import MediaSpan


class SamplingParams(msgspec.Struct, frozen=True):
    """How to draw tokens. `temperature == 0` is greedy; then the other fields have no effect."""

    temperature: float = 0.0
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability
    top_k: int = 0  # keep the k most probable; 0: all
    min_p: float = 0.0  # drop tokens below min_p × the most probable one's probability
    seed: int = 0  # 64 bit; noise is a function of (seed, position) alone


class StopParams(msgspec.Struct, frozen=True):
    """When generation ends inside the engine. Stop strings are the door's business: they need text."""

    max_tokens: int  # generated tokens at most, at least 1
    stop_token_ids: tuple[
        int, ...
    ] = ()  # includes the model's end-of-sequence ids unless the client ignores them


class Prompt(msgspec.Struct, frozen=True):
    """Token ids with placeholders expanded, and what stands in the placeholder ranges, in prompt order."""

    token_ids: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()


class GenerateRequest(msgspec.Struct, frozen=True):
    """One choice to generate, as the engines see it."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    stop: StopParams
