"""Translates a request body of /v1/responses to the chat endpoint's call. Pure except for the random seed.

A request becomes a `ChatRequest` first, so both endpoints have one meaning. Errors name fields as this
endpoint names them: `messages[2].content[0]` becomes `input[1].content[0]`.
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Sequence
from typing import Any

from cluster.errors import RequestError, UnsupportedError
from router.api.body import validated
from router.api.chat.schema import ChatRequest, MediaFields
from router.api.chat.structure import AskedFormat
from router.api.chat.translate import chat_call
from router.api.fields import SamplingFields
from router.api.names import naming, renamed, with_names
from router.api.protocol import CallContext
from router.api.responses.schema import (
    LOGPROBS,
    AllowedFunctions,
    CallItem,
    CallOutputItem,
    InputFile,
    InputImage,
    InputText,
    InputVideo,
    Item,
    MessageItem,
    NamedFunction,
    OutputRefusal,
    OutputText,
    Part,
    ReasoningItem,
    ResponsesRequest,
    SchemaFormat,
)
from router.calls import ChatCall
from router.http.limits import Limits

_MEDIA_KINDS = ("image", "audio", "video")
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "reasoning_effort": "reasoning.effort",
}
_SAME = (*SamplingFields.model_fields, *MediaFields.model_fields)
_ENDING = re.compile(r"\.[a-zA-Z0-9]{1,8}$")


def responses_call(request: ResponsesRequest, context: CallContext) -> ChatCall:
    """Raises RequestError."""
    _check_kept(request, context.limits)
    conversation = _Conversation(request)
    names, tools = conversation.names, []
    for idx, tool in enumerate(request.tools or ()):
        names[f"tools[{idx}].function"] = f"tools[{idx}]"
        tools.append({"type": "function", "function": tool.model_dump(exclude={"type"})})
    wants_logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    asked = {
        "model": request.model,
        "messages": conversation.messages,
        "max_completion_tokens": request.max_output_tokens,
        "tools": tools,
        "tool_choice": _choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": request.reasoning and request.reasoning.effort,
        "response_format": _asked_format(request),
        "structured_outputs": request.structured_outputs,
        "chat_template_kwargs": request.chat_template_kwargs,
        "logprobs": wants_logprobs,
        "top_logprobs": request.top_logprobs if wants_logprobs else None,
        "stream": request.stream,
        **{name: getattr(request, name) for name in _SAME},
    }
    with naming(lambda param: renamed(param, names)):
        chat = validated(ChatRequest, asked, ChatRequest.model_validate)
        call = chat_call(chat, context)
    return with_names(call, names)


def _check_kept(request: ResponsesRequest, limits: Limits) -> None:
    if request.background and not limits.keep_responses_s:
        why = "background responses are not kept here (several doors, or keep_responses_s: 0)"
        raise UnsupportedError(why, param="background")
    if request.background and request.store is False:
        raise RequestError("a background response is kept; store cannot be false", param="store")
    if request.store and not request.background:
        raise UnsupportedError("only responses with background: true are kept", param="store")


def _choice(choice: str | NamedFunction | AllowedFunctions | None) -> Any:
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [_choice(each) for each in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


class _Conversation:
    """The messages of an input, and which field each part of them comes from. An assistant's reasoning, text
    and calls are items of their own here; in this order they are one message, whose pieces of reasoning are
    joined in the end."""

    def __init__(self, request: ResponsesRequest):
        self.names = dict(_NAMES)
        self.messages: list[dict[str, Any]] = []
        if request.instructions is not None:
            self._add("instructions", "system", content=request.instructions)
        if isinstance(request.input, str):
            self._add("input", "user", content=request.input)
            return
        for idx, item in enumerate(request.input):
            self._take(item, f"input[{idx}]")
        for message in self.messages:
            message.setdefault("content", None if "tool_calls" in message else "")
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])

    def _take(self, item: Item, param: str) -> None:
        match item:
            case MessageItem():
                content = _content(item.content, item.role, f"{param}.content")
                if item.role == "assistant" and self._has_room("content", "tool_calls"):
                    self.names[f"{self._last}.content"] = f"{param}.content"
                    self.messages[-1]["content"] = content
                else:
                    self._add(param, item.role, content=content)
            case ReasoningItem():
                if not self._has_room("content", "tool_calls"):
                    self._add(param, "assistant", reasoning_content=[])
                texts = item.content or item.summary or ()
                self.messages[-1]["reasoning_content"] += (each.text for each in texts)
            case CallItem():
                if not self._has_room():
                    self._add(param, "assistant")
                calls = self.messages[-1].setdefault("tool_calls", [])
                self.names |= {
                    f"{self._last}.tool_calls": param,
                    f"{self._last}.tool_calls[{len(calls)}].function": param,
                }
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case CallOutputItem():
                content = _content(item.output, "tool", f"{param}.output")
                self._add(param, "tool", content=content, tool_call_id=item.call_id, name=item.name)
                self.names[f"{self._last}.content"] = f"{param}.output"

    def _add(self, param: str, role: str, **fields: Any) -> None:
        self.messages.append({"role": role, **fields})
        self.names[self._last] = param

    @property
    def _last(self) -> str:
        return f"messages[{len(self.messages) - 1}]"

    def _has_room(self, *fields: str) -> bool:
        """Whether the last message is an assistant's that has none of these."""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and not last.keys() & set(fields)


def _content(content: str | Sequence[Part], role: str, param: str) -> Any:
    """A single text becomes a string: this endpoint's clients write every text as a part, and templates may
    treat a list of parts differently."""
    if isinstance(content, str):
        return content
    parts = [_part(part, role, f"{param}[{idx}]") for idx, part in enumerate(content)]
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


def _part(part: Part, role: str, param: str) -> Any:
    match part:
        case InputText():
            return {"type": "text", "text": part.text}
        case OutputText() | OutputRefusal():
            if role != "assistant":
                raise RequestError(f"{param}: {part.type} belongs to the assistant", param=param)
            return {"type": "text", "text": part.text if isinstance(part, OutputText) else part.refusal}
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
    """Returns an image, a sound or a video, by its declared type, else by its name."""
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


def responses_name(param: str) -> str:
    """A field of a chat request, as this endpoint names it."""
    return renamed(param, _NAMES)
