"""ASGI middleware around every request. It answers errors that no handler answered, ends requests of clients
that do not read, holds the lease for a body's bytes, and measures the lag of the event loop. Bodies pass
unchanged. Runs on the door's event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.openai.bodies import BodyBudget, BodyLease

LAG_TICK_S = 0.1  # the longest delay that a tick may miss; each tick costs 60 us beside a model that computes
_LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LEASE = "epdg.body"


class HttpMetrics:
    def __init__(self, budget: BodyBudget):
        self._registry = CollectorRegistry()
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

    def __init__(self, send: Send, deadline: asyncio.Timeout, timeout_s: float):
        self.has_started = False
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
        self._is_sending = True
        await self._send(message)
        self._is_sending = False
        self._num_sent += 1

    def close(self) -> None:
        self._timer.cancel()

    def _check(self, num_sent: int) -> None:
        """One timer per response, none per event."""
        if self._is_sending and self._num_sent == num_sent:
            self._deadline.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(self._timeout_s, self._check, self._num_sent)


class Edge:
    def __init__(
        self,
        app: ASGIApp,
        budget: BodyBudget,
        metrics: HttpMetrics,
        answer_error: Callable[[Request, Exception], Awaitable[Response]],
        read_timeout_s: float,
    ):
        self._app = app
        self._budget = budget
        self._answer_error = answer_error
        self._read_timeout_s = read_timeout_s
        self._watch = _LoopWatch(metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._watch.enter()
        try:
            with self._budget.lease(tenant_of(Request(scope))) as scope[_LEASE]:
                await self._run(scope, receive, send)
        finally:
            self._watch.leave()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A response that cannot be sent stays unfinished; the server then closes the connection."""
        deadline = asyncio.timeout(None)
        try:
            async with deadline:
                await self._answer(scope, receive, _Sending(send, deadline, self._read_timeout_s))
        except TimeoutError:
            if not deadline.expired():
                raise

    async def _answer(self, scope: Scope, receive: Receive, sending: _Sending) -> None:
        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            if sending.has_started:
                raise
            answer = await self._answer_error(Request(scope), error)
            await answer(scope, receive, sending)
        finally:
            sending.close()


def lease_of(request: Request) -> BodyLease:
    return request.scope[_LEASE]


def tenant_of(request: Request) -> str:
    """The client, by its API key. The key cannot be recovered from it."""
    key = request.headers.get("authorization", "")
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""
