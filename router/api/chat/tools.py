"""The fields of a chat about tools and reasoning, in OpenAI's and vLLM's names, and what they mean. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Discriminator, Field, Tag

from cluster.errors import RequestError
from cluster.text.chat import ChatOptions, ToolCall
from router.api.fields import StrictModel
from router.calls import MAX_CALL_NAME_CHARS, ToolFunction, ToolRules

MAX_TOOLS = 128
MAX_CHARS = 200_000  # of a schema, or of another value
MAX_VARIABLES = 64
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
# In a conversation: a model may have called a function that it was never given
CalledName = Annotated[str, Field(min_length=1, max_length=MAX_CALL_NAME_CHARS)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _Function(StrictModel):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # none: the function has no arguments
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: _Function


class _Named(StrictModel):
    name: str


class NamedTool(StrictModel):
    type: Literal["function"]
    function: _Named


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(StrictModel):
    """A choice of tools, as if the request had no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class _Called(StrictModel):
    name: CalledName
    arguments: str
    parsed_arguments: Any = None  # what the openai clients' helpers add


class InputToolCall(StrictModel):
    """A call in an assistant's message of the conversation."""

    id: CallId
    type: Literal["function"]
    function: _Called
    index: Any = None  # of streamed pieces; some clients send it back


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
Variables = Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)]


def choice_kind(value: Any) -> str:
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<tools>" if kind == "allowed_tools" else "<tool>"


_Tool = TypeVar("_Tool")
_Allowed = TypeVar("_Allowed")
ChoiceOf = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[_Tool, Tag("<tool>")]
    | Annotated[_Allowed, Tag("<tools>")],
    Discriminator(choice_kind),
]


class ToolFields(BaseModel):
    """The fields of chats."""

    tools: Tools | None = None
    tool_choice: ChoiceOf[NamedTool, AllowedChoice] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None


def tool_texts(request: ToolFields) -> list[str]:
    """Writes each tool as JSON, whether or not the model sees it. Raises RequestError."""
    return [_json(_shown(tool), f"tools[{idx}]") for idx, tool in enumerate(request.tools or ())]


def options_of(request: ToolFields, tools: Sequence[str]) -> ChatOptions:
    """Returns what the chat template gets. A model that must not call a tool does not see any. `tools`: all
    of the request."""
    variables, hints = request.chat_template_kwargs or {}, _effort(request.reasoning_effort)
    offered = {} if request.tool_choice == "none" else _offered(request)
    return ChatOptions(
        tuple(tools[idx] for idx in offered),
        tuple((name, _json(value, "chat_template_kwargs")) for name, value in variables.items()),
        tuple((name, json.dumps(value)) for name, value in hints.items()),
        "reasoning_effort" if "reasoning_effort" in hints else "",
    )


def _effort(effort: str | None) -> dict[str, Any]:
    """Returns what templates know: how much reasoning is wanted, or only whether some is."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": "xhigh" if effort == "max" else effort}


def rules_of(request: ToolFields) -> ToolRules | None:
    """Raises RequestError for tools that cannot be meant."""
    choice, tools = request.tool_choice, _offered(request)
    _check_tools(request.tools or ())
    if isinstance(choice, AllowedChoice):
        _check_allowed(choice.allowed_tools, tools.values())
        choice = choice.allowed_tools.mode
    if not tools and choice not in (None, "none", "auto"):
        raise RequestError("tool_choice: there are no tools to choose from", param="tool_choice")
    if not tools or choice == "none":
        return None
    functions = [_function(tool.function, f"tools[{idx}].function") for idx, tool in tools.items()]
    is_parallel = request.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
        is_parallel = False
        if not functions:
            param = "tool_choice.function.name"
            raise RequestError(f"{param}: no tool has the name {choice.function.name[:64]!r}", param=param)
    return ToolRules(tuple(functions), choice not in (None, "auto"), is_parallel)


def _offered(request: ToolFields) -> dict[int, Tool]:
    """The tools that the model may see, by their place in the request."""
    choice = request.tool_choice
    tools = dict(enumerate(request.tools or ()))
    if not isinstance(choice, AllowedChoice):
        return tools
    names = {tool.function.name for tool in choice.allowed_tools.tools}
    return {idx: tool for idx, tool in tools.items() if tool.function.name in names}


def _check_allowed(allowed: AllowedTools, offered: Iterable[Tool]) -> None:
    names = {tool.function.name for tool in offered}
    for name in (tool.function.name for tool in allowed.tools):
        if name not in names:
            param = "tool_choice.allowed_tools"
            raise RequestError(f"{param}: no tool has the name {name[:64]!r}", param=param)


def _function(function: _Function, param: str) -> ToolFunction:
    param = f"{param}.parameters"
    parameters = _NO_ARGUMENTS if function.parameters is None else function.parameters
    return ToolFunction(function.name, _json(parameters, param), param, bool(function.strict))


def _shown(tool: Tool) -> dict[str, Any]:
    """Returns what the model sees of a tool."""
    function = tool.function.model_dump(exclude={"strict"})
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }


def _json(value: Any, param: str) -> str:
    """Raises RequestError."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param}: cannot be written as JSON", param=param) from error
    if len(text) > MAX_CHARS:
        raise RequestError(f"{param}: more than {MAX_CHARS} characters", param=param)
    return text


def _check_tools(tools: Sequence[Tool]) -> None:
    names: set[str] = set()
    for idx, tool in enumerate(tools):
        param, function = f"tools[{idx}].function", tool.function
        if function.name in names:
            raise RequestError(f"{param}.name: two tools have this name", param=f"{param}.name")
        names.add(function.name)
        if function.parameters is None:
            continue
        param = f"{param}.parameters"
        if function.parameters.get("type", "object") != "object":
            raise RequestError(f"{param}: arguments are an object", param=param)


def call_in_history(call: InputToolCall) -> ToolCall:
    """Translates a call of the conversation. Templates get the arguments as an object. A call that was cut,
    or that a model wrote wrongly, stays in its conversation: what is no object comes as one that has the text
    as it is."""
    text = call.function.arguments or "{}"
    try:
        arguments = _object(text)
    except (ValueError, RecursionError):
        arguments = json.dumps({"invalid_arguments": text}, ensure_ascii=False)
    return ToolCall(call.id, call.function.name, arguments)


def _object(text: str) -> str:
    """Returns the same JSON without half surrogate pairs, which no tokenizer takes. Raises ValueError or
    RecursionError."""
    arguments = json.loads(text)
    if not isinstance(arguments, dict):
        raise ValueError("not an object")
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()
