"""What a JSON schema may say so that every answer is valid under it.

llguidance refuses keywords that it does not implement. Here is what it accepts without holding it, and the
limits of size. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cluster.structure.matcher import StructureError

MAX_DEPTH = 64
MAX_TEXT_CHARS = 200_000

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = ("additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains")


def check_schema(text: str) -> None:
    """`text`: a JSON schema. Raises StructureError, which names the keyword and its place."""
    schema = json.loads(text)
    if not isinstance(schema, dict | bool):
        raise StructureError("a JSON schema is an object")
    for path, part in _parts(schema):
        _check(path, part)


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and all schemas in it, with their paths."""
    waiting = [("", schema, 0)]
    while waiting:
        path, part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise StructureError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        if not isinstance(part, dict):
            continue
        yield path, part
        for key, value in part.items():
            if key in _MAPS and isinstance(value, dict):
                waiting += [(f"{path}/{key}/{name}", inner, depth + 1) for name, inner in value.items()]
            elif isinstance(value, list) and key in (*_LISTS, "items"):
                waiting += [(f"{path}/{key}/{i}", inner, depth + 1) for i, inner in enumerate(value)]
            elif key in _SCHEMAS:
                waiting.append((f"{path}/{key}", value, depth + 1))


def _check(path: str, part: dict[str, Any]) -> None:
    if "x-guidance" in part:
        raise StructureError(f"{path or '/'}: 'x-guidance' is not a keyword of JSON Schema")
    # Names under additionalProperties and patternProperties may repeat in an answer; a reader counts them
    # once.
    least = part.get("minProperties", 0)
    if isinstance(least, int | float) and least > max(1, len(part.get("required", ()))):
        raise StructureError(
            f"{path or '/'}: 'minProperties' is supported up to the number of required properties"
        )
