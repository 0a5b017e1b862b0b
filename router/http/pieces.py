"""Writes large JSON piece by piece, so that the event loop goes on between two pieces. Pure.

What may be large in an answer are the log-probabilities of its tokens and of its prompts. They stand in it as
`Many`, which makes and writes a few items at a time; everything else of one choice is written at once. The
pieces together are the bytes that `msgspec.json.encode` would give for the same value with plain lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

MAX_ITEMS = 64  # of a `Many` in one piece: up to 21 entries each take 2 ms together
_encode = msgspec.json.Encoder().encode


class Many:
    """A list whose items are made when they are written."""

    def __init__(self, make: Callable[[Any], Any], of: Sequence[Any]):
        self._make = make
        self._of = of

    def parts(self) -> Iterator[Callable[[], bytes]]:
        """Returns the parts of the list, without its brackets; each is written when it is called."""
        for begin in range(0, len(self._of), MAX_ITEMS):
            yield partial(self._part, begin)

    def _part(self, begin: int) -> bytes:
        part = _encode([self._make(each) for each in self._of[begin : begin + MAX_ITEMS]])[1:-1]
        return b"," + part if begin else part


def json_pieces(value: Any) -> Iterator[bytes]:
    """Writes `value`, which may contain `Many`s, and iterators of values that become lists. A small value is
    one piece."""
    written: list[bytes] = []
    for _ in _write(value, written):
        yield b"".join(written)
        written.clear()
    yield b"".join(written)


def json_bytes(value: Any) -> bytes:
    return b"".join(json_pieces(value))


def _write(value: Any, written: list[bytes]) -> Iterator[None]:
    """Appends the JSON of `value` to `written`, and stops where a piece may end."""
    if isinstance(value, dict) and value:
        for idx, (key, each) in enumerate(value.items()):
            written += (b"," if idx else b"{", _encode(key), b":")
            yield from _write(each, written)
        written.append(b"}")
    elif isinstance(value, Many):
        written.append(b"[")
        for idx, part in enumerate(value.parts()):
            if idx:
                yield
            written.append(part())
        written.append(b"]")
    elif isinstance(value, Iterator):
        written.append(b"[")
        for idx, each in enumerate(value):
            if idx:
                yield
                written.append(b",")
            yield from _write(each, written)
        written.append(b"]")
    else:
        written.append(_encode(value))
