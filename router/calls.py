"""What a client asks for and what it gets back, apart from HTTP: the types that the API, the door and the
prompt builder share.

Pure frozen values. The API makes a call from a request body (`router.api.chat.translate`), valid by
construction and with every default filled in. The door answers with deltas, usage and notes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec

from cluster.errors import ModelNotFoundError
from cluster.media.sources import MediaSource
from cluster.text.chat import NO_OPTIONS, ChatMessage, ChatOptions
from cluster.text.stop import StopStrings
from cluster.types.request import LogitChanges, SamplingParams
from cluster.types.structure import Structure

MAX_CALL_NAME_CHARS = 256  # of the function in a call that an answer has, and that a conversation repeats


@dataclass(frozen=True)
class ServedModels:
    """What clients may give as `model`: the model, or one of its adapters, as `name` or `model:name`.

    adapters: digests by name."""

    model_id: str
    adapters: Mapping[str, str] = field(default_factory=dict)

    def adapter_of(self, name: str) -> str:
        """Returns the digest of the adapter that a client names; of the model itself: "". Raises
        ModelNotFoundError."""
        if name == self.model_id:
            return ""
        adapter = self.adapters.get(name) or self.adapters.get(name.removeprefix(f"{self.model_id}:"))
        if adapter is None:
            raise ModelNotFoundError(f"the model {name[:200]!r} does not exist", param="model")
        return adapter


class StopRules(msgspec.Struct, frozen=True, dict=True):
    """When a choice ends."""

    max_tokens: int | None  # None: the model's default, as far as the context has room
    token_ids: tuple[int, ...]  # includes the model's end-of-sequence ids unless the client ignores them
    strings: tuple[str, ...]
    min_tokens: int = 0
    shows_match: bool = False  # the stop string, or the stop token's text, is part of the answer

    @cached_property
    def matched(self) -> StopStrings:
        """The strings, as all choices of all prompts look for them."""
        return StopStrings(self.strings)


class GuidanceRules(msgspec.Struct, frozen=True):
    """Classifier-free guidance. Without a negative prompt, the prompt's last token is one."""

    scale: float
    negative: tuple[ChatMessage, ...] | str | None


class MediaRules(msgspec.Struct, frozen=True):
    """What may be done with media that cost too much or cannot be used."""

    max_tokens: int | None = None  # of all items together
    is_exact: bool = False  # nothing may be reduced
    omits_bad: bool = False  # an item that cannot be used is left out, and the request is answered without it


class ToolFunction(msgspec.Struct, frozen=True):
    name: str
    parameters: str  # JSON schema of the arguments, as JSON
    param: str  # the field of the request that has the schema; errors name it
    is_strict: bool  # a call of it has arguments that are valid under the schema


