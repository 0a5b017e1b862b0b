"""Composes the application of a door: the routes of all endpoints, in the order of the OpenAPI document, and
around them errors, the edge and pages of other origins. Broad `except`s are only in `router.http.edge` and
`event_stream`, and they answer the client. A client that disconnects cancels its request, streamed or not."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from router.api.absent import mount_absent
from router.api.adapters import mount_adapters
from router.api.anthropic.render import error_body
from router.api.protocol import DoorProtocol
from router.api.responses.kept import KeptResponses
from router.api.responses.routes import mount_kept, mount_responses
from router.api.routes import MESSAGES_PATH, mount_answers, mount_audio, mount_messages, mount_tokens
from router.api.server import mount_models, mount_server, package_version
from router.api.serving import LEDGER, CallServer
from router.http.bodies import BodyBudget
from router.http.body_parser import BodyReader
from router.http.edge import Edge, HttpMetrics
from router.http.errors import ErrorAnswers
from router.http.limits import CLIENT_TIMEOUTS, ClientTimeouts
from router.page.site import Site


def build_api(
    door: DoorProtocol, timeouts: ClientTimeouts = CLIENT_TIMEOUTS, *, tells_request_id: bool = True
) -> FastAPI:
    """`tells_request_id`: answers have `x-request-id`; false: the server adds it."""
    api = FastAPI(
        title="OpenAI-compatible API",
        version=package_version(),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    budget = BodyBudget(door.limits.held_body_bytes)
    metrics = HttpMetrics(budget, door.access.keys)
    calls = CallServer(door, BodyReader(door.limits, timeouts.body_s))
    kept = KeptResponses(door.limits.keep_responses_s)
    mount_answers(api, door, calls)
    mount_responses(api, door, calls, kept)
    mount_messages(api, door, calls)
    mount_audio(api, door, calls)
    mount_models(api, door)
    mount_adapters(api, door, calls)
    mount_tokens(api, door, calls)
    mount_server(api, door, metrics)
    mount_kept(api, kept)
    mount_absent(api)
    Site(door.pools).mount(api)
    _answer_head(api)
    errors = ErrorAnswers({MESSAGES_PATH: error_body})
    errors.mount(api)
    api.add_middleware(
        Edge,
        access=door.access,
        budget=budget,
        metrics=metrics,
        answer_error=errors.answer,
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
    """Answers HEAD wherever GET is answered, with the same status and headers; the server leaves out the
    body. FastAPI adds no such routes, as Starlette does."""
    for route in list(api.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            api.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
