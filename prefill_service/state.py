"""The life of one request in a prefill worker.

    WAITING    waits for KV blocks for its prompts                             → RUNNING, or ended
    RUNNING    its tokens are computed, as far as embeddings have arrived      → SENDING, CLOSING, or ended
    SENDING    first tokens are out; the KV is on its way to decode. If those
               tokens ended every choice, the door's Cancel is awaited         → CLOSING, or ended
    CLOSING    over for its door; writes from its blocks are still in flight   → ended

A request has one sequence per prompt: its own and, with classifier-free guidance, that of the negative
prompt. The sequences are computed independently. The first tokens need the last logits of both. The
embeddings of a media item (`FeatureStore`) live beside the request: reserved → ready → released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from cluster.model.language import PromptPositions
from cluster.types.request import GenerateRequest, Prompt
from cluster.worker.outbox import DoorId
from kv_transfer.lease.transfer import OutgoingLease
from prefill_service.timing import Stopwatch


class PrefillPhase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SENDING = "sending"
    CLOSING = "closing"


TRANSITIONS: dict[PrefillPhase, frozenset[PrefillPhase]] = {
    PrefillPhase.WAITING: frozenset({PrefillPhase.RUNNING}),
    PrefillPhase.RUNNING: frozenset({PrefillPhase.SENDING, PrefillPhase.CLOSING}),
    PrefillPhase.SENDING: frozenset({PrefillPhase.CLOSING}),
    PrefillPhase.CLOSING: frozenset(),
}


@dataclass(eq=False)
class PromptSequence:
    """One prompt whose KV is being computed."""

    sequence_id: str  # unique in the worker
    prompt: Prompt
    positions: PromptPositions
    block_hashes: list[bytes]  # one per full block
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_missing_at_start: int = 0  # tokens that were not cached when the sequence got its blocks
    num_blocks_sent: int = 0  # prefix of the block table that has been posted
    first_recomputed: int | None = None  # KV from this token on does not travel: decode computes it
    items_ready: set[int] = field(default_factory=set)  # media items whose embeddings are here
    last_logits: Tensor | None = None  # [1, vocab_size], once the prompt is computed

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def is_complete(self) -> bool:
        return self.num_computed_tokens == self.num_tokens

    @property
    def num_ready_tokens(self) -> int:
        """Tokens that can be computed now: up to the first range of an item whose embeddings are missing."""
        missing = (item for i, item in enumerate(self.prompt.media) if i not in self.items_ready)
        starts = (item.first_range_after(self.num_computed_tokens) for item in missing)
        first = min((start for start in starts if start is not None), default=self.num_tokens)
        return max(first, self.num_computed_tokens)


@dataclass(eq=False)
class PrefillRequest:
    """Written by the engine only."""

    request: GenerateRequest
    door: DoorId
    arrived_at: float  # when the client asked, by this worker's clock
    stopwatch: Stopwatch  # runs since StartPrefill arrived
    sequences: list[PromptSequence] = field(default_factory=list)  # the prompt's, then the negative prompt's
    phase: PrefillPhase = PrefillPhase.WAITING
    first_tokens: tuple[int, ...] = ()  # per choice
    outgoing: OutgoingLease | None = None  # once decode's grant is known
    num_counted_tokens: int = 0  # tokens of this request in `PrefillLifecycle.num_missing_tokens`

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_closing(self) -> bool:
        return self.phase is PrefillPhase.CLOSING

    @property
    def held_blocks(self) -> set[int]:
        """KV blocks of all sequences."""
        return {block_id for sequence in self.sequences for block_id in sequence.block_table}

    @property
    def main(self) -> PromptSequence:
        """The sequence that carries the media."""
        return self.sequences[0]

    @property
    def is_complete(self) -> bool:
        return all(sequence.is_complete for sequence in self.sequences)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all sequences."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_missing_tokens(self) -> int:
        return sum(sequence.num_tokens - sequence.num_computed_tokens for sequence in self.sequences)

    def move(self, phase: PrefillPhase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self.request_id}: {self.phase} cannot become {phase}")
        self.phase = phase
