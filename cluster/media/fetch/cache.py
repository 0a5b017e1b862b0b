"""Cached answers of URLs: contents by digest, limited in bytes, and which URL gave which content, as long as
its host allows.

An answer belongs to the tenant that asked for it. Equal contents are stored once. Stale answers are kept as
well, because with their validators the host can say that nothing has changed. Belongs to one event loop;
nothing blocks.
"""

from __future__ import annotations

import re
from collections import OrderedDict

import msgspec

from cluster.clock import Clock

MAX_FRESH_S = 3600.0
MAX_ANSWERS = 4096
_SECONDS = re.compile(r'"?([0-9]{1,9})"?')

Key = tuple[str, str]  # tenant, URL


class Freshness(msgspec.Struct, frozen=True):
    """What a host allows for its answer. If the host says nothing, the answer is stored, but validated at
    each use."""

    may_store: bool
    fresh_s: float

    def and_(self, other: Freshness) -> Freshness:
        return Freshness(self.may_store and other.may_store, min(self.fresh_s, other.fresh_s))


FOREVER = Freshness(True, MAX_FRESH_S)


def freshness(cache_control: str, age: str | None) -> Freshness:
    """The freshness that the header fields of one answer give (several Cache-Control lines joined by commas).
    With an unreadable field: not fresh."""
    directives: dict[str, str] = {}
    for directive in cache_control.lower().split(","):
        name, _, value = directive.strip().partition("=")
        directives.setdefault(name.strip(), value.strip())
    max_age, passed = _seconds(directives.get("max-age")), 0.0 if age is None else _seconds(age.strip())
    fresh_s = 0.0
    if max_age is not None and passed is not None and "no-cache" not in directives:
        fresh_s = min(max(max_age - passed, 0.0), MAX_FRESH_S)
    return Freshness("no-store" not in directives, fresh_s)


def _seconds(text: str | None) -> float | None:
    match = None if text is None else _SECONDS.fullmatch(text)
    return None if match is None else float(match[1])


class Downloaded(msgspec.Struct, frozen=True):
    """The answer of a URL, and what may be done with it."""

    data: bytes
    digest: bytes
    allowed: Freshness
    url: str  # after redirects
    validators: tuple[tuple[str, str], ...]


class Answer(msgspec.Struct, frozen=True):
    """The last answer of a URL."""

    digest: bytes
    fresh_until: float  # on the cache's clock
    url: str  # after redirects; the validators belong to it
    validators: tuple[tuple[str, str], ...]  # header fields of a conditional request


Known = tuple[Answer, bytes]  # with its content


class ContentCache:
    def __init__(self, max_bytes: int, clock: Clock):
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._clock = clock
        self._contents: OrderedDict[bytes, bytes] = OrderedDict()  # by digest, least recently used first
        self._answers: OrderedDict[Key, Answer] = OrderedDict()

    def get(self, key: Key) -> Known | None:
        """The last answer and its content, fresh or not; None if either is gone."""
        answer = self._answers.get(key)
        if answer is None:
            return None
        data = self._contents.get(answer.digest)
        if data is None:
            del self._answers[key]
            return None
        self._answers.move_to_end(key)
        self._contents.move_to_end(answer.digest)
        return answer, data

    def is_fresh(self, answer: Answer) -> bool:
        return self._clock.now() < answer.fresh_until

    def put(self, key: Key, got: Downloaded) -> bytes:
        """Stores an answer if its host allows it. Returns the content: the stored copy, if an equal one
        exists."""
        self._answers.pop(key, None)
        digest, allowed = got.digest, got.allowed
        data = self._contents.get(digest, got.data)
        if not allowed.may_store or not (allowed.fresh_s or got.validators) or len(data) > self._max_bytes:
            return data
        self._answers[key] = Answer(digest, self._clock.now() + allowed.fresh_s, got.url, got.validators)
        if digest not in self._contents:
            self._contents[digest] = data
            self.num_bytes += len(data)
        self._contents.move_to_end(digest)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._contents.popitem(last=False)[1])
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
        return data
