"""The life of one request in a decode worker.

    WAITING      waits for KV blocks for its prompts                      → GRANTED, or ended;
                                                                            CATCHING_UP (nothing travels)
    GRANTED      its prompt blocks are leased to the prefill worker       → RUNNING, CATCHING_UP, CLOSING
    CATCHING_UP  the part of its prompt that did not travel is computed   → RUNNING, or ended
    CLOSING      over for its door; the writer may still write            → ended (lease closed)
    RUNNING      in each step, every choice gets a token, or none does    → ended, also by preemption

Requests that have ended leave the engine; their blocks are free from that moment.

A request has one or more choices (`n`). A choice has one or two branches: its KV under the prompt and, with
classifier-free guidance, its KV under the negative prompt. Choices share the full blocks of a prompt. The
last, partly filled block is copied for each choice before a choice writes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from cluster.types.messages import FinishReason, KvReady, PrefillTiming
from cluster.types.request import GenerateRequest, SamplingParams, StopParams
from cluster.worker.outbox import DoorId

NOTHING_TRAVELS = KvReady(first_tokens=(), position_deltas=(0,), first_recomputed=0)  # of a text prompt


class DecodePhase(Enum):
    WAITING = "waiting"
    GRANTED = "granted"
    CATCHING_UP = "catching up"
    CLOSING = "closing"
    RUNNING = "running"


TRANSITIONS: dict[DecodePhase, frozenset[DecodePhase]] = {
    DecodePhase.WAITING: frozenset({DecodePhase.GRANTED, DecodePhase.CATCHING_UP}),
    DecodePhase.GRANTED: frozenset({DecodePhase.RUNNING, DecodePhase.CATCHING_UP, DecodePhase.CLOSING}),
    DecodePhase.CATCHING_UP: frozenset({DecodePhase.RUNNING}),
    DecodePhase.CLOSING: frozenset(),
    DecodePhase.RUNNING: frozenset(),
}


@dataclass(frozen=True)
class PromptPart:
    """Successive tokens of a prompt whose KV is computed here."""

    token_ids: Sequence[int]
    start: int  # index of the first token; the KV of the tokens before it is there
    position_delta: int
    block_table: Sequence[int]
    draws: Sequence[DecodeChoice] = ()  # choices that get their first token after this part


@dataclass(eq=False)
class Branch:
    """The KV of a choice under one prompt. If no layer of the model looks back further than a window, the
    blocks behind the window are freed: their places in the table, [0, num_dropped), hold block 0, which is
    not read there."""

    num_prompt_tokens: int
    position_delta: int
    block_table: list[int]
    num_dropped: int = 0

    @property
    def blocks(self) -> list[int]:
        """Blocks that the branch holds."""
        return self.block_table[self.num_dropped :]

    def drop_behind_window(self, num_blocks: int) -> list[int]:
        """The first `num_blocks` of the table are behind the window now. Returns those that were held: the
        caller frees them."""
        left = self.block_table[self.num_dropped : num_blocks]
        self.block_table[self.num_dropped : num_blocks] = [0] * len(left)
        self.num_dropped += len(left)
        return left


@dataclass(eq=False)
class DecodeChoice:
    request_id: str  # of the choice itself: unique among all choices of the worker
    idx: int
    sampling: SamplingParams
    stop: StopParams
    token_ids: list[int]  # prompt and generated tokens; the KV of the last one is not computed yet
    num_prompt_tokens: int
    branches: list[Branch] = field(default_factory=list)  # the prompt's, then the negative prompt's
    drafts: list[int] = field(default_factory=list)  # guesses of the next tokens, to be verified in this step
    is_done: bool = False
    num_counted_tokens: int = 0  # tokens of this choice in `SequenceCounts.num_context_tokens`

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def context_len(self, branch: Branch) -> int:
        """Tokens whose KV is in the pool; also the index of the last token in the branch."""
        return branch.num_prompt_tokens + self.num_generated - 1

    @property
    def num_context_tokens(self) -> int:
        """Of all branches."""
        return sum(self.context_len(branch) for branch in self.branches)

    def append(self, token_id: int) -> FinishReason | None:
        """Takes a newly drawn token. Returns why the choice ends with it; None: it goes on."""
        self.token_ids.append(token_id)
        if token_id in self.stop.stop_token_ids:
            return FinishReason.STOP
        if self.num_generated >= self.stop.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(eq=False)
class DecodeRequest:
    """Written by the engine only."""

    request: GenerateRequest
    door: DoorId
    timeout_s: float  # from arrival until its KV must be there
    arrived_at: float  # when the client asked, by this worker's clock
    started_at: float = 0.0  # when this worker was asked
    prefills: bool = False  # no KV comes: the prompt is computed here
    codec: str = "raw"  # codec in which the KV travels, if it can
    phase: DecodePhase = DecodePhase.WAITING
    lease_id: str = ""
    # Per prompt, until the choices take them over.
    prompt_blocks: list[list[int]] = field(default_factory=list)
    # For copies of the partly filled prompt blocks, one per further choice; until the choices take them over.
    copy_blocks: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # of the prompt, while the request catches up
    ready: KvReady = NOTHING_TRAVELS  # prefill's message, once it has come
    admitted_at: float | None = None  # when the request got blocks
    began_at: float | None = None  # when its KV was complete, until its first step is over
    computing_s: float = 0.0  # in local prefill steps with tokens of its prompt
    choices: list[DecodeChoice] = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        prompt = request.prompt.token_ids
        self.choices = [
            DecodeChoice(
                f"{request.request_id}/{idx}", idx, sampling, request.stop, list(prompt), len(prompt)
            )
            for idx, sampling in enumerate(request.sampling)
        ]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_closing(self) -> bool:
        return self.phase is DecodePhase.CLOSING

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def live_choices(self) -> list[DecodeChoice]:
        return [choice for choice in self.choices if not choice.is_done]

    @property
    def held_blocks(self) -> set[int]:
        """Blocks of all prompts and choices."""
        tables = [*self.prompt_blocks, self.copy_blocks]
        tables += (branch.blocks for choice in self.choices for branch in choice.branches)
        return {block_id for table in tables for block_id in table}

    @property
    def num_sequences(self) -> int:
        """Rows of a decode step."""
        return len(self.live_choices) * len(self.request.prompts)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens of the prompt that are still to be computed, while the request catches up."""
        return len(self.request.prompt.token_ids) - self.num_computed_tokens

    def next_part(self, max_tokens: int) -> PromptPart:
        """The next tokens of the prompt, at most `max_tokens`. They count as computed from now on. For a
        request that catches up."""
        start = self.num_computed_tokens
        token_ids = self.request.prompt.token_ids[start : start + max_tokens]
        self.num_computed_tokens += len(token_ids)
        draws = self.choices if self.prefills and self.num_missing_tokens == 0 else ()
        return PromptPart(token_ids, start, self.ready.position_deltas[0], self.prompt_blocks[0], draws)

    def prompt_timing(self, now: float) -> PrefillTiming:
        """Of a prompt whose end was computed here."""
        admitted_at = now if self.admitted_at is None else self.admitted_at
        blocks_s = admitted_at - self.started_at
        queued_s = max(0.0, now - admitted_at - self.computing_s)
        return PrefillTiming(blocks_s=blocks_s, queued_s=queued_s, computing_s=self.computing_s)

    def take_first_step_s(self, now: float) -> float:
        """Seconds since the KV was complete, at the first call; 0 afterwards."""
        if self.began_at is None:
            return 0.0
        step_s, self.began_at = now - self.began_at, None
        return step_s

    def num_admission_blocks(self, block_size: int) -> int:
        """Blocks that admission needs: for the prompts, and for a copy of each partly filled block for every
        further choice."""
        num_partial = sum(len(prompt.token_ids) % block_size > 0 for prompt in self.request.prompts)
        return self.request.num_prompt_blocks(block_size) + num_partial * (len(self.choices) - 1)

    def move(self, phase: DecodePhase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self.request_id}: {self.phase} cannot become {phase}")
        self.phase = phase
