"""How tokens are drawn and where an answer ends: fields that mean the same at several endpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from router.http.limits import MAX_INT

MAX_STOPS = 16
MAX_STOP_CHARS = 1000  # of one
MAX_ALL_STOP_CHARS = 2000  # the door builds their automaton on its event loop, in 1 µs for each
MAX_LOGPROBS = 20  # tokens at one position, besides the one that was drawn
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256  # of one
MAX_ALL_BAD_WORD_CHARS = 4000  # engines build their automaton
MAX_ALLOWED = 4096  # token ids
MAX_PRIORITY = 8
MAX_PARTS = 4096  # of all messages
MAX_FIELDS = 128  # of an object whose fields are named here: none has so many

Unit = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _together(max_chars: int) -> Callable[[list[str]], list[str]]:
    """Returns a validator of texts that have at most so many characters together."""

    def check(texts: list[str]) -> list[str]:
        if sum(map(len, texts)) > max_chars:
            message = "this server accepts at most {max_chars} characters in all items together"
            raise PydanticCustomError("too_many_chars", message, {"max_chars": max_chars})
        return texts

    return check


StopList = Annotated[
    list[StopString],
    Field(max_length=MAX_STOPS, fail_fast=True),
    AfterValidator(_together(MAX_ALL_STOP_CHARS)),
]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]  # the vocabulary is checked with the whole call
Count = Annotated[int, Field(ge=1, le=MAX_INT)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


_Item = TypeVar("_Item")
_Items = TypeVar("_Items")
# Of all messages, or of one: pydantic stops at the first that is too many
Parts = Annotated[list[_Item], Field(max_length=MAX_PARTS, fail_fast=True)]
SomeParts = Annotated[list[_Item], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
# Decided by the value's kind, so that an error is about the one or the other
TextOr = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[_Items, Tag("<parts>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<parts>"),
]


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, fields: Any) -> Any:
        """Each unknown field is an error of its own, so an object with too many is refused as a whole."""
        if isinstance(fields, dict) and len(fields) > MAX_FIELDS:
            raise PydanticCustomError(
                "too_many_fields", "an object has {most} fields at most", {"most": MAX_FIELDS}
            )
        return fields


class SamplingFields(BaseModel):
    """A field that is None has the value of the model's folder, or the neutral one."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Unit | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: (
        Annotated[
            Annotated[StopString, Tag("<string>")] | Annotated[StopList, Tag("<strings>")],
            Discriminator(lambda value: "<string>" if isinstance(value, str) else "<strings>"),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # by token id, in decimal
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES, fail_fast=True)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
            Field(max_length=MAX_BAD_WORDS, fail_fast=True),
            AfterValidator(_together(MAX_ALL_BAD_WORD_CHARS)),
        ]
        | None
    ) = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED, fail_fast=True)] | None
    ) = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None  # lower runs sooner
    guidance_scale: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    negative_prompt: Annotated[str, Field(min_length=1)] | None = None
    # only KV and embeddings under the same salt are reused
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
