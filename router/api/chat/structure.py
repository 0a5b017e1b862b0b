"""`response_format`, `structured_outputs` and `guided_*`: the fields of a request that say which form its
answers have, and what they mean. The names are OpenAI's and vLLM's. Pure."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from cluster.errors import RequestError
from cluster.types.structure import Structure, StructureKind
from router.api.fields import StrictModel

MAX_TEXT_CHARS = 200_000  # of a schema, a pattern, a grammar or all choices
MAX_CHOICES = 10_000
_ANY_OBJECT = '{"type":"object"}'

Schema = dict[str, Any]
StructureText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class NamedSchema(StrictModel):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    content: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None  # a schema is held either way; strict: words that are no keywords are refused


class AskedFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(StrictModel):
    """vLLM's: one structure."""

    content: Annotated[Schema | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: StructureText | None = None
    choice: Choices | None = None
    grammar: StructureText | None = None
    disable_any_whitespace: bool | None = None  # JSON without blanks


class StructureFields(BaseModel):
    """The fields of both endpoints."""

    response_format: AskedFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: StructureText | None = None
    guided_choice: Choices | None = None
    guided_grammar: StructureText | None = None


def structure_of(request: StructureFields, min_tokens: int | None = None) -> Structure | None:
    """Raises RequestError if the fields contradict each other, or say something that is too long."""
    wanted = [*_of_format(request), *_of_vllm(request)]
    if len(wanted) > 1:
        names = " and ".join(structure.param for structure in wanted[:2])
        raise RequestError(f"{names} ask for two structures; send one", param=wanted[1].param)
    if not wanted:
        return None
    if min_tokens:
        raise RequestError("min_tokens cannot be combined with a structure", param="min_tokens")
    (structure,) = wanted
    param = structure.param
    if len(structure.text) > MAX_TEXT_CHARS:
        raise RequestError(f"{param}: more than {MAX_TEXT_CHARS} characters", param=param)
    if any("\ud800" <= char <= "\udfff" for char in structure.text):
        raise RequestError(f"{param}: half a surrogate pair is no character", param=param)
    return structure


def _of_format(request: StructureFields) -> list[Structure]:
    asked = request.response_format
    if asked is None:
        return []
    if (asked.type == "json_schema") != (asked.json_schema is not None):
        param = "response_format.json_schema"
        why = "is missing" if asked.json_schema is None else "belongs to the type json_schema alone"
        raise RequestError(f"{param}: {why}", param=param)
    if asked.json_schema is not None:
        named, param = asked.json_schema, "response_format.json_schema.schema"
        return [_schema(named.content, param, is_strict=bool(named.strict))]
    if asked.type == "json_object":
        return [_schema(_ANY_OBJECT, "response_format")]
    return []


def _of_vllm(request: StructureFields) -> list[Structure]:
    asked = request.structured_outputs or StructuredOutputs()
    found, is_compact = [], bool(asked.disable_any_whitespace)
    if asked.content is not None:
        found.append(_schema(asked.content, "structured_outputs.json", is_compact=is_compact))
    if request.guided_json is not None:
        found.append(_schema(request.guided_json, "guided_json"))
    if asked.json_object:
        found.append(_schema(_ANY_OBJECT, "structured_outputs.json_object", is_compact=is_compact))
    for kind, of_new, of_old in (
        (StructureKind.REGEX, asked.regex, request.guided_regex),
        (StructureKind.GRAMMAR, asked.grammar, request.guided_grammar),
    ):
        for text, param in ((of_new, f"structured_outputs.{kind}"), (of_old, f"guided_{kind}")):
            if text is not None:
                found.append(Structure(kind, text, param))
    for choices, param in (
        (asked.choice, "structured_outputs.choice"),
        (request.guided_choice, "guided_choice"),
    ):
        if choices is not None:
            found.append(Structure(StructureKind.CHOICE, _compact(choices, param), param))
    if request.structured_outputs is not None and not any("." in each.param for each in found):
        raise RequestError("structured_outputs: names no structure", param="structured_outputs")
    return found


def _schema(
    content: Schema | str, param: str, is_strict: bool = False, is_compact: bool = False
) -> Structure:
    """`content`: the schema, or its JSON."""
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param}: is not JSON", param=param) from error
    if not isinstance(content, dict):
        raise RequestError(f"{param}: a JSON schema is an object", param=param)
    return Structure(StructureKind.JSON_SCHEMA, _compact(content, param), param, is_strict, is_compact)


def _compact(value: Any, param: str) -> str:
    """Writes JSON in the client's order: properties are generated in this order."""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param}: cannot be written as JSON", param=param) from error
