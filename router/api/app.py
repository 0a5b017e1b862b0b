"""Composes the API of a door: the routes of all endpoints, with `router.http` around them. They have the
order of the OpenAPI document."""

from __future__ import annotations

from fastapi import FastAPI

from router.api.absent import mount_absent
from router.api.adapters import AdapterRoutes
from router.api.anthropic.render import error_body
from router.api.anthropic.routes import MESSAGES_PATH, MessagesRoutes
from router.api.audio import AudioRoutes
from router.api.chat.routes import ChatRoutes
from router.api.models import ModelRoutes
from router.api.protocol import DoorProtocol
from router.api.responses.kept import KeptResponses
from router.api.responses.routes import KeptRoutes, ResponsesRoutes
from router.api.server import ServerRoutes, package_version
from router.api.serving import LEDGER, CallServer
from router.api.tokens import TokenRoutes
from router.http.app import wire
from router.http.bodies import BodyBudget
from router.http.body_parser import BodyReader
from router.http.edge import HttpMetrics
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
    bodies = BodyReader(door.limits, timeouts.body_s)
    calls = CallServer(door, bodies)
    kept = KeptResponses(door.limits.keep_responses_s)
    ChatRoutes(door, calls).mount(api)
    ResponsesRoutes(door, calls, kept).mount(api)
    MessagesRoutes(door, calls).mount(api)
    AudioRoutes(door, calls).mount(api)
    ModelRoutes(door).mount(api)
    AdapterRoutes(door, calls).mount(api)
    TokenRoutes(door, calls).mount(api)
    ServerRoutes(door, metrics).mount(api)
    KeptRoutes(kept).mount(api)
    mount_absent(api)
    Site(door.pools).mount(api)
    wire(
        api,
        door.access,
        budget,
        metrics,
        ErrorAnswers({MESSAGES_PATH: error_body}),
        read_timeout_s=timeouts.read_s,
        tells_request_id=tells_request_id,
        shown_headers=(LEDGER,),
    )
    return api
