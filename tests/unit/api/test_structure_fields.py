"""Which fields ask for a structure, and what they mean. Names and shapes are OpenAI's and vLLM's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.errors import RequestError
from cluster.types.structure import Structure, StructureKind
from router.api.body import parse
from router.api.chat.schema import ChatRequest, CompletionRequest
from router.api.chat.structure import MAX_TEXT_CHARS, structure_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "ä"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"const":"ä"}}}'


def parsed(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse(ChatRequest, json.dumps(body).encode())


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, **more}}


OBJECT = '{"type":"object"}'
OF_SCHEMA = "response_format.json_schema.schema"
MEANINGS: list[tuple[dict[str, Any], StructureKind, str, str]] = [
    ({"response_format": named(SCHEMA)}, StructureKind.JSON_SCHEMA, TEXT, OF_SCHEMA),
    (
        {"response_format": named(SCHEMA, strict=True, description="d")},
        StructureKind.JSON_SCHEMA,
        TEXT,
        OF_SCHEMA,
    ),
    ({"response_format": {"type": "json_object"}}, StructureKind.JSON_SCHEMA, OBJECT, "response_format"),
    ({"guided_json": SCHEMA}, StructureKind.JSON_SCHEMA, TEXT, "guided_json"),
    ({"guided_json": json.dumps(SCHEMA)}, StructureKind.JSON_SCHEMA, TEXT, "guided_json"),
    ({"guided_regex": "a+"}, StructureKind.REGEX, "a+", "guided_regex"),
    ({"guided_choice": ["a"]}, StructureKind.CHOICE, '["a"]', "guided_choice"),
    ({"guided_grammar": "start: A"}, StructureKind.GRAMMAR, "start: A", "guided_grammar"),
    *(
        ({"structured_outputs": {name: value}}, kind, text, f"structured_outputs.{name}")
        for name, value, kind, text in (
            ("json", SCHEMA, StructureKind.JSON_SCHEMA, TEXT),
            ("json", json.dumps(SCHEMA), StructureKind.JSON_SCHEMA, TEXT),
            ("json_object", True, StructureKind.JSON_SCHEMA, OBJECT),
            ("regex", "a+", StructureKind.REGEX, "a+"),
            ("choice", ["a", "b"], StructureKind.CHOICE, '["a","b"]'),
            ("grammar", "start: A", StructureKind.GRAMMAR, "start: A"),
        )
    ),
]


@pytest.mark.parametrize(("fields", "kind", "text", "param"), MEANINGS)
def test_each_field_asks_for_its_structure(
    fields: dict[str, Any], kind: StructureKind, text: str, param: str
):
    found = structure_of(parsed(**fields))
    assert found is not None and (found.kind, found.text, found.param) == (kind, text, param)


def test_strict_schemas_and_json_without_blanks_are_other_structures():
    strict = structure_of(parsed(response_format=named(SCHEMA, strict=True)))
    compact = structure_of(parsed(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}))
    plain = structure_of(parsed(guided_json=SCHEMA))
    assert strict and compact and plain and strict.is_strict and compact.is_compact
    assert len({strict.key, compact.key, plain.key}) == 3


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_choice": None}]
)
def test_without_one_any_text_is_an_answer(fields: dict[str, Any]):
    assert structure_of(parsed(**fields)) is None


def test_completions_have_the_same_fields():
    body = json.dumps({"model": "m", "prompt": "x", "guided_regex": "a"}).encode()
    assert structure_of(parse(CompletionRequest, body)) == Structure(StructureKind.REGEX, "a", "guided_regex")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {**named(SCHEMA), "type": "json_object"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "response_format.json_schema.name",
    ),
    ({"response_format": named(SCHEMA, name="a b")}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": named([1])}, "response_format.json_schema.schema"),
    ({"response_format": named(SCHEMA, strict="yes")}, "response_format.json_schema.strict"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "3"}, "guided_json"),
    ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
    ({"guided_regex": "a" * (MAX_TEXT_CHARS + 1)}, "guided_regex"),
    ({"guided_choice": ["a" * 1000] * 300}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice[0]"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_a_field_that_says_nothing_clear_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(RequestError) as raised:
        structure_of(parsed(**fields))
    assert raised.value.param == param
