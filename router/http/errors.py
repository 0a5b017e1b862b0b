"""Errors as answers: OpenAI's object or that of the endpoint, the status, and the headers that belong to it.
The answer to an error depends on the request's path, headers and id. Runs on the door's event loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from cluster.errors import ClusterError, InternalError, RequestError
from router.http.bodies import BodyTimeoutError, BodyTooLargeError, MediaTypeError
from router.http.disconnect import ClientGoneError
from router.http.edge import request_id_of
from router.http.keys import InvalidKeyError

log = logging.getLogger(__name__)
CLIENT_GONE_STATUS = 499  # for the access log, as nginx does; the client is gone
ErrorBody = Callable[[ClusterError, str], bytes]  # of an error and the request's id


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


def error_body(error: ClusterError) -> bytes:
    """OpenAI's error object."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def public_error(error: BaseException) -> ClusterError:
    """The error that the client may see. The text of an unexpected exception is only in the log."""
    return error if isinstance(error, ClusterError) else InternalError("internal error")


def log_unexpected(request: Request, error: Exception) -> None:
    if not isinstance(error, ClusterError):
        log.error("request %s failed unexpectedly", request_id_of(request), exc_info=error)


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`value`: what is written as JSON, or bytes that are JSON already."""
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return Response(body, status, headers, media_type="application/json")


class ErrorAnswers:
    """The exception handlers of an application."""

    def __init__(self, bodies: Mapping[str, ErrorBody]):
        """`bodies`: the forms of errors that differ from OpenAI's, by the path of their endpoints."""
        self._bodies = bodies

    def mount(self, api: FastAPI) -> None:
        api.add_exception_handler(ClusterError, self.answer)
        api.add_exception_handler(ClientGoneError, self._answer_client_gone)
        api.add_exception_handler(HTTPException, self._answer_http_exception)
        api.add_exception_handler(RequestValidationError, self._answer_wrong_parameter)

    async def answer(self, request: Request, error: Exception) -> Response:
        log_unexpected(request, error)
        known = public_error(error)
        headers = {}
        if known.status in (429, 503):
            headers["retry-after"] = str(max(1, math.ceil(known.retry_after_s or 1)))
        if isinstance(known, InvalidKeyError):
            headers["www-authenticate"] = "Bearer"
        if isinstance(known, BodyTimeoutError):
            # After other errors the server reads the rest of the body and drops it, because closing earlier
            # would lose the answer
            headers["connection"] = "close"
        return json_answer(self._body(request, known), known.status, headers)

    async def _answer_client_gone(self, request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE_STATUS)

    async def _answer_http_exception(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # the class it is registered for
        kind = _KINDS.get(error.status_code) or (RequestError if error.status_code < 500 else InternalError)
        known = kind(f"{request.method[:20]} {request.url.path[:200]}: {error.detail}")
        headers = dict(error.headers or {})
        if error.status_code == 405:  # Starlette names the methods of one route, and a path may have several
            headers = {"allow": ", ".join(sorted(_methods(request)))}
        return json_answer(self._body(request, known), error.status_code, headers)

    async def _answer_wrong_parameter(self, request: Request, error: Exception) -> Response:
        """Answers an error of a query or a path. The endpoints check bodies themselves."""
        assert isinstance(error, RequestValidationError)  # the class it is registered for
        first = error.errors()[0]
        _, *names = map(str, first["loc"])
        known = RequestError(f"{'.'.join(names)}: {first['msg']}", param=".".join(names) or None)
        return await self.answer(request, known)

    def _body(self, request: Request, error: ClusterError) -> bytes:
        for path, body in self._bodies.items():
            if path in request.url.path:  # after the prefix of the application
                return body(error, request_id_of(request))
        return error_body(error)


def _methods(request: Request) -> set[str]:
    """The methods of all routes to the request's path."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in found for method in route.methods or ()}
