"""ASGI middleware around every request. It lets a request pass or refuses it (`keys`), gives it an id,
answers errors that no handler answered, ends requests of clients that do not read, holds the lease for a
body's bytes, and measures the lag of the event loop. Bodies pass unchanged. Runs on the door's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.bodies import BodyBudget, BodyLease
from router.http.keys import Access, ForbiddenError, InvalidKeyError, KeyRing
from router.http.rates import Permit, RateLimitError

# The longest delay that a tick may miss; each tick costs 60 us next to a model that computes
LAG_TICK_S = 0.1
_STATUSES = (200, 400, 429, 500, 503)  # that boards and operators look for
_LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_HELD = "epdg.held"
_LEASE = "epdg.body"
_PERMIT = "epdg.permit"
_REQUEST_ID = "epdg.request_id"
_ID_HEADER = "x-request-id"
_VALID_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")  # W3C Trace Context


class HttpMetrics:
    def __init__(self, budget: BodyBudget, keys: KeyRing, registry: CollectorRegistry | None = None):
        self._registry = registry or CollectorRegistry()
        self.loop_lag_s = Histogram(
            "epdg_door_event_loop_lag_seconds",
            "Delay of a timer of the door's event loop while requests are in work",
            buckets=_LAG_BUCKETS_S,
            registry=self._registry,
        )
        self.loop_busy_s = Histogram(
            "epdg_door_event_loop_busy_seconds",
            "The part of such a delay in which this process computed instead of waiting for a core or a call",
            buckets=_LAG_BUCKETS_S,
            registry=self._registry,
        )
        self.max_loop_lag_s = Gauge(
            "epdg_door_event_loop_max_lag_seconds", "The longest since the start", registry=self._registry
        )
        held = Gauge("epdg_door_body_bytes", "Bodies of requests in work", registry=self._registry)
        held.set_function(lambda: budget.num_held)
        stale = Gauge(
            "epdg_door_key_file_stale",
            "1: the file of API keys has changed and cannot be used",
            registry=self._registry,
        )
        stale.set_function(lambda: keys.is_stale)
        refusals = Counter(
            "epdg_door_key_refusals",
            "Requests without a valid key, with a key for other paths, or beyond a key's limits",
            ("status",),
            registry=self._registry,
        )
        self.responses = Counter(
            "epdg_http_responses", "Answers, by HTTP status", ("status",), registry=self._registry
        )
        for status in _STATUSES:
            self.responses.labels(status)  # a rate does not see the first count of a new series
        self.refusals: dict[type[Exception], Counter] = {
            refusal: refusals.labels(refusal.status)
            for refusal in (InvalidKeyError, ForbiddenError, RateLimitError)
        }

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _LoopWatch:
    """Ticks while requests are in work; an idle door has no timer."""

    def __init__(self, metrics: HttpMetrics):
        self._metrics = metrics
        self._num_requests = 0
        self._max_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def enter(self) -> None:
        self._num_requests += 1
        if self._num_requests == 1:
            self._tick_later(asyncio.get_running_loop())

    def leave(self) -> None:
        self._num_requests -= 1
        if self._num_requests == 0 and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick_later(self, loop: asyncio.AbstractEventLoop) -> None:
        due_at = loop.time() + LAG_TICK_S
        self._timer = loop.call_at(due_at, self._tick, loop, due_at, time.process_time())

    def _tick(self, loop: asyncio.AbstractEventLoop, due_at: float, spent_s: float) -> None:
        lag_s = max(0.0, loop.time() - due_at)
        self._metrics.loop_lag_s.observe(lag_s)
        self._metrics.loop_busy_s.observe(min(lag_s, time.process_time() - spent_s))
        if lag_s > self._max_s:
            self._max_s = lag_s
            self._metrics.max_loop_lag_s.set(lag_s)
        self._tick_later(loop)


class _Sending:
    """The sends of one response. If the client does not read for `timeout_s`, the request ends."""

    def __init__(
        self,
        send: Send,
        deadline: asyncio.Timeout,
        timeout_s: float,
        request_id: str | None,
        responses: Counter,
    ):
        """`request_id` goes into the answer's headers. `responses` counts the answer by its status."""
        self.has_started = False
        self._responses = responses
        self._request_id = request_id
        self._send = send
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._num_sent = 0
        self._is_sending = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(timeout_s, self._check, 0)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            self._responses.labels(str(message["status"])).inc()
            if self._request_id is not None:
                MutableHeaders(scope=message)[_ID_HEADER] = self._request_id
        self._is_sending = True
        await self._send(message)
        self._is_sending = False
        self._num_sent += 1

    def close(self) -> None:
        self._timer.cancel()

    def _check(self, num_sent: int) -> None:
        """Ends a request whose client does not read. There is one timer per response, none per event."""
        if self._is_sending and self._num_sent == num_sent:
            self._deadline.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(self._timeout_s, self._check, self._num_sent)


