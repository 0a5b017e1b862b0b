"""Routes, streams and disconnects. This is the edge of the process: broad `except`s are only here and in
`edge`, and they answer the client.

Every error has OpenAI's form (`errors`). A client that disconnects cancels its call,
streamed or not, also while the door is still choosing workers. Runs on the door's event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import ClusterError, ModelNotFoundError
from router.calls import ChatCall, CompletionCall, TokenizeCall
from router.openai import render
from router.openai.absent import mount_absent
from router.openai.anthropic.render import MessageFormat
from router.openai.anthropic.schema import CountRequest, MessagesRequest
from router.openai.anthropic.translate import messages_call, messages_name
from router.openai.bodies import BodyBudget, check_json_type, read_body
from router.openai.body_parser import BIG_BYTES, BodyParser
from router.openai.edge import Edge, HttpMetrics, lease_of, permit_of, take_held, tenant_of
from router.openai.errors import (
    answer_client_gone,
    answer_error,
    answer_http_exception,
    answer_wrong_parameter,
    json_answer,
)
from router.openai.event_stream import EventStream
from router.openai.limits import CLIENT_TIMEOUTS, ClientTimeouts
from router.openai.names import NameOf, chat_name, completion_name, naming
from router.openai.openapi import document
from router.openai.protocol import DoorProtocol
from router.openai.responses.kept import KeptResponses
from router.openai.responses.render import ResponsesFormat
from router.openai.responses.routes import KeptRoutes, stream_kept
from router.openai.responses.schema import ResponsesRequest
from router.openai.responses.translate import responses_call, responses_name
from router.openai.schema import ChatRequest, CompletionRequest, parse
from router.openai.serving import (
    AnswerFormat,
    ClientGoneError,
    TimelineReport,
    stream,
    until_disconnect,
    whole,
)
from router.openai.tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenized,
    ids_to_detokenize,
    tokenize_call,
    tokenized,
)
from router.openai.transcriptions import (
    TranscriptFormat,
    TranscriptionRequest,
    TranslationRequest,
    transcription_call,
    transcription_name,
)
from router.openai.translate import CallContext, chat_call, completion_call
from router.page.site import Site

log = logging.getLogger(__name__)
# Header. In a request it asks for the timeline; in the answer it has the durations until the first token
LEDGER = "x-epdg-ledger"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")  # W3C Trace Context


def build_api(
    door: DoorProtocol, timeouts: ClientTimeouts = CLIENT_TIMEOUTS, *, tells_request_id: bool = True
) -> FastAPI:
    """`tells_request_id`: answers have `x-request-id`; false: the server adds it."""
    api = FastAPI(
        title="OpenAI-compatible API",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    budget = BodyBudget(door.limits.held_body_bytes)
    metrics = HttpMetrics(budget, door.access.keys)
    kept = KeptResponses(door.limits.keep_responses_s)
    _Routes(door, metrics, timeouts, kept).mount(api)
    KeptRoutes(kept).mount(api)
    mount_absent(api)
    Site(door.pools).mount(api)
    _answer_head(api)
    api.add_exception_handler(ClusterError, answer_error)
    api.add_exception_handler(ClientGoneError, answer_client_gone)
    api.add_exception_handler(HTTPException, answer_http_exception)
    api.add_exception_handler(RequestValidationError, answer_wrong_parameter)
    api.add_middleware(
        Edge,
        access=door.access,
        budget=budget,
        metrics=metrics,
        answer_error=answer_error,
        read_timeout_s=timeouts.read_s,
        tells_request_id=tells_request_id,
    )
    if door.access.cors_origins:  # around the edge, so that a page can read its errors, too
        api.add_middleware(
            CORSMiddleware,
            allow_origins=door.access.cors_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", LEDGER),
        )
    return api


def _answer_head(api: FastAPI) -> None:
    """HEAD wherever GET is answered: the same status and headers; the server leaves out the body. FastAPI
    adds no such routes, as Starlette does."""
    for route in list(api.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            api.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], include_in_schema=False, response_model=None
            )


class _Routes:
    def __init__(
        self, door: DoorProtocol, metrics: HttpMetrics, timeouts: ClientTimeouts, kept: KeptResponses
    ):
        self._door = door
        self._kept = kept
        self._timeouts = timeouts
        self._metrics = metrics
        self._parser = BodyParser()

    def mount(self, api: FastAPI) -> None:
        api.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        api.add_api_route("/v1/completions", self.complete, methods=["POST"], response_model=None)
        api.add_api_route("/v1/responses", self.respond, methods=["POST"], response_model=None)
        api.add_api_route("/v1/messages", self.message, methods=["POST"], response_model=None)
        api.add_api_route("/v1/messages/count_tokens", self.count, methods=["POST"], response_model=None)
        api.add_api_route("/v1/audio/transcriptions", self.transcribe, methods=["POST"], response_model=None)
        if self._door.translation_instruction:
            api.add_api_route("/v1/audio/translations", self.translate, methods=["POST"], response_model=None)
        api.add_api_route("/v1/models", self.models, methods=["GET"], response_model=None)
        api.add_api_route("/v1/models/{model_id:path}", self.model, methods=["GET"], response_model=None)
        api.add_api_route("/tokenize", self.tokenize, methods=["POST"], response_model=None)
        api.add_api_route("/detokenize", self.detokenize, methods=["POST"], response_model=None)
        api.add_api_route("/version", self.version, methods=["GET"], response_model=None)
        for path in ("/health", "/ready"):
            api.add_api_route(path, self.ready, methods=["GET"], response_model=None)
        described = functools.cache(lambda: document(api, self._door))

        async def openapi() -> Response:
            return json_answer(await asyncio.to_thread(described))  # the first time takes a tenth of a second

        api.add_api_route("/openapi.json", openapi, methods=["GET"], response_model=None)
        api.add_api_route("/metrics", self.metrics, methods=["GET"], response_model=None)

    async def chat(self, request: Request) -> Response:
        call: ChatCall = await self._call(
            request, lambda body: chat_call(parse(ChatRequest, body), self._context(request))
        )
        answer = render.ChatFormat(_new_id("chatcmpl"), int(time.time()), self._door.model_id, call)
        return await self._answer(request, call, self._door.chat, answer, chat_name)

    async def complete(self, request: Request) -> Response:
        call: CompletionCall = await self._call(
            request, lambda body: completion_call(parse(CompletionRequest, body), self._context(request))
        )
        answer = render.CompletionFormat(_new_id("cmpl"), int(time.time()), self._door.model_id, call)
        return await self._answer(request, call, self._door.complete, answer, completion_name)

    async def respond(self, request: Request) -> Response:
        def translate(body: bytes) -> tuple[ChatCall, ResponsesFormat]:
            # Parsed values are many times as large as the body, so they do not live as long as the answer.
            asked = parse(ResponsesRequest, body)
            call = responses_call(asked, self._context(request))
            return call, ResponsesFormat(_new_id("resp", "_"), int(time.time()), asked, call)

        call, answer = await self._call(request, translate)
        if not answer.is_background:
            return await self._answer(request, call, self._door.chat, answer, responses_name)
        kept = self._kept.add(answer, tenant_of(request))
        begin, report = _starting(request, call, self._door.chat), self._report(request, {})
        events = stream(begin, answer, 1, include_usage=False, report=report)
        self._kept.begin(kept, events, take_held(request))
        if call.stream:
            return stream_kept(kept.read())
        return json_answer(answer.now())

    async def message(self, request: Request) -> Response:
        call: ChatCall = await self._call(
            request, lambda body: messages_call(parse(MessagesRequest, body), self._context(request))
        )
        answer = MessageFormat(_new_id("msg", "_"), self._door.model_id)
        return await self._answer(request, call, self._door.chat, answer, messages_name)

    async def count(self, request: Request) -> Response:
        call: ChatCall = await self._call(
            request, lambda body: messages_call(parse(CountRequest, body), self._context(request))
        )
        with naming(messages_name):
            found = await until_disconnect(request, self._door.tokenize(TokenizeCall(call, names=False)))
        return json_answer(msgspec.json.encode({"input_tokens": len(found.token_ids)}))

    async def transcribe(self, request: Request) -> Response:
        return await self._write_down(request, TranscriptionRequest, self._door.transcription_instruction)

    async def translate(self, request: Request) -> Response:
        return await self._write_down(request, TranslationRequest, self._door.translation_instruction)

    async def _write_down(
        self, request: Request, kind: type[TranscriptionRequest], instruction: str
    ) -> Response:
        content_type = request.headers.get("content-type", "")
        asked, call = await self._call(
            request,
            lambda body: transcription_call(body, content_type, kind, instruction, self._context(request)),
            is_json=False,
        )
        return await self._answer(request, call, self._door.chat, TranscriptFormat(asked), transcription_name)

    def _context(self, request: Request) -> CallContext:
        door = self._door
        return CallContext(
            door.model_id, door.defaults, tenant_of(request), _trace_parent(request), door.limits
        )

    async def models(self, request: Request) -> Response:
        return json_answer(msgspec.json.encode({"object": "list", "data": [self._card()]}))

    async def model(self, model_id: str) -> Response:
        if model_id != self._door.model_id:
            raise ModelNotFoundError(f"the model {model_id[:200]!r} does not exist", param="model")
        return json_answer(msgspec.json.encode(self._card()))

    def _card(self) -> dict[str, Any]:
        door = self._door
        return render.model_fields(door.model_id, door.created, door.limits.max_model_len)

    async def tokenize(self, request: Request) -> Response:
        call: TokenizeCall = await self._call(
            request, lambda body: tokenize_call(parse(TokenizeRequest, body), self._context(request))
        )
        found = await until_disconnect(request, self._door.tokenize(call))
        return json_answer(tokenized(found, self._door.limits.max_model_len))

    async def detokenize(self, request: Request) -> Response:
        token_ids: list[int] = await self._call(
            request, lambda body: ids_to_detokenize(parse(DetokenizeRequest, body), self._context(request))
        )
        return json_answer(detokenized(await self._door.detokenize(token_ids)))

    async def version(self) -> Response:
        return json_answer(msgspec.json.encode({"version": _version()}))

    async def ready(self) -> Response:
        return Response(status_code=200 if self._door.is_ready() else 503)

    async def metrics(self) -> Response:
        return Response(self._door.metrics() + self._metrics.render(), media_type=METRICS_TYPE)

    async def _call(
        self, request: Request, translate: Callable[[bytes], Any], *, is_json: bool = True
    ) -> Any:
        if is_json:
            check_json_type(request)
        lease = lease_of(request)
        body = await read_body(request, self._door.limits, lease, self._timeouts.body_s, is_json=is_json)
        if not is_json:
            lease.grow(len(body) // 3)  # a form's file becomes base64
        if len(body) < BIG_BYTES:
            return translate(body)
        return await until_disconnect(request, self._parser.parse(tenant_of(request), translate, body))

    async def _answer(
        self,
        request: Request,
        call: Any,
        start: Callable[[Any], Awaitable[Any]],
        answer: AnswerFormat,
        name_of: NameOf,
    ) -> Response:
        num_choices = len(call.sampling)
        begin = _starting(request, call, start)
        headers: dict[str, str] = {}
        report = self._report(request, headers)
        if call.stream:
            events = stream(begin, answer, num_choices, call.include_usage, report)
            return EventStream(events, headers, answer.error_event, name_of)
        with naming(name_of):
            body = await until_disconnect(request, whole(begin, answer, num_choices, report))
        return Response(body, headers=headers, media_type=answer.media_type)

    def _report(self, request: Request, headers: dict[str, str]) -> TimelineReport | None:
        if LEDGER not in request.headers:
            return None
        return TimelineReport(headers, LEDGER, shows_workers=self._door.limits.shows_workers)


def _starting(
    request: Request, call: Any, start: Callable[[Any], Awaitable[Any]]
) -> Callable[[], Awaitable[Any]]:
    """`start` of the call; its tokens are the request's."""
    permit = permit_of(request)

    async def begin() -> Any:
        generations = await start(call)
        permit.watch(generations, len(call.sampling))
        return generations

    return begin


def _trace_parent(request: Request) -> str:
    given = request.headers.get("traceparent", "")
    return given if _TRACE_PARENT.fullmatch(given) else ""


def _new_id(kind: str, separator: str = "-") -> str:
    return f"{kind}{separator}{secrets.token_hex(12)}"


def _version() -> str:
    """The package's version; of a checkout that is not installed, the form that packaging tools give it."""
    try:
        return version("epdg")
    except PackageNotFoundError:
        return "0+unknown"
