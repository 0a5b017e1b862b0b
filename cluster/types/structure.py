"""The form that an answer must have: what a client asks for with `response_format`, `structured_outputs` or
tools."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class StructureKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    CALLS = "calls"


class Structure(msgspec.Struct, frozen=True):
    """Every token of the answer keeps to it. An answer that ends by itself is complete; one that reaches
    `max_tokens` may not be."""

    kind: StructureKind
    # JSON_SCHEMA, CHOICE: a schema, a list of strings, as compact JSON in the client's order; REGEX: a
    # regular expression for the whole answer; GRAMMAR: Lark or GBNF; CALLS: what
    # `cluster.structure.calls` has made of tools
    text: str
    param: str = ""  # field of the request that asks for it; errors name it
    is_strict: bool = False  # JSON_SCHEMA: words that are no keywords of JSON Schema are refused
    is_compact: bool = False  # JSON_SCHEMA: no blanks between the tokens of JSON
    is_loose: bool = False  # JSON_SCHEMA: what cannot be held is left out; a door's check says what is held

    @property
    def key(self) -> tuple[str, str]:
        """Equal for structures that allow the same answers because they say the same."""
        return f"{self.kind}{self.is_strict:d}{self.is_compact:d}{self.is_loose:d}", self.text