class Edge:
    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        budget: BodyBudget,
        metrics: HttpMetrics,
        answer_error: Callable[[Request, Exception], Awaitable[Response]],
        read_timeout_s: float,
        *,
        tells_request_id: bool,
    ):
        """`tells_request_id`: answers have the request's id; false: the server adds it."""
        self._app = app
        self._access = access
        self._budget = budget
        self._metrics = metrics
        self._tells_request_id = tells_request_id
        self._answer_error = answer_error
        self._read_timeout_s = read_timeout_s
        self._watch = _LoopWatch(metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_REQUEST_ID] = _request_id(scope)
        deadline = asyncio.timeout(None)
        told_id = scope[_REQUEST_ID] if self._tells_request_id else None
        self._watch.enter()
        try:
            async with deadline:
                counted = self._metrics.responses
                sending = _Sending(send, deadline, self._read_timeout_s, told_id, counted)
                await self._answer(scope, receive, sending)
        except (
            TimeoutError
        ):  # a response that cannot be sent stays unfinished; the server closes the connection
            if not deadline.expired():
                raise
        finally:
            self._watch.leave()

    async def _answer(self, scope: Scope, receive: Receive, sending: _Sending) -> None:
        try:
            with contextlib.ExitStack() as held:
                permit = held.enter_context(await self._access.admit(scope))
                lease = held.enter_context(self._budget.lease(permit.tenant))
                scope[_PERMIT], scope[_LEASE], scope[_HELD] = permit, lease, held
                await self._app(scope, receive, sending)
        except Exception as error:
            if sending.has_started:
                raise
            if (refusal := self._metrics.refusals.get(type(error))) is not None:
                refusal.inc()
            answer = await self._answer_error(Request(scope), error)
            await answer(scope, receive, sending)
        finally:
            sending.close()


def lease_of(request: Request) -> BodyLease:
    return request.scope[_LEASE]


def permit_of(request: Request) -> Permit:
    return request.scope[_PERMIT]


def take_held(request: Request) -> contextlib.ExitStack:
    """The request's permit and lease, which from now on end when the caller closes them."""
    held: contextlib.ExitStack = request.scope[_HELD]
    return held.pop_all()


def tenant_of(request: Request) -> str:
    """The client: the name of its key, or without keys a digest of its Authorization header."""
    return permit_of(request).tenant


def request_id_of(request: Request) -> str:
    return request.scope[_REQUEST_ID]


def trace_parent_of(request: Request) -> str:
    """The client's span; empty if it names none."""
    given = request.headers.get("traceparent", "")
    return given if _TRACE_PARENT.fullmatch(given) else ""


def _request_id(scope: Scope) -> str:
    """Returns the client's id if it may stand in a log and in a header, else a new one."""
    given = Headers(scope=scope).get(_ID_HEADER, "")
    return given if _VALID_ID.fullmatch(given) else str(uuid.uuid4())
