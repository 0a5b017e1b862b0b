"""What the API says of the server itself: its models, version, readiness, description and metrics. Runs on
the door's event loop."""

from __future__ import annotations

import asyncio
import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from router.api.openapi import document
from router.api.protocol import DoorProtocol
from router.http.edge import HttpMetrics
from router.http.errors import json_answer

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def mount_models(api: FastAPI, door: DoorProtocol) -> None:
    """The model of this cluster and its adapters."""

    @api.get("/v1/models")
    async def models() -> Response:
        names = (door.models.model_id, *door.models.adapters)
        return json_answer({"object": "list", "data": [card(name) for name in names]})

    @api.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        door.models.adapter_of(model_id)
        return json_answer(card(model_id))

    def card(name: str) -> dict[str, Any]:
        """`parent`: of an adapter, the model that it changes."""
        parent = door.models.model_id
        return {
            "id": name,
            "object": "model",
            "created": door.created,
            "owned_by": "epdg",
            "parent": None if name == parent else parent,
            "max_model_len": door.limits.max_model_len,
        }


def mount_server(api: FastAPI, door: DoorProtocol, metrics: HttpMetrics) -> None:
    described = functools.cache(lambda: document(api, door))

    @api.get("/version")
    async def of_package() -> Response:
        return json_answer({"version": package_version()})

    @api.get("/health")
    @api.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if door.is_ready() else 503)

    @api.get("/openapi.json")
    async def openapi() -> Response:
        return json_answer(await asyncio.to_thread(described))  # the first time takes a tenth of a second

    @api.get("/metrics")
    async def measured() -> Response:
        return Response(door.metrics() + metrics.render(), media_type=METRICS_TYPE)


def package_version() -> str:
    """The package's version; of a checkout that is not installed, the form that packaging tools give it."""
    try:
        return version("epdg")
    except PackageNotFoundError:
        return "0+unknown"
