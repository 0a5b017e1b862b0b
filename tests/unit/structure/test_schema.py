"""What cannot be held is refused, and the error says what."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
from typing import Any

import pytest

from cluster.errors import StructureError
from cluster.structure.grammar import compile_structure, loosened_structure
from cluster.structure.schema import FORMATS, KEYWORDS
from cluster.types.structure import Structure
from tests.architecture.sources import SOURCES, tree_of
from tests.fakes.structures import demo_vocabulary, ids_of, matcher_of, of_grammar, of_regex, of_schema

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
    "oneOf that overlaps": (
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        "oneOf whose branches may overlap; send",
    ),
    "a remote reference": ({"$ref": "https://example.org/schema"}, "example.org"),
    "an unknown reference": ({"$ref": "#/$defs/none"}, "$defs/none"),
    "a lookaround": ({"type": "string", "pattern": "(?=a)b"}, "look"),
    "an unknown type": ({"type": "text"}, "text"),
    "a contradiction": ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
    "the library's own options": ({**OBJECT, "x-guidance": {"lenient": True}}, "x-guidance"),
    "minProperties of a map": ({**OBJECT, "minProperties": 2}, "minProperties"),
    "required of drafts before 4": ({"required": True}, "required"),
    "a limit of draft 4": ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum"),
    "items of drafts before 2020-12": ({"type": "array", "items": [{}]}, "prefixItems"),
    "a class that would not be held": ({"type": "string", "pattern": "^[\\x00-!]$"}, "control"),
    "the same in a name": ({**OBJECT, "patternProperties": {'^[^"]$': {}}}, "control"),
    "an endless reference": ({"$ref": "#"}, ""),
}


def refusal(structure: Structure) -> StructureError:
    with pytest.raises(StructureError) as raised:
        compile_structure(structure, demo_vocabulary())
    assert raised.value.param == structure.param
    return raised.value


@pytest.mark.parametrize(("schema", "named"), REFUSED.values(), ids=REFUSED)
def test_a_schema_that_cannot_be_held_is_refused_by_name(schema: Any, named: str):
    assert named in refusal(of_schema(schema, is_strict=True)).message


def test_unknown_words_are_annotations_unless_the_schema_is_strict():
    assert compile_structure(of_schema({"type": "string", "minLenght": 3}), demo_vocabulary())


def test_a_format_is_held_or_is_an_annotation():
    """As the specification has it: only those that are held say something about validity."""
    anything = ids_of('"no date, no address"')
    for name in FORMATS:
        assert matcher_of(of_schema({"type": "string", "format": name})).legal(anything) != anything, name
    for name in ("isbn", "password", "path", "binary", "uuid4", "regex", "iri"):
        assert name not in FORMATS
        schema = {"type": "string", "format": name, "maxLength": 30}
        assert matcher_of(of_schema(schema, is_strict=True)).legal(anything) == anything


WRONG = (None, True, 3, -1.5, "x", [], [3], [{}], {}, {"a": 3}, {"(": {}}, {"a": [{}]})


@pytest.mark.parametrize("keyword", sorted(KEYWORDS | {"not", "if", "contains", "dependentSchemas"}))
def test_a_keyword_with_a_value_of_any_type_is_held_or_refused(keyword: str):
    """Also inside of others, and where what cannot be held is left out."""
    num_held = 0
    for value, is_loose in itertools.product(WRONG, (False, True)):
        for schema in ({keyword: value}, {"type": "object", "properties": {"a": {keyword: value}}}):
            structure = of_schema(schema, is_loose=is_loose)
            with contextlib.suppress(StructureError):
                if is_loose:
                    structure, _ = loosened_structure(structure, demo_vocabulary())
                num_held += compile_structure(structure, demo_vocabulary()) is not None
    assert num_held


@pytest.mark.parametrize(
    ("pattern", "excluded"),
    [('^[^"]$', '"'), ("^[^\\\\]$", "\\"), ('^x?[^]"\\\\a]$', '"'), ('^[^<>"&]$', '"')],
)
def test_a_class_excludes_what_must_be_escaped_in_json(pattern: str, excluded: str):
    matcher = matcher_of(of_schema({"type": "string", "pattern": pattern}))
    tokens = demo_vocabulary().native.greedy_tokenize(json.dumps(excluded))
    assert len(matcher.legal(tokens)) < len(tokens)
    assert matcher.legal(ids_of('"b"')) == ids_of('"b"')


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


def test_the_library_is_imported_when_the_first_structure_comes():
    """Its import takes a tenth of a second, which no start pays for."""
    for path in SOURCES:
        at_import = [node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert "llguidance" not in "".join(map(ast.unparse, at_import)), path
