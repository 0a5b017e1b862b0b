"""The answer of /v1/messages: one message, or the typed events of a stream. Pure.

A `MessageFormat` belongs to one answer. The order of a stream: `message_start`, the events of each block,
`message_delta` with the reason of the end, `message_stop`. As with the other endpoints nothing is sent before
the first token, so that an error until then is an HTTP error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from cluster.errors import ClusterError
from router.api.anthropic.translate import messages_name
from router.api.protocol import Answers, Generation, Generations, Ledger, extra_fields
from router.calls import TextDelta, Usage
from router.http.pieces import MAX_ITEMS
from router.overlong import OverlongError

_encode = msgspec.json.Encoder().encode
# Type of a block → type of its deltas, and the field that grows
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ClusterError, request_id: str | None = None) -> bytes:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    text = error.of_messages if isinstance(error, OverlongError) else ""
    told = {"type": kind, "message": text or error.message}
    return _encode({"type": "error", "error": told, "request_id": request_id})


class MessageFormat:
    media_type = "application/json"

    def __init__(self, message_id: str, model: str):
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._content: list[dict[str, Any]] = []
        self._grown: list[str] = []  # what the last block has got

    def body(self, answers: Answers, generations: Generations, ledger: Ledger = ()) -> Iterator[bytes]:
        (deltas,), (generation,) = answers, generations
        for idx, delta in enumerate(deltas, 1):
            for _ in self._pushed(delta):
                pass
            if idx % MAX_ITEMS == 0:
                yield b""
        for _ in self._closed():
            pass
        whole = {
            **self._head,
            "content": self._content,
            **_ending(deltas[-1]),
            "usage": _usage(generation.usage),
        }
        yield _encode(whole | extra_fields(generation, ledger))

    def first(self, index: int, generation: Generation, *, has_notes: bool) -> bytes:
        begun = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        usage = _usage(generation.usage) | {"output_tokens": 0}
        return _event("message_start", message={**begun, "usage": usage, **extra_fields(generation, ())})

    def text(self, index: int, delta: TextDelta, generation: Generation) -> bytes:
        return b"".join(self._pushed(delta))

    def finish(self, index: int, delta: TextDelta, generation: Generation) -> bytes:
        events = b"".join(self._closed())
        events += _event("message_delta", delta=_ending(delta), usage=_usage(generation.usage))
        return events + _event("message_stop")

    def error_event(self, error: ClusterError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def ledger(self, ledger: Ledger) -> bytes:
        """Writes an event of our own, for a client that asked for it."""
        return _event("epdg:ledger", ledger=ledger)

    def end(self, generations: Generations) -> bytes:
        return b""  # `message_stop` is the last event

    def name_of(self, param: str) -> str:
        return messages_name(param)

    def _pushed(self, delta: TextDelta) -> Iterator[bytes]:
        pieces = list(delta.calls)
        while pieces and not pieces[0].name:  # of the call that is open; text of this delta comes after it
            yield self._grow(pieces.pop(0).arguments)
        for kind, text in (("thinking", delta.reasoning), ("text", delta.text)):
            if text:
                if not self._content or self._content[-1]["type"] != kind:
                    more = {"signature": ""} if kind == "thinking" else {"citations": None}
                    yield from self._begun({"type": kind, kind: "", **more})
                yield self._grow(text)
        for piece in pieces:
            if piece.name:
                yield from self._begun(
                    {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}}
                )
            yield self._grow(piece.arguments)

    def _begun(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._closed()
        self._content.append(block)
        yield _event("content_block_start", index=len(self._content) - 1, content_block=block)

    def _grow(self, text: str) -> bytes:
        self._grown.append(text)
        kind, name = _DELTAS[self._content[-1]["type"]]
        return _event("content_block_delta", index=len(self._content) - 1, delta={"type": kind, name: text})

    def _closed(self) -> Iterator[bytes]:
        """Ends the last block. The input of a call that was cut at `max_tokens`, or that is no object,
        stays empty."""
        if not self._content:
            return
        block, text = self._content[-1], "".join(self._grown)
        self._grown.clear()
        if block["type"] != "tool_use":
            block[block["type"]] = text
        else:
            with contextlib.suppress(msgspec.DecodeError):
                block["input"] = msgspec.json.decode(text or "{}", type=dict[str, Any])
        yield _event("content_block_stop", index=len(self._content) - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _ending(delta: TextDelta) -> dict[str, Any]:
    reason = "stop_sequence" if delta.stop_string is not None else _STOP_REASONS[str(delta.finish_reason)]
    return {"stop_reason": reason, "stop_sequence": delta.stop_string}


def _usage(usage: Usage) -> dict[str, Any]:
    """Returns the usage, in which the tokens of the prompt are apart from those that were cached."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
