"""One request's life in a decode worker.

    WAITING   wants blocks for its whole answer                        → GRANTED, or ended
    GRANTED   its prompt blocks are leased to the prefill worker       → RUNNING (KV complete), CLOSING
    CLOSING   nobody wants it any more, but the writer may still write → ended (lease closed)
    RUNNING   one token per step                                       → ended

Ended requests leave the engine; their blocks are free from that moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.types.messages import FinishReason
from cluster.types.request import SamplingParams, StopParams
from cluster.worker.outbox import DoorId


class Phase(Enum):
    WAITING = "waiting"
    GRANTED = "granted"
    CLOSING = "closing"
    RUNNING = "running"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.GRANTED}),
    Phase.GRANTED: frozenset({Phase.RUNNING, Phase.CLOSING}),
    Phase.CLOSING: frozenset(),
    Phase.RUNNING: frozenset(),
}


@dataclass(eq=False)
class DecodeRequest:
    """Written by the engine only."""

    request_id: str
    door: DoorId
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopParams
    timeout_s: float  # from arrival until its KV must be there
    phase: Phase = Phase.WAITING
    lease_id: str = ""
    block_table: list[int] = field(default_factory=list)  # prompt and answer, reserved at once
    position_delta: int = 0
    last_token: int = -1  # drawn, its KV not computed yet
    num_generated: int = 0  # including `last_token`

    @property
    def context_len(self) -> int:
        """Tokens whose KV is in the pool; also the position index of `last_token`."""
        return self.num_prompt_tokens + self.num_generated - 1

    @property
    def num_tokens_reserved(self) -> int:
        return self.num_prompt_tokens + self.stop.max_tokens

    def move(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self.request_id}: {self.phase} cannot become {phase}")
        self.phase = phase

    def append(self, token_id: int) -> FinishReason | None:
        """Take a newly drawn token; returns why generation ends with it, if it does."""
        self.last_token = token_id
        self.num_generated += 1
        if token_id in self.stop.stop_token_ids:
            return FinishReason.STOP
        if self.num_generated >= self.stop.max_tokens:
            return FinishReason.LENGTH
        return None
