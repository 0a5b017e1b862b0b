"""The life of one request in a language engine.

    WAITING    waits for KV blocks for its prompts                           → ARRIVING, COMPUTING, or over
    ARRIVING   its blocks are leased to the worker that computes its prompts → COMPUTING, RUNNING, or over
    COMPUTING  tokens of its prompts are computed, as far as embeddings
               are here                                                      → RUNNING, SENDING, or over
    RUNNING    in each step, every choice gets a token, or none does         → over, also by preemption
    SENDING    its first tokens are out; its KV is on the way to another
               worker. If those tokens ended every choice, the door's Cancel
               is awaited                                                    → over
    CLOSING    its door was told the end, but a transfer still uses its blocks → gone

Over: the request leaves the engine, by way of CLOSING if a transfer is open.

What a worker does for a request: it computes the prompts or receives their KV, and it generates the answer or
sends the KV to the worker that does. To receive KV only to send it on makes no sense.

A request has one sequence per prompt: its own and, with classifier-free guidance, that of the negative
prompt (`TokenSequence`). When the answer begins, each choice (`n`) gets sequences of its own. They share the
full blocks of a prompt. The last, partly filled block is copied for each choice before a choice writes to it.

Requests that have ended leave the engine; their blocks are free from that moment.

The records change through their methods only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from cluster.engine.sequence import TokenSequence
from cluster.engine.timing import Stopwatch
from cluster.types.logprobs import TokenLogprobs
from cluster.types.messages import FinishReason, TokenEvent
from cluster.types.request import NUM_PLACES, GenerateRequest, SamplingParams, StopParams
from cluster.types.transfer import KvReady
from cluster.worker.outbox import DoorId
from kv_transfer.lease.prompt_places import PromptPlaces
from kv_transfer.lease.transfer import OutgoingLease

if TYPE_CHECKING:  # it is made for these records
    from cluster.engine.draw_state import DrawState


class LanguagePhase(Enum):
    WAITING = "waiting"
    ARRIVING = "arriving"
    COMPUTING = "computing"
    RUNNING = "running"
    SENDING = "sending"
    CLOSING = "closing"


TRANSITIONS: dict[LanguagePhase, frozenset[LanguagePhase]] = {
    LanguagePhase.WAITING: frozenset({LanguagePhase.ARRIVING, LanguagePhase.COMPUTING}),
    LanguagePhase.ARRIVING: frozenset(
        {LanguagePhase.COMPUTING, LanguagePhase.RUNNING, LanguagePhase.CLOSING}
    ),
    LanguagePhase.COMPUTING: frozenset({LanguagePhase.RUNNING, LanguagePhase.SENDING, LanguagePhase.CLOSING}),
    LanguagePhase.RUNNING: frozenset(),
    LanguagePhase.SENDING: frozenset({LanguagePhase.CLOSING}),
    LanguagePhase.CLOSING: frozenset(),
}


@dataclass(eq=False)
class AnswerChoice:
    """One answer that is generated here."""

    request_id: str  # of the choice itself: unique among all choices of the worker
    idx: int
    sampling: SamplingParams
    stop: StopParams
    token_ids: list[int]  # prompt and generated tokens; the KV of the last one is not computed yet
    num_prompt_tokens: int
    # Under the prompt, then under the negative prompt.
    sequences: list[TokenSequence] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # guesses of the next tokens, to be verified in this step
    num_steps_without: int = 0  # drafts, since the last that had some
    draw_state: DrawState | None = None  # None: the request is plain, or no step has drawn for it yet
    is_done: bool = False
    num_counted_tokens: int = 0  # tokens of this choice in `SequenceCounts.num_context_tokens`

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose KV is here, of all sequences."""
        num_tokens = 0
        for sequence in self.sequences:
            num_tokens += sequence.num_computed_tokens
        return num_tokens

    def propose(self, drafts: list[int]) -> None:
        """Sets the guesses that this step verifies."""
        self.drafts = drafts
        self.num_steps_without = 0 if drafts else self.num_steps_without + 1

    def drop_drafts(self) -> None:
        self.drafts = []

    def draw_with(self, state: DrawState) -> None:
        """Passes each further token of the choice to `state`."""
        self.draw_state = state

    def take(self, sequence: TokenSequence) -> None:
        """Adds the choice's copy of a prompt's sequence."""
        self.sequences.append(sequence)

    def append(self, token_id: int) -> FinishReason | None:
        """Takes a newly drawn token. Returns why the choice ends with it; None: it goes on."""
        self.token_ids.append(token_id)
        is_complete = self.draw_state is not None and self.draw_state.accept(token_id)
        return finish_reason(token_id, self.num_generated, self.stop, is_complete)

    def count_context(self) -> int:
        """Returns how many context tokens have come since the last call."""
        num_new = self.num_context_tokens - self.num_counted_tokens
        self.num_counted_tokens += num_new
        return num_new

    def end(self) -> list[TokenSequence]:
        """Returns the choice's sequences: the caller frees their blocks."""
        self.is_done = True
        sequences, self.sequences = self.sequences, []
        return sequences


