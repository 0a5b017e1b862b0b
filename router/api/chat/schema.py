"""Request bodies of /v1/chat/completions and /v1/completions. Pure values, made and dropped within one
request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from router.api.body import NEUTRAL, Harmless, RequestBody
from router.api.chat.structure import StructureFields
from router.api.chat.tools import CallId, InputToolCall, ToolFields
from router.api.fields import Count, NumLogprobs, Parts, SamplingFields, StrictModel, TextOr, TokenId
from router.http.limits import MAX_INT

MAX_CHOICES = 8
MAX_PROMPTS = 64
MAX_MESSAGES = 4096
MAX_CALLS = 256  # of one message
MAX_FRAMES = 1 << 20
MAX_URL_CHARS = 8192  # of one that is fetched


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


class InputMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[Parts[ContentPart]] | None = None  # none: of an assistant that calls tools
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
    """Decides by the first item: a long list of one kind is never tried as another."""
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
