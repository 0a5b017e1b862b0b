"""The endpoints of Anthropic's API. Runs on the door's event loop."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from router.api.anthropic.render import MessageFormat
from router.api.anthropic.schema import CountRequest, MessagesRequest
from router.api.anthropic.translate import messages_call, messages_name
from router.api.body import parse
from router.api.names import naming, new_id
from router.api.protocol import DoorProtocol
from router.api.serving import CallServer
from router.calls import TokenizeCall
from router.http.disconnect import until_disconnect
from router.http.errors import json_answer

MESSAGES_PATH = "/v1/messages"


class MessagesRoutes:
    def __init__(self, door: DoorProtocol, calls: CallServer):
        self._door = door
        self._calls = calls

    def mount(self, api: FastAPI) -> None:
        api.add_api_route(MESSAGES_PATH, self.message, methods=["POST"], response_model=None)
        api.add_api_route(f"{MESSAGES_PATH}/count_tokens", self.count, methods=["POST"], response_model=None)

    async def message(self, request: Request) -> Response:
        call = await self._calls.read(
            request, lambda body, context: messages_call(parse(MessagesRequest, body), context)
        )
        answer = MessageFormat(new_id("msg_"), call.model)
        return await self._calls.answer(request, call, self._door.chat, answer)

    async def count(self, request: Request) -> Response:
        call = await self._calls.read(
            request, lambda body, context: messages_call(parse(CountRequest, body), context)
        )
        with naming(messages_name):
            found = await until_disconnect(request, self._door.tokenize(TokenizeCall(call, names=False)))
        return json_answer(msgspec.json.encode({"input_tokens": len(found.token_ids)}))
