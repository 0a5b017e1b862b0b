"""What is to be generated: a valid prompt, how to draw tokens, and when to stop. One `SamplingParams` per
choice."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.types.media import PlacedMedia
from cluster.types.structure import Structure


class SamplingParams(msgspec.Struct, frozen=True):
    """How to draw tokens. `temperature == 0` is greedy; then the other fields have no effect."""

    temperature: float = 0.0
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability
    top_k: int = 0  # keep the k most probable; 0: all
    min_p: float = 0.0  # drop tokens below min_p × the most probable one's probability
    seed: int = 0  # 64 bit; noise is a function of (seed, position) alone


class StopParams(msgspec.Struct, frozen=True):
    """When generation ends inside the engine. The door handles stop strings, because they need text."""

    max_tokens: int  # most generated tokens; at least 1
    # includes the model's end-of-sequence ids unless the client ignores them
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # stop tokens are not drawn before that many others


class Prompt(msgspec.Struct, frozen=True):
    """Token ids with expanded placeholders, and the media in the placeholder ranges, ordered by each item's
    first range.

    Only the ranges say which tokens are media. A token outside them is text even if its id is a
    placeholder's: a model may generate any id, and a resumed prompt contains generated tokens."""

    token_ids: tuple[int, ...]
    media: tuple[PlacedMedia, ...] = ()
    cache_salt: str = ""  # only prompts with an equal salt share KV
    num_generated: int = 0  # tokens at the end that an earlier attempt generated
    adapter: str = ""  # digest of the LoRA adapter that computes it; only prompts with the same one share KV

    def text_indices(self, start: int, end: int) -> list[int]:
        """The indices of the tokens [start, end) that are text."""
        ranges = [(offset, offset + length) for item in self.media for offset, length in item.ranges]
        shown = {i for first, last in ranges for i in range(max(start, first), min(end, last))}
        return [i for i in range(start, end) if i not in shown]

    @property
    def media_end(self) -> int:
        """The index after the last token of any item; 0: there is none. Tokens from here on need no
        embeddings."""
        return max((item.end for item in self.media), default=0)

    @property
    def num_asked(self) -> int:
        """Tokens that no attempt generated."""
        return len(self.token_ids) - self.num_generated

    @property
    def as_asked(self) -> Prompt:
        """The prompt without generated tokens."""
        if self.num_generated == 0:
            return self
        return msgspec.structs.replace(self, token_ids=self.token_ids[: -self.num_generated], num_generated=0)


class Guidance(msgspec.Struct, frozen=True):
    """Classifier-free guidance (Ho and Salimans 2022). With every choice runs a negative sequence: the same
    generated tokens under a negative prompt. The tokens of the choice are pushed away from what the negative
    sequence makes likely."""

    scale: float  # 1: no effect
    negative_prompt: Prompt  # text only, at least one token


