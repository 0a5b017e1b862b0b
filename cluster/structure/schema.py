"""What a JSON schema may say so that every answer is valid under it. Pure.

llguidance refuses most keywords that it does not implement, by name. Here is the rest: what it would ignore
or hold wrongly, found by generating answers and judging them with another library; and limits of size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from cluster.errors import StructureError

MAX_DEPTH = 64

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SCHEMAS = ("additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains")
NESTING = frozenset((*_MAPS, *_LISTS, *_SCHEMAS))  # keywords whose values have schemas
# Keywords that are held, or that say nothing about validity. llguidance refuses all other keywords of
# drafts 4 to 2020-12, and ignores other words.
KEYWORDS = frozenset((
    "$anchor", "$comment", "$defs", "$id", "$ref", "$schema", "additionalItems", "additionalProperties",
    "allOf", "anyOf", "const", "contentEncoding", "contentMediaType", "default", "definitions",
    "deprecated", "description", "enum", "examples", "exclusiveMaximum", "exclusiveMinimum", "format", "id",
    "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties",
    "minimum", "multipleOf", "oneOf", "pattern", "patternProperties", "prefixItems", "properties",
    "readOnly", "required", "title", "type", "writeOnly",
))  # fmt: skip
# Other formats say nothing about validity, as the specification has it unless a schema's dialect says more.
FORMATS = frozenset((
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
))  # fmt: skip
_SCHEMA = ("object", "boolean")
# Types of JSON, by keyword: of its value, and of what is in that
_KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_MAPS, "dependentRequired"), ("object",)),
    **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems", "enum", "required", "examples"), ("array",)),
    **dict.fromkeys((*_SCHEMAS, "propertyNames"), _SCHEMA),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), _SCHEMA),
    "items": ("object", "boolean", "array"),
    "type": ("string", "array"),
    **dict.fromkeys(
        ("$anchor", "$comment", "$id", "$ref", "$schema", "format", "id", "pattern"), ("string",)
    ),
    **dict.fromkeys(("maxItems", "maxLength", "maxProperties", "maxContains", "maximum"), ("number",)),
    **dict.fromkeys(("minItems", "minLength", "minProperties", "minContains", "minimum"), ("number",)),
    "multipleOf": ("number",),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), ("number", "boolean")),
    "uniqueItems": ("boolean",),
}
_INNER_KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_MAPS, "anyOf", "allOf", "oneOf", "prefixItems", "items"), _SCHEMA),
    **dict.fromkeys(("required", "type"), ("string",)),
}
_CONTROLS = "".join(map(chr, range(0x20)))
_OLD = ("draft-04", "draft-06", "draft-07", "2019-09")


def held_schema(text: str, *, is_strict: bool) -> str:
    """The schema that llguidance is given for this one: no answer is valid under it and not under this one.
    Raises StructureError, which names the keyword and its place."""
    schema = json.loads(text)
    check_types(schema)
    draft = schema.get("$schema", "")
    for path, part in _parts(schema):
        _check(path or "/", part, str(draft), is_strict)
        if part.get("format") not in FORMATS:
            part.pop("format", None)
        if "pattern" in part:
            part["pattern"] = without_controls(part["pattern"])
    return json.dumps(schema, ensure_ascii=False)


def check_types(schema: Any) -> None:
    """Raises StructureError for a keyword whose value is of a type that it cannot have."""
    if not isinstance(schema, dict):
        raise StructureError("a schema is an object")
    for path, part in _parts(schema):
        for keyword, value in part.items():
            if (kinds := _KINDS.get(keyword)) is not None and _kind(value) not in kinds:
                raise StructureError(f"{path or '/'}: the value of '{keyword}' is of the wrong type")
            if (kinds := _INNER_KINDS.get(keyword)) is not None:
                inner = value.values() if keyword in _MAPS else value if isinstance(value, list) else ()
                if any(_kind(each) not in kinds for each in inner):
                    raise StructureError(f"{path or '/'}: a value in '{keyword}' is of the wrong type")


def _kind(value: Any) -> str:
    """The type of a JSON value."""
    kinds = (("boolean", bool), ("number", int | float), ("string", str), ("array", list), ("object", dict))
    return next((name for name, kind in kinds if isinstance(value, kind)), "null")


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and all schemas in it, with their paths."""
    waiting: list[tuple[str, Any, int]] = [("", schema, 0)]
    while waiting:
        path, part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise StructureError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        if not isinstance(part, dict):
            continue
        yield path, part
        for key, value in part.items():
            for place, inner in schemas_in(key, value):
                waiting.append(("/".join((path, key, *map(str, place))), inner, depth + 1))


