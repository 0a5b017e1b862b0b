"""A structure to llguidance's grammar, and the limits under which it is compiled and matched. Blocks; any
thread; releases the GIL while it compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from cluster.errors import StructureError
from cluster.structure.loosening import loosened
from cluster.structure.matcher import Matcher, one_line
from cluster.structure.schema import check_types, held_schema
from cluster.structure.vocabulary import Vocabulary
from cluster.types.structure import Structure, StructureKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

# Between tokens of JSON: a blank, or a new line and its indentation. With any white space allowed, weak
# models write it until `max_tokens`.
WHITESPACE = r"\x20|\x0A\x20{0,16}"
LOOKAHEAD_TOKENS = 16
# In Lark: a string, a comment, a regular expression, the name of a special token
_LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\])+/|<[^<>\s"]+>')


def loosened_structure(structure: Structure, vocabulary: Vocabulary) -> tuple[Structure, list[str]]:
    """What can be held of a loose structure, and what is left out. Raises StructureError for what is no JSON
    schema."""

    def is_held(schema: dict[str, Any]) -> bool:
        part = replace(structure, text=json.dumps(schema, ensure_ascii=False))
        try:
            matcher = Matcher(compile_structure(part, vocabulary), vocabulary)
            for _ in range(LOOKAHEAD_TOKENS):  # some schemas that no value satisfies are found only so
                if not matcher.is_complete:
                    matcher.accept(int(matcher.allowed()[0]))
        except StructureError:
            return False
        return True

    schema = json.loads(structure.text)
    try:
        check_types(schema)
    except StructureError as error:
        raise StructureError(error.message, param=structure.param) from None
    if is_held(schema):
        return structure, []
    schema, left_out = loosened(schema, is_held)
    return replace(structure, text=json.dumps(schema, ensure_ascii=False)), left_out


def compile_structure(structure: Structure, vocabulary: Vocabulary) -> LLMatcher:
    """Compiles a structure at the start of an answer. Raises StructureError, which says what is not
    supported."""
    from llguidance import LLMatcher

    try:
        text = _grammar(structure, vocabulary)
        native = LLMatcher(vocabulary.native, text, log_level=0, limits=_limits())
    except StructureError as error:
        raise StructureError(error.message, param=structure.param) from None
    except (ValueError, RecursionError) as error:  # llguidance raises ValueError
        raise StructureError(one_line(str(error)), param=structure.param) from error
    if not native.is_error():
        native.compute_bitmask()  # a part of a grammar is built only now
    if native.is_error():
        raise StructureError(one_line(native.get_error()), param=structure.param)
    return native


@cache
def _limits() -> LLParserLimits:
    """A lexer state takes one to two kilobytes, and every choice has its own. A row has four items for each
    optional property of an object. Masks of 230 structures (the benchmark's, and large ones: 200 optional
    properties, 5,000 values) with vocabularies of 1,024 and 65,000 tokens took up to 10,000 items; an
    ambiguous grammar takes more after some 100 characters. Time is limited by `Effort`."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        step_max_items=20_000,
        max_lexer_states=25_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _grammar(structure: Structure, vocabulary: Vocabulary) -> str:
    from llguidance import LLMatcher, grammar_from

    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(
                held_schema(structure.text, is_strict=structure.is_strict),
                overrides=json_options(is_compact=structure.is_compact, is_loose=structure.is_loose),
            )
        case StructureKind.REGEX:
            return LLMatcher.grammar_from_regex(structure.text)
        case StructureKind.CHOICE:
            choices = " | ".join(json.dumps(choice) for choice in json.loads(structure.text))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case StructureKind.CALLS:
            return LLMatcher.grammar_from_lark(structure.text)
        case StructureKind.GRAMMAR:
            return grammar_from("grammar", _by_id(structure.text, vocabulary.special_ids))


def json_options(*, is_compact: bool, is_loose: bool) -> Any:
    """How llguidance reads a JSON schema."""
    blanks = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": WHITESPACE}
    return {**blanks, "coerce_one_of": is_loose, "lenient": False}


def _by_id(grammar: str, special_ids: Mapping[str, int]) -> str:
    """Special tokens of a grammar in Lark by their ids: llguidance does not know their names (see
    `vocabulary`). GBNF has none."""
    if "::=" in grammar:
        return grammar

    def replaced(found: re.Match[str]) -> str:
        token_id = special_ids.get(found[0])
        return found[0] if token_id is None else f"<[{token_id}]>"

    return _LARK_TOKEN.sub(replaced, grammar)
