"""Translates a request body of /v1/messages to the chat endpoint's call. Pure except for the random seed.

A request becomes a `ChatRequest` first, as one of /v1/responses does. Errors name fields as this endpoint
names them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from cluster.errors import RequestError, UnsupportedError
from router.api.anthropic.schema import (
    Base64Source,
    Block,
    CountRequest,
    ImageBlock,
    Message,
    MessagesRequest,
    OutputConfig,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.api.body import validated
from router.api.chat.schema import ChatRequest
from router.api.chat.translate import chat_call
from router.api.names import naming, renamed, with_names
from router.api.protocol import CallContext
from router.calls import ChatCall

_NAMES = {
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "tool_choice.function": "tool_choice",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def messages_call(request: CountRequest, context: CallContext) -> ChatCall:
    """Translates a request; a `CountRequest` has only what the prompt depends on. Raises RequestError."""
    names = dict(_NAMES)
    asked = {
        "model": request.model,
        "messages": _conversation(request, names),
        "tools": _tools(request, names),
        **_choice(request.tool_choice),
        "include_reasoning": request.thinking is None or request.thinking.display != "omitted",
        "response_format": _output_format(request.output_config),
    }
    if isinstance(request, MessagesRequest):
        _check_last(request.messages)
        asked |= {
            "max_completion_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop": request.stop_sequences,
            "stream": request.stream,
        }
    with naming(lambda param: renamed(param, names)):
        chat = validated(ChatRequest, asked, ChatRequest.model_validate)
        call = chat_call(chat, context)
    options = msgspec.structs.replace(call.options, hints=_hints(request))
    return with_names(msgspec.structs.replace(call, options=options), names)


def messages_name(param: str) -> str:
    """A field of a chat request, as this endpoint names it."""
    return renamed(param, _NAMES)


def _conversation(request: CountRequest, names: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the messages of a chat. `names` gets the fields that they come from."""
    found: list[tuple[dict[str, Any], str]] = []
    if request.system:
        found.append(({"role": "system", "content": _parts(request.system)}, "system"))
    for idx, message in enumerate(request.messages):
        found += _messages(message, f"messages[{idx}]", names, len(found))
    for idx, (_, param) in enumerate(found):
        names[f"messages[{idx}]"] = param
    return [message for message, _ in found]


def _check_last(messages: Sequence[Message]) -> None:
    """Refuses an assistant's last message: a template would begin a new answer after it."""
    if messages[-1].role == "assistant":
        param = f"messages[{len(messages) - 1}]"
        raise UnsupportedError(
            f"{param}: this server does not continue an assistant's message (prefill); a conversation must "
            "end with a user's",
            param=param,
        )


def _messages(
    message: Message, param: str, names: dict[str, str], begin: int
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the messages that one message of this endpoint becomes: a tool's result is one of its own."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}, param
    elif message.role == "assistant":
        yield _assistant(message.content, param), param
    else:
        rest: list[TextBlock | ImageBlock] = []
        for idx, block in enumerate(message.content):
            where = f"{param}.content[{idx}]"
            if isinstance(block, ToolResultBlock) and message.role == "user" and not rest:
                result = {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": _parts(block.content or ""),
                }
                yield result, where
            elif isinstance(block, TextBlock | ImageBlock):
                names[f"messages[{begin + idx - len(rest)}].content[{len(rest)}]"] = where
                rest.append(block)
            else:
                what = (
                    "stands before text and images"
                    if isinstance(block, ToolResultBlock)
                    else "is not the user's"
                )
                raise RequestError(f"{where}: a block of type {block.type!r} {what}", param=where)
        if rest:
            yield {"role": message.role, "content": _parts(rest)}, param


def _assistant(blocks: Sequence[Block], param: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for idx, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                where = f"{param}.content[{idx}]"
                raise RequestError(
                    f"{where}: a block of type {block.type!r} is not the assistant's", param=where
                )
    return {
        "role": "assistant",
        "content": "".join(texts) if texts or not calls else None,
        **({"reasoning_content": "".join(thoughts)} if thoughts else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _parts(content: str | Sequence[TextBlock | ImageBlock | ToolReferenceBlock]) -> Any:
    """A single text becomes a string, as at /v1/responses."""
    if isinstance(content, str):
        return content
    if len(content) == 1 and isinstance(content[0], TextBlock):
        return content[0].text
    return [_part(block) for block in content]


def _part(block: TextBlock | ImageBlock | ToolReferenceBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    if isinstance(block, ToolReferenceBlock):
        return {"type": "text", "text": f"<tool_reference>{block.tool_name}</tool_reference>"}
    source = block.source
    is_data = isinstance(source, Base64Source)
    url = f"data:{source.media_type};base64,{source.data}" if is_data else source.url
    return {"type": "image_url", "image_url": {"url": url}}


def _tools(request: CountRequest, names: dict[str, str]) -> list[dict[str, Any]]:
    tools = []
    for idx, tool in enumerate(request.tools or ()):
        names[f"tools[{idx}].function.parameters"] = f"tools[{idx}].input_schema"
        names[f"tools[{idx}].function"] = f"tools[{idx}]"
        function = tool.model_dump(include={"name", "description", "strict"})
        tools.append({"type": "function", "function": {**function, "parameters": tool.input_schema}})
    return tools


def _choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError("tool_choice.name: belongs to the type 'tool'", param="tool_choice.name")
    return {
        "tool_choice": named if choice.type == "tool" else _CHOICES[choice.type],
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _hints(request: CountRequest) -> tuple[tuple[str, str], ...]:
    """Clients ask for reasoning and for effort whatever the model is, so a template without these variables
    is no error."""
    hints: dict[str, Any] = {}
    if request.thinking is not None:
        hints["enable_thinking"] = request.thinking.type != "disabled"
    effort = request.output_config and request.output_config.effort
    if effort is not None:
        hints["reasoning_effort"] = "xhigh" if effort == "max" else effort
    return tuple((name, json.dumps(value)) for name, value in hints.items())


def _output_format(config: OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    schema = {"name": "output", "schema": config.format.json_schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}
