"""The messages of a chat: roles, parts, media items, calls of tools. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from cluster.errors import RequestError
from cluster.media.sources import MediaSource
from cluster.text.chat import ChatMedia, ChatMessage, ChatText
from cluster.types.media import FrameStrategy, MediaOptions, Modality
from router.api.chat import schema
from router.api.chat.schema import MAX_URL_CHARS, ChatRequest
from router.api.chat.tools import call_in_history


def media_options(request: ChatRequest) -> dict[Modality, MediaOptions]:
    """The media options of each modality."""
    asked = request.mm_processor_kwargs or schema.ProcessorOptions()
    video = (request.media_io_kwargs or schema.MediaLoading()).video or schema.VideoLoading()
    if asked.fps is not None and video.fps not in (None, asked.fps):
        raise RequestError("two different fps for videos; send one", param="media_io_kwargs.video.fps")
    if video.num_frames is not None and (video.min_frames or video.max_frames) is not None:
        raise RequestError(
            "num_frames says min_frames and max_frames already", param="media_io_kwargs.video.num_frames"
        )
    if (video.min_frames or 0) > (video.max_frames or video.min_frames or 0):
        raise RequestError("min_frames is larger than max_frames", param="media_io_kwargs.video.min_frames")
    if (asked.min_pixels or 0) > (asked.max_pixels or asked.min_pixels or 0):
        raise RequestError("min_pixels is larger than max_pixels", param="mm_processor_kwargs.min_pixels")
    image = MediaOptions(
        min_pixels=asked.min_pixels, max_pixels=asked.max_pixels, spatial_pooling=asked.spatial_pooling or 1
    )
    clip = msgspec.structs.replace(
        image,
        strategy=FrameStrategy(video.strategy or "uniform"),
        fps=video.fps or asked.fps,
        min_frames=video.num_frames or video.min_frames,
        max_frames=video.num_frames or video.max_frames,
        audio_in_video=bool(asked.use_audio_in_video),
        temporal_pooling=asked.temporal_pooling or 1,
    )
    return {Modality.IMAGE: image, Modality.VIDEO: clip, Modality.AUDIO: MediaOptions()}


def messages_of(
    messages: Sequence[schema.InputMessage],
    options: Mapping[Modality, MediaOptions],
    media: list[MediaSource],
) -> tuple[ChatMessage, ...]:
    """Translates messages, and adds their media items to `media`."""
    names: dict[str, str] = {}  # of the tools that were called, by the call's id
    found = []
    for idx, message in enumerate(messages):
        param = f"messages[{idx}]"
        _check_kind(message, param)
        calls = tuple(call_in_history(call) for call in message.tool_calls or ())
        names |= {call.call_id: call.name for call in calls}
        call_id = message.tool_call_id or ""
        found.append(
            ChatMessage(
                "system" if message.role == "developer" else message.role,
                _content(message, param, options, media),
                calls,
                call_id,
                str(message.name or names.get(call_id, "")) if message.role == "tool" else "",
                message.reasoning_content or message.reasoning or "",
            )
        )
    return tuple(found)


def _check_kind(message: schema.InputMessage, param: str) -> None:
    """Raises RequestError for fields that belong to another role."""
    if message.tool_calls and message.role != "assistant":
        raise RequestError(f"{param}.tool_calls: only an assistant calls tools", param=f"{param}.tool_calls")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        param = f"{param}.tool_call_id"
        why = "is missing" if message.role == "tool" else "belongs to a tool's message alone"
        raise RequestError(f"{param}: {why}", param=param)
    if message.role != "assistant" and _has_refusal(message):
        raise RequestError(f"{param}: only an assistant refuses", param=param)
    if message.content is None and not (message.tool_calls or message.refusal):
        raise RequestError(f"{param}.content: is missing", param=f"{param}.content")


def _has_refusal(message: schema.InputMessage) -> bool:
    parts = () if isinstance(message.content, str) else message.content or ()
    return bool(message.refusal) or any(isinstance(part, schema.RefusalPart) for part in parts)


def _content(
    message: schema.InputMessage,
    param: str,
    options: Mapping[Modality, MediaOptions],
    media: list[MediaSource],
) -> str | tuple[ChatText | ChatMedia, ...]:
    content, refusal = message.content or "", message.refusal or ""
    if isinstance(content, str):
        return content + refusal
    parts: list[ChatText | ChatMedia] = []
    for part_idx, part in enumerate(content):
        if isinstance(part, schema.TextPart | schema.RefusalPart):
            parts.append(ChatText(part.text))
            continue
        source = _source(part, f"{param}.content[{part_idx}]", options)
        media.append(source)
        parts.append(ChatMedia(source.modality))
    return (*parts, ChatText(refusal)) if refusal else tuple(parts)


def _source(
    part: schema.ImagePart | schema.VideoPart | schema.AudioUrlPart | schema.InputAudioPart,
    param: str,
    options: Mapping[Modality, MediaOptions],
) -> MediaSource:
    match part:
        case schema.ImagePart():
            modality, url = Modality.IMAGE, part.image_url.url
        case schema.VideoPart():
            modality, url = Modality.VIDEO, part.video_url.url
        case schema.AudioUrlPart():
            modality, url = Modality.AUDIO, part.audio_url.url
        case schema.InputAudioPart():
            modality = Modality.AUDIO
            url = f"data:audio/{part.input_audio.format};base64,{part.input_audio.data}"
    if len(url) > MAX_URL_CHARS and url[:5].lower() != "data:":
        raise RequestError(f"{param}: a URL may have {MAX_URL_CHARS} characters at most", param=param)
    return MediaSource(modality, url, param, options[modality])


def negative_of(messages: Sequence[ChatMessage], text: str) -> tuple[ChatMessage, ...]:
    """Returns the same conversation without media and with its last user message replaced."""
    bare = [msgspec.structs.replace(message, content=_text_of(message)) for message in messages]
    last = max((i for i, message in enumerate(bare) if message.role == "user"), default=len(bare) - 1)
    bare[last] = msgspec.structs.replace(bare[last], content=text)
    return tuple(bare)


def _text_of(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content if isinstance(part, ChatText))
