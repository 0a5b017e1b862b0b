"""One request's life in a prefill worker.

    WAITING    wants blocks for its prompt                                        → RUNNING, CLOSING, or ended
    RUNNING    prompt tokens are computed as far as embeddings have arrived       → SENDING, CLOSING
    SENDING    first token is out; KV is on its way to decode, or, if that token
               ended the answer, the door's Cancel is awaited                     → ended, CLOSING
    CLOSING    nobody wants it any more, but writes from its blocks are in flight → ended

A media item's embeddings (`FeatureStore`) live beside it: reserved → ready → released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.model.language import PromptPositions
from cluster.types.messages import StartPrefill
from cluster.worker.outbox import DoorId
from kv_transfer.sender import Outgoing


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SENDING = "sending"
    CLOSING = "closing"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.CLOSING}),  # its target may have come before its blocks
    Phase.RUNNING: frozenset({Phase.SENDING, Phase.CLOSING}),
    Phase.SENDING: frozenset({Phase.CLOSING}),
    Phase.CLOSING: frozenset(),
}


@dataclass(eq=False)
class PrefillRequest:
    """Written by the engine only."""

    door: int | DoorId
    message: StartPrefill
    positions: PromptPositions
    block_hashes: list[bytes]  # one per full block of the prompt
    phase: Phase = Phase.WAITING
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    items_ready: set[int] = field(default_factory=set)  # media items whose embeddings are here
    first_token: int | None = None
    outgoing: Outgoing | None = None  # once decode's grant is known
    num_blocks_sent: int = 0  # prefix of the block table that has been posted

    @property
    def request_id(self) -> str:
        return self.message.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.message.request.prompt.token_ids)

    @property
    def num_ready_tokens(self) -> int:
        """Prompt tokens that can be computed now: up to the first item whose embeddings are missing."""
        for item_idx, span in enumerate(self.message.request.prompt.media):
            if span.end > self.num_computed_tokens and item_idx not in self.items_ready:
                return max(span.offset, self.num_computed_tokens)
        return self.num_prompt_tokens

    def move(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self.request_id}: {self.phase} cannot become {phase}")
        self.phase = phase
