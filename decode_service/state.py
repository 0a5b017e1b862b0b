"""One request's life in a decode worker.

    WAITING   wants blocks for its prompts                             → GRANTED, CATCHING_UP (nothing travels), or ended
    GRANTED   its prompt blocks are leased to the prefill worker       → RUNNING (KV complete), CATCHING_UP, CLOSING
    CATCHING_UP  what of its prompt did not travel is computed         → RUNNING, or ended
    CLOSING   nobody wants it any more, but the writer may still write → ended (lease closed)
    RUNNING   every choice gets a token per step, or none does         → ended, also by preemption

Ended requests leave the engine; their blocks are free from that moment.

A request holds one or more choices (`n`), and a choice one or two branches: its KV under the prompt and, with
classifier-free guidance, under the companion's. Choices share the full blocks of a prompt; the last, partly filled one
is copied for each before anybody writes to it.
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
    start: int  # index of the first; the KV of those before it is there
    position_delta: int
    block_table: Sequence[int]
    draws: Sequence[DecodeChoice] = ()  # that get their first token behind it


@dataclass(eq=False)
class Branch:
    """A choice's KV under one prompt. In a model that looks no further back than a window, the blocks behind it are given back:
    their places in the table, [0, num_dropped), hold block 0, which nothing reads there."""

    num_prompt_tokens: int
    position_delta: int
    block_table: list[int]
    num_dropped: int = 0

    @property
    def blocks(self) -> list[int]:
        """What the branch holds."""
        return self.block_table[self.num_dropped :]

    def drop_behind_window(self, num_blocks: int) -> list[int]:
        """The first `num_blocks` of the table are behind the window now. Returns those that were held: the caller frees them."""
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
    token_ids: list[int]  # prompt and generated; the KV of the last one is not computed yet
    num_prompt_tokens: int
    branches: list[Branch] = field(default_factory=list)  # the prompt's, then the companion's
    drafts: list[int] = field(default_factory=list)  # guesses at what follows, to be verified in this step
    is_done: bool = False
    num_counted_tokens: int = 0  # that count for it in the worker's load

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def context_len(self, branch: Branch) -> int:
        """Tokens whose KV is in the pool; also the index of the last token in the branch."""
        return branch.num_prompt_tokens + self.num_generated - 1

    @property
    def num_context_tokens(self) -> int:
        """Of all its branches."""
        return sum(self.context_len(branch) for branch in self.branches)

    def append(self, token_id: int) -> FinishReason | None:
        """Take a newly drawn token; returns why the choice ends with it, if it does."""
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
    arrived_at: float  # when the client asked, on this worker's clock
    started_at: float = 0.0  # when this worker was asked
    prefills: bool = False  # no KV comes: the prompt is computed here
    codec: str = "raw"  # in which the KV comes where it can
    phase: DecodePhase = DecodePhase.WAITING
    lease_id: str = ""
    prompt_blocks: list[list[int]] = field(default_factory=list)  # per prompt, until the choices take them
    # For copies of the partly filled prompt blocks, one per further choice; until the choices take them over.
    copy_blocks: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # of the prompt, while the request catches up
    ready: KvReady = NOTHING_TRAVELS  # what prefill said, once it has
    admitted_at: float | None = None  # when it got blocks
    began_at: float | None = None  # when its KV was complete, until its first step is over
    computing_s: float = 0.0  # in stretches with tokens of its prompt
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
        """Of all its prompts and choices."""
        tables = [*self.prompt_blocks, self.copy_blocks]
        tables += (branch.blocks for choice in self.choices for branch in choice.branches)
        return {block_id for table in tables for block_id in table}

    @property
    def num_sequences(self) -> int:
        """Rows of a decode step."""
        return len(self.live_choices) * len(self.request.prompts)

    @property
    def num_missing_tokens(self) -> int:
        """Of the prompt, while the request catches up."""
        return len(self.request.prompt.token_ids) - self.num_computed_tokens

    def next_part(self, max_tokens: int) -> PromptPart:
        """Of the prompt, at most so many tokens; they count as computed from now on. For a request that catches up."""
        start = self.num_computed_tokens
        token_ids = self.request.prompt.token_ids[start : start + max_tokens]
        self.num_computed_tokens += len(token_ids)
        draws = self.choices if self.prefills and self.num_missing_tokens == 0 else ()
        return PromptPart(token_ids, start, self.ready.position_deltas[0], self.prompt_blocks[0], draws)

    def prompt_timing(self, now: float) -> PrefillTiming:
        """Of a prompt that was computed here to its end."""
        admitted_at = now if self.admitted_at is None else self.admitted_at
        blocks_s = admitted_at - self.started_at
        queued_s = max(0.0, now - admitted_at - self.computing_s)
        return PrefillTiming(blocks_s=blocks_s, queued_s=queued_s, computing_s=self.computing_s)

    def take_first_step_s(self, now: float) -> float:
        """Seconds since the KV was complete, once; 0 afterwards."""
        if self.began_at is None:
            return 0.0
        step_s, self.began_at = now - self.began_at, None
        return step_s

    def num_admission_blocks(self, block_size: int) -> int:
        """What admission needs: the prompts' blocks, and a copy of each partly filled one for every further choice."""
        num_partial = sum(len(prompt.token_ids) % block_size > 0 for prompt in self.request.prompts)
        return self.request.num_prompt_blocks(block_size) + num_partial * (len(self.choices) - 1)

    def move(self, phase: DecodePhase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self.request_id}: {self.phase} cannot become {phase}")
        self.phase = phase
