"""OpenAI's published schemas of what a server answers, as JSON schemas.

The source are the types of the openai-python client, which are generated from OpenAI's OpenAPI document.
`openai_schemas.json` is a trimmed copy of them: without texts, defaults and what concerns other services.
Written by `python -m tests.conformance.schemas`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema.exceptions
import openai
from openai.types import Completion, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

COPY = Path(__file__).with_name("openai_schemas.json")
TYPES: dict[str, Any] = {
    "ChatCompletion": ChatCompletion,
    "ChatCompletionChunk": ChatCompletionChunk,
    "Completion": Completion,
    "ErrorObject": ErrorObject,
    "Model": Model,
    "ResponseStreamEvent": ResponseStreamEvent,  # its last event has the whole response
}
LEFT_OUT = {"title", "description", "default"}
# Fields of services that are no part of this one
FOREIGN = {
    "moderation", "misalignment", "access_programs", "conversation", "image", "input_transformations",
    "prompt", "prompt_cache_diagnostics", "prompt_cache_options", "prompt_cache_retention", "tool_usage",
    "caller", "namespace", "allowed_callers", "defer_loading", "output_schema", "async",
}  # fmt: skip

# Of these types' unions only what this server has
RESPONSES = {
    "FunctionTool",
    "ToolChoiceFunction",
    "ResponseOutputMessage",
    "ResponseReasoningItem",
    "ResponseFunctionToolCall",
    "ResponseOutputText",
    "PartReasoningText",
    "ResponseFormatText",
    "ResponseFormatTextJSONSchemaConfig",
    "ResponseFormatJSONObject",
}
RESPONSES |= {
    f"Response{kind}Event"
    for kind in (
        "Created", "InProgress", "Completed", "Incomplete", "Failed", "OutputItemAdded", "OutputItemDone",
        "ContentPartAdded", "ContentPartDone", "TextDelta", "TextDone", "ReasoningTextDelta",
        "ReasoningTextDone", "FunctionCallArgumentsDelta", "FunctionCallArgumentsDone",
    )
}  # fmt: skip

# Fields of ours and of vLLM's beside OpenAI's, by type. Everything else is refused.
OWN_FIELDS = {
    "ChatCompletion": {"media", "ledger", "prompt_token_ids", "prompt_logprobs"},
    "ChatCompletionChunk": {"media", "ledger", "prompt_token_ids"},
    "ChatCompletion.Choice": {"token_ids"},
    "ChatCompletionChunk.Choice": {"token_ids", "prompt_token_ids", "media"},
    "ChatCompletionMessage": {"reasoning", "reasoning_content"},
    "ChoiceDelta": {"reasoning", "reasoning_content"},
    "Completion": {"ledger"},
    "CompletionChoice": {"token_ids", "prompt_token_ids", "prompt_logprobs"},
    "Model": {"max_model_len", "parent"},
    "Response": {"media", "ledger", "frequency_penalty", "presence_penalty", "store"},
    "InputTokensDetails": {"audio_tokens"},
    "ResponseFunctionCallArgumentsDoneEvent": {"name"},  # the types of openai 2 demand it
    "Logprob": {"bytes"},  # of events; as it is of a whole text
    "LogprobTopLogprob": {"bytes"},
    "PromptTokensDetails": {"image_tokens", "video_tokens"},
}


def published() -> dict[str, Any]:
    """Of the client that is installed."""
    schemas = {name: _trimmed(TypeAdapter(each).json_schema()) for name, each in TYPES.items()}
    for schema in schemas.values():
        definitions = schema.get("$defs", {})
        used = _referred(schema, definitions)
        schema["$defs"] = {name: body for name, body in definitions.items() if name in used}
    return {"source": f"openai-python {openai.__version__}", "schemas": schemas}


def _trimmed(part: Any) -> Any:
    if isinstance(part, list):
        ours = [each for each in part if isinstance(each, dict) and _name(each) in RESPONSES]
        other = [each for each in part if not (isinstance(each, dict) and _name(each))]
        kept = other + ours if ours else part
        if {"type": "string"} in kept:  # so no list of names says more
            kept = [each for each in kept if "enum" not in each]
        return [_trimmed(each) for each in kept]
    if not isinstance(part, dict):
        return part
    kept = {name: _trimmed(each) for name, each in part.items() if name not in LEFT_OUT}
    if kept.get("additionalProperties") is True:
        del kept["additionalProperties"]
    if isinstance(kept.get("properties"), dict):
        kept["properties"] = {
            name: _trimmed(each) for name, each in part["properties"].items() if name not in FOREIGN
        }
    return kept


def _name(part: dict[str, Any]) -> str:
    """Of the definition that it refers to."""
    return str(part.get("$ref", "")).rpartition("/")[2]


def _referred(schema: dict[str, Any], definitions: dict[str, Any]) -> set[str]:
    """Names of definitions that the schema needs."""
    found: set[str] = set()
    left = [json.dumps({name: part for name, part in schema.items() if name != "$defs"})]
    while left:
        text = left.pop()
        new = {name for name in definitions if f'"#/$defs/{name}"' in text} - found
        found |= new
        left += [json.dumps(definitions[name]) for name in new]
    return found


@cache
def validator(name: str, *, is_event: bool = False, is_echo: bool = False) -> jsonschema.Draft202012Validator:
    """No field is accepted that is neither OpenAI's nor one of ours. Where the published types do not say
    what servers send: `is_event`: a text completion's events have null as finish reason until the last one,
    and events before the last one have null as usage; `is_echo`: a prompt's first token has null as its
    log-probability."""
    schema = json.loads(COPY.read_text())["schemas"][name]
    for part, body in (("", schema), *schema.get("$defs", {}).items()):
        if "properties" not in body:
            continue  # a union, or an enumeration
        own = OWN_FIELDS.get(f"{name}.{part}", set()) | OWN_FIELDS.get((part or name).split("__")[-1], set())
        body["properties"] |= dict.fromkeys(own, True)
        body["additionalProperties"] = False
    if is_event and name == "Completion":
        schema["$defs"]["CompletionChoice"]["properties"]["finish_reason"]["enum"].append(None)
        del schema["$defs"]["CompletionChoice"]["properties"]["finish_reason"]["type"]
    if is_echo:
        logprobs = schema["$defs"]["Logprobs"]["properties"]
        for field in ("token_logprobs", "top_logprobs"):
            (values,) = (each for each in logprobs[field]["anyOf"] if each["type"] == "array")
            values["prefixItems"] = [{"type": "null"}]
    return jsonschema.Draft202012Validator(schema)


def check(name: str, answer: Any, **how: bool) -> None:
    error = jsonschema.exceptions.best_match(validator(name, **how).iter_errors(answer))
    if error is not None:
        raise error


def _main() -> None:
    found = published()
    lines = [f'{{"source": {json.dumps(found["source"])}, "schemas": {{']
    for i, (name, schema) in enumerate(found["schemas"].items()):
        definitions = schema.pop("$defs")
        lines.append(f'{"," if i else ""}"{name}": {json.dumps(schema)[:-1]}, "$defs": {{')
        lines += [
            f"{',' if j else ''}{json.dumps(each)}: {json.dumps(body)}"
            for j, (each, body) in enumerate(definitions.items())
        ]
        lines.append("}}")
    COPY.write_text("\n".join([*lines, "}}"]) + "\n")


if __name__ == "__main__":
    _main()
