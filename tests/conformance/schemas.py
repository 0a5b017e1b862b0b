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
import openai
from openai.types import Completion, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

COPY = Path(__file__).with_name("openai_schemas.json")
TYPES = (ChatCompletion, ChatCompletionChunk, Completion, ErrorObject, Model)
LEFT_OUT = {"title", "description", "default"}
FOREIGN = {"moderation", "misalignment"}  # fields of services that are no part of this one

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
    "Model": {"max_model_len"},
    "PromptTokensDetails": {"image_tokens", "video_tokens"},
}


def published() -> dict[str, Any]:
    """Of the client that is installed."""
    schemas = {each.__name__: _trimmed(TypeAdapter(each).json_schema()) for each in TYPES}
    for schema in schemas.values():
        definitions = schema.get("$defs", {})
        used = _referred(schema, definitions)
        schema["$defs"] = {name: body for name, body in definitions.items() if name in used}
    return {"source": f"openai-python {openai.__version__}", "schemas": schemas}


def _trimmed(part: Any) -> Any:
    if isinstance(part, list):
        return [_trimmed(each) for each in part]
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
        own = OWN_FIELDS.get(f"{name}.{part}", set()) | OWN_FIELDS.get(part or name, set())
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
    validator(name, **how).validate(answer)


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
