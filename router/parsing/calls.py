"""Parses the text of a region with calls, while it grows, to pieces of calls for the client. Pure; one object
per region.

A region becomes calls when it is complete, by the parser that its field of the response template names.
Before that, JSON that is not complete yet is completed and parsed in the same way: what is certain of the
arguments goes out. Certain is what every continuation begins with; a number at the end may still grow.

Text that is no call goes out as content. What has gone out of a call stays: if its rest cannot be parsed, its
arguments end there. If the answer is cut within a call, they do so, too, and if the model changes an argument
that has gone out (a name that JSON has twice).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from router.calls import MAX_CALL_NAME_CHARS, ToolCallDelta

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

GROWTH = 64  # the text is parsed again when it has grown by 1/64, so that all of it costs linear time
_UNPARSABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_NUMBER = "0123456789+-.eE"


class CallRegion:
    def __init__(
        self,
        field: ResponseTemplateField,
        first_index: int,
        new_id: Callable[[], str],
        cast: Callable[[Any], Any],
    ):
        """`first_index`: the place of the region's first call among those of the answer. `cast` turns
        arguments that the format writes as text into what the schema says."""
        self._field = field
        self._first_index = first_index
        self._new_id = new_id
        self._cast = cast
        self._texts: list[str] = []
        self._num_chars = 0
        self._sent: list[str] = []  # arguments, of each call that has begun
        self._parse_from = 0

    @property
    def num_calls(self) -> int:
        return len(self._sent)

    def push(self, text: str) -> None:
        self._texts.append(text)
        self._num_chars += len(text)

    def progress(self, captures: dict[str, str]) -> tuple[ToolCallDelta, ...]:
        """Returns what is new and certain. `captures`: named groups of the pattern that opened the region."""
        if self._field.content != "json" or self._num_chars < self._parse_from:
            return ()
        self._parse_from = self._num_chars * (GROWTH + 1) // GROWTH
        body = self._body()
        try:
            named = self._calls(_completed(body, has_strings=False), captures)
            calls = self._calls(_completed(body, has_strings=True), captures)
        except _UNPARSABLE:
            return ()
        return tuple(self._pieces(calls[: len(named)], is_complete=False))

    def close(self, captures: dict[str, str], *, is_cut: bool) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Returns text that is no call, and the rest of the calls. `is_cut`: the answer was cut within the
        region."""
        body = self._body()
        try:
            calls = self._calls(body, captures)
        except _UNPARSABLE:
            rest: tuple[ToolCallDelta, ...] = ()
            if is_cut or self._sent:
                self._parse_from = 0
                rest = self.progress(captures)
            return ("" if self._sent else body.strip()), rest
        return "", tuple(self._pieces(calls, is_complete=True))

    def _body(self) -> str:
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    def _calls(self, body: str, captures: dict[str, str]) -> list[tuple[str, Any]]:
        """Returns names and arguments. Raises one of `_UNPARSABLE`."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        value = process_field(body, self._field, captures)
        if self._field.content != "json":
            value = self._cast(value)
        calls = []
        for call in value if isinstance(value, list) else [value]:
            name, arguments = call["function"]["name"], call["function"].get("arguments")
            if not isinstance(name, str) or not 0 < len(name.strip()) <= MAX_CALL_NAME_CHARS:
                raise ValueError("a call without a name, or with too long a one")
            calls.append((name.strip(), arguments))
        return calls

    def _pieces(self, calls: list[tuple[str, Any]], *, is_complete: bool) -> Iterator[ToolCallDelta]:
        for i, (name, arguments) in enumerate(calls):
            text = _certain(arguments, is_complete=is_complete or i + 1 < len(calls))
            if i == len(self._sent):
                self._sent.append(text)
                yield ToolCallDelta(self._first_index + i, text, self._new_id(), name)
                continue
            sent = self._sent[i]
            if text.startswith(sent) and len(text) > len(sent):
                self._sent[i] = text
                yield ToolCallDelta(self._first_index + i, text[len(sent) :])


def _completed(body: str, *, has_strings: bool) -> str:
    """Writes the JSON of what is there. `has_strings`: with the beginning of a string that is not
    complete."""
    return json.dumps(from_json(body, allow_partial="trailing-strings" if has_strings else "on"))


def _certain(arguments: Any, *, is_complete: bool) -> str:
    """Writes the JSON of these arguments, or what it begins with for certain."""
    if not is_complete and not isinstance(arguments, dict):
        return ""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    text = text.encode(errors="backslashreplace").decode()  # half a surrogate pair, as JSON writes it
    return text if is_complete else text.rstrip('"]}').rstrip(_NUMBER)
