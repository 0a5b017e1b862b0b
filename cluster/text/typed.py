"""Tells apart the control tokens that a chat template writes from those that texts of a client form: alone,
together with each other, or with letters of the template.

1. `Typed.marked` puts marks around each control token in a client's text, and one into each part of a token
   that something else could complete. What the template makes of the text keeps the marks.
2. `Typed.resolved` reads the rendered text. A control token without marks is the template's. All others get
   transformers' own marks, with which its tokenizers encode them as letters (`encode_marked_chat`).

Marks are private to one rendering, and no client can guess them. A text without parts of control tokens has
none, so that a template sees it as it is. Two ways stay open, which no known template and vocabulary have: a
template that takes letters out of the middle of a text, and a token whose last part is all letters or digits
and whose first part the template writes.

`ControlTokens` is frozen and shared; a `Typed` belongs to one rendering.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

MARKS = (0x100000, 0x10FFF0)  # code points of a plane that no font and no text uses


class ControlTokens:
    def __init__(self, tokens: Iterable[str], literals: Iterable[str]):
        """`tokens`: the control tokens. `literals`: the template's own texts."""
        tokens = frozenset(filter(None, tokens))
        self.pattern = re.compile(_any_of(tokens))
        firsts = {token[0] for token in tokens if _is_sign(token[0])}
        first = f"[{''.join(map(re.escape, sorted(firsts)))}]" if firsts else "(?!)"
        self._starts = frozenset(
            token[:n] for token in tokens if token[0] in firsts for n in range(1, len(token))
        )
        # Group 1: a whole token. Otherwise the first letter of a beginning that stands at the end, before a
        # space, or where another token may begin
        self.begun = re.compile(rf"({_any_of(tokens)})|(?={_any_of(self._starts)}(?:\s|\Z|{first})){first}")
        ends = (token[n:] for token in tokens for n in range(1, len(token)))
        self._ends = frozenset(end for end in ends if any(map(_is_sign, end)))
        literals = tuple(filter(None, literals))
        self._inner = frozenset(inner for token in tokens for inner in _inner_parts(token, literals))
        self._longest = max(map(len, tokens), default=0)
        # A tokenizer prefers the longer one
        self.extended = frozenset(
            token for token in tokens if any(other != token and other.startswith(token) for other in tokens)
        )

    def rest_at(self, text: str) -> int | None:
        """A place in the end of a token whose beginning something else may have written."""
        start = len(text) - len(text.lstrip())
        head = text[start : start + self._longest]
        if any(head[:length] in self._ends for length in range(1, len(head) + 1)):
            return start + next(i for i, char in enumerate(head) if _is_sign(char))
        return start + len(head) - 1 if text.strip() in self._inner else None

    def is_begun(self, text: str) -> bool:
        """Whether the beginning of a token stands at the end."""
        return any(text[-length:] in self._starts for length in range(1, self._longest))


class Typed:
    """The client's texts in one rendering."""

    def __init__(self, control: ControlTokens):
        self._control = control
        first = secrets.choice(range(*MARKS))
        self._marks = self._before, self._behind, self._within = chr(first), chr(first + 1), chr(first + 2)

    def marked(self, value: Any) -> Any:
        """A JSON value with marks in all its strings, names included."""
        if isinstance(value, dict):
            return {self.marked(name): self.marked(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(inner) for inner in value]
        return self._marked(value) if isinstance(value, str) else value

    def resolved(self, text: str) -> str:
        """The rendered text. Marks of transformers that a client has written are dropped."""
        from transformers.utils.chat_template_utils import _CONTROL_TOKEN_END, _CONTROL_TOKEN_START

        text = _without(text, (_CONTROL_TOKEN_START, _CONTROL_TOKEN_END))
        for mark in self._marks:  # in lists that a template prints they are escaped
            text = text.replace(repr(mark)[1:-1], mark).replace(json.dumps(mark)[1:-1], mark)
        if not any(mark in text for mark in self._marks):
            return text
        out: list[str] = []
        done = 0
        for match in self._control.pattern.finditer(text):
            token, (start, end) = match[0], match.span()
            if text[start - 1 : start] == self._before and text[end : end + 1] == self._behind:
                continue
            out.append(self._letters(text[done:start]))
            if self._control.is_begun(out[-1]):
                out.append(_CONTROL_TOKEN_END)  # alone it only keeps the tokenizer from reading on
            out.append(token)
            if token in self._control.extended:
                out.append(_CONTROL_TOKEN_END)
            done = end
        out.append(self._letters(text[done:]))
        return "".join(out)

    def _marked(self, text: str) -> str:
        text = _without(text, self._marks)
        rest_at = self._control.rest_at(text)
        rest = "" if rest_at is None else text[:rest_at] + self._within
        text = text if rest_at is None else text[rest_at:]
        return rest + self._control.begun.sub(self._mark, text)

    def _mark(self, match: re.Match[str]) -> str:
        return f"{self._before}{match[0]}{self._behind}" if match[1] else match[0] + self._within

    def _letters(self, text: str) -> str:
        from transformers.utils.chat_template_utils import _CONTROL_TOKEN_END, _CONTROL_TOKEN_START

        marked = rf"{_CONTROL_TOKEN_START}\g<0>{_CONTROL_TOKEN_END}"
        return self._control.pattern.sub(marked, _without(text, self._marks))


def _without(text: str, marks: Sequence[str]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text


def _is_sign(char: str) -> bool:
    """Not a letter, a digit or a space: marks before those would change what a template compares."""
    return not (char.isalnum() or char.isspace())


def _inner_parts(token: str, literals: Sequence[str]) -> Iterator[str]:
    """What may stand between two of the template's literals in it: `think` if one ends with `<` and one
    begins with `>`."""
    starts = [n for n in range(1, len(token)) if any(text.endswith(token[:n]) for text in literals)]
    stops = [n for n in range(1, len(token)) if any(text.startswith(token[n:]) for text in literals)]
    return (token[start:stop] for start in starts for stop in stops if start < stop)


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of the longest of these texts: one step for each character, however many there are."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern_of(tree) if tree else "(?!)"


def _pattern_of(tree: dict[str, Any]) -> str:
    branches = [re.escape(char) + _pattern_of(inner) for char, inner in tree.items() if char]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in tree else ''}"
