"""Answers and stream events, as bytes. Pure.

A stream's events differ only in index, text and finish reason, so everything else is encoded once per stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from cluster.errors import ClusterError, InternalError
from router.calls import MediaNote, Usage

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def error_body(error: ClusterError) -> bytes:
    """OpenAI's error object."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return _encode({"error": fields})


def error_event(error: ClusterError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


def public_error(error: BaseException) -> ClusterError:
    """The error that the client may see. The text of an unexpected exception is only in the log."""
    return error if isinstance(error, ClusterError) else InternalError("internal error")


def usage_fields(usages: Sequence[Usage], num_choices: int) -> dict[str, Any]:
    """Totals over all choices; the prompt counts once for the `num_choices` choices that share it."""
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    prompts = usages[::num_choices]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in prompts),
            "audio_tokens": sum(usage.audio_tokens for usage in prompts),
        },
    }


def model_fields(model_id: str, created: int, max_model_len: int) -> dict[str, Any]:
    fields = {"id": model_id, "object": "model", "created": created, "owned_by": "epdg"}
    return {**fields, "max_model_len": max_model_len}


class ResponseFormat(ABC):
    """The JSON of one response. The events of a stream differ only in their choice."""

    _kind: ClassVar[str]  # of a whole answer
    _event_kind: ClassVar[str]

    def __init__(self, response_id: str, created: int, model: str, include_usage: bool = False):
        self._head = {"id": response_id, "created": created, "model": model}
        self._prefix, self._suffix = _frame(self._head, self._event_kind, include_usage)

    def body(
        self,
        texts: Sequence[str],
        finish_reasons: Sequence[str],
        usage: dict[str, Any],
        notes: Sequence[MediaNote] = (),
        timelines: Sequence[dict[str, Any]] = (),
    ) -> bytes:
        """`timelines`: the fields of the timelines, one per prompt, if the client asked for them."""
        choices = [
            {"index": idx, **self._content(text), "logprobs": None, "finish_reason": reason}
            for idx, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True))
        ]
        more: dict[str, Any] = {"media": notes} if notes else {}
        if timelines:
            more["ledger"] = timelines
        return _encode({**self._head, "object": self._kind, "choices": choices, "usage": usage, **more})

    def usage(self, usage: dict[str, Any]) -> bytes:
        return b'%b[],"usage":%b}\n\n' % (self._prefix, _encode(usage))

    def timelines(self, timelines: Sequence[dict[str, Any]]) -> bytes:
        return b'%b[],"ledger":%b%b' % (self._prefix, _encode(timelines), self._suffix)

    @abstractmethod
    def first(self, index: int, notes: Sequence[MediaNote] = ()) -> bytes:
        """The event before a choice's first text; empty if there is none."""

    @abstractmethod
    def text(self, index: int, text: str) -> bytes: ...

    @abstractmethod
    def finish(self, index: int, reason: str) -> bytes: ...

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """The text fields of a choice in a whole answer."""


class ChatFormat(ResponseFormat):
    """/v1/chat/completions."""

    _kind, _event_kind = "chat.completion", "chat.completion.chunk"

    def first(self, index: int, notes: Sequence[MediaNote] = ()) -> bytes:
        delta = (
            b'"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}]'
        )
        suffix = b',"media":%b%b' % (_encode(notes), self._suffix) if notes else self._suffix
        return b'%b[{"index":%d,%b%b' % (self._prefix, index, delta, suffix)

    def text(self, index: int, text: str) -> bytes:
        return b'%b[{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]%b' % (
            self._prefix, index, _encode(text), self._suffix,
        )  # fmt: skip

    def finish(self, index: int, reason: str) -> bytes:
        return b'%b[{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}]%b' % (
            self._prefix, index, reason.encode(), self._suffix,
        )  # fmt: skip

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


class CompletionFormat(ResponseFormat):
    """/v1/completions. It has no media, so there are no notes."""

    _kind = _event_kind = "text_completion"

    def first(self, index: int, notes: Sequence[MediaNote] = ()) -> bytes:
        return b""

    def text(self, index: int, text: str) -> bytes:
        return b'%b[{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}]%b' % (
            self._prefix, index, _encode(text), self._suffix,
        )  # fmt: skip

    def finish(self, index: int, reason: str) -> bytes:
        return b'%b[{"index":%d,"text":"","logprobs":null,"finish_reason":"%b"}]%b' % (
            self._prefix, index, reason.encode(), self._suffix,
        )  # fmt: skip

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}


def _frame(head: dict[str, Any], kind: str, include_usage: bool) -> tuple[bytes, bytes]:
    """The bytes before and after the choices of every event."""
    prefix = b"data: " + _encode({**head, "object": kind})[:-1] + b',"choices":'
    return prefix, b',"usage":null}\n\n' if include_usage else b"}\n\n"
