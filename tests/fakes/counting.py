"""Counts work, so that a test of what something costs does not need a clock."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from re import _parser  # type: ignore[attr-defined]
from types import FrameType
from typing import Any

SKIP = "\ue000"  # stands for the verbs that `re` does not know


def num_lines(call: Callable[[], object]) -> int:
    """How many lines of Python it runs."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class CountedDict(dict[Any, Any]):
    """Counts how often a key is looked up."""

    num_lookups = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.num_lookups += 1
        return super().get(key, default)


class CountedToken(int):
    """Counts how often any token of this class is looked up in a table."""

    num_lookups = 0

    def __hash__(self) -> int:
        CountedToken.num_lookups += 1
        return super().__hash__()


class CountedPattern:
    """Counts the steps that a backtracking matcher without any shortcut takes for a pattern of `regex`: an
    upper bound for the real one, which does the work."""

    def __init__(self, pattern: Any):
        self._pattern = pattern
        self._items = list(_parser.parse(pattern.pattern.replace("(*SKIP)(*FAIL)", SKIP), re.DOTALL))
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pattern, name)

    def search(self, text: str, pos: int = 0, *, partial: bool = False) -> Any:
        for start in range(pos, len(text) + 1):
            end, has_hit_end = self._matched(text, start)
            if end is not None or (partial and has_hit_end):
                break
        return self._pattern.search(text, pos, partial=partial)

    def finditer(self, text: str) -> list[Any]:
        start = 0
        while start <= len(text):
            try:
                end, _ = self._matched(text, start)
            except _Skipped as skipped:
                end = skipped.end
            start = start + 1 if end is None else max(end, start + 1)
        return list(self._pattern.finditer(text))

    def _matched(self, text: str, start: int) -> tuple[int | None, bool]:
        self._text, self._has_hit_end, self._end = text, False, None

        def done(i: int) -> bool:
            self._end = i
            return True

        self._match(self._items, 0, start, done)
        return self._end, self._has_hit_end

    def _match(self, items: list[Any], at: int, i: int, then: Callable[[int], bool]) -> bool:
        """Whether the items from this one on match from character i on, and `then` what follows them."""
        if at == len(items):
            return then(i)
        (op, value), rest = items[at], partial(self._match, items, at + 1, then=then)
        match str(op):
            case "AT":
                return i == 0 and rest(i)
            case "SUBPATTERN":
                return self._match(list(value[-1]), 0, i, rest)
            case "ATOMIC_GROUP":
                return (end := self._alone(list(value), i)) is not None and rest(end)
            case "BRANCH":
                return any(self._match(list(branch), 0, i, rest) for branch in value[1])
            case "ASSERT":
                return self._alone(list(value[1]), i) is not None and rest(i)
            case "ASSERT_NOT":
                return self._alone(list(value[1]), i) is None and rest(i)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, body = value
                return self._repeated(str(op), least, most, list(body), i, rest)
            case _:
                return self._is_one(op, value, i) and rest(i + 1)

    def _alone(self, items: list[Any], i: int) -> int | None:
        ends: list[int] = []
        return ends[0] if self._match(items, 0, i, lambda end: not ends.append(end)) else None

    def _repeated(
        self, op: str, least: int, most: int, body: list[Any], i: int, rest: Callable[[int], bool]
    ) -> bool:
        """Repeats of single characters, and optional groups."""
        if len(body) > 1 or str(body[0][0]) in ("SUBPATTERN", "BRANCH"):
            assert op == "MAX_REPEAT" and (least, most) == (0, 1)
            return self._match(body, 0, i, rest) or rest(i)
        (kind, value), end = body[0], i
        if op == "MIN_REPEAT":
            while not (end - i >= least and rest(end)):
                if end - i == most or not self._is_one(kind, value, end):
                    return False
                end += 1
            return True
        while end - i < most and self._is_one(kind, value, end):
            end += 1
        first = end if op == "POSSESSIVE_REPEAT" else i + least
        return any(rest(j) for j in range(end, first - 1, -1) if j - i >= least)

    def _is_one(self, op: Any, value: Any, i: int) -> bool:
        self.num_steps += 1
        if (str(op), value) == ("LITERAL", ord(SKIP)):
            raise _Skipped(i)
        if i >= len(self._text):
            self._has_hit_end = True
            return False
        char = self._text[i]
        match str(op):
            case "LITERAL":
                return ord(char) == value
            case "NOT_LITERAL":
                return ord(char) != value
            case "ANY":
                return True
        negates = str(value[0][0]) == "NEGATE"
        return negates != any(_is_in(str(kind), each, char) for kind, each in value[negates:])


class _Skipped(Exception):
    def __init__(self, end: int):
        self.end = end


def _is_in(kind: str, value: Any, char: str) -> bool:
    match kind, str(value):
        case "LITERAL", _:
            return ord(char) == value
        case "RANGE", _:
            return value[0] <= ord(char) <= value[1]
        case _, "CATEGORY_SPACE":
            return char.isspace()
        case _, "CATEGORY_WORD":
            return char.isalnum() or char == "_"
    raise AssertionError(f"not known: {kind} {value}")
