"""Request bodies of /v1/chat/completions and /v1/completions.

There are three kinds of fields:

* Implemented ones are typed here.
* `HARMLESS` ones are accepted and have no effect on the answer.
* `NEUTRAL` ones would change the answer but are not implemented, so only values that change nothing are
  accepted.

Any other field is refused, with the nearest known name in the message.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import BaseModel, Discriminator, Field, Tag

from cluster.errors import RequestError, UnsupportedError
from router.openai.fields import Count, NumLogprobs, SamplingFields, StrictModel, TokenId
from router.openai.limits import MAX_INT
from router.openai.structure import StructureFields
from router.openai.tools import CallId, InputToolCall, ToolFields

MAX_CHOICES = 8
MAX_PROMPTS = 64
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of all messages
MAX_CALLS = 256  # of one message
MAX_FRAMES = 1 << 20
MAX_URL_CHARS = 8192  # of one that is fetched

Harmless = Any
# Field → values that change nothing; None is always one of them
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "top_logprobs": (0,),
    "length_penalty": (1,),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "return_tokens_as_token_ids": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
}
HARMLESS = (
    "user", "metadata", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "prediction", "request_id", "session_id",
    "spaces_between_special_tokens",
)  # fmt: skip


class RequestBody(StrictModel):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL
    harmless: ClassVar[tuple[str, ...]] = HARMLESS


class TextPart(StrictModel):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Harmless = None  # here every prefix is cached


class RefusalPart(StrictModel):
    """A part of an earlier answer, as another server wrote it."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class _Url(StrictModel):
    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None  # the processor's own size rule applies


class ImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: _Url
    uuid: Harmless = None
    prompt_cache_breakpoint: Harmless = None


class VideoPart(StrictModel):
    type: Literal["video_url"]
    video_url: _Url
    uuid: Harmless = None


class AudioUrlPart(StrictModel):
    type: Literal["audio_url"]
    audio_url: _Url
    uuid: Harmless = None


class _InputAudio(StrictModel):
    data: str
    format: Annotated[str, Field(pattern=r"^[a-zA-Z0-9.+-]{1,32}$")]


class InputAudioPart(StrictModel):
    type: Literal["input_audio"]
    input_audio: _InputAudio
    uuid: Harmless = None
    prompt_cache_breakpoint: Harmless = None


ContentPart = Annotated[
    TextPart | RefusalPart | ImagePart | VideoPart | AudioUrlPart | InputAudioPart,
    Field(discriminator="type"),
]


def _content_kind(value: Any) -> str:
    return "text" if isinstance(value, str) else "parts"


class InputMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag("text")]
            | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("parts")],
            Discriminator(_content_kind),
        ]
        | None
    ) = None  # only of an assistant that calls tools
    name: Harmless = None  # of a tool's message: the template may want it
    tool_calls: Annotated[list[InputToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: CallId | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None  # of an assistant: text
    # Fields of the API's assistant messages, which clients send back; they must be empty
    audio: None = None
    function_call: None = None
    annotations: Harmless = None
    parsed: Harmless = None  # what the openai clients' helpers add
    provider_specific_fields: Harmless = None  # what litellm adds to an answer


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: Harmless = None
    continuous_usage_stats: bool | None = None  # the usage so far in every chunk


FrameCount = Annotated[int, Field(ge=1, le=MAX_FRAMES)]
FramesPerSecond = Annotated[float, Field(ge=0.001, le=240, allow_inf_nan=False)]


class ProcessorOptions(StrictModel):
    """`mm_processor_kwargs`: options of the model's processor for all images and clips of the request."""

    min_pixels: Count | None = None
    max_pixels: Count | None = None
    fps: FramesPerSecond | None = None
    use_audio_in_video: bool | None = None
    temporal_pooling: Annotated[int, Field(ge=1, le=8)] | None = None
    spatial_pooling: Annotated[int, Field(ge=1, le=8)] | None = None


class VideoLoading(StrictModel):
    fps: FramesPerSecond | None = None
    num_frames: FrameCount | None = None
    min_frames: FrameCount | None = None
    max_frames: FrameCount | None = None
    strategy: Literal["uniform", "keyframes", "scenes"] | None = None


class MediaLoading(StrictModel):
    """`media_io_kwargs`: which part of a file is read, per modality."""

    video: VideoLoading | None = None
    image: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    audio: Annotated[dict[str, Any], Field(max_length=0)] | None = None


class MediaFields(BaseModel):
    """How the media of a request are read and reduced."""

    mm_processor_kwargs: ProcessorOptions | None = None
    media_io_kwargs: MediaLoading | None = None
    max_media_tokens: Count | None = None  # of all items together; more is reduced
    exact_media: bool | None = None  # refuse what would have to be reduced
    # omit: answer without an item that cannot be used
    on_media_error: Literal["refuse", "omit"] | None = None


class EndpointRequest(RequestBody, SamplingFields, StructureFields):
    """The fields that both endpoints have."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


Messages = Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(EndpointRequest, MediaFields, ToolFields):
    # the chat template writes them
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {**NEUTRAL, "add_special_tokens": (False,)}

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None


TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
MANY = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)


def _prompt_kind(value: Any) -> str | None:
    """By the first item: a long list of one kind is never tried as another."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    if isinstance(first, str):
        return "<texts>"
    return "<lists of ids>" if isinstance(first, list) else "<ids>"


class CompletionRequest(EndpointRequest):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {**NEUTRAL, "add_special_tokens": (True,)}

    prompt: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[str], MANY, Tag("<texts>")]
        | Annotated[TokenIds, Tag("<ids>")]
        | Annotated[list[TokenIds], MANY, Tag("<lists of ids>")],
        Discriminator(
            _prompt_kind,
            custom_error_type="prompt_type",
            custom_error_message="Input should be a string, a list of strings, or token ids",
        ),
    ]
    logprobs: NumLogprobs | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None  # 0: with echo
    echo: bool | None = None
    best_of: Count | None = None  # must equal n: answers are not ranked


