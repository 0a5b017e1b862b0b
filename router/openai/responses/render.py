"""The answer of /v1/responses: one response object, or the typed events of a stream. Pure but for the clock.

A `ResponsesFormat` belongs to one response and counts its events. The order of a stream:
`response.created`, `response.in_progress`, `output_item.added`, `content_part.added`, one `output_text.delta`
per piece, `output_text.done`, `content_part.done`, `output_item.done`, then `response.completed`, or
`response.incomplete` if the answer was cut at its longest. An error after the first event is
`response.failed`. As with the other endpoints nothing is sent before the first token, so that an error until
then is an HTTP error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cluster.errors import ClusterError, OverloadedError, RequestError
from router.calls import ChatCall, TextDelta, TokenScores, Usage
from router.openai.protocol import Generation
from router.openai.render import WholeChoice, logprob_entries
from router.openai.responses.schema import ResponsesRequest

_encode = msgspec.json.Encoder().encode
_ITEM_STATUS = {"stop": "completed", "length": "incomplete"}


class ResponsesFormat:
    media_type = "application/json"

    def __init__(
        self,
        response_id: str,
        created: int,
        request: ResponsesRequest,
        call: ChatCall,
        clock: Callable[[], float] = time.time,
    ):
        self._fields = _fields(response_id, created, request, call)
        self._item_id = "msg_" + response_id.removeprefix("resp_")
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._clock = clock
        self._num_events = 0
        self._pieces: list[str] = []
        self._scores: list[TokenScores] = []
        self._last: Generation | None = None  # the one that has begun

    def body(
        self,
        answers: Sequence[WholeChoice],
        generations: Sequence[Generation],
        num_choices: int,
        timelines: Sequence[dict[str, Any]] = (),
    ) -> bytes:
        (answer,) = answers
        item = self._item(answer.text, answer.scores, _ITEM_STATUS[answer.finish_reason])
        whole = self._response(item["status"], item, generations[0])
        if timelines:
            whole["ledger"] = timelines
        return _encode(whole)

    def first(self, index: int, generation: Generation, *, has_notes: bool) -> bytes:
        self._last = generation
        begun = self._response("in_progress", None, generation)
        item = {**self._item("", (), "in_progress"), "content": []}
        return b"".join(
            (
                self._event("response.created", {"response": begun}),
                self._event("response.in_progress", {"response": begun}),
                self._event("response.output_item.added", {"output_index": 0, "item": item}),
                self._event("response.content_part.added", {**self._place, "part": _part("", ())}),
            )
        )

    def text(self, index: int, delta: TextDelta, generation: Generation) -> bytes:
        if not (delta.text or delta.scores):
            return b""
        self._pieces.append(delta.text)
        self._scores += delta.scores
        return self._event(
            "response.output_text.delta",
            {**self._place, "delta": delta.text, "logprobs": logprob_entries(delta.scores)},
        )

    def finish(self, index: int, reason: str, generation: Generation) -> bytes:
        text, status = "".join(self._pieces), _ITEM_STATUS[reason]
        item, scores = self._item(text, self._scores, status), logprob_entries(self._scores)
        whole = self._response(status, item, generation)
        return b"".join(
            (
                self._event("response.output_text.done", {**self._place, "text": text, "logprobs": scores}),
                self._event("response.content_part.done", {**self._place, "part": item["content"][0]}),
                self._event("response.output_item.done", {"output_index": 0, "item": item}),
                self._event(f"response.{status}", {"response": whole}),
            )
        )

    def error_event(self, error: ClusterError) -> bytes:
        """The last event of a stream that fails after its first one."""
        item = self._item("".join(self._pieces), self._scores, "incomplete")
        whole = self._response("failed", item, self._last)
        whole["error"] = {"code": _error_code(error), "message": error.message}
        return self._event("response.failed", {"response": whole})

    def timelines(self, timelines: Sequence[dict[str, Any]]) -> bytes:
        """An event of our own, behind the last one of OpenAI's, for a client that asked for it."""
        return self._event("epdg:ledger", {"ledger": timelines})

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last event has it already."""
        return b""

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = _encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _item(self, text: str, scores: Sequence[TokenScores], status: str) -> dict[str, Any]:
        fields = {"id": self._item_id, "type": "message", "role": "assistant", "status": status}
        return {**fields, "content": [_part(text, scores)]}

    def _response(
        self, status: str, item: dict[str, Any] | None, generation: Generation | None
    ) -> dict[str, Any]:
        is_over = status != "in_progress"
        whole = {
            **self._fields,
            "status": status,
            "completed_at": int(self._clock()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if item is None else [item],
            "usage": _usage(generation.usage) if is_over and generation is not None else None,
        }
        if generation is not None and (notes := generation.media_notes):
            whole["media"] = notes
        return whole


def _fields(response_id: str, created: int, request: ResponsesRequest, call: ChatCall) -> dict[str, Any]:
    """What is the same in all response objects of a stream. Clients expect every field of a request, with the
    value that was used."""
    wanted = None if request.text is None else request.text.format
    text = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
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
        "text": {"format": text, "verbosity": "medium"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_tool_calls": None,
        "reasoning": {"effort": None, "summary": None},
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
        "service_tier": "default",
    }


def _part(text: str, scores: Sequence[TokenScores]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprob_entries(scores)}


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
    """OpenAI's types know no others that fit."""
    if isinstance(error, RequestError):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"