class ToolRules(msgspec.Struct, frozen=True):
    """Which tools an answer may call, and how."""

    functions: tuple[ToolFunction, ...]  # that may be called
    must_call: bool
    is_parallel: bool = True  # several calls in one answer

    @property
    def is_constrained(self) -> bool:
        """The calls are valid for certain."""
        return self.must_call or any(function.is_strict for function in self.functions)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints have."""

    model: str  # as the client names it
    adapter: str = ""  # digest of the model's adapter
    sampling: tuple[SamplingParams, ...]  # one per choice; choice i of every prompt draws with sampling[i]
    stop: StopRules
    num_logprobs: int | None = None  # as in `GenerateRequest`
    guidance: GuidanceRules | None = None
    tenant: str = ""  # is charged for the request, and may use the files that were fetched for it
    cache_salt: str = ""  # tenant and client's salt: only KV and embeddings under the same salt are reused
    trace_parent: str = ""  # the client's span
    structure: Structure | None = None  # the form of each answer
    changes: LogitChanges | None = None  # without bad words
    bad_words: tuple[str, ...] = ()
    num_prompt_logprobs: int | None = None  # as `num_logprobs`, of a prompt's tokens
    skips_special: bool = True  # special tokens have no text
    returns_token_ids: bool = False  # of the prompt and of the answer
    priority: int = 0
    stream: bool = False
    include_usage: bool = False  # streams only: a last chunk with the usage
    usage_in_events: bool = False  # … and the usage so far in each chunk


class ChatCall(Call, frozen=True, kw_only=True):
    messages: tuple[ChatMessage, ...]
    media: tuple[MediaSource, ...]  # in the order of the messages' media parts; not yet opened
    media_rules: MediaRules = MediaRules()
    options: ChatOptions = NO_OPTIONS
    tools: ToolRules | None = None  # None: the answer is text
    shows_reasoning: bool = True


class CompletionCall(Call, frozen=True, kw_only=True):
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False  # the answer begins with the prompt
    generates: bool = True  # False: the answer is the prompt


def num_scored(call: Call) -> int | None:
    """How many of the most probable tokens are wanted at each position of a prompt; None: no
    log-probabilities are."""
    echoed = call.num_logprobs if isinstance(call, CompletionCall) and call.echo else None
    return max((each for each in (call.num_prompt_logprobs, echoed) if each is not None), default=None)


def num_told(call: CompletionCall) -> int:
    """Log-probabilities that the answer tells for each token of a prompt: in the text of every choice, and
    beside it."""
    echoed = call.num_logprobs if call.echo else None
    each = sum(1 + num for num in (echoed, call.num_prompt_logprobs) if num is not None)
    return each * len(call.sampling)


class ScoredToken(msgspec.Struct, frozen=True):
    piece: bytes  # what it adds to the text; may be a part of a character
    logprob: float | None  # natural logarithm; None: of a prompt's first token


class TokenScores(msgspec.Struct, frozen=True):
    """Log-probabilities at one position of an answer."""

    drawn: ScoredToken
    top: tuple[ScoredToken, ...]  # the most probable tokens, as many as the client wants
    offset: int  # characters of the answer before the token


class RankedToken(msgspec.Struct, frozen=True):
    """A token at one position of a prompt."""

    token_id: int
    logprob: float
    rank: int | None  # 1: the most probable one; None: it is not among those that were asked for
    text: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of a call of a tool."""

    index: int  # among the calls of the answer
    arguments: str = ""  # the next part of their JSON
    call_id: str = ""  # in the first piece …
    name: str = ""  # … together with the name


class TextDelta(msgspec.Struct, frozen=True):
    """A piece of one choice's text. Only the last one carries the finish reason; its text may be empty."""

    text: str
    num_tokens: int = 0
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    # Of the tokens whose text ends in this piece, or later if a stop string cuts it. The last piece also has
    # those of tokens without text
    scores: tuple[TokenScores, ...] = ()
    token_ids: tuple[int, ...] = ()  # of all tokens that this piece is about, if the client wants them
    reasoning: str = ""  # apart from the text
    calls: tuple[ToolCallDelta, ...] = ()
    num_reasoning_tokens: int = 0
    stop_string: str | None = None  # the one that has ended the answer

    @property
    def is_empty(self) -> bool:
        """But for the finish reason."""
        return not (self.text or self.reasoning or self.calls or self.scores or self.token_ids)

    def pieces(self, max_scores: int) -> Sequence[TextDelta]:
        """The same in deltas with at most so many scores each. The text is in the first one, calls that begin
        and the end in the last one."""
        if len(self.scores) <= max_scores:
            return (self,)
        begun = next((idx for idx, piece in enumerate(self.calls) if piece.name), len(self.calls))
        first, *others = (
            self.scores[begin : begin + max_scores] for begin in range(0, len(self.scores), max_scores)
        )
        return (
            msgspec.structs.replace(self, scores=first, calls=self.calls[:begun], finish_reason=None),
            *(TextDelta("", scores=scores) for scores in others[:-1]),
            TextDelta(
                "",
                0,
                self.finish_reason,
                others[-1],
                calls=self.calls[begun:],
                stop_string=self.stop_string,
            ),
        )


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one choice. Each choice counts the prompt; the API counts it once per prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt
    audio_tokens: int = 0  # of the prompt
    reasoning_tokens: int = 0  # of the answer
    audio_s: float = 0.0  # seconds of sound in the prompt


class TokenizeCall(msgspec.Struct, frozen=True):
    what: str | ChatCall  # a text, or a conversation's prompt
    names: bool  # the tokens' names are wanted
    adds_special: bool = False  # a text gets the tokens that the tokenizer adds


class Tokenized(msgspec.Struct, frozen=True):
    token_ids: list[int]
    names: list[str] | None  # as the vocabulary writes the tokens, if the client wants them


class MediaNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change to one media item that the client did not ask for, in `media` of the answer."""

    item: int  # index among the request's items
    modality: str
    reason: str  # "budget" or "load": it was reduced; "error": it was left out
    num_tokens: int = 0  # after the change
    num_frames: int | None = None
    max_pixels: int | None = None  # of the image, or of each frame
    error: str | None = None