def schemas_in(keyword: str, value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The schemas in the value of a keyword, each with the key or index that leads to it; with none if
    the value is a schema itself."""
    if keyword in _MAPS and isinstance(value, dict):
        yield from (((name,), inner) for name, inner in value.items())
    elif keyword in _LISTS and isinstance(value, list):
        yield from (((idx,), inner) for idx, inner in enumerate(value))
    elif keyword in _SCHEMAS:
        yield (), value


def _check(path: str, part: dict[str, Any], draft: str, is_strict: bool) -> None:
    unknown = [key for key in part if key not in KEYWORDS]
    if "x-guidance" in unknown or (is_strict and unknown):
        word = "x-guidance" if "x-guidance" in unknown else unknown[0]
        raise StructureError(f"{path}: '{word[:64]}' is not a keyword that is supported")
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(part.get(key), bool) and "draft-04" not in draft:
            raise StructureError(f"{path}: '{key}' is a number, unless '$schema' is that of draft 4")
    if isinstance(part.get("items"), list) and not any(name in draft for name in _OLD):
        raise StructureError(f"{path}: 'items' is a schema; 'prefixItems' is a list of schemas")
    required = part.get("required", ())
    # Names under additionalProperties and patternProperties may repeat; a reader counts them once.
    if part.get("minProperties", 0) > max(1, len(required)):
        raise StructureError(f"{path}: 'minProperties' may be at most the number of required properties")
    for pattern in part.get("patternProperties", ()):
        if without_controls(pattern) != pattern:
            raise StructureError(f"{path}: pattern {pattern[:64]!r}: a class with all control characters")


def without_controls(pattern: str) -> str:
    """The pattern without control characters in classes that have all of them and exclude a quotation mark or
    a backslash: `[^"]`. In JSON strings llguidance would allow what such a class excludes. Raises
    StructureError for such a class that is not a negated one."""
    out, at = [], 0
    for start, end in _classes(pattern):
        found = pattern[start:end]
        out.append(pattern[at:start])
        at = end
        if not _is_held(found):
            if not found.startswith("[^"):
                raise StructureError(f"pattern: the class {found[:64]!r} has all control characters")
            first = "\\]" if found.startswith("[^]") else found[2:3]
            found = f"[^\\x00-\\x1f{first}{found[3:]}"
        out.append(found)
    return "".join([*out, pattern[at:]])


def _classes(pattern: str) -> Iterator[tuple[int, int]]:
    """Where the classes in brackets are."""
    at = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 2
        elif pattern[at] == "[":
            start, depth = at, 1
            at += 2 if pattern.startswith("[^", at) else 1
            at += pattern.startswith("]", at)  # a bracket that comes first is one of the class
            while at < len(pattern):
                depth += (pattern[at] == "[") - (pattern[at] == "]")
                at += 1 + (pattern[at] == "\\")
                if depth == 0:
                    break
            yield start, at
        else:
            at += 1


@lru_cache(4096)
def _is_held(found: str) -> bool:
    """Whether llguidance holds this class in a JSON string. False if it is not known."""
    try:
        matches = re.compile(found).fullmatch if "[" not in found[1:] else None
    except (re.error, RecursionError, OverflowError):
        matches = None
    if matches is None:
        return "\\x00" not in found and "\\u0000" not in found and not found.startswith("[^")
    return not all(map(matches, _CONTROLS)) or bool(matches('"') and matches("\\"))
