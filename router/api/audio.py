"""/v1/audio/transcriptions and /v1/audio/translations: a form with a sound becomes a chat request with the
sound and an instruction, and its answer is the transcript, or its translation to English.

The instructions are the operator's (`door.transcription_instruction`, `door.translation_instruction`); the
client's `language` and `prompt` are lines below them. The models are those that take sound in a chat request;
they give no times, so the forms with times (verbose_json, srt, vtt) have one segment, from the start to the
end of the sound. Pure.
"""

from __future__ import annotations

import base64
import functools
import io
import zlib
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from cluster.errors import ClusterError, RequestError
from router.api.body import RequestBody, validated
from router.api.chat import render
from router.api.chat.schema import ChatRequest
from router.api.chat.translate import chat_call
from router.api.fields import Unit
from router.api.names import naming
from router.api.protocol import Answers, CallContext, Generation, Generations, Ledger, extra_fields
from router.calls import ChatCall, TextDelta, Usage
from router.http.errors import error_body
from router.http.forms import parse_form

PIECE_BYTES = 3 << 18  # of a file that becomes base64: the interpreter's lock is held for one piece at a time
_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"
_encode = msgspec.json.Encoder().encode


class TranscriptionRequest(RequestBody):
    """The form's fields, apart from its file."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "include": ([],),
        "chunking_strategy": ("auto",),
        "known_speaker_names": ([],),
        "known_speaker_references": ([],),
        "keywords": ([],),
        "languages": ([],),
    }
    harmless: ClassVar[tuple[str, ...]] = ("user",)
    task: ClassVar[str] = "transcribe"

    model: str
    language: Annotated[str, Field(pattern=r"^[a-zA-Z]{2,8}(-[a-zA-Z0-9]{1,8}){0,3}$")] | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Unit = 0.0  # OpenAI's default
    timestamp_granularities: Annotated[list[Literal["segment"]], Field(max_length=2)] | None = None
    stream: bool = False

    @property
    def answer_language(self) -> str:
        return self.language or "unknown"


class TranslationRequest(TranscriptionRequest):
    """`language` is that of the sound. It and `stream` are not OpenAI's, but vLLM's."""

    task: ClassVar[str] = "translate"

    @property
    def answer_language(self) -> str:
        return "english"  # as OpenAI writes it


def transcription_call(
    body: bytes,
    content_type: str,
    kind: type[TranscriptionRequest],
    instruction: str,
    context: CallContext,
) -> tuple[TranscriptionRequest, ChatCall]:
    """Translates a form. `content_type`: the request's header. Raises RequestError."""
    form = parse_form(body, content_type)
    file = form.files.pop("file", None)
    if form.files:
        raise RequestError("the form has another file beside 'file'", param=next(iter(form.files))[:64])
    fields: dict[str, Any] = dict(form.fields)
    # a form has numbers and truth values as text
    request = validated(kind, fields, functools.partial(kind.model_validate, strict=False))
    if not file:
        raise RequestError("file: the form needs a sound", param="file")
    if request.stream and request.response_format != "json":
        raise RequestError("stream needs response_format json", param="response_format")
    if request.timestamp_granularities and request.response_format != "verbose_json":
        raise RequestError(
            "timestamp_granularities needs response_format verbose_json", param="timestamp_granularities"
        )
    has_details = request.response_format == "verbose_json"
    chat = ChatRequest.model_validate(
        {
            "model": request.model,
            "messages": [{"role": "user", "content": _content(request, file, instruction)}],
            "temperature": request.temperature,
            "stream": request.stream,
            "logprobs": has_details,
            "return_token_ids": has_details,
        }
    )
    with naming(lambda param: "prompt" if param == "messages" else param):
        call = chat_call(chat, context)
    media = tuple(msgspec.structs.replace(source, param="file") for source in call.media)
    return request, msgspec.structs.replace(call, media=media)


def _content(request: TranscriptionRequest, data: bytes, instruction: str) -> list[dict[str, Any]]:
    lines = [instruction]
    if request.language is not None:
        lines.append(f"Language: {request.language}")
    if request.prompt:
        lines.append(f"Context: {request.prompt}")
    return [
        {"type": "audio_url", "audio_url": {"url": _data_uri(data)}},
        {"type": "text", "text": "\n".join(lines)},
    ]


