"""Almost valid requests. Equal seeds and numbers give equal requests, independent of what was sent before.

tree     some values of the JSON are replaced, removed, repeated, wrapped, swapped or moved
media    bytes of a media file are flipped, cut or repeated after its valid header
bytes    bytes of the JSON text are flipped, cut, inserted or removed
wire     headers, methods, lengths and chunks that do not fit the body
valid    nothing is wrong: the cluster must answer it
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.fuzz.corpus import Seed

KINDS = ("tree", "media", "bytes", "wire", "valid")
WEIGHTS = (55, 15, 15, 10, 5)
NUMBERS = (
    0, -1, 1, 2, 255, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30,
    0.5, -0.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", " ", "\x00", "\ufeff", "\u202e\u0301" * 20, "\U0001f9d1\u200d\U0001f680" * 10, "\ud800", "x" * 5000, "a " * 5000,
    "<|im_end|>", "<|image_pad|><|vision_start|>", "{{ 7 * 7 }}", "../../etc/passwd", "file:///etc/passwd",
    "http://127.0.0.1:1/", "data:", "data:image/png;base64,", "data:,x", "%00", "\\u0000",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, {"type": "text"}, [0] * 300)
FILES = ("url", "data", "image_url", "file_data")  # what a file is the value of
Node = tuple[Any, Any]  # (container, key or index)


@dataclass(frozen=True)
class HttpCase:
    """One request. `length`: the content-length header; if it is None, the body is sent in chunks of
    `chunk_bytes`.
    """

    kind: str
    path: str
    body: bytes
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)
    length: int | None = None
    chunk_bytes: int = 0
    is_cut: bool = False  # the client disconnects before the end of the body


class Mutator:
    def __init__(self, seeds: Sequence[Seed], seed: int):
        self._seeds = seeds
        self._seed = seed

    def case(self, number: int, kinds: Sequence[str] = KINDS) -> HttpCase:
        rng = random.Random(f"{self._seed}/{number}")
        weights = [WEIGHTS[KINDS.index(kind)] for kind in kinds]
        kind = rng.choices(kinds, weights)[0]
        seed = rng.choice(self._seeds)
        if kind == "media":
            seed = rng.choice([each for each in self._seeds if _files(each.body)])
        body = copy.deepcopy(seed.body)
        if kind == "tree":
            with contextlib.suppress(RecursionError):  # nested too deeply to be copied again
                for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
                    _change(rng, body, rng.choice(self._seeds).body)
        if kind == "media":
            container, key = rng.choice(_files(body))
            container[key] = _broken_file(rng, container[key])
        text = _written(rng, body)
        if kind == "bytes":
            text = _flipped(rng, text)
        if kind == "wire":
            return _wire(rng, seed.path, text)
        return HttpCase(kind, seed.path, text, length=len(text))


def _written(rng: random.Random, body: Any) -> bytes:
    """UTF-8 or escaped. Lone surrogates can only be escaped; a body nested too deeply for JSON becomes pure
    nesting.
    """
    try:
        return json.dumps(body, ensure_ascii=rng.random() < 0.5).encode()
    except UnicodeEncodeError:
        return json.dumps(body).encode()
    except RecursionError:
        return b'{"messages":' + b"[" * 100_000


def _nodes(value: Any) -> list[Node]:
    """Every value inside, as (container, key)."""
    found: list[Node] = []
    waiting = [value]
    while waiting:
        container = waiting.pop()
        keys = range(len(container)) if isinstance(container, list) else list(container)
        found += [(container, key) for key in keys]
        waiting += [container[key] for key in keys if isinstance(container[key], dict | list)]
    return found


def _files(body: Any) -> list[Node]:
    return [
        (container, key)
        for container, key in _nodes(body)
        if isinstance(container, dict) and key in FILES and isinstance(container[key], str)
    ]


def _change(rng: random.Random, body: Any, other: Any) -> None:
    """One operation on one value. `other`: another request whose values may be used."""
    nodes = _nodes(body)
    if not nodes:
        return
    container, key = rng.choice(nodes)
    value = container[key]
    match rng.choice(
        ("number", "text", "other", "remove", "repeat", "wrap", "nest", "borrow", "rename", "swap")
    ):
        case "number":
            container[key] = rng.choice(NUMBERS)
        case "text":
            container[key] = rng.choice(TEXTS)
        case "other":
            container[key] = copy.deepcopy(rng.choice(OTHERS))
        case "remove":
            del container[key]
        case "repeat" if isinstance(container, list):
            container.extend(copy.deepcopy(value) for _ in range(rng.choice((1, 5, 100))))
        case "repeat":
            container[key] = [copy.deepcopy(value) for _ in range(rng.choice((0, 1, 5, 100)))]
        case "wrap":
            container[key] = rng.choice(
                ([value], {"value": value}, {key: value} if isinstance(key, str) else [[value]])
            )
        case "nest":
            for _ in range(rng.choice((10, 100, 500))):
                value = [value]
            container[key] = value
        case "borrow":
            donor, name = rng.choice(_nodes(other))
            container[key] = copy.deepcopy(donor[name])
        case "rename" if isinstance(container, dict):
            container[rng.choice((f"{key}s", str(key).upper(), "", "x" * 300, "prompt", "messages"))] = (
                container.pop(key)
            )
        case _:
            second, name = rng.choice(nodes)
            if not isinstance(value, dict | list) and not isinstance(second[name], dict | list):
                container[key], second[name] = second[name], value


def _broken_file(rng: random.Random, url: str) -> str:
    """The data URI with its data changed; sometimes the base64 text itself is changed."""
    start = url.find(",") + 1
    data = bytearray(base64.b64decode(url[start:]))
    operation = rng.choice(("flip", "flip", "flip", "cut", "repeat", "zero", "base64"))
    at = rng.randrange(len(data))
    if operation == "flip":
        for _ in range(rng.choice((1, 4, 32))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif operation == "cut":
        del data[at:]
    elif operation == "repeat":
        data[at:at] = data[: min(len(data), 4096)]
    elif operation == "zero":
        data[at : at + 64] = bytes(64)
    else:
        place = rng.randrange(start, len(url))
        return url[:place] + rng.choice(("*", "=", "\n", "é", " ")) + url[place + 1 :]
    return url[:start] + base64.b64encode(data).decode()


def _flipped(rng: random.Random, text: bytes) -> bytes:
    data = bytearray(text)
    for _ in range(rng.choice((1, 1, 3, 20))):
        at = rng.randrange(len(data) or 1)
        match rng.choice(("flip", "insert", "remove", "cut", "repeat")):
            case "flip" if data:
                data[at] ^= 1 << rng.randrange(8)
            case "insert":
                data[at:at] = rng.choice(
                    (b"\xff", b"\x00", b"{", b"]", b'"', b"\\", b",", b"1e999", b"NaN", b"\xed\xa0\x80")
                )
            case "remove":
                del data[at : at + rng.choice((1, 10))]
            case "cut" if rng.random() < 0.3:
                del data[at:]
            case _:
                data[at:at] = data[at : at + 50]
    return bytes(data)


def _wire(rng: random.Random, path: str, body: bytes) -> HttpCase:
    json_type = ("content-type", "application/json")
    match rng.choice(("type", "method", "path", "short", "long", "chunks", "cut", "headers", "empty")):
        case "type":
            kind = rng.choice(
                ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "", "\xe9")
            )
            return HttpCase("wire", path, body, headers=(("content-type", kind),), length=len(body))
        case "method":
            method = rng.choice(("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE"))
            return HttpCase("wire", path, body, method, length=len(body))
        case "path":
            wrong = rng.choice(
                (
                    "/",
                    "/v1",
                    path + "/",
                    path + "?a=%ff",
                    "/v1/models/%00",
                    "/v1/models/" + "x" * 3000,
                    "/%2e%2e",
                )
            )
            return HttpCase("wire", wrong, body, length=len(body))
        case "short":
            return HttpCase("wire", path, body, length=rng.randrange(len(body)))
        case "long":
            return HttpCase("wire", path, body, length=len(body) + 10, is_cut=True)
        case "chunks":
            return HttpCase(
                "wire", path, body, chunk_bytes=rng.choice((1 + len(body) // 200, 4096, len(body)))
            )
        case "cut":
            return HttpCase("wire", path, body[: rng.randrange(len(body))], chunk_bytes=4096, is_cut=True)
        case "headers":
            more = rng.choice(
                (("authorization", "x" * 4000), ("authorization", "\xff"), ("traceparent", "00-zz"), ("x-epdg-ledger", "1"),
                 ("expect", "100-continue"), ("content-encoding", "gzip"), ("accept", "nothing/*"))
            )  # fmt: skip
            return HttpCase("wire", path, body, headers=(json_type, more), length=len(body))
        case _:
            return HttpCase("wire", path, b"", length=0)
