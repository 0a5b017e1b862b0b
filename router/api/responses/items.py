"""The items of one answer as they grow: reasoning, messages, calls. Pure; one object per response.

One item is open at a time. A delta of another kind, or of the next call, ends it and opens a new one, so they
have the order in which the model wrote them. Every change is an event: its kind and its fields, without
the number that a stream gives it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from router.api.chat.render import logprob_entry
from router.calls import TextDelta, TokenScores, ToolCallDelta
from router.http.pieces import Many, json_bytes

Event = tuple[str, dict[str, Any]]


class OutputItems:
    def __init__(self, response_id: str):
        self._base = response_id.removeprefix("resp_")
        self._closed: list[dict[str, Any]] = []
        self._open: OutputItem | None = None

    def push(self, delta: TextDelta) -> list[Event]:
        return list(self._events(delta))

    def close(self, status: str) -> list[Event]:
        """Ends the answer. `status`: that of the last item. An answer without any has an empty message."""
        events = [] if self._closed or self._open else list(self._begin(MessageOutput))
        return [*events, *self._end(status)]

    def fields(self, open_status: str) -> list[dict[str, Any]]:
        """Returns the fields of all items."""
        return [*self._closed, *([] if self._open is None else [self._open.fields(open_status)])]

    def _events(self, delta: TextDelta) -> Iterator[Event]:
        pieces = list(delta.calls)
        while pieces and not pieces[0].name:  # of the call that is open; text of this delta comes after it
            yield from self._grown(CallOutput, pieces.pop(0).arguments)
        if delta.reasoning:
            yield from self._grown(ReasoningOutput, delta.reasoning)
        # Tokens without text belong to the message around them; those of calls and of reasoning to none
        is_only = delta.finish_reason is not None and not (self._closed or self._open or pieces)
        if delta.text or (delta.scores and (isinstance(self._open, MessageOutput) or is_only)):
            yield from self._grown(MessageOutput, delta.text, delta.scores)
        for piece in pieces:
            if piece.name:
                yield from self._begin(CallOutput, piece)
            yield from self._grown(CallOutput, piece.arguments)

    def _grown(
        self, kind: type[OutputItem], text: str, scores: tuple[TokenScores, ...] = ()
    ) -> Iterator[Event]:
        if not isinstance(self._open, kind):
            yield from self._begin(kind)
        if self._open is not None and (text or scores):
            yield self._open.grow(text, scores)

    def _begin(self, kind: type[OutputItem], call: ToolCallDelta | None = None) -> Iterator[Event]:
        yield from self._end("completed")
        self._open = kind(self._base, len(self._closed), call)
        yield from self._open.begin()

    def _end(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.end(status)
            self._closed.append(self._open.fields(status))
            self._open = None


class OutputItem(ABC):
    prefix: ClassVar[str]
    stem: ClassVar[str]  # of the events about its text

    def __init__(self, base: str, index: int, call: ToolCallDelta | None):
        self.id = f"{self.prefix}_{base}{index:02x}"
        self.place: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self.call = call
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", self._whole(self.fields("in_progress"))

    def grow(self, text: str, scores: tuple[TokenScores, ...]) -> Event:
        self._pieces.append(text)
        return f"{self.stem}.delta", {**self.place, "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        yield "response.output_item.done", self._whole(self.fields(status))

    @abstractmethod
    def fields(self, status: str) -> dict[str, Any]:
        """Returns the item as it stands in a response."""

    def _whole(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"output_index": self.place["output_index"], "item": fields}


class PartedOutput(OutputItem):
    """An item whose text is one part of its content."""

    def __init__(self, base: str, index: int, call: ToolCallDelta | None):
        super().__init__(base, index, call)
        self.place["content_index"] = 0

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", self._whole({**self.fields("in_progress"), "content": []})
        yield "response.content_part.added", {**self.place, "part": self.part()}

    def end(self, status: str) -> Iterator[Event]:
        part = {name: value for name, value in self.part().items() if name in ("text", "logprobs")}
        yield f"{self.stem}.done", {**self.place, **part}
        yield "response.content_part.done", {**self.place, "part": self.part()}
        yield from super().end(status)

    @abstractmethod
    def part(self) -> dict[str, Any]: ...


class MessageOutput(PartedOutput):
    """A message of the answer. Log-probabilities are written as they come: several events and the response
    repeat them."""

    prefix, stem = "msg", "response.output_text"

    def __init__(self, base: str, index: int, call: ToolCallDelta | None):
        super().__init__(base, index, call)
        self._scores: list[bytes] = []

    def grow(self, text: str, scores: tuple[TokenScores, ...]) -> Event:
        written = json_bytes(Many(logprob_entry, scores))
        if scores:
            self._scores.append(written[1:-1])
        kind, fields = super().grow(text, scores)
        return kind, {**fields, "logprobs": msgspec.Raw(written)}

    def fields(self, status: str) -> dict[str, Any]:
        fields = {"id": self.id, "type": "message", "role": "assistant", "status": status}
        return {**fields, "content": [self.part()]}

    def part(self) -> dict[str, Any]:
        logprobs = msgspec.Raw(b"[%b]" % b",".join(self._scores))
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}


class ReasoningOutput(PartedOutput):
    prefix, stem = "rs", "response.reasoning_text"

    def fields(self, status: str) -> dict[str, Any]:
        fields = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        return {**fields, "content": [self.part()], "encrypted_content": None}

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}


class CallOutput(OutputItem):
    prefix, stem = "fc", "response.function_call_arguments"

    def end(self, status: str) -> Iterator[Event]:
        fields = self.fields(status)
        yield f"{self.stem}.done", {**self.place, "name": fields["name"], "arguments": fields["arguments"]}
        yield from super().end(status)

    def fields(self, status: str) -> dict[str, Any]:
        call = ToolCallDelta(0) if self.call is None else self.call
        fields = {"id": self.id, "type": "function_call", "status": status}
        return {**fields, "call_id": call.call_id, "name": call.name, "arguments": self.text}
