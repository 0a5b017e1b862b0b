"""`/v1/models`: the model of this cluster and its adapters. Runs on the door's event loop."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from router.api.protocol import DoorProtocol
from router.http.errors import json_answer


class ModelRoutes:
    def __init__(self, door: DoorProtocol):
        self._door = door

    def mount(self, api: FastAPI) -> None:
        api.add_api_route("/v1/models", self.models, methods=["GET"], response_model=None)
        api.add_api_route("/v1/models/{model_id:path}", self.model, methods=["GET"], response_model=None)

    async def models(self) -> Response:
        return json_answer(msgspec.json.encode({"object": "list", "data": self._cards()}))

    async def model(self, model_id: str) -> Response:
        self._door.models.adapter_of(model_id)
        return json_answer(msgspec.json.encode(self._card(model_id)))

    def _cards(self) -> list[dict[str, Any]]:
        return [self._card(name) for name in (self._door.models.model_id, *self._door.models.adapters)]

    def _card(self, name: str) -> dict[str, Any]:
        """`parent`: of an adapter, the model that it changes."""
        parent = self._door.models.model_id
        return {
            "id": name,
            "object": "model",
            "created": self._door.created,
            "owned_by": "epdg",
            "parent": None if name == parent else parent,
            "max_model_len": self._door.limits.max_model_len,
        }
