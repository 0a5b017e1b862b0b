"""The endpoints of chats and of completions. Runs on the door's event loop."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import parse
from router.api.chat.render import ChatFormat, CompletionFormat
from router.api.chat.schema import ChatRequest, CompletionRequest
from router.api.chat.translate import chat_call, completion_call
from router.api.names import new_id
from router.api.protocol import DoorProtocol
from router.api.serving import CallServer


class ChatRoutes:
    def __init__(self, door: DoorProtocol, calls: CallServer):
        self._door = door
        self._calls = calls

    def mount(self, api: FastAPI) -> None:
        api.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        api.add_api_route("/v1/completions", self.complete, methods=["POST"], response_model=None)

    async def chat(self, request: Request) -> Response:
        call = await self._calls.read(
            request, lambda body, context: chat_call(parse(ChatRequest, body), context)
        )
        answer = ChatFormat(new_id("chatcmpl-"), int(time.time()), call.model, call)
        return await self._calls.answer(request, call, self._door.chat, answer)

    async def complete(self, request: Request) -> Response:
        call = await self._calls.read(
            request, lambda body, context: completion_call(parse(CompletionRequest, body), context)
        )
        answer = CompletionFormat(new_id("cmpl-"), int(time.time()), call.model, call)
        return await self._calls.answer(request, call, self._door.complete, answer)
