"""From a request body of /v1/responses to the chat endpoint's call. Pure except for the random seed.

The way is over a `ChatRequest`, so both endpoints have one meaning. Whatever is wrong is named as this
endpoint names it: `messages[2].content[0]` becomes `input[1].content[0]`.
"""

from __future__ import annotations

import functools
import mimetypes
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from cluster.errors import RequestError, UnsupportedError
from cluster.text.defaults import GenerationDefaults
from router.calls import ChatCall
from router.openai.limits import Limits
from router.openai.names import renamed
from router.openai.responses.schema import (
    LOGPROBS,
    InputFile,
    InputImage,
    InputText,
    InputVideo,
    MessageItem,
    OutputText,
    Part,
    ResponsesRequest,
    SchemaFormat,
)
from router.openai.schema import ChatRequest
from router.openai.structure import AskedFormat
from router.openai.translate import ANY, chat_call

_MEDIA_KINDS = ("image", "audio", "video")
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
_ENDING = re.compile(r"\.[a-zA-Z0-9]{1,8}$")
_MESSAGE = re.compile(r"messages\[(\d+)\]")


def responses_call(
    request: ResponsesRequest,
    model_id: str,
    defaults: GenerationDefaults,
    tenant: str = "",
    trace_parent: str = "",
    limits: Limits = ANY,
) -> ChatCall:
    """Raises RequestError."""
    origins, messages = _messages(request)
    name_of = functools.partial(responses_name, origins=origins)
    wants_logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    chat = ChatRequest.model_validate(
        {
            "model": request.model,
            "messages": messages,
            "max_completion_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "frequency_penalty": request.frequency_penalty,
            "presence_penalty": request.presence_penalty,
            "response_format": _asked_format(request),
            "logprobs": wants_logprobs,
            "top_logprobs": request.top_logprobs if wants_logprobs else None,
            "stream": request.stream,
        }
    )
    try:
        call = chat_call(chat, model_id, defaults, tenant, trace_parent, limits)
    except RequestError as error:
        raise renamed(error, name_of) from error
    structure = call.structure
    if structure is not None:
        structure = msgspec.structs.replace(structure, param=name_of(structure.param))
    media = tuple(msgspec.structs.replace(source, param=name_of(source.param)) for source in call.media)
    return msgspec.structs.replace(call, media=media, structure=structure)


def _messages(request: ResponsesRequest) -> tuple[list[str], list[dict[str, Any]]]:
    """The conversation, and which field each message comes from."""
    origins: list[str] = []
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        origins.append("instructions")
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*origins, "input"], [*messages, {"role": "user", "content": request.input}]
    for idx, item in enumerate(request.input):
        origins.append(f"input[{idx}]")
        messages.append({"role": item.role, "content": _content(item, origins[-1])})
    return origins, messages


def _content(item: MessageItem, param: str) -> Any:
    """A single text becomes a string: this endpoint's clients write every text as a part, and templates may
    treat a list of parts differently."""
    if isinstance(item.content, str):
        return item.content
    parts = [_part(part, item.role, f"{param}.content[{idx}]") for idx, part in enumerate(item.content)]
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


def _part(part: Part, role: str, param: str) -> Any:
    match part:
        case InputText():
            return {"type": "text", "text": part.text}
        case OutputText():
            if role != "assistant":
                raise RequestError(f"{param}: output_text belongs to the assistant", param=param)
            return {"type": "text", "text": part.text}
        case InputImage():
            return _media("image", part.image_url, part.detail)
        case InputVideo():
            return _media("video", part.video_url)
        case InputFile():
            return _file(part, param)
        case _:  # `input_audio` is written as in a chat request
            return part


def _media(kind: str, url: str, detail: str | None = None) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url, "detail": detail}}


def _file(part: InputFile, param: str) -> dict[str, Any]:
    """An image, a sound or a video, by its declared type, else by its name."""
    if (part.file_data is None) == (part.file_url is None):
        raise RequestError(f"{param}: send either file_data or file_url", param=param)
    ending = _ENDING.search(part.filename or (part.file_url or "").split("?")[0])
    declared = (mimetypes.guess_type(f"file{ending[0]}")[0] if ending else None) or ""
    url = part.file_url or part.file_data or ""
    if url[:5].lower() == "data:":
        declared = url[5:300].split(",")[0].split(";")[0].strip().lower() or declared
    elif part.file_data is not None:
        url = f"data:{declared};base64,{part.file_data}"
    kind = declared.split("/")[0]
    if kind not in _MEDIA_KINDS:
        what = f"its type is {declared[:100]}" if declared else "its type is not known"
        raise UnsupportedError(
            f"{param}: a file must be an image, a sound or a video; {what}", param=f"{param}.type"
        )
    return _media(kind, url)


def _asked_format(request: ResponsesRequest) -> AskedFormat | None:
    wanted = None if request.text is None else request.text.format
    if wanted is None:
        return None
    schema = wanted if isinstance(wanted, SchemaFormat) else None
    return AskedFormat(type=wanted.type, json_schema=schema)


def responses_name(param: str, origins: Sequence[str] = ()) -> str:
    """A field of a chat request, as this endpoint names it. `origins`: of the messages."""
    found = _MESSAGE.match(param)
    if found and int(found[1]) < len(origins):
        return origins[int(found[1])] + param[found.end() :]
    return _NAMES.get(param, param)
