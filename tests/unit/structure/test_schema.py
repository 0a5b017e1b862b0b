"""What cannot be held is refused, and the error says what."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.structure.grammar import compile_structure
from cluster.structure.matcher import StructureError
from cluster.types.structure import Structure
from tests.fakes.structures import demo_vocabulary, of_grammar, of_regex, of_schema

OBJECT = {"type": "object"}
REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"if": OBJECT, "then": OBJECT}, "if"),
    "contains": ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "dependentRequired": ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "propertyNames": ({**OBJECT, "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    "unevaluatedProperties": ({**OBJECT, "unevaluatedProperties": False}, "unevaluatedProperties"),
    "a misspelt keyword": ({"type": "string", "minLenght": 3}, "minLenght"),
    "a keyword deep inside": (
        {**OBJECT, "properties": {"a": {"items": {"uniqueItems": True}}}},
        "uniqueItems",
    ),
    "an unknown format": ({"type": "string", "format": "isbn"}, "isbn"),
    "oneOf that overlaps": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    "a remote reference": ({"$ref": "https://example.org/schema"}, "example.org"),
    "an unknown reference": ({"$ref": "#/$defs/none"}, "$defs/none"),
    "a lookaround": ({"type": "string", "pattern": "(?=a)b"}, "look"),
    "an unknown type": ({"type": "text"}, "text"),
    "a contradiction": ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
    "the library's own options": ({**OBJECT, "x-guidance": {"lenient": True}}, "x-guidance"),
    "minProperties of a map": ({**OBJECT, "minProperties": 2}, "minProperties"),
    "false": (False, "false"),
}


def refusal(structure: Structure) -> StructureError:
    with pytest.raises(StructureError) as raised:
        compile_structure(structure, demo_vocabulary())
    assert raised.value.param == structure.param
    return raised.value


@pytest.mark.parametrize(("schema", "named"), REFUSED.values(), ids=REFUSED)
def test_a_schema_that_cannot_be_held_is_refused_by_name(schema: Any, named: str):
    assert named in refusal(of_schema(schema)).message


@pytest.mark.parametrize(
    "structure",
    [of_regex("(unclosed"), of_grammar("start: missing"), of_grammar("not a grammar"), of_grammar("")],
)
def test_what_is_no_structure_is_refused(structure: Structure):
    assert refusal(structure).message


def test_a_deep_schema_is_refused():
    schema: Any = {"type": "string"}
    for _ in range(80):
        schema = {"type": "array", "items": schema}
    assert "levels" in refusal(of_schema(schema)).message
