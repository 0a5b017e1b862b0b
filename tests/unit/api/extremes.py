"""Every field of the endpoints that ask a model, found in the schema, and values no request should have."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel

from router.api import openapi
from router.api.anthropic.translate import messages_call
from router.api.body import RequestBody, parse
from router.api.chat.schema import InputMessage
from router.api.chat.translate import chat_call, completion_call
from router.api.protocol import CallContext, DoorProtocol
from router.api.responses.translate import responses_call
from router.api.tokens import ids_to_detokenize, tokenize_call

Path = tuple[str | int, ...]
ENDPOINTS: dict[str, type[RequestBody]] = {
    path: endpoint.body
    for path, endpoint in openapi.ENDPOINTS.items()
    if endpoint.body is not None and "model" in endpoint.body.model_fields and not endpoint.file
}
# As JSON; some of it is not what `json.dumps` writes.
EXTREMES = (
    "0", "-1", "1", "2", "2147483647", "2147483648", "9223372036854775807", "9223372036854775808", "18446744073709551615",
    "18446744073709551616", "-9223372036854775808", "-9223372036854775809", "9" * 400, "9" * 5000,
    "0.5", "1e308", "-1e308", "5e-324", "1e999", "NaN", "Infinity", "-Infinity", "true", "false", "null",
    '""', '"x"', '"\\u0000"', '"\\ud800"', '"\\udc00x"', '"\\ud83d\\ude00"', json.dumps("x" * 20_000), json.dumps("\u202e" * 300),
    "[]", "{}", "[null]", '[""]', '["\\ud800"]', "[2147483647]", "[1023, 0]", "[18446744073709551616]", "[-1]", "[[0]]",
    '{"a": 18446744073709551616}', "[" * 150 + "]" * 150, "[" * 300 + "]" * 300, '{"a":' * 300 + "0" + "}" * 300,
    json.dumps([0] * 5000), json.dumps([""] * 5000), json.dumps([{}] * 5000),
)  # fmt: skip
_HERE = "\u2603 here \u2603"


def fields(model: type[RequestBody]) -> list[Path]:
    """Every field of a request and of what is nested in it; elements of lists are 0."""
    untyped = ((name,) for name in (*model.neutral, *model.harmless, "no such field"))
    return [*dict.fromkeys([*_fields(model), *untyped])]


def request(kind: type[BaseModel], values: dict[Path, str], **more: Any) -> bytes:
    """A small valid request of which some fields are replaced. A field inside a replaced one is not there."""
    paths = tuple(sorted(values, key=len, reverse=True))
    text = _marked(kind, paths, json.dumps(more))
    for number, path in enumerate(paths):
        text = text.replace(json.dumps(f"{_HERE}{number}"), values[path])
    return text.encode()


@lru_cache(maxsize=16)  # a field is replaced by one value after the other
def _marked(kind: type[BaseModel], paths: tuple[Path, ...], more: str) -> str:
    """The request with a mark in place of each field that is replaced."""
    body = {**_smallest(kind), **json.loads(more)}
    for number, path in enumerate(paths):
        _put(body, kind, path, f"{_HERE}{number}")
    return json.dumps(body)


def accepted(path: str, body: bytes, door: DoorProtocol) -> Any:
    """The call that a door is asked for. Raises ClusterError for a request that is refused before."""
    translate: Any = {
        "/v1/chat/completions": chat_call,
        "/v1/completions": completion_call,
        "/v1/responses": responses_call,
        "/v1/messages": messages_call,
        "/v1/messages/count_tokens": messages_call,
        "/tokenize": tokenize_call,
        "/detokenize": ids_to_detokenize,
    }[path]
    context = CallContext(door.models, door.defaults, limits=door.limits)
    return translate(parse(ENDPOINTS[path], body), context)


def _fields(kind: Any) -> Iterator[Path]:
    for alternative in _alternatives(kind):
        if typing.get_origin(alternative) is list:
            yield (0,)
            yield from ((0, *path) for path in _fields(typing.get_args(alternative)[0]))
        elif isinstance(alternative, type) and issubclass(alternative, BaseModel):
            for name, field in alternative.model_fields.items():
                yield (name,)
                yield from ((name, *path) for path in _fields(field.annotation))


def _alternatives(kind: Any) -> Iterator[Any]:
    """What a value may be, without unions and annotations."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        yield from _alternatives(typing.get_args(kind)[0])
    elif origin in (typing.Union, types.UnionType):
        for each in typing.get_args(kind):
            yield from _alternatives(each)
    else:
        yield kind


def _smallest(kind: Any) -> Any:
    """A valid value."""
    alternative = next(_alternatives(kind))
    if typing.get_origin(alternative) is Literal:
        return typing.get_args(alternative)[0]
    if typing.get_origin(alternative) is list:
        return [_smallest(typing.get_args(alternative)[0])]
    if isinstance(alternative, type) and issubclass(alternative, BaseModel):
        needed = ("content",) if alternative is InputMessage else ()  # only an assistant's may be missing
        required = {
            name: field
            for name, field in alternative.model_fields.items()
            if field.is_required() or name in needed
        }
        return {name: _smallest(field.annotation) for name, field in required.items()}
    return {str: "hi", int: 1, float: 1.0, bool: True}.get(alternative)


def _put(container: Any, kind: Any, path: Path, value: Any) -> None:
    """Makes what the path needs on its way: the first alternative that has the next step."""
    step, *rest = path
    inner = _inner(container, kind, step)
    if not rest:
        if isinstance(container, list):
            container[:] = [value]
        else:
            container[step] = value
        return
    body: Any = container
    has_it = isinstance(container, list) or step in container
    present = body[step] if has_it else None
    if not _fits(present, inner, rest[0]):
        present = next(_smallest(each) for each in _alternatives(inner) if tuple(rest) in set(_fields(each)))
        body[step] = present
    _put(present, inner, tuple(rest), value)


def _inner(container: Any, kind: Any, step: str | int) -> Any:
    """The annotation of what stands at a step."""
    for each in _alternatives(kind):
        if isinstance(step, int) and typing.get_origin(each) is list:
            return typing.get_args(each)[0]
        if isinstance(each, type) and issubclass(each, BaseModel) and step in each.model_fields:
            tag = each.model_fields.get("type")
            if tag is None or not isinstance(container, dict):
                return each.model_fields[step].annotation
            tags = typing.get_args(tag.annotation)
            if not tags or container.get("type", tag.default) in tags:
                return each.model_fields[step].annotation
    return Any


def _fits(present: Any, kind: Any, step: str | int) -> bool:
    if isinstance(step, int):
        return isinstance(present, list) and bool(present)
    if not isinstance(present, dict):
        return False
    tagged = [
        each for each in _alternatives(kind) if isinstance(each, type) and issubclass(each, BaseModel)
    ]  # fmt: skip
    return any(
        step in each.model_fields
        and (
            "type" not in each.model_fields
            or present.get("type", each.model_fields["type"].default)
            in typing.get_args(each.model_fields["type"].annotation)
        )
        for each in tagged
    )
