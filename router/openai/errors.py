"""Errors as answers: OpenAI's object (at Anthropic's paths theirs), the status, and the headers that belong
to it. Plain functions of the application's exception handlers; no request is known to them but its path and
its headers. Runs on the door's event loop.
"""

from __future__ import annotations

import logging
import math

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from cluster.errors import ClusterError, InternalError, RequestError
from router.openai import render
from router.openai.anthropic.render import error_body as anthropic_error
from router.openai.bodies import BodyTimeoutError, BodyTooLargeError, MediaTypeError
from router.openai.edge import request_id_of
from router.openai.keys import InvalidKeyError

log = logging.getLogger(__name__)
CLIENT_GONE_STATUS = 499  # for the access log, as nginx does; the client is gone
ANTHROPIC_PATH = "/v1/messages"


class NoSuchRouteError(RequestError):
    code = "not_found"


class WrongMethodError(RequestError):
    code = "method_not_allowed"


_KINDS: dict[int, type[RequestError]] = {
    404: NoSuchRouteError,
    405: WrongMethodError,
    413: BodyTooLargeError,
    415: MediaTypeError,
}


async def answer_error(request: Request, error: Exception) -> Response:
    log_unexpected(request, error)
    known = render.public_error(error)
    headers = {}
    if known.status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(known.retry_after_s or 1)))
    if isinstance(known, InvalidKeyError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(known, BodyTimeoutError):
        # After other errors the server reads the rest of the body and drops it, because closing earlier would
        # lose the answer
        headers["connection"] = "close"
    return json_answer(_body(request, known), known.status, headers)


async def answer_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # the class it is registered for
    kind = _KINDS.get(error.status_code) or (RequestError if error.status_code < 500 else InternalError)
    known = kind(f"{request.method[:20]} {request.url.path[:200]}: {error.detail}")
    headers = dict(error.headers or {})
    if error.status_code == 405:  # Starlette names the methods of one route, and a path may have several
        headers = {"allow": ", ".join(sorted(_methods(request)))}
    return json_answer(_body(request, known), error.status_code, headers)


def _methods(request: Request) -> set[str]:
    """Of all routes to this path."""
    found = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in found for method in getattr(route, "methods", None) or ()}


async def answer_wrong_parameter(request: Request, error: Exception) -> Response:
    """Of a query or a path; bodies are checked by `schema`."""
    assert isinstance(error, RequestValidationError)  # the class it is registered for
    first = error.errors()[0]
    _, *names = map(str, first["loc"])
    known = RequestError(f"{'.'.join(names)}: {first['msg']}", param=".".join(names) or None)
    return await answer_error(request, known)


def _body(request: Request, error: ClusterError) -> bytes:
    if ANTHROPIC_PATH in request.url.path:  # behind the prefix of the application
        return anthropic_error(error, request_id_of(request))
    return render.error_body(error)


def log_unexpected(request: Request, error: Exception) -> None:
    if not isinstance(error, ClusterError):
        log.error("request %s failed unexpectedly", request_id_of(request), exc_info=error)


def json_answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
