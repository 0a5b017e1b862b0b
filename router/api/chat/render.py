"""Answers and stream events, as bytes. Pure.

A stream's events differ only in index, text and finish reason, and in what a client has asked for
besides, so everything else is encoded once per stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, ClassVar

import msgspec

from cluster.errors import ClusterError
from router.api.protocol import Answers, Generation, Generations, Ledger, extra_fields
from router.calls import Call, RankedToken, ScoredToken, TextDelta, TokenScores, ToolCallDelta, Usage
from router.http.errors import error_body
from router.http.pieces import Many, json_bytes, json_pieces

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # of what has no probability
_encode = msgspec.json.Encoder().encode


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
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)},
    }


class WholeChoice(msgspec.Struct, frozen=True):
    """One choice, whole."""

    text: str
    finish_reason: str
    scores: Sequence[TokenScores] = ()
    token_ids: Sequence[int] = ()
    reasoning: str = ""
    calls: Sequence[ToolCallDelta] = ()

    @classmethod
    def of(cls, deltas: Sequence[TextDelta]) -> WholeChoice:
        calls: dict[int, list[ToolCallDelta]] = {}
        for piece in (piece for delta in deltas for piece in delta.calls):
            calls.setdefault(piece.index, []).append(piece)
        return cls(
            "".join(delta.text for delta in deltas),
            str(deltas[-1].finish_reason),
            [scores for delta in deltas for scores in delta.scores],
            [token_id for delta in deltas for token_id in delta.token_ids],
            "".join(delta.reasoning for delta in deltas),
            [
                msgspec.structs.replace(pieces[0], arguments="".join(piece.arguments for piece in pieces))
                for pieces in calls.values()
            ],
        )


class ResponseFormat(ABC):
    """The JSON of one response. The events of a stream differ only in their choice."""

    media_type = "application/json"
    _kind: ClassVar[str]  # of a whole answer
    _event_kind: ClassVar[str]
    _repeats_prompt: ClassVar[bool]  # in a whole answer: in every choice, or once

    def __init__(self, response_id: str, created: int, model: str, call: Call):
        self._head = {"id": response_id, "created": created, "model": model}
        # The bytes before and after the choices of every event
        self._prefix = b"data: " + _encode({**self._head, "object": self._event_kind})[:-1] + b',"choices":'
        self._suffix = b',"usage":null}\n\n' if call.include_usage else b"}\n\n"
        self._num_choices = len(call.sampling)
        self._include_usage = call.include_usage
        self._has_logprobs = call.num_logprobs is not None
        self._has_token_ids = call.returns_token_ids
        self._has_prompt_logprobs = call.num_prompt_logprobs is not None
        self._has_usage = call.usage_in_events

    def body(self, answers: Answers, generations: Generations, ledger: Ledger = ()) -> Iterator[bytes]:
        """Writes a whole answer. `generations`: those of `answers`."""
        choices = map(self._choice, count(), answers, generations)
        whole = {**self._head, "object": self._kind, "choices": choices, "usage": self._usage(generations)}
        if not self._repeats_prompt:
            whole |= self._prompt(generations[0])
        return json_pieces(whole | extra_fields(generations[0], ledger))

    def _usage(self, generations: Generations) -> dict[str, Any]:
        return usage_fields([generation.usage for generation in generations], self._num_choices)

    def _choice(self, index: int, deltas: Sequence[TextDelta], generation: Generation) -> dict[str, Any]:
        answer = WholeChoice.of(deltas)
        return {
            "index": index,
            **self._content(answer),
            "logprobs": self._logprobs(answer.scores) if self._has_logprobs else None,
            "finish_reason": answer.finish_reason,
            **({"token_ids": answer.token_ids} if self._has_token_ids else {}),
            **(self._prompt(generation) if self._repeats_prompt else {}),
        }

    def _prompt(self, generation: Generation) -> dict[str, Any]:
        """Returns what an answer says of a choice's prompt."""
        fields: dict[str, Any] = {}
        if self._has_token_ids:
            fields["prompt_token_ids"] = generation.prompt_token_ids
        if self._has_prompt_logprobs:
            fields["prompt_logprobs"] = Many(_ranked, generation.prompt_logprobs)
        return fields

    def end(self, generations: Generations) -> bytes:
        if not self._include_usage:
            return DONE
        return b'%b[],"usage":%b}\n\n%b' % (self._prefix, _encode(self._usage(generations)), DONE)

    def ledger(self, ledger: Ledger) -> bytes:
        return b'%b[],"ledger":%b%b' % (self._prefix, _encode(ledger), self._suffix)

    @abstractmethod
    def first(self, index: int, generation: Generation, *, has_notes: bool) -> bytes:
        """The event before a choice's first text; empty if there is none. `has_notes`: it says what has been
        changed in the media."""

    def text(self, index: int, delta: TextDelta, generation: Generation) -> bytes:
        logprobs = json_bytes(self._logprobs(delta.scores)) if delta.scores else b"null"
        token_ids = b',"token_ids":%b' % _encode(delta.token_ids) if self._has_token_ids else b""
        return b'%b[{"index":%d,%b,"logprobs":%b,"finish_reason":null%b}]%b' % (
            self._prefix, index, self._piece(delta), logprobs, token_ids, self._tail(generation),
        )  # fmt: skip

    def finish(self, index: int, delta: TextDelta, generation: Generation) -> bytes:
        return b'%b[{"index":%d,%b,"logprobs":null,"finish_reason":"%b"}]%b' % (
            self._prefix, index, self._nothing, str(delta.finish_reason).encode(), self._tail(generation),
        )  # fmt: skip

    def error_event(self, error: ClusterError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    @abstractmethod
    def name_of(self, param: str) -> str:
        """A field of a chat request, as the endpoint names it."""

    def _tail(self, generation: Generation) -> bytes:
        """Returns the last bytes of an event that is about this choice."""
        if not self._has_usage:
            return self._suffix
        return b',"usage":%b}\n\n' % _encode(usage_fields([generation.usage], 1))

    _nothing: ClassVar[bytes]  # the text fields of an event without text

    @abstractmethod
    def _piece(self, delta: TextDelta) -> bytes:
        """The text fields of an event."""

    @abstractmethod
    def _content(self, answer: WholeChoice) -> dict[str, Any]:
        """The text fields of a choice in a whole answer."""

    @abstractmethod
    def _logprobs(self, scores: Sequence[TokenScores]) -> dict[str, Any]: ...


class ChatFormat(ResponseFormat):
    """/v1/chat/completions."""

    _kind, _event_kind = "chat.completion", "chat.completion.chunk"
    _repeats_prompt = False
    _nothing = b'"delta":{}'

    def name_of(self, param: str) -> str:
        return "messages" if param == "prompt" else param

    def first(self, index: int, generation: Generation, *, has_notes: bool) -> bytes:
        delta = (
            b'"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}]'
        )
        if has_notes and generation.media_notes:
            delta += b',"media":%b' % _encode(generation.media_notes)
        if self._has_token_ids:
            delta += b',"prompt_token_ids":%b' % _encode(generation.prompt_token_ids)
        return b'%b[{"index":%d,%b%b' % (self._prefix, index, delta, self._tail(generation))

    def _piece(self, delta: TextDelta) -> bytes:
        if not (delta.reasoning or delta.calls):
            return b'"delta":{"content":%b}' % _encode(delta.text)
        fields: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.calls:
            fields["tool_calls"] = [_call(piece, is_event=True) for piece in delta.calls]
        return b'"delta":%b' % _encode(fields | _reasoning(delta.reasoning))

    def _content(self, answer: WholeChoice) -> dict[str, Any]:
        content = None if answer.calls and not answer.text else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.calls:
            message["tool_calls"] = [_call(call, is_event=False) for call in answer.calls]
        return {"message": message | _reasoning(answer.reasoning)}

    def _logprobs(self, scores: Sequence[TokenScores]) -> dict[str, Any]:
        return {"content": Many(logprob_entry, scores), "refusal": None}


class CompletionFormat(ResponseFormat):
    """/v1/completions. It has no media, so there are no notes."""

    _kind = _event_kind = "text_completion"
    _repeats_prompt = True
    _nothing = b'"text":""'

    def name_of(self, param: str) -> str:
        return "prompt" if param == "messages" else param

    def first(self, index: int, generation: Generation, *, has_notes: bool) -> bytes:
        if not self._has_token_ids:
            return b""
        return b'%b[{"index":%d,"text":"","logprobs":null,"finish_reason":null,"prompt_token_ids":%b}]%b' % (
            self._prefix, index, _encode(generation.prompt_token_ids), self._tail(generation),
        )  # fmt: skip

    def _piece(self, delta: TextDelta) -> bytes:
        return b'"text":%b' % _encode(delta.text)

    def _content(self, answer: WholeChoice) -> dict[str, Any]:
        return {"text": answer.text}

    def _logprobs(self, scores: Sequence[TokenScores]) -> dict[str, Any]:
        """The drawn token is among the most probable ones even if it is none of them. A prompt's first
        token has none."""
        return {
            "tokens": Many(lambda each: _name(each.drawn), scores),
            "token_logprobs": Many(lambda each: _finite(each.drawn.logprob), scores),
            "top_logprobs": Many(_named_logprobs, scores),
            "text_offset": Many(lambda each: each.offset, scores),
        }


def _call(piece: ToolCallDelta, *, is_event: bool) -> dict[str, Any]:
    """Returns a call as OpenAI writes it. Its id, type and name are in its first event only."""
    index = {"index": piece.index} if is_event else {}
    if not piece.name:
        return {**index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {**index, "id": piece.call_id, "type": "function", "function": function}


def _reasoning(text: str) -> dict[str, str]:
    """Returns reasoning under the two names by which clients know it."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def logprob_entry(scores: TokenScores) -> dict[str, Any]:
    """Returns log-probabilities as the chat endpoint writes them."""
    return {**_scored(scores.drawn), "top_logprobs": [_scored(other) for other in scores.top]}


def _named_logprobs(scores: TokenScores) -> dict[str, float | None] | None:
    """Returns log-probabilities as the endpoint for completions writes them."""
    if scores.drawn.logprob is None:
        return None
    return {_name(token): _finite(token.logprob) for token in (*scores.top, scores.drawn)}


def _scored(token: ScoredToken) -> dict[str, Any]:
    text = token.piece.decode(errors="replace")
    return {"token": text, "logprob": _finite(token.logprob), "bytes": list(token.piece)}


def _name(token: ScoredToken) -> str:
    """Names a token as OpenAI does: a key for each token, also for a part of a character."""
    try:
        return token.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.piece)


def _ranked(tokens: Sequence[RankedToken] | None) -> dict[str, Any] | None:
    """Returns the tokens at one position of a prompt as vLLM writes them: by token id."""
    if tokens is None:
        return None
    return {
        str(each.token_id): {
            "logprob": _finite(each.logprob),
            "rank": each.rank,
            "decoded_token": each.text,
        }
        for each in tokens
    }


def _finite(logprob: float | None) -> float | None:
    """Returns a number in place of infinity, which JSON has not; OpenAI writes the same one."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
