"""What the API says of the server itself: version, readiness, its own description, metrics. Runs on the
door's event loop."""

from __future__ import annotations

import asyncio
import functools
from importlib.metadata import PackageNotFoundError, version

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from router.api.openapi import document
from router.api.protocol import DoorProtocol
from router.http.edge import HttpMetrics
from router.http.errors import json_answer

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServerRoutes:
    def __init__(self, door: DoorProtocol, metrics: HttpMetrics):
        self._door = door
        self._metrics = metrics

    def mount(self, api: FastAPI) -> None:
        api.add_api_route("/version", self.version, methods=["GET"], response_model=None)
        for path in ("/health", "/ready"):
            api.add_api_route(path, self.ready, methods=["GET"], response_model=None)
        described = functools.cache(lambda: document(api, self._door))

        async def openapi() -> Response:
            return json_answer(await asyncio.to_thread(described))  # the first time takes a tenth of a second

        api.add_api_route("/openapi.json", openapi, methods=["GET"], response_model=None)
        api.add_api_route("/metrics", self.metrics, methods=["GET"], response_model=None)

    async def version(self) -> Response:
        return json_answer(msgspec.json.encode({"version": package_version()}))

    async def ready(self) -> Response:
        return Response(status_code=200 if self._door.is_ready() else 503)

    async def metrics(self) -> Response:
        return Response(self._door.metrics() + self._metrics.render(), media_type=METRICS_TYPE)


def package_version() -> str:
    """The package's version; of a checkout that is not installed, the form that packaging tools give it."""
    try:
        return version("epdg")
    except PackageNotFoundError:
        return "0+unknown"
