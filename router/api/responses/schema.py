"""Request bodies of /v1/responses. Fields are of the three kinds of `router.api.body`, with OpenAI's
names for this endpoint. Pure values, made and dropped within one request.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from router.api.body import Harmless, RequestBody
from router.api.chat.schema import MAX_MESSAGES, InputAudioPart, MediaFields
from router.api.chat.structure import NamedSchema, StructuredOutputs
from router.api.chat.tools import MAX_TOOLS, CalledName, CallId, ChoiceOf, Effort, ToolName, Variables
from router.api.fields import Count, NumLogprobs, Parts, SamplingFields, SomeParts, StrictModel, TextOr

LOGPROBS = "message.output_text.logprobs"  # value of `include`

# All but the first are about parts of an answer that this server never has, so that they change nothing
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class InputText(StrictModel):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Harmless = None


class OutputText(StrictModel):
    """A part of an earlier answer, as this server or another one wrote it."""

    type: Literal["output_text"]
    text: str
    annotations: Harmless = None
    logprobs: Harmless = None
    parsed: Harmless = None  # what the openai client's helpers add


class OutputRefusal(StrictModel):
    """The same, of another server."""

    type: Literal["refusal"]
    refusal: str


class InputImage(StrictModel):
    type: Literal["input_image"]
    file_id: None = None  # before the fields that are missed if it is sent
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    prompt_cache_breakpoint: Harmless = None


class InputVideo(StrictModel):
    type: Literal["input_video"]
    video_url: str


class InputFile(StrictModel):
    """Media only. Exactly one of `file_data` and `file_url`."""

    type: Literal["input_file"]
    file_id: None = None
    file_data: str | None = None  # a data URI; or base64, if the file's name says its type
    file_url: str | None = None
    filename: Annotated[str, Field(max_length=1000)] | None = None
    detail: Literal["auto", "low", "high"] | None = None
    prompt_cache_breakpoint: Harmless = None


Part = InputText | OutputText | OutputRefusal | InputImage | InputVideo | InputFile | InputAudioPart


Content = TextOr[SomeParts[Annotated[Part, Field(discriminator="type")]]]


class _KeptItem(StrictModel):
    """What items of an earlier answer have besides."""

    id: Harmless = None
    status: Harmless = None


class MessageItem(_KeptItem):
    """A message of the client, or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Harmless = None


class CallItem(_KeptItem):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: CallId
    name: CalledName
    arguments: str
    parsed_arguments: Harmless = None  # what the openai client's helpers add
    namespace: None = None
    caller: None = None


class CallOutputItem(_KeptItem):
    """What a tool answered."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content
    name: CalledName | None = None
    namespace: None = None
    caller: None = None


class ReasoningText(StrictModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = Parts[ReasoningText]


class ReasoningItem(_KeptItem):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: ReasoningTexts | None = None
    summary: ReasoningTexts | None = None  # read if there is no content
    encrypted_content: None = None


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return f"<{kind}>" if kind in _ITEMS else None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _item_kind,
        custom_error_type="item_type",
        custom_error_message="unknown item type; known are " + ", ".join(map(repr, _ITEMS)),
    ),
]


class FunctionTool(StrictModel):
    type: Literal["function"]  # first: it is named in the error about a tool of another type
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(StrictModel):
    type: Literal["function"]
    name: str


class AllowedFunctions(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class ReasoningOptions(StrictModel):
    effort: Effort | None = None
    summary: Literal["auto"] | None = None  # there is none: the reasoning itself is in the answer


class PlainFormat(StrictModel):
    type: Literal["text", "json_object"]


class SchemaFormat(NamedSchema):
    type: Literal["json_schema"]


def _format_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<schema>" if kind == "json_schema" else "<plain>"


class TextOptions(StrictModel):
    format: (
        Annotated[
            Annotated[PlainFormat, Tag("<plain>")] | Annotated[SchemaFormat, Tag("<schema>")],
            Discriminator(_format_kind),
        ]
        | None
    ) = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(StrictModel):
    include_obfuscation: Harmless = None


Key = Annotated[str, Field(max_length=64)]
Label = Annotated[str, Field(max_length=512)]


class ResponsesRequest(RequestBody, SamplingFields, MediaFields):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "moderation": (),
        "context_management": ([],),
        "image": ({}, {"context_compression": "auto"}, {"context_compression": "disabled"}),
        "access_programs": (),
    }
    # The first one is about tools that a server calls itself
    harmless: ClassVar[tuple[str, ...]] = ("max_tool_calls", "prompt_cache_options", "prompt_cache_retention")

    model: str
    input: TextOr[Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ChoiceOf[NamedFunction, AllowedFunctions] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: Variables | None = None
    include: Annotated[list[Includable], Field(max_length=16)] | None = None
    top_logprobs: NumLogprobs | None = None
    background: bool | None = None
    store: bool | None = None  # what `background` says
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    # These are repeated in the answer and have no other effect
    metadata: Annotated[dict[Key, Label], Field(max_length=16, fail_fast=True)] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
