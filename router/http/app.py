"""Composes the application around the routes of an API: edge, errors, answers to HEAD, pages of other
origins. Broad `except`s are only in `edge` and `event_stream`, and they answer the client.

A client that disconnects cancels its request, streamed or not (`disconnect`).
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from router.http.bodies import BodyBudget
from router.http.edge import Edge, HttpMetrics
from router.http.errors import ErrorAnswers
from router.http.keys import Access


def wire(
    api: FastAPI,
    access: Access,
    budget: BodyBudget,
    metrics: HttpMetrics,
    errors: ErrorAnswers,
    *,
    read_timeout_s: float,
    tells_request_id: bool,
    shown_headers: Sequence[str] = (),
) -> None:
    """Composes `api`, which has all its routes by then. `shown_headers`: headers of answers that pages of
    other origins may read. `tells_request_id`: answers have `x-request-id`; false: the server adds it."""
    _answer_head(api)
    errors.mount(api)
    api.add_middleware(
        Edge,
        access=access,
        budget=budget,
        metrics=metrics,
        answer_error=errors.answer,
        read_timeout_s=read_timeout_s,
        tells_request_id=tells_request_id,
    )
    if access.cors_origins:  # around the edge, so that a page can read its errors, too
        api.add_middleware(
            CORSMiddleware,
            allow_origins=access.cors_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", *shown_headers),
        )


def _answer_head(api: FastAPI) -> None:
    """Answers HEAD wherever GET is answered, with the same status and headers; the server leaves out the
    body. FastAPI adds no such routes, as Starlette does."""
    for route in list(api.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            api.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], include_in_schema=False, response_model=None
            )
