"""The endpoints that clients ask for answers and tokens: each reads a call from the body, has the door carry
it out, and answers in its own form. Run on the door's event loop."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from router.api.anthropic.render import MessageFormat
from router.api.anthropic.schema import CountRequest, MessagesRequest
from router.api.anthropic.translate import messages_call, messages_name
from router.api.audio import TranscriptFormat, TranscriptionRequest, TranslationRequest, transcription_call
from router.api.chat.render import ChatFormat, CompletionFormat
from router.api.chat.schema import ChatRequest, CompletionRequest
from router.api.chat.translate import chat_call, completion_call
from router.api.names import naming, new_id
from router.api.protocol import DoorProtocol
from router.api.serving import CallServer
from router.api.tokens import DetokenizeRequest, TokenizeRequest, ids_to_detokenize, tokenize_call
from router.calls import TokenizeCall
from router.http.disconnect import until_disconnect
from router.http.errors import json_answer

MESSAGES_PATH = "/v1/messages"


def mount_answers(api: FastAPI, door: DoorProtocol, calls: CallServer) -> None:
    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        call = await calls.parse(request, ChatRequest, chat_call)
        answer = ChatFormat(new_id("chatcmpl-"), int(time.time()), call.model, call)
        return await calls.answer(request, call, door.chat, answer)

    @api.post("/v1/completions")
    async def complete(request: Request) -> Response:
        call = await calls.parse(request, CompletionRequest, completion_call)
        answer = CompletionFormat(new_id("cmpl-"), int(time.time()), call.model, call)
        return await calls.answer(request, call, door.complete, answer)


def mount_messages(api: FastAPI, door: DoorProtocol, calls: CallServer) -> None:
    @api.post(MESSAGES_PATH)
    async def message(request: Request) -> Response:
        call = await calls.parse(request, MessagesRequest, messages_call)
        return await calls.answer(request, call, door.chat, MessageFormat(new_id("msg_"), call.model))

    @api.post(f"{MESSAGES_PATH}/count_tokens")
    async def count(request: Request) -> Response:
        call = await calls.parse(request, CountRequest, messages_call)
        with naming(messages_name):
            found = await until_disconnect(request, door.tokenize(TokenizeCall(call, names=False)))
        return json_answer({"input_tokens": len(found.token_ids)})


def mount_audio(api: FastAPI, door: DoorProtocol, calls: CallServer) -> None:
    async def write_down(request: Request, kind: type[TranscriptionRequest], instruction: str) -> Response:
        content_type = request.headers.get("content-type", "")
        asked, call = await calls.read(
            request,
            lambda body, context: transcription_call(body, content_type, kind, instruction, context),
            is_json=False,
        )
        return await calls.answer(request, call, door.chat, TranscriptFormat(asked))

    @api.post("/v1/audio/transcriptions")
    async def transcribe(request: Request) -> Response:
        return await write_down(request, TranscriptionRequest, door.transcription_instruction)

    if not door.translation_instruction:
        return

    @api.post("/v1/audio/translations")
    async def translate(request: Request) -> Response:
        return await write_down(request, TranslationRequest, door.translation_instruction)


def mount_tokens(api: FastAPI, door: DoorProtocol, calls: CallServer) -> None:
    @api.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        call = await calls.parse(request, TokenizeRequest, tokenize_call)
        found = await until_disconnect(request, door.tokenize(call))
        fields = {
            "count": len(found.token_ids),
            "max_model_len": door.limits.max_model_len,
            "tokens": found.token_ids,
            "token_strs": found.names,
        }
        return json_answer(fields)

    @api.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        token_ids = await calls.parse(request, DetokenizeRequest, ids_to_detokenize)
        return json_answer({"prompt": await door.detokenize(token_ids)})
