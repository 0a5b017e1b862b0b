"""A structure to llguidance's grammar, and the limits under which it is compiled and matched. Blocks; any
thread; releases the GIL while it compiles."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

from cluster.structure.matcher import StructureError
from cluster.structure.schema import check_schema
from cluster.structure.vocabulary import Vocabulary
from cluster.types.structure import Structure, StructureKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

# Between tokens of JSON. Without a bound a model that likes blanks writes them until `max_tokens`.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"


def compile_structure(structure: Structure, vocabulary: Vocabulary) -> LLMatcher:
    """At the start of an answer. Raises StructureError, which says what is not supported."""
    from llguidance import LLMatcher

    try:
        native = LLMatcher(vocabulary.native, _grammar(structure), log_level=0, limits=_limits())
    except StructureError as error:
        raise StructureError(error.message, param=structure.param) from None
    except (ValueError, RecursionError) as error:  # llguidance raises ValueError
        raise StructureError(_first_line(str(error)), param=structure.param) from error
    if not native.is_error():
        native.compute_bitmask()  # a part of a grammar is built only now
    if native.is_error():
        raise StructureError(_first_line(native.get_error()), param=structure.param)
    return native


@cache
def _limits() -> LLParserLimits:
    """A lexer state takes one to two kilobytes, and every choice has its own."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=25_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _grammar(structure: Structure) -> str:
    from llguidance import LLMatcher, grammar_from

    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            check_schema(structure.text)
            return LLMatcher.grammar_from_json_schema(
                structure.text,
                overrides={"whitespace_pattern": WHITESPACE, "coerce_one_of": False, "lenient": False},
            )
        case StructureKind.REGEX:
            return LLMatcher.grammar_from_regex(structure.text)
        case StructureKind.CHOICE:
            choices = " | ".join(json.dumps(choice) for choice in json.loads(structure.text))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case StructureKind.GRAMMAR:
            return grammar_from("grammar", structure.text)


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:500] or "cannot be compiled"
