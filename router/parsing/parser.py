"""Parses the text of one answer to content, reasoning and calls, as it comes. transformers' `ResponseParser`
finds the regions; text that may still become the beginning of one waits. One object per choice, on the door's
event loop.

White space at the beginning and at the end of content and of reasoning is dropped, and that before a call.

A letter costs the same wherever it comes in an answer: the parser gets the text in short pieces, it keeps no
text that is out, and no more than `MAX_WAITING` characters wait.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import Any

import msgspec

from cluster.text.answer_format import CALLS, REASONING, AnswerSyntax
from cluster.types.messages import TokenEvent
from router.answer_text import AnswerText
from router.calls import TextDelta, ToolCallDelta
from router.parsing.calls import CallRegion

MAX_PIECE = 256  # characters that are looked through at once, once for each region that begins in them
MAX_WAITING = 1024  # characters that may still become the beginning or the end of a region
MAX_BEFORE = 64  # characters before them that patterns may look at
_LETTERS = string.ascii_letters + string.digits


class Parts(msgspec.Struct):
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class AnswerParser:
    def __init__(
        self,
        form: AnswerSyntax,
        prefix: str,
        *,
        has_calls: bool,
        streams: bool = False,
        is_parallel: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ):
        """`prefix`: the end of the prompt; the answer may begin within a region. `has_calls`: False: what
        looks like a call is content. `streams`: arguments come as they grow. `is_parallel`: False: the
        answer ends with its first call. `tools`: whose schemas say what arguments are, for a form that writes
        them as text."""
        from transformers.utils.chat_parsing import ResponseParser

        self._format = form
        template = form.with_calls if has_calls else form.without_calls
        anchored = prefix if template.start_anchor_re.search(prefix) else ""
        self._parser = ResponseParser(template, anchored, tools=list(tools))
        self._streams = streams
        self._is_parallel = is_parallel
        self._content, self._reasoning = _Trimmed(), _Trimmed()
        self._region: CallRegion | None = None
        self._num_calls = 0  # of closed regions
        self._is_cut = False
        self.initial_events: Sequence[dict[str, Any]] = self._parser.initial_events  # what the prefix has
        self.in_reasoning = is_in_reasoning(self.initial_events)
        self.has_call = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted."""
        return self._num_calls > 0 and not self._is_parallel

    def push(self, text: str) -> Parts:
        parts = Parts()
        for start in range(0, len(text), MAX_PIECE):
            if self.is_over:
                break
            events = self._parser.feed(text[start : start + MAX_PIECE])
            self._bound(events)
            self._add(parts, events)
        return parts

    def finish(self, *, is_cut: bool) -> Parts:
        """Ends the answer. `is_cut`: the model would have gone on."""
        if self.is_over:
            return Parts()
        self._is_cut = is_cut and not self._has_end_of_calls()
        parts = Parts()
        self._add(parts, self._parser.finalize()[1])
        return parts

    def _bound(self, events: list[dict[str, Any]]) -> None:
        """Lets go of what waits for too long, and of what is out. The parser has no way to say so."""
        parser = self._parser
        if (num_more := len(parser._buffer) - parser._pos - MAX_WAITING) > 0:
            end = parser._pos + num_more
            parser._accumulate(events, parser._buffer[parser._pos : end])
            parser._pos = end
        if parser._pos > MAX_WAITING:  # not each time: a letter would cost what waits
            parser._buffer = parser._buffer[parser._pos - MAX_BEFORE :]
            parser._pos = MAX_BEFORE
        parser._body = ""  # regions have their text from the events

    def _has_end_of_calls(self) -> bool:
        """Whether the last text, which waits because it could still grow, ends a region with calls."""
        end = self._parser._spec.fields[CALLS].close_re if self._region is not None else None
        return end is not None and end.search(self._parser._buffer, self._parser._pos) is not None

    def _add(self, parts: Parts, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            name, kind = event["field"], event["type"]
            if name == CALLS:
                self._on_call(kind, event, parts)
            elif name in REASONING:
                self.in_reasoning = kind != "region_close"
                parts.reasoning += self._reasoning.push(event.get("text", ""))
            else:
                parts.content += self._content.push(event.get("text", ""))
            if self.is_over:
                break
        if self._streams and self._region is not None:
            parts.calls += self._region.progress(self._parser._captures)
        if not self._is_parallel:
            parts.calls = tuple(call for call in parts.calls if call.index == 0)
        self.has_call = self.has_call or bool(parts.calls)

    def _on_call(self, kind: str, event: dict[str, Any], parts: Parts) -> None:
        if kind == "region_open":
            self._content.drop_space()
            self._region = CallRegion(
                self._format.fields[CALLS],
                self._num_calls,
                self._new_id,
                self._parser._coerce_tool_calls,
            )
        elif self._region is not None and kind == "region_chunk":
            self._region.push(event["text"])
        elif self._region is not None:
            text, calls = self._region.close(event["value"]["captures"], is_cut=self._is_cut)
            parts.content += self._content.push(text)
            parts.calls += calls
            self._num_calls += self._region.num_calls
            self._region = None

    def _new_id(self) -> str:
        if self._format.id_chars:
            return "".join(secrets.choice(_LETTERS) for _ in range(self._format.id_chars))
        return f"call_{secrets.token_hex(12)}"


class ParsedAnswer:
    """An `AnswerText` whose text is parsed."""

    def __init__(self, text: AnswerText, parser: AnswerParser, *, shows_reasoning: bool):
        self._text = text
        self._parser = parser
        self._shows_reasoning = shows_reasoning

    def push(self, event: TokenEvent) -> TextDelta:
        delta = self._text.push(event)
        was_reasoning = self._parser.in_reasoning
        parts = self._parser.push(delta.text)
        is_over = self._parser.is_over  # not by its end: that may have come within a call
        num_reasoning = delta.num_tokens if was_reasoning or self._parser.in_reasoning else 0
        reason = delta.finish_reason
        if reason is not None:
            rest = self._parser.finish(is_cut=reason == "length" or delta.stop_string is not None)
            parts.content += rest.content
            parts.reasoning += rest.reasoning
            parts.calls += rest.calls
        if is_over or (self._parser.has_call and reason == "stop"):
            reason = "tool_calls"
        return msgspec.structs.replace(
            delta,
            text=parts.content,
            reasoning=parts.reasoning if self._shows_reasoning else "",
            calls=parts.calls,
            finish_reason=reason,
            num_reasoning_tokens=num_reasoning,
        )


class _Trimmed:
    """Text without white space at its beginning and end."""

    def __init__(self) -> None:
        self._held: list[str] = []  # white space that the end may follow
        self._has_begun = False

    def push(self, text: str) -> str:
        if not self._has_begun:
            text = text.lstrip()
        out = text.rstrip()
        space = text[len(out) :]
        if out:
            self._has_begun = True
            out = "".join((*self._held, out))
            self._held = []
        if space:
            self._held.append(space)
        return out

    def drop_space(self) -> None:
        """Drops white space: the text goes on after something else."""
        self._held = []


def is_in_reasoning(events: Sequence[dict[str, Any]]) -> bool:
    """Whether these events of a parser end in reasoning."""
    return bool(events) and events[-1]["field"] in REASONING and events[-1]["type"] != "region_close"