def _data_uri(data: bytes) -> str:
    uri = io.StringIO()
    uri.write("data:application/octet-stream;base64,")  # the file's first bytes say its type
    for begin in range(0, len(data), PIECE_BYTES):
        uri.write(base64.b64encode(data[begin : begin + PIECE_BYTES]).decode())
    return uri.getvalue()


class TranscriptFormat:
    """The transcript in the form that the client wants. A stream has `transcript.text.delta` for each piece,
    then `transcript.text.done` with the whole text."""

    def __init__(self, request: TranscriptionRequest):
        self._request = request
        self._pieces: list[str] = []
        self.media_type = _JSON if "json" in request.response_format else _TEXT

    def body(self, answers: Answers, generations: Generations, ledger: Ledger = ()) -> Iterator[bytes]:
        yield self._body(render.WholeChoice.of(answers[0]), generations[0], ledger)

    def _body(self, answer: render.WholeChoice, generation: Generation, ledger: Ledger) -> bytes:
        usage = generation.usage
        match self._request.response_format:
            case "text":
                return f"{answer.text}\n".encode()
            case "srt":
                return f"1\n{_time(0, ',')} --> {_time(usage.audio_s, ',')}\n{answer.text}\n\n".encode()
            case "vtt":
                return f"WEBVTT\n\n{_time(0)} --> {_time(usage.audio_s)}\n{answer.text}\n\n".encode()
            case "verbose_json":
                whole = self._details(answer, usage)
            case _:
                whole = {"text": answer.text, "usage": _usage(usage)}
        whole["finish_reason"] = answer.finish_reason  # `length`: the transcript is not complete
        return _encode(whole | extra_fields(generation, ledger))

    def first(self, index: int, generation: Generation, *, has_notes: bool) -> bytes:
        return b""

    def text(self, index: int, delta: TextDelta, generation: Generation) -> bytes:
        if not delta.text:
            return b""
        self._pieces.append(delta.text)
        return _event({"type": "transcript.text.delta", "delta": delta.text})

    def finish(self, index: int, delta: TextDelta, generation: Generation) -> bytes:
        text, usage = "".join(self._pieces), _usage(generation.usage)
        whole = {"text": text, "usage": usage, "finish_reason": delta.finish_reason}
        return _event({"type": "transcript.text.done", **whole})

    def ledger(self, ledger: Ledger) -> bytes:
        return _event({"type": "epdg:ledger", "ledger": ledger})

    def end(self, generations: Generations) -> bytes:
        return render.DONE

    def name_of(self, param: str) -> str:
        return "file" if param.startswith(("messages", "prompt")) else param

    def error_event(self, error: ClusterError) -> bytes:
        return b"data: %b\n\n" % error_body(error)

    def _details(self, answer: render.WholeChoice, usage: Usage) -> dict[str, Any]:
        """Returns a transcript of one segment. Whisper's measures of it are the model's own, but for the
        probability that nothing was said, which no model here gives."""
        text = answer.text.encode()
        logprobs = [each.drawn.logprob for each in answer.scores if each.drawn.logprob is not None]
        segment = {
            "id": 0,
            "seek": 0,
            "start": 0.0,
            "end": round(usage.audio_s, 3),
            "text": answer.text,
            "tokens": list(answer.token_ids),
            "temperature": self._request.temperature,
            "avg_logprob": max(sum(logprobs) / max(1, len(logprobs)), render.LEAST_LOGPROB),
            "compression_ratio": len(text) / len(zlib.compress(text)),
            "no_speech_prob": 0.0,
        }
        return {
            "task": self._request.task,
            "language": self._request.answer_language,
            "duration": round(usage.audio_s, 3),
            "text": answer.text,
            "segments": [segment],
            "usage": {"type": "duration", "seconds": round(usage.audio_s, 3)},
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "input_token_details": {
            "audio_tokens": usage.audio_tokens,
            "text_tokens": usage.prompt_tokens - usage.audio_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _time(seconds: float, point: str = ".") -> str:
    """Writes a time as subtitles have it: 00:00:02.500."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{milliseconds:03}"


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _encode(fields)