class LogitChanges(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes of logits before a token is drawn, the same for every choice, in the order of these fields.
    Each change is a function of the prompt and of the tokens generated before."""

    bias: tuple[tuple[int, float], ...] = ()  # token id, what is added to its logit; each id once
    # Above 0. The logit of each token of prompt or answer is divided by it, or multiplied if it is negative
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0  # is subtracted for each time that the answer has the token …
    presence_penalty: float = 0.0  # … and for having it at all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that the answer does not contain
    allowed_token_ids: tuple[int, ...] = ()  # no others are drawn; empty: all may be

    @property
    def penalties(self) -> tuple[float, float, float]:
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    @property
    def counts_tokens(self) -> bool:
        return self.penalties != (1, 0, 0)


NUM_PLACES = 2  # that each sequence has for its state: before and after a step


class GenerateRequest(msgspec.Struct, frozen=True):
    """One prompt and the choices to generate for it, as the engines see it. At every worker the choices and
    their negative sequences start and end together."""

    request_id: str
    prompt: Prompt
    sampling: tuple[SamplingParams, ...]  # one per choice
    stop: StopParams
    guidance: Guidance | None = None
    priority: int = 0  # lower runs sooner; waiting time compensates for it
    waited_s: float = 0.0  # time since the client asked, when the door sent this
    changes: LogitChanges | None = None
    # Log-probabilities are wanted: of each drawn token, and of this many of the most probable ones. None: no
    num_logprobs: int | None = None
    structure: Structure | None = None  # the form of each choice's text
    # The same of the prompt's own text tokens, but the first. Then the worker that computes the prompt
    # computes all of it, cached or not. None: they are not wanted
    num_prompt_logprobs: int | None = None

    @property
    def is_plain(self) -> bool:
        """Tokens are drawn from the logits as they are, and nothing else is reported of them."""
        return (
            self.guidance is None
            and self.changes is None
            and self.num_logprobs is None
            and self.structure is None
            and self.stop.min_tokens == 0
        )

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompt, and the negative prompt if there is one: both are computed before the first token."""
        return (self.prompt,) if self.guidance is None else (self.prompt, self.guidance.negative_prompt)

    def max_blocks(self, block_size: int, window: int | None = None, state_blocks: int = 0) -> int:
        """Most KV blocks that the whole answer may need where it is decoded. The choices share full prompt
        blocks. With a window, blocks older than the last `window` tokens are freed; those of the prompt once
        the prompt has arrived. state_blocks: of one state (`num_state_blocks`)."""
        total = self.num_state_blocks(state_blocks)
        for prompt in self.prompts:
            num_shared = len(prompt.token_ids) // block_size
            num_tokens = len(prompt.token_ids) + self.stop.max_tokens
            num_own = -(-num_tokens // block_size) - num_shared
            if window is not None:
                num_own = min(num_own, num_window_blocks(window, block_size))
            total += num_shared + num_own * len(self.sampling)
        return total

    def num_prompt_blocks(self, block_size: int, state_blocks: int = 0) -> int:
        """KV blocks of the prompt and the negative prompt, and of their states."""
        num_kv = sum(-(-len(prompt.token_ids) // block_size) for prompt in self.prompts)
        return num_kv + NUM_PLACES * state_blocks * len(self.prompts)

    def num_state_blocks(self, state_blocks: int) -> int:
        """KV blocks for the states of all choices. state_blocks: of one state."""
        return NUM_PLACES * state_blocks * len(self.prompts) * len(self.sampling)

    def resumed(
        self, request_id: str, choice_idxs: Sequence[int], token_ids: tuple[int, ...]
    ) -> GenerateRequest:
        """A request for the rest of some choices, each of which has generated `token_ids`. These become part
        of the prompts and are computed again. Drawing continues with the same noise, so the answer is the
        same as without the interruption. The first token came with the prompt's log-probabilities."""
        guidance = self.guidance
        if guidance is not None:
            guidance = Guidance(guidance.scale, _extended(guidance.negative_prompt, token_ids))
        num_done = len(token_ids)
        stop = StopParams(
            self.stop.max_tokens - num_done,
            self.stop.stop_token_ids,
            max(0, self.stop.min_tokens - num_done),
        )
        return msgspec.structs.replace(
            self,
            request_id=request_id,
            prompt=_extended(self.prompt, token_ids),
            sampling=tuple(self.sampling[idx] for idx in choice_idxs),
            stop=stop,
            guidance=guidance,
            num_prompt_logprobs=None if token_ids else self.num_prompt_logprobs,
        )


def num_window_blocks(window: int, block_size: int) -> int:
    """Most blocks that `window` successive tokens touch."""
    return (window + block_size - 2) // block_size + 1


def _extended(prompt: Prompt, token_ids: tuple[int, ...]) -> Prompt:
    return msgspec.structs.replace(
        prompt,
        token_ids=(*prompt.token_ids, *token_ids),
        num_generated=prompt.num_generated + len(token_ids),
    )
