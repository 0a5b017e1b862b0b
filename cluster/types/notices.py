"""What a writer reports to the owner of the memory that it has written to, through the agents' notifications:
the payload of its last one."""

from __future__ import annotations

import msgspec


class WriterNotice(msgspec.Struct, frozen=True, tag=True):
    """Base of every notice."""


class KvReady(WriterNotice, frozen=True):
    """All KV that travels is written. Payload of prefill's last notification."""

    first_tokens: tuple[int, ...]  # per choice
    position_deltas: tuple[int, ...]  # per prompt; mRoPE: position = context length + delta; else 0
    first_recomputed: int | None = None  # index in the prompt; decode computes the KV from this token on


class FeaturesReady(WriterNotice, frozen=True):
    media_hash: str