def finish_reason(
    token_id: int, num_generated: int, stop: StopParams, is_complete: bool = False
) -> FinishReason | None:
    """Why a choice ends with this token, its `num_generated`-th; None: it goes on. `is_complete`: under the
    request's structure, with this token."""
    if token_id in stop.stop_token_ids:
        return FinishReason.STOP
    if is_complete:
        return FinishReason.COMPLETE
    return FinishReason.LENGTH if num_generated >= stop.max_tokens else None


@dataclass(eq=False)
class LanguageRequest:
    """A request as the engine knows it."""

    request: GenerateRequest
    door: DoorId
    timeout_s: float  # from the arrival of its message until its answer begins
    arrived_at: float  # when the client asked, by this worker's clock
    stopwatch: Stopwatch  # runs since the request's message arrived
    computes: bool  # the prompts are computed here; otherwise their KV is received
    sends: bool  # the KV is sent to another worker; otherwise the answer is generated here
    # As of `GenerateRequest`: every step asks for them
    request_id: str = field(init=False)
    is_plain: bool = field(init=False)
    num_prompts: int = field(init=False)
    codec: str = "raw"  # in which KV is received, where possible
    phase: LanguagePhase = LanguagePhase.WAITING
    # One per prompt, until the choices take them over.
    sequences: list[TokenSequence] = field(default_factory=list)
    choices: list[AnswerChoice] = field(default_factory=list)  # empty if the KV is sent
    live_choices: list[AnswerChoice] = field(default_factory=list)  # those that have not ended
    # Blocks for copies of the partly filled prompt blocks, one per further choice, until the answer begins.
    copy_blocks: list[int] = field(default_factory=list)
    was_tried: bool = False  # there was no room for its prompts yet
    is_admitted: bool = False  # the request has had blocks
    num_sending_blocks: int = 0  # its part of `SequenceCounts.num_sending_blocks`
    first_tokens: tuple[int, ...] = ()  # per choice, once they are drawn, here or by the sender of the KV
    lease_id: str = ""  # of the blocks that the KV is received in
    outgoing: OutgoingLease | None = None  # once the other worker's grant is known …
    places: PromptPlaces | None = None  # … and which blocks it wants
    began_at: float | None = None  # when the answer began, until its first step is over
    num_counted_tokens: int = 0  # tokens of this request in `Lifecycle.num_missing_tokens`

    def __post_init__(self) -> None:
        self.request_id, self.is_plain = self.request.request_id, self.request.is_plain
        self.num_prompts = len(self.request.prompts)
        if self.sends:
            return
        request, prompt = self.request, self.request.prompt.token_ids
        self.choices = [
            AnswerChoice(
                f"{request.request_id}/{idx}", idx, sampling, request.stop, list(prompt), len(prompt)
            )
            for idx, sampling in enumerate(request.sampling)
        ]
        self.live_choices = self.choices

    @property
    def is_closing(self) -> bool:
        return self.phase is LanguagePhase.CLOSING

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of the prompt's tokens are found out here: each of them is computed here."""
        return self.computes and self.request.num_prompt_logprobs is not None

    @property
    def needs_embeddings(self) -> bool:
        return self.computes and bool(self.request.prompt.media)

    @property
    def main(self) -> TokenSequence:
        """The sequence under the request's own prompt, which carries the media. Until the answer begins."""
        return self.sequences[0]

    @property
    def is_complete(self) -> bool:
        """Whether the KV of all prompts is here."""
        return all(sequence.is_complete for sequence in self.sequences)

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.request.prompts)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens of the prompts that are still to be computed here."""
        if not self.computes and self.phase is not LanguagePhase.COMPUTING:
            return 0
        return sum(sequence.num_missing_tokens for sequence in self.sequences)

    @property
    def num_sequences(self) -> int:
        """Rows of a step while the request runs."""
        return len(self.live_choices) * self.num_prompts

    @property
    def held_blocks(self) -> set[int]:
        """Blocks of all prompts and choices."""
        sequences = [*self.sequences, *(s for choice in self.choices for s in choice.sequences)]
        return {*self.copy_blocks, *(block_id for sequence in sequences for block_id in sequence.blocks)}

    def num_copies(self, block_size: int, state_blocks: int) -> int:
        """Blocks for every further choice: for copies of each partly filled prompt block, and for its
        states. state_blocks: of one state."""
        prompts = self.request.prompts
        num_partial = sum(len(prompt.token_ids) % block_size > 0 for prompt in prompts)
        return (num_partial + NUM_PLACES * state_blocks * len(prompts)) * max(0, len(self.choices) - 1)

    def move(self, phase: LanguagePhase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"{self.request_id}: {self.phase} cannot become {phase}")
        self.phase = phase

    def add_prompt(self, sequence: TokenSequence) -> None:
        """Adds the sequence of the next prompt."""
        self.sequences.append(sequence)

    def count_missing(self, num_tokens: int) -> int:
        """Counts the request as `num_tokens` missing tokens. Returns as how many it was counted before."""
        num_before, self.num_counted_tokens = self.num_counted_tokens, num_tokens
        return num_before

    def note_try(self) -> None:
        """Room for the prompts is looked for."""
        self.was_tried = True

    def hold_copies(self, block_ids: list[int]) -> None:
        """Keeps these blocks for what further choices copy from the prompts."""
        self.copy_blocks = block_ids

    def take_copies(self) -> list[int]:
        """Returns the blocks for copies: the caller uses them or frees them."""
        block_ids, self.copy_blocks = self.copy_blocks, []
        return block_ids

    def admit(self, num_sending_blocks: int) -> None:
        """The request has its blocks; the KV of `num_sending_blocks` of them is to be sent."""
        self.is_admitted, self.num_sending_blocks = True, num_sending_blocks

    def lease_blocks(self, lease_id: str) -> None:
        """Another worker may write the prompts' KV into the blocks, under this lease."""
        self.lease_id = lease_id

    def arrived(self, ready: KvReady) -> None:
        """All KV that travels is here."""
        self.first_tokens = ready.first_tokens
        for sequence, delta in zip(self.sequences, ready.position_deltas, strict=True):
            sequence.arrived(delta, ready.first_recomputed if sequence is self.main else None)

    def send_to(self, outgoing: OutgoingLease, places: PromptPlaces) -> None:
        """The other worker has granted room for the prompts' KV."""
        self.outgoing, self.places = outgoing, places

    def drawn(self, first_tokens: tuple[int, ...]) -> None:
        """The first tokens are known; further ones are wanted."""
        self.first_tokens = first_tokens

    def drop_logits(self) -> None:
        """No first token is drawn from the prompts any more."""
        for sequence in self.sequences:
            sequence.drop_logits()

    def end_choice(self, choice: AnswerChoice) -> list[TokenSequence]:
        """Returns the choice's sequences: the caller frees their blocks."""
        self.live_choices = [each for each in self.live_choices if each is not choice]
        return choice.end()

    def hand_over(self, choice: AnswerChoice) -> None:
        """The choice takes over the sequences of the prompts."""
        choice.sequences += self.sequences
        self.sequences = []

    def begin_answer(self, now: float) -> None:
        self.began_at = now

    def take_first_step_s(self, now: Callable[[], float]) -> float:
        """Returns the seconds since the answer began, at the first call; 0 afterwards."""
        if self.began_at is None:
            return 0.0
        step_s, self.began_at = now() - self.began_at, None
        return step_s


