"""Request bodies of /v1/messages and /v1/messages/count_tokens. Fields are of the three kinds of
`router.api.body`, with Anthropic's names. Pure values, made and dropped within one request.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from router.api.body import Harmless, RequestBody
from router.api.chat.schema import MAX_MESSAGES
from router.api.chat.tools import MAX_TOOLS, CalledName, CallId, ToolName
from router.api.fields import Count, Parts, SomeParts, StopList, StrictModel, TextOr, Unit


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: Harmless = None  # here every prefix is cached
    citations: Harmless = None


class Base64Source(StrictModel):
    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z0-9.+-]{1,32}$")]
    data: str


class UrlSource(StrictModel):
    type: Literal["url"]
    url: str


class ImageBlock(StrictModel):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: Harmless = None


class ThinkingBlock(StrictModel):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: Harmless = None


class RedactedThinkingBlock(StrictModel):
    """Reasoning that another server has encrypted. It is left out."""

    type: Literal["redacted_thinking"]
    data: Harmless = None


class ToolUseBlock(StrictModel):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: CallId
    name: CalledName
    input: dict[str, Any]
    cache_control: Harmless = None
    caller: Harmless = None


class ToolReferenceBlock(StrictModel):
    """A tool that a client's search for tools has found."""

    type: Literal["tool_reference"]
    tool_name: CalledName
    cache_control: Harmless = None


ResultBlock = Annotated[TextBlock | ImageBlock | ToolReferenceBlock, Field(discriminator="type")]


class ToolResultBlock(StrictModel):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextOr[Parts[ResultBlock]] | None = None
    is_error: Harmless = None  # the model reads it from the content
    cache_control: Harmless = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Message(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: TextOr[SomeParts[Block]]


class CustomTool(StrictModel):
    type: Literal["custom"] | None = None  # first: tools that a server calls itself are refused by their type
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Harmless = None
    eager_input_streaming: Harmless = None  # arguments are always streamed as they come
    defer_loading: Harmless = None  # the model sees all tools


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Harmless = None  # `max_tokens` bounds reasoning and answer together
    display: Literal["summarized", "omitted"] | None = None  # a summary is the reasoning itself


class JsonFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountRequest(RequestBody):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": (
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},  # which clears nothing
        ),
        "mcp_servers": ([],),
        "diagnostics": (),
        "inference_geo": (),
        "speed": ("standard",),
    }
    harmless: ClassVar[tuple[str, ...]] = ("cache_control", "user_profile_id", "workspace_id")

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextOr[Parts[TextBlock]] | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    harmless: ClassVar[tuple[str, ...]] = (*CountRequest.harmless, "metadata", "service_tier")

    max_tokens: Count
    temperature: Unit | None = None
    top_p: Unit | None = None
    top_k: Count | None = None
    stop_sequences: StopList | None = None
    stream: bool | None = None
