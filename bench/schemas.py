"""JSON schemas like those that clients send, from a seed: the classes of JSONSchemaBench (Geng et al.
2025), built again because the collection cannot be had here. With each class: the share of its schemas in
the collection is not kept; every class comes equally often.

    function calls   flat objects with typed, described arguments          (Glaive function calls)
    extraction       nested records and lists of records                   (GitHub easy, medium)
    configuration    many optional properties, patterns, maps, defaults    (SchemaStore, Kubernetes)
    unions           anyOf, disjoint oneOf, const tags, nullable values    (Snowplow, Washington Post)
    references       $defs, $ref, recursion, allOf                         (GitHub hard)
    numbers          bounds, multiples, exclusive limits
    strings          patterns, formats, lengths, enums
    arrays           tuples, bounds, arrays of arrays
    maps             additionalProperties and patternProperties with schemas
    mixed            any of these inside each other
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

WORDS = (
    "id", "name", "title", "city", "country", "price", "amount", "total", "status", "kind", "type", "color",
    "size", "width", "height", "email", "phone", "address", "street", "zip", "date", "time", "start", "end",
    "author", "tags", "items", "notes", "score", "rating", "level", "count", "limit", "offset", "page",
    "query", "language", "region", "enabled", "visible", "public", "owner", "team", "project", "version",
    "release", "branch", "commit", "path", "file", "url", "host", "port", "user", "group", "role", "token",
    "key", "value", "label", "weight", "unit", "currency", "tax", "discount",
)  # fmt: skip
PATTERNS = (
    "^[a-z]{2,8}$", "^[A-Z]{3}-[0-9]{4}$", "^#[0-9a-f]{6}$", "^[0-9]{5}(-[0-9]{4})?$", "^v[0-9]+\\.[0-9]+$",
    "^(red|green|blue)$", "^[A-Za-z_][A-Za-z0-9_]{0,15}$", "^\\+?[0-9]{7,12}$",
    "^[a-z0-9]+(-[a-z0-9]+){0,3}$", "[0-9]{2}",
)  # fmt: skip
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "hostname")


class Generator:
    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def schema(self, kind: str) -> Schema:
        """One schema of this class."""
        return KINDS[kind](self)

    def function_call(self) -> Schema:
        return self._object([self._scalar for _ in range(self._random.randint(1, 6))], described=True)

    def extraction(self) -> Schema:
        record = self._object([self._scalar for _ in range(self._random.randint(2, 5))])
        inner = self._object(
            [self._scalar, lambda: _array(record, 0, 4), lambda: _array(self._scalar(), 1, 3)]
        )
        return self._object([self._scalar, lambda: inner, lambda: _array(record, 1, 3)])

    def configuration(self) -> Schema:
        schema = self._object([self._scalar for _ in range(self._random.randint(6, 14))], required=0.2)
        for value in list(schema["properties"].values())[::3]:
            value["description"] = "See the manual."
            value["default"] = None
        schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        schema["title"] = "Settings"
        return schema

    def union(self) -> Schema:
        shapes = []
        for tag in self._names(self._random.randint(2, 4)):
            shape = self._object([self._scalar for _ in range(self._random.randint(1, 3))], required=1.0)
            shape["properties"] = {"kind": {"const": tag}, **shape["properties"]}
            shape["required"] = list(shape["properties"])
            shapes.append(shape)
        word = self._random.choice(("anyOf", "oneOf"))
        nullable = {"anyOf": [self._scalar(), {"type": "null"}]}
        either = (
            {"type": ["string", "integer"]} if self._random.random() < 0.5 else {"type": ["null", "boolean"]}
        )
        return self._object([lambda: {word: shapes}, lambda: nullable, lambda: either], required=1.0)

    def reference(self) -> Schema:
        node = {
            "type": "object",
            "properties": {
                "value": self._scalar(),
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
        point = self._object([self._scalar, self._scalar], required=1.0)
        both = {"allOf": [{"$ref": "#/$defs/point"}, {"description": "of the same point"}]}
        return {
            **self._object(
                [lambda: {"$ref": "#/$defs/node"}, lambda: {"$ref": "#/$defs/point"}, lambda: both]
            ),
            "$defs": {"node": node, "point": point},
        }

    def numbers(self) -> Schema:
        return self._object([self._number for _ in range(self._random.randint(2, 6))], required=1.0)

    def strings(self) -> Schema:
        return self._object([self._string for _ in range(self._random.randint(2, 6))], required=1.0)

    def arrays(self) -> Schema:
        pair = {
            "type": "array",
            "prefixItems": [self._scalar(), self._scalar()],
            "items": False,
            "minItems": 2,
        }
        few = self._random.randint(0, 3)
        nested = _array(_array(self._scalar(), 0, 3), 1, 3)
        return self._object(
            [lambda: pair, lambda: nested, lambda: _array(self._scalar(), few, few + 2)], required=1.0
        )

    def maps(self) -> Schema:
        free = {"type": "object", "additionalProperties": self._scalar()}
        by_pattern = {
            "type": "object",
            "patternProperties": {"^x_[a-z]{1,4}$": self._scalar()},
            "additionalProperties": False,
        }
        bounded = {
            "type": "object",
            "additionalProperties": self._scalar(),
            "minProperties": 1,
            "maxProperties": 3,
        }
        open_one = {**self._object([self._scalar, self._scalar]), "additionalProperties": self._scalar()}
        return self._object([lambda: free, lambda: by_pattern, lambda: bounded, lambda: open_one])

    def mixed(self) -> Schema:
        return self._any(3)

    def _any(self, depth: int) -> Schema:
        if depth == 0:
            return self._scalar()
        makers = (
            lambda: self._object([lambda: self._any(depth - 1) for _ in range(self._random.randint(1, 4))]),
            lambda: _array(self._any(depth - 1), 0, self._random.randint(1, 3)),
            lambda: {"anyOf": [self._any(depth - 1), self._scalar()]},
            self._scalar,
        )
        return makers[0]() if depth == 3 else self._random.choice(makers)()

    def _scalar(self) -> Schema:
        makers = (self._string, self._number, self._enum, lambda: {"type": "boolean"})
        return self._random.choice(makers)()

    def _string(self) -> Schema:
        roll = self._random.random()
        if roll < 0.3:
            return {"type": "string", "pattern": self._random.choice(PATTERNS)}
        if roll < 0.5:
            return {"type": "string", "format": self._random.choice(FORMATS)}
        if roll < 0.8:
            shortest = self._random.randint(0, 6)
            return {
                "type": "string",
                "minLength": shortest,
                "maxLength": shortest + self._random.randint(0, 20),
            }
        return {"type": "string", "maxLength": 40}

    def _number(self) -> Schema:
        kind = self._random.choice(("integer", "number"))
        low = self._random.randint(-1000, 1000)
        high = low + self._random.randint(1, 5000)
        roll = self._random.random()
        if roll < 0.4:
            return {"type": kind, "minimum": low, "maximum": high}
        if roll < 0.6:
            return {"type": kind, "exclusiveMinimum": low, "exclusiveMaximum": high + 2}
        if roll < 0.75:
            return {
                "type": "integer",
                "multipleOf": self._random.choice((2, 5, 10)),
                "minimum": 0,
                "maximum": high + 1000,
            }
        if roll < 0.9:
            return {"type": kind, "minimum": low / 8, "maximum": low / 8 + 100}
        return {"type": "integer", "minimum": 0}

    def _enum(self) -> Schema:
        values: list[Any] = self._names(self._random.randint(2, 12))
        if self._random.random() < 0.2:
            values = [1, 2.5, None, True, *values[:2]]
        return {"enum": values} if self._random.random() < 0.5 else {"enum": values[:1] + values[1:]}

    def _names(self, count: int) -> list[str]:
        return self._random.sample(WORDS, count)

    def _object(
        self, values: list[Callable[[], Schema]], required: float = 0.6, described: bool = False
    ) -> Schema:
        names = self._names(len(values))
        properties = {name: value() for name, value in zip(names, values, strict=True)}
        if described:
            for name, value in properties.items():
                value["description"] = f"The {name} to use."
        return {
            "type": "object",
            "properties": properties,
            "required": [name for name in names if self._random.random() < required],
            "additionalProperties": False,
        }


def _array(items: Schema, shortest: int, longest: int) -> Schema:
    return {"type": "array", "items": items, "minItems": shortest, "maxItems": longest}


KINDS: dict[str, Callable[[Generator], Schema]] = {
    "function calls": Generator.function_call,
    "extraction": Generator.extraction,
    "configuration": Generator.configuration,
    "unions": Generator.union,
    "references": Generator.reference,
    "numbers": Generator.numbers,
    "strings": Generator.strings,
    "arrays": Generator.arrays,
    "maps": Generator.maps,
    "mixed": Generator.mixed,
}


def schemas(count: int, seed: int = 0) -> list[tuple[str, Schema]]:
    """`count` schemas with their class, the classes in turn."""
    kinds = list(KINDS)
    return [(kinds[i % len(kinds)], Generator(seed + i).schema(kinds[i % len(kinds)])) for i in range(count)]
