"""What cannot be held of a tool's schema is left out, and the rest is held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, SecretStr, StringConstraints

from cluster.errors import StructureError
from cluster.structure.grammar import compile_structure, loosened_structure
from cluster.structure.loosening import loosened
from tests.fakes.structures import demo_vocabulary, ids_of, matcher_of, of_schema
from tests.unit.structure.test_schema import REFUSED


class Order(BaseModel):
    kinds: set[int]
    secret: SecretStr
    folder: Path
    content: bytes
    code: Annotated[str, StringConstraints(min_length=2, max_length=3)]
    counts: dict[Annotated[str, StringConstraints(pattern="^[a-z]+$")], int]


LOOKAROUND = {"type": "string", "pattern": "^(?!no)[a-z]+$", "maxLength": 4}
GOOD = {
    "kinds": [1, 2],
    "secret": "s",
    "folder": "/tmp",
    "content": "x",
    "code": "abc",
    "counts": {"a": 1},
}


def held_of(schema: Any) -> tuple[Any, list[str]]:
    structure, left_out = loosened_structure(of_schema(schema, is_loose=True), demo_vocabulary())
    assert compile_structure(structure, demo_vocabulary())
    return structure, left_out


def allows(structure: Any, value: Any) -> bool:
    tokens = ids_of(json.dumps(value))
    return matcher_of(structure).legal(tokens) == tokens


def test_what_pydantic_makes_is_held_without_what_cannot_be():
    structure, left_out = held_of(Order.model_json_schema())
    assert left_out == ["/properties/kinds/uniqueItems"]
    assert allows(structure, GOOD) and allows(structure, GOOD | {"kinds": [1, 1]})
    for wrong in ({"kinds": ["x"]}, {"secret": 3}, {"code": "abcd"}, {"counts": {"a": "x"}}):
        assert not allows(structure, GOOD | wrong), wrong


@pytest.mark.parametrize(
    ("part", "left_out", "good", "bad"),
    [
        (LOOKAROUND, ["pattern"], "nooo", "noooo"),
        ({"type": "integer", "not": {"const": 3}}, ["not"], 3, "x"),
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "if": {}, "then": {"required": ["a"]}},
         ["if", "then"], {"a": 3}, {"a": "x"}),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 3}, "minContains": 2},
         ["contains", "minContains"], [1], ["x"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}, "dependentSchemas": {"a": {}}},
         ["dependentSchemas"], {"a": 3}, {"a": "x"}),
        ({"type": "object", "propertyNames": {"maxLength": 3}, "unevaluatedProperties": False},
         ["propertyNames", "unevaluatedProperties"], {"abcd": 3}, 3),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, [], 3, "x"),
        ({"anyOf": [{"$ref": "https://example.org/schema"}, {"type": "integer"}]}, ["anyOf/0/$ref"], 3, None),
    ],
)  # fmt: skip
def test_the_rest_of_a_schema_is_held(part: Any, left_out: list[str], good: Any, bad: Any):
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"], "additionalProperties": False}
    structure, found = held_of(schema)
    assert sorted(found) == [f"/properties/a/{name}" for name in left_out]
    assert allows(structure, {"a": good})
    assert bad is None or not allows(structure, {"a": bad})


def test_a_cycle_of_references_is_cut_and_a_tree_is_held():
    inner = {"inner": {"$ref": "#/$defs/tree"}, "kinds": {"uniqueItems": True}}
    tree = {"type": "object", "properties": inner, "additionalProperties": False}
    structure, left_out = held_of({"$ref": "#/$defs/tree", "$defs": {"tree": tree}})
    assert left_out == ["/$defs/tree/properties/kinds/uniqueItems"]
    assert allows(structure, {"inner": {"inner": {}}}) and not allows(structure, {"inner": {"other": 1}})
    endless = {"$ref": "#/$defs/a"}
    schema = {"type": "object", "properties": {"a": endless}, "required": ["a"], "$defs": {"a": endless}}
    structure, left_out = held_of(schema)
    assert left_out and allows(structure, {"b": 1})


@pytest.mark.parametrize("name", REFUSED)
def test_whatever_is_refused_is_held_in_part_or_no_schema(name: str):
    schema, _ = REFUSED[name]
    try:
        _, left_out = held_of({"type": "object"} | schema)
    except StructureError:
        assert name in ("required of drafts before 4",)
    else:
        assert left_out or name in ("a misspelt keyword", "oneOf that overlaps")


def test_what_is_held_is_not_touched():
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"minimum": 3}]}}}
    assert loosened(schema, lambda _: True) == (schema, [])


def test_the_cost_is_a_few_compilations_for_each_kind_that_is_left_out():
    """Counted, not timed."""
    schema = {
        "properties": {f"p{i}": {"type": "array", "uniqueItems": True, "title": str(i)} for i in range(500)}
    }
    num_compiled = []

    def is_held(part: Any) -> bool:
        num_compiled.append(part)
        return "uniqueItems" not in json.dumps(part)

    part, left_out = loosened(schema, is_held)
    assert len(left_out) == 500 and len(num_compiled) < 20
    assert all(
        each == {"type": "array", "title": str(i)} for i, each in enumerate(part["properties"].values())
    )
