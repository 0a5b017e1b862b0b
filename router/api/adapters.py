"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them. They need an admin key. Runs on
the door's event loop.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from router.api.body import RequestBody, parse
from router.api.protocol import DoorProtocol
from router.api.serving import CallServer
from router.http.disconnect import until_disconnect
from router.http.keys import LOAD_PATH, UNLOAD_PATH

Name = Annotated[str, Field(min_length=1, max_length=256)]


class UnloadRequest(RequestBody):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    harmless: ClassVar[tuple[str, ...]] = ()
    lora_name: Name


class LoadRequest(UnloadRequest):
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]  # in `adapters_folder`


def mount_adapters(api: FastAPI, door: DoorProtocol, calls: CallServer) -> None:
    @api.post(LOAD_PATH)
    async def load(request: Request) -> Response:
        wanted = await calls.read(request, lambda body, _: parse(LoadRequest, body))
        await until_disconnect(request, door.adapters.load(wanted.lora_name, wanted.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' added successfully.")

    @api.post(UNLOAD_PATH)
    async def unload(request: Request) -> Response:
        wanted = await calls.read(request, lambda body, _: parse(UnloadRequest, body))
        await until_disconnect(request, door.adapters.unload(wanted.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.")
