"""The answer of /v1/responses: one response object, or the typed events of a stream. Pure but for the clock.

A `ResponsesFormat` belongs to one response and counts its events. The order of a stream:
`response.created`, `response.in_progress`, the events of each item (`items`), then `response.completed`, or
`response.incomplete` if the answer was cut at its longest. An error after the first event is
`response.failed`. As with the other endpoints nothing is sent before the first token, so that an error until
then is an HTTP error. A background response is reported at once, as `queued`, and an error is always
`response.failed`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel

from cluster.errors import ClusterError, OverloadedError, RequestError
from router.api.chat.render import DONE
from router.api.protocol import Answers, Generation, Generations, Ledger, extra_fields
from router.api.responses.items import Event, OutputItems
from router.api.responses.schema import ResponsesRequest
from router.api.responses.translate import responses_name
from router.calls import ChatCall, TextDelta, Usage
from router.http.pieces import MAX_ITEMS

_encode = msgspec.json.Encoder().encode


class ResponsesFormat:
    media_type = "application/json"

    def __init__(self, response_id: str, created: int, request: ResponsesRequest, call: ChatCall):
        self.response_id = response_id
        self._fields = _fields(response_id, created, request, call)
        self.is_background = bool(request.background)
        self.whole: bytes | None = None  # when the answer has ended
        self._items = OutputItems(response_id)
        self.num_events = 0
        self._last: Generation | None = None  # the one that has begun, until the answer has ended

    def body(self, answers: Answers, generations: Generations, ledger: Ledger = ()) -> Iterator[bytes]:
        (deltas,) = answers
        for idx, delta in enumerate(deltas, 1):
            self._items.push(delta)
            if idx % MAX_ITEMS == 0:
                yield b""
        status = _status(deltas[-1].finish_reason)
        self._items.close(status)
        yield _encode(self._response(status, generations[0], ledger))

    def first(self, index: int, generation: Generation, *, has_notes: bool) -> bytes:
        self._last = generation
        begun = {"response": self._response("in_progress", generation)}
        events = [("response.created", begun), ("response.in_progress", begun)]
        return self._events(events[self.is_background :])

    def queued(self) -> bytes:
        """Writes the first events of a background response."""
        begun = {"response": self._response("queued", None)}
        return self._events([("response.created", begun), ("response.queued", begun)])

    def now(self) -> bytes:
        """Writes the response as it is, ended or not."""
        begun = "queued" if self._last is None else "in_progress"
        return self.whole or _encode(self._response(begun, self._last))

    def cancel(self) -> bytes:
        """Ends the answer without an event. Has no effect on an answer that has ended."""
        if self.whole is None:
            self._items.close("incomplete")
            self._end(self._response("cancelled", self._last))
        return b""

    def drop_output(self, num_events: int) -> None:
        """Drops what comes after the first `num_events` events, for lack of room: how the answer ended, if it
        has, and the output."""
        self.whole = None
        self._items = OutputItems(self.response_id)
        self.num_events = num_events

    def text(self, index: int, delta: TextDelta, generation: Generation) -> bytes:
        return self._events(self._items.push(delta))

    def finish(self, index: int, delta: TextDelta, generation: Generation) -> bytes:
        status = _status(delta.finish_reason)
        events = self._items.close(status)
        whole = self._end(self._response(status, generation))
        return self._events([*events, (f"response.{status}", {"response": whole})])

    def error_event(self, error: ClusterError) -> bytes:
        """Writes the last event of a stream that fails after its first one."""
        whole = self._response("failed", self._last)
        whole["error"] = {"code": _error_code(error), "message": error.message}
        return self._events([("response.failed", {"response": self._end(whole)})])

    def ledger(self, ledger: Ledger) -> bytes:
        """Writes an event of our own, after the last one of OpenAI's, for a client that asked for it."""
        return self._events([("epdg:ledger", {"ledger": ledger})])

    def end(self, generations: Generations) -> bytes:
        return DONE

    def name_of(self, param: str) -> str:
        return responses_name(param)

    def _end(self, whole: dict[str, Any]) -> msgspec.Raw:
        """Ends the answer, and lets go of its generation: a response may be kept long after the prompt and
        its media."""
        self.whole, self._last = _encode(whole), None
        self._items = OutputItems(self.response_id)
        return msgspec.Raw(self.whole)

    def _events(self, events: Sequence[Event]) -> bytes:
        written = []
        for kind, fields in events:
            data = _encode({"type": kind, "sequence_number": self.num_events, **fields})
            written.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
            self.num_events += 1
        return b"".join(written)

    def _response(self, status: str, generation: Generation | None, ledger: Ledger = ()) -> dict[str, Any]:
        is_over = status not in ("queued", "in_progress")
        whole = {
            **self._fields,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items.fields("incomplete"),
            "usage": _usage(generation.usage) if is_over and generation is not None else None,
        }
        return whole if generation is None else whole | extra_fields(generation, ledger)


def _fields(response_id: str, created: int, request: ResponsesRequest, call: ChatCall) -> dict[str, Any]:
    """Returns what is the same in all response objects of a stream. Clients expect every field of a request,
    with the value that was used."""
    wanted = None if request.text is None else request.text.format
    text = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
    choice = request.tool_choice
    asked = ("model", "instructions", "max_output_tokens", "user", "safety_identifier", "prompt_cache_key")
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "error": None,
        **{name: getattr(request, name) for name in asked},
        "metadata": request.metadata or {},
        "temperature": call.sampling[0].temperature,
        "top_p": call.sampling[0].top_p,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "presence_penalty": request.presence_penalty or 0.0,
        "top_logprobs": request.top_logprobs or 0,
        "text": msgspec.Raw(_encode({"format": text, "verbosity": "medium"})),
        "tools": msgspec.Raw(
            _encode([tool.model_dump() | {"strict": bool(tool.strict)} for tool in request.tools or ()])
        ),
        "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "max_tool_calls": None,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "previous_response_id": None,
        "background": bool(request.background),
        "store": bool(request.background),
        "truncation": "disabled",
        "service_tier": "default",
    }


def _status(reason: str | None) -> str:
    """Returns the status of a response and of its last item."""
    return "incomplete" if reason == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,  # the client's types demand it; here nothing is charged for it
            "audio_tokens": usage.audio_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error_code(error: ClusterError) -> str:
    """Returns one of OpenAI's codes; their types know no others that fit."""
    if isinstance(error, RequestError):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"
