"""The HTTP answer that is a stream of server-sent events. Runs on the door's event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cluster.errors import ClusterError
from router.http.disconnect import ClientGoneError, until_disconnect
from router.http.errors import log_unexpected, public_error


class EventStream(Response):
    """Sends events as they come. The status line waits for the first event, so an error before it is a plain
    HTTP error. A later error is an event, after which the stream ends without `[DONE]`. The answer to HEAD
    ends with the first event."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        more_headers: Mapping[str, str],
        error_event: Callable[[ClusterError], bytes],
    ):
        """`more_headers` may grow until the first event. `error_event`: writes an error after it."""
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._events = events
        self._more_headers = more_headers
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises the error of a stream that fails before its first event."""
        request = Request(scope, receive)
        with contextlib.suppress(ClientGoneError):
            async with contextlib.aclosing(self._events):
                await until_disconnect(request, self._send_all(request, send))

    async def _send_all(self, request: Request, send: Send) -> None:
        async def write(message: Message) -> None:
            try:
                await send(message)
            except OSError:  # the server raises it when the connection is gone
                raise ClientGoneError from None

        has_started = False
        try:
            async for event in self._events:
                if not has_started:
                    has_started = True
                    self.headers.update(self._more_headers)
                    start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                    await write(start)
                    if request.method == "HEAD":
                        break
                await write({"type": "http.response.body", "body": event, "more_body": True})
        except ClientGoneError:
            raise
        except Exception as error:
            if not has_started:
                raise
            log_unexpected(request, error)
            last = self._error_event(public_error(error))
            await write({"type": "http.response.body", "body": last, "more_body": True})
        await write({"type": "http.response.body", "body": b"", "more_body": False})
