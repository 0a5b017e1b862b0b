"""A request body to a frozen call: what the door has to do, with every default filled in. Pure but for the seed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import msgspec

from cluster.errors import ModelNotFoundError, RequestError
from cluster.media.sources import MediaSource
from cluster.text.chat import ChatMessage, MediaPart, TextPart
from cluster.text.defaults import GenerationDefaults
from cluster.types.media import Modality
from cluster.types.request import SamplingParams
from router.openai import schema
from router.openai.schema import ChatRequest, CompletionRequest

SEED_MASK = 2**64 - 1
SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: neighbouring choices get seeds far apart
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions


class StopRules(msgspec.Struct, frozen=True):
    """When a choice ends."""

    max_tokens: int | None  # None: the model's default, as far as the context has room
    token_ids: tuple[int, ...]  # includes the model's end-of-sequence ids unless the client ignores them
    strings: tuple[str, ...]
    min_tokens: int = 0


class GuidanceRules(msgspec.Struct, frozen=True):
    """Classifier-free guidance; without a negative prompt the companion starts from the prompt's last token alone."""

    scale: float
    negative: tuple[ChatMessage, ...] | str | None


class ChatCall(msgspec.Struct, frozen=True):
    messages: tuple[ChatMessage, ...]
    media: tuple[MediaSource, ...]  # in the order of the messages' media parts; not yet looked at
    sampling: tuple[SamplingParams, ...]  # one per choice
    stop: StopRules
    guidance: GuidanceRules | None = None
    priority: int = 0
    stream: bool = False
    include_usage: bool = False  # streams only: a last chunk with the usage


class CompletionCall(msgspec.Struct, frozen=True):
    prompts: tuple[str | tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]  # choice i of every prompt draws with sampling[i]
    stop: StopRules
    guidance: GuidanceRules | None = None
    priority: int = 0
    stream: bool = False
    include_usage: bool = False


def chat_call(request: ChatRequest, model_id: str, defaults: GenerationDefaults) -> ChatCall:
    _check(request, model_id)
    max_tokens = request.max_completion_tokens or request.max_tokens
    if request.max_tokens not in (None, max_tokens):
        raise RequestError("max_tokens and max_completion_tokens differ; send one", param="max_tokens")
    media: list[MediaSource] = []
    messages = tuple(_message(message, idx, media) for idx, message in enumerate(request.messages))
    return ChatCall(
        messages=messages,
        media=tuple(media),
        sampling=_sampling(request, defaults),
        stop=_stop(request, max_tokens, defaults),
        guidance=_guidance(request, lambda text: _negative(messages, text)),
        priority=request.priority or 0,
        stream=bool(request.stream),
        include_usage=_wants_usage(request),
    )


def completion_call(
    request: CompletionRequest, model_id: str, defaults: GenerationDefaults
) -> CompletionCall:
    _check(request, model_id)
    return CompletionCall(
        prompts=_prompts(request.prompt),
        sampling=_sampling(request, defaults),
        stop=_stop(request, request.max_tokens or DEFAULT_COMPLETION_TOKENS, defaults),
        guidance=_guidance(request, lambda text: text),
        priority=request.priority or 0,
        stream=bool(request.stream),
        include_usage=_wants_usage(request),
    )


def _check(request: ChatRequest | CompletionRequest, model_id: str) -> None:
    if request.model != model_id:
        raise ModelNotFoundError(f"the model {request.model[:200]!r} does not exist", param="model")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")


def _message(message: schema.Message, idx: int, media: list[MediaSource]) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return ChatMessage(role, message.content)
    parts: list[TextPart | MediaPart] = []
    for part_idx, part in enumerate(message.content):
        if isinstance(part, schema.TextPart):
            parts.append(TextPart(part.text))
            continue
        source = _source(part, f"messages[{idx}].content[{part_idx}]")
        media.append(source)
        parts.append(MediaPart(source.modality))
    return ChatMessage(role, tuple(parts))


def _source(
    part: schema.ImagePart | schema.VideoPart | schema.AudioUrlPart | schema.InputAudioPart, param: str
) -> MediaSource:
    match part:
        case schema.ImagePart():
            return MediaSource(Modality.IMAGE, part.image_url.url, param)
        case schema.VideoPart():
            return MediaSource(Modality.VIDEO, part.video_url.url, param)
        case schema.AudioUrlPart():
            return MediaSource(Modality.AUDIO, part.audio_url.url, param)
        case schema.InputAudioPart():
            url = f"data:audio/{part.input_audio.format};base64,{part.input_audio.data}"
            return MediaSource(Modality.AUDIO, url, param)


def _sampling(
    request: ChatRequest | CompletionRequest, defaults: GenerationDefaults
) -> tuple[SamplingParams, ...]:
    """One value per choice. Choice 0 draws with the client's seed itself, the others with seeds derived from it."""
    temperature = defaults.temperature if request.temperature is None else request.temperature
    top_p = defaults.top_p if request.top_p is None else request.top_p
    if top_p == 0:  # OpenAI accepts it; the smallest set of tokens is the most probable one
        temperature, top_p = 0.0, 1.0
    top_k = defaults.top_k if request.top_k is None else request.top_k
    min_p = defaults.min_p if request.min_p is None else request.min_p
    seed = secrets.randbits(64) if request.seed is None and temperature > 0 else (request.seed or 0)
    return tuple(
        SamplingParams(temperature, top_p, max(top_k, 0), min_p, (seed + choice * SEED_STEP) & SEED_MASK)
        for choice in range(request.n or 1)
    )


def _stop(
    request: ChatRequest | CompletionRequest, max_tokens: int | None, defaults: GenerationDefaults
) -> StopRules:
    eos = () if request.ignore_eos else defaults.eos_token_ids
    token_ids = dict.fromkeys((*eos, *(request.stop_token_ids or ())))
    stop = request.stop or ()
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError("min_tokens is larger than max_tokens", param="min_tokens")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    return StopRules(max_tokens, tuple(token_ids), strings, min_tokens)


def _guidance(
    request: ChatRequest | CompletionRequest,
    negative: Callable[[str], tuple[ChatMessage, ...] | str],
) -> GuidanceRules | None:
    if request.guidance_scale is None or request.guidance_scale == 1:
        if request.negative_prompt is not None:
            raise RequestError("negative_prompt needs a guidance_scale other than 1", param="negative_prompt")
        return None
    text = request.negative_prompt
    return GuidanceRules(request.guidance_scale, None if text is None else negative(text))


def _negative(messages: Sequence[ChatMessage], text: str) -> tuple[ChatMessage, ...]:
    """The same conversation without media, its last user message replaced."""
    bare = [ChatMessage(message.role, _text_of(message)) for message in messages]
    last = max((i for i, message in enumerate(bare) if message.role == "user"), default=len(bare) - 1)
    bare[last] = ChatMessage(bare[last].role, text)
    return tuple(bare)


def _text_of(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content if isinstance(part, TextPart))


def _wants_usage(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def _prompts(
    prompt: str | list[str] | list[int] | list[list[int]],
) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    token_ids = tuple(item for item in prompt if isinstance(item, int))
    if token_ids:  # one prompt as token ids
        return (token_ids,)
    return tuple(
        item if isinstance(item, str) else tuple(item) for item in prompt if not isinstance(item, int)
    )