_FIELDS = pydantic.TypeAdapter(dict[str, Any])
Request = TypeVar("Request", bound=RequestBody)


def parse(model: type[Request], body: bytes) -> Request:
    """A valid request. Raises RequestError or UnsupportedError; messages name fields, not values."""
    try:
        fields = _FIELDS.validate_json(body)
    except pydantic.ValidationError as error:
        raise RequestError("the body is not a JSON object") from error
    return validated(model, fields, model.model_validate)


def validated(
    model: type[Request], fields: dict[str, Any], validate: Callable[[dict[str, Any]], Request]
) -> Request:
    """As `parse`, of fields that are read already. `validate`: a method of the model."""
    known = model.model_fields
    for name in list(fields):
        if name in known:
            continue
        value = fields.pop(name)
        if name in model.harmless:
            continue
        if name not in model.neutral:
            names = [*known, *model.neutral, *model.harmless]
            near = difflib.get_close_matches(name[:64], names, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"unknown field {name[:64]!r}{hint}", param=name[:64])
        if value is not None and not any(_is_same(value, neutral) for neutral in model.neutral[name]):
            raise UnsupportedError(f"{name!r} is not supported by this server", param=name)
    try:
        return validate(fields)
    except pydantic.ValidationError as error:
        raise _refusal(error) from None


def _is_same(value: Any, neutral: Any) -> bool:
    """Equality that distinguishes False from 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _refusal(error: pydantic.ValidationError) -> RequestError:
    """The error with the deepest location: of a union's branches, the one that matched furthest."""
    details = max(error.errors(include_url=False, include_input=False), key=lambda item: len(item["loc"]))
    path = _path(details["loc"])
    is_other_tool = "tool" in path and path.endswith("type")  # only functions can be called
    if is_other_tool or details["type"] == "none_required":
        return UnsupportedError(f"{path}: not supported by this server", param=path)
    if details["type"] in ("model_type", "dict_type"):
        return RequestError(f"{path}: Input should be an object", param=path)
    if limit := _limit(details):
        return RequestError(f"{path}: this server accepts {limit}", param=path)
    if details["type"] == "extra_forbidden":
        return RequestError(f"unknown field {path!r}", param=path)
    if details["type"] == "union_tag_invalid":
        expected = details.get("ctx", {}).get("expected_tags", "")
        return RequestError(f"{path}: unknown part type; known are {expected}", param=path)
    return RequestError(f"{path}: {details['msg']}", param=path)


def _limit(details: Any) -> str:
    """What a value or a list is bounded by; empty if it is something else that is wrong."""
    bounds = details.get("ctx", {})
    match details["type"]:
        case "less_than_equal":
            return f"at most {bounds['le']:g}"
        case "greater_than_equal":
            return f"at least {bounds['ge']:g}"
        case "too_long":
            return f"at most {bounds['max_length']} items"
        case _:
            return ""


_BRANCHES = {"text", "parts", "refusal", "image_url", "video_url", "audio_url", "input_audio"} | {
    "input_text", "output_text", "input_image", "input_video", "input_file",
    "image", "thinking", "redacted_thinking", "tool_reference", "tool_use", "tool_result", "base64", "url",
}  # fmt: skip
_UNIONS = ("content", "source")  # fields of several shapes


def _path(loc: tuple[str | int, ...]) -> str:
    """`messages[0].content[1].image_url.url`, without the names that pydantic gives to a union's branches."""
    path = ""
    for i, step in enumerate(loc):
        if isinstance(step, int):
            path += f"[{step}]"
            continue
        is_type = "[" in step or "-" in step or step[:1] == "<"
        is_branch = step in _BRANCHES and i > 0 and (loc[i - 1] in _UNIONS or isinstance(loc[i - 1], int))
        if not is_type and not is_branch:
            path += f".{step}" if path else step
    return path[:200]
