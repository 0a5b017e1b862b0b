"""`/v1/models`: the one model of this cluster. Runs on the door's event loop."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from cluster.errors import ModelNotFoundError
from router.api.protocol import DoorProtocol
from router.http.errors import json_answer


class ModelRoutes:
    def __init__(self, door: DoorProtocol):
        self._door = door

    def mount(self, api: FastAPI) -> None:
        api.add_api_route("/v1/models", self.models, methods=["GET"], response_model=None)
        api.add_api_route("/v1/models/{model_id:path}", self.model, methods=["GET"], response_model=None)

    async def models(self) -> Response:
        return json_answer(msgspec.json.encode({"object": "list", "data": [self._card()]}))

    async def model(self, model_id: str) -> Response:
        if model_id != self._door.model_id:
            raise ModelNotFoundError(f"the model {model_id[:200]!r} does not exist", param="model")
        return json_answer(msgspec.json.encode(self._card()))

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._door.model_id,
            "object": "model",
            "created": self._door.created,
            "owned_by": "epdg",
            "max_model_len": self._door.limits.max_model_len,
        }