@dataclass(frozen=True)
class PromptWork:
    """The next tokens of a prompt, computed in a step."""

    request: LanguageRequest
    sequence: TokenSequence
    num_tokens: int

    @property
    def request_id(self) -> str:
        return self.request.request_id


# A part of a step: the next tokens of a prompt; or, of a request that runs, the next token of every live
# choice, with the drafts behind it
Work = PromptWork | LanguageRequest


class WorkResult(msgspec.Struct, frozen=True):
    """What a step gives for one piece of work."""

    tokens: Sequence[Sequence[int]] = ()  # of an answer: the new tokens of each live choice, at least one
    logits: Tensor | None = None  # [1, vocab_size]: of a prompt whose last token was computed
    logprobs: Sequence[tuple[TokenLogprobs, ...]] = ()  # of the tokens, if the request wants them
    # of the text tokens of the prompt behind those of the work, if the request wants them
    prompt_logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True)
class FirstTokens:
    """First tokens of a request whose prompts are computed: one per choice."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # if the request wants them
    complete: frozenset[int] = frozenset()  # choices whose structure is complete with their token

    def events(self, request: LanguageRequest, now: float) -> list[TokenEvent]:
        """What the door is told: one event per choice. That of choice 0 also says where the request's time
        went, that of the first choice that is read has the log-probabilities of the prompt."""
        first_read = next((choice.idx for choice in request.choices if not choice.is_done), 0)
        prompt_logprobs = tuple(request.main.prompt_logprobs)
        return [
            TokenEvent(
                request.request_id,
                (token_id,),
                finish_reason(token_id, 1, request.request.stop, choice_idx in self.complete),
                request.main.num_cached_tokens,
                choice_idx,
                request.stopwatch.timing(now) if choice_idx == 0 else None,
                logprobs=self.logprobs[choice_idx : choice_idx + 1],
                prompt_logprobs=prompt_logprobs if choice_idx == first_read else (),
            )
            for choice_idx, token_id in enumerate(self.token_ids)
        ]
