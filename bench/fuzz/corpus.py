"""Valid requests of all endpoints, with every kind of media and every field: the seeds of the mutator."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from bench import EXAMPLES

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MAX_TOKENS = 4


@dataclass(frozen=True)
class Seed:
    path: str
    body: dict[str, Any]


SCHEMA = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square"]},
        "sizes": {"type": "array", "items": {"type": "number", "minimum": 0}, "maxItems": 3},
        "said": {"anyOf": [{"type": "string", "pattern": "^[a-z]{1,5}$"}, {"type": "null"}]},
    },
    "required": ["shape", "said"],
    "additionalProperties": False,
}


def seeds(model_id: str) -> list[Seed]:
    """The same seeds for the same model."""
    image, photo = part("image", "png", "red_circle.png"), part("image", "jpeg", "blue_triangle.jpg")
    video, sound = part("video", "mp4", "moving_right.mp4"), part("audio", "wav", "seven.wav")
    heard = {"data": encoded("seven.wav"), "format": "wav"}
    text = {"type": "text", "text": "What do you see or hear?"}
    contents: list[Any] = [
        "hello",
        [text],
        [image, text],
        [photo, image, text],
        [video, text],
        [sound, text],
        [{"type": "input_audio", "input_audio": heard}, text],
        [image, sound, text],
    ]
    fields = _fields()
    system = {"role": "system", "content": "be brief"}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", "name": "a"}]
    found = []
    for i, content in enumerate(contents):
        for j, more in enumerate(fields):
            before = [[], [system], turns][(i + j) % 3]
            messages = [*before, {"role": "user", "content": content}]
            found.append(Seed(CHAT, _body(model_id, messages=messages, **more)))
    for prompt in ("once upon", ["one", "two"], [5, 6, 7], [[5, 6], [7]]):
        for more in (*fields[:5], {"echo": True, "logprobs": 2}, {"echo": True, "max_tokens": 0, "n": 2}):
            found.append(Seed(COMPLETIONS, _body(model_id, prompt=prompt, **more)))
    found += [
        Seed(CHAT, _body(model_id, messages=_called(contents[3]), **more)) for more in _tool_fields(TOOL)
    ]
    found += [Seed(RESPONSES, body) for body in _responses(model_id)]
    conversation = [system, {"role": "user", "content": contents[3]}]
    tokens: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": "once upon", "add_special_tokens": False, "return_token_strs": True}),
        ("/tokenize", {"messages": conversation, "return_token_strs": True}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
    ]
    return found + [Seed(path, {"model": model_id, **fields}) for path, fields in tokens for _ in range(4)]


TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True},
}
FUNCTION = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}


def _called(content: Any) -> list[dict[str, Any]]:
    """A conversation in which a tool was called."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"said": "x"}'}}
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "a circle"},
    ]


def _tool_fields(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields of both endpoints that have tools. For a model whose chat template takes none, only the last
    is valid."""
    return [
        {"tools": [tool], "stream": True},
        {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [tool], "tool_choice": "none"},
    ]


def _responses(model_id: str) -> list[dict[str, Any]]:
    picture = {"type": "input_image", "image_url": part("image", "png", "red_circle.png")["image_url"]["url"]}
    sound = {"type": "input_file", "filename": "a.wav", "file_data": encoded("seven.wav")}
    question = {"type": "input_text", "text": "What do you see or hear?"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": [picture]}
    inputs: list[Any] = [
        "hello",
        [{"role": "user", "content": [picture, question]}],
        [{"type": "message", "role": "user", "content": [sound, question]}],
        [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
            output,
        ],
    ]
    options: list[dict[str, Any]] = [
        {"stream": True, "instructions": "Be brief."},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}},
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}},
        *_tool_fields(FUNCTION),
    ]
    fixed = {"model": model_id, "max_output_tokens": MAX_TOKENS, "temperature": 0}
    return [{**fixed, "input": asked, **more} for asked in inputs for more in options]


def _fields() -> list[dict[str, Any]]:
    """The fields of both generating endpoints."""
    return [
        {},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 5, "n": 2},
        {"stop": ["\n", "x"], "stop_token_ids": [3], "min_tokens": 1, "ignore_eos": True, "priority": 1},
        {"guidance_scale": 1.5, "negative_prompt": "nothing", "cache_salt": "salt", "user": "u"},
        {
            "mm_processor_kwargs": {
                "min_pixels": 1024,
                "max_pixels": 16384,
                "fps": 2.0,
                "spatial_pooling": 2,
            },
            "media_io_kwargs": {"video": {"num_frames": 4, "strategy": "uniform"}},
            "max_media_tokens": 64,
            "on_media_error": "omit",
        },
        {"logprobs": False, "tools": [], "metadata": {"a": "b"}, "response_format": {"type": "text"}},
        {
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": -1},
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "bad_words": ["x"],
            "allowed_token_ids": [5, 6, 7],
            "return_token_ids": True,
        },
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
            }
        },
        {"structured_outputs": {"regex": "(yes|no)[!.]{0,3}"}, "temperature": 1.0, "seed": 3, "n": 2},
        {"guided_grammar": 'start: "a" start | "b"', "stream": True},
        {"guided_choice": ["red", "green"], "logprobs": True},
    ]


def part(modality: str, kind: str, name: str) -> dict[str, Any]:
    url = f"data:{modality}/{kind};base64,{encoded(name)}"
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}


def encoded(name: str) -> str:
    return base64.b64encode((EXAMPLES / name).read_bytes()).decode()


def _body(model_id: str, **fields: Any) -> dict[str, Any]:
    return {"model": model_id, "max_tokens": MAX_TOKENS, "temperature": 0, **fields}
