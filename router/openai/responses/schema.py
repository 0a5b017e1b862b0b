"""Request bodies of /v1/responses. Fields are of the three kinds of `router.openai.schema`, with OpenAI's
names for this endpoint. Pure values, made and dropped within one request.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from router.openai.schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    Count,
    Harmless,
    InputAudioPart,
    NumLogprobs,
    Penalty,
    StrictModel,
    Unit,
)
from router.openai.structure import NamedSchema

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
    file_data: str | None = None  # a data URI; or base64, if the file's name tells its type
    file_url: str | None = None
    filename: Annotated[str, Field(max_length=1000)] | None = None
    detail: Literal["auto", "low", "high"] | None = None
    prompt_cache_breakpoint: Harmless = None


Part = InputText | OutputText | InputImage | InputVideo | InputFile | InputAudioPart


def _content_kind(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<parts>"


class MessageItem(StrictModel):
    """A message of the client, or of an earlier answer."""

    type: Literal["message"] = "message"  # first: it is named in the error about an item of another type
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[
            list[Annotated[Part, Field(discriminator="type")]],
            Field(min_length=1, max_length=MAX_PARTS, fail_fast=True),
            Tag("<parts>"),
        ],
        Discriminator(_content_kind),
    ]
    id: Harmless = None
    status: Harmless = None
    phase: Harmless = None


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


class ResponsesRequest(StrictModel):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "store": (False,),
        "prompt": (),
        "reasoning": ({}, {"effort": "none"}, {"effort": None, "summary": None}),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "moderation": (),
        "context_management": ([],),
        "prompt_cache_options": ({},),
        "image": ({}, {"context_compression": "auto"}, {"context_compression": "disabled"}),
        "access_programs": (),
    }
    harmless: ClassVar[tuple[str, ...]] = (
        "max_tool_calls", "parallel_tool_calls", "prompt_cache_retention",
    )  # fmt: skip

    model: str
    input: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[
            list[MessageItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("<parts>")
        ],
        Discriminator(_content_kind),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Unit | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    text: TextOptions | None = None
    include: Annotated[list[Includable], Field(max_length=16)] | None = None
    top_logprobs: NumLogprobs | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    # These are repeated in the answer and have no other effect
    metadata: Annotated[dict[Key, Label], Field(max_length=16)] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
