"""Drives the request flow on the door's event loop: connections to workers, streams of readers, Serve's
calls, one timer. To its reader each choice of a request is a stream of token events.

Every message and event is passed to `RequestFlow` with the time, and what the flow wants done is done at
once, in order. Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from cluster.clock import Clock
from cluster.errors import ClusterError
from cluster.ids import new_process_name
from cluster.rpc import connect
from cluster.types.messages import AdaptersHeld, AnyMessage, TokenEvent
from router.flow.outputs import CallDecode, Deliver, Drained, Output, Placed, Send
from router.flow.request_flow import RequestFlow
from router.flow.state import ClientRequest
from router.members import Dial, MemberTable, Peer

logger = logging.getLogger(__name__)

# Ray Serve's one call of a request: (replica id, request id).
DecodeCaller = Callable[[str, str], Awaitable[None]]


class TokenStream:
    """Token events of one choice; the last one has a finish reason. Raises ClusterError. One reader. A stream
    that has not ended or raised must be closed. The request is submitted when one of its streams is first
    read."""

    def __init__(self, submit: Callable[[], None], close: Callable[[], None]):
        """`submit`: the first choice of the request is read; may be repeated. `close`: this one is not read
        any more."""
        self._submit = submit
        self._on_closed = close
        self._events: deque[TokenEvent | ClusterError] = deque()
        self._arrival: asyncio.Future[None] | None = None  # the reader waits for it
        self._is_submitted = False
        self.is_closed = False

    @property
    def has_next(self) -> bool:
        """Whether tokens are there: reading on does not wait, and raises no ClusterError."""
        return bool(self._events) and not self.is_closed and isinstance(self._events[0], TokenEvent)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self.is_closed:
            raise StopAsyncIteration
        if not self._is_submitted:
            self._is_submitted = True
            self._submit()
        try:
            if not self._events:
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
            event = self._events.popleft()
            if isinstance(event, ClusterError):
                raise event
        except BaseException:  # also when the reader is cancelled
            self._close()
            raise
        if event.finish_reason is not None:
            self._close()
        return event

    def put(self, event: TokenEvent | ClusterError) -> None:
        """What the reader gets next."""
        self._events.append(event)
        arrival, self._arrival = self._arrival, None
        if arrival is not None and not arrival.done():  # done: the reader was cancelled
            arrival.set_result(None)

    async def aclose(self) -> None:
        """May be repeated, and may come before the first event."""
        self._close()

    def _close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._on_closed()


class Dispatcher:
    """Listens to the member table. Event loop only."""

    def __init__(
        self,
        flow: RequestFlow,
        call_decode: DecodeCaller,
        secret: str | None,
        clock: Clock,
        dial: Dial = connect,
        on_adapters: Callable[[Peer], None] = lambda peer: None,
    ):
        """`secret`: of the cluster, for connections to workers. `dial`: connects to one of them.
        `on_adapters(peer)`: it has told of its adapters, or is lost."""
        self.flow = flow
        self.members = MemberTable(new_process_name("door"), self, secret, dial)
        self._call_decode = call_decode
        self._on_adapters = on_adapters
        self._clock = clock
        self._unread: dict[str, ClientRequest] = {}  # no choice has been read yet
        self._streams: dict[str, list[TokenStream]] = {}
        self._calls: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    @property
    def is_idle(self) -> bool:
        return self.flow.is_idle and not self._streams and not self._unread

    def generate(self, client: ClientRequest) -> list[TokenStream]:
        """One stream per choice, each to be closed."""
        request_id = client.request_id
        self._unread[request_id] = client
        streams = [
            TokenStream(partial(self.submit, request_id), partial(self._close, request_id, idx))
            for idx in range(len(client.choices))
        ]
        self._streams[request_id] = streams
        return streams.copy()

    def submit(self, request_id: str) -> None:
        client = self._unread.pop(request_id, None)
        if client is None:
            return
        self._run(self.flow.submit, client)
        for choice_idx, stream in enumerate(self._streams[request_id]):
            if stream.is_closed:
                self._run(self.flow.close, request_id, choice_idx)

    def _close(self, request_id: str, choice_idx: int) -> None:
        if all(stream.is_closed for stream in self._streams[request_id]):
            del self._streams[request_id]
        if self._unread.get(request_id) is None:
            self._run(self.flow.close, request_id, choice_idx)
        elif request_id not in self._streams:
            del self._unread[request_id]

    # For the member table (`PeerListener`)

    def on_joined(self, peer: Peer) -> None:
        self._run(self.flow.on_joined, peer.member)

    def on_listed(self, peer: Peer) -> None:
        self._run(self.flow.on_listed, peer.member.replica_id, peer.is_listed)

    def on_message(self, peer: Peer, message: AnyMessage) -> None:
        self._run(self.flow.on_message, peer.member.replica_id, message)
        if isinstance(message, AdaptersHeld):
            self._on_adapters(peer)

    def on_lost(self, peer: Peer) -> None:
        self._run(self.flow.on_lost, peer.member.replica_id)
        self._on_adapters(peer)

    # Outputs

    def _run(self, call: Callable[..., None], *args: Any) -> None:
        call(*args, self._clock.now())
        while outputs := self.flow.take_outputs():
            for output in outputs:
                self._carry_out(output)
        self._set_timer()

    def _carry_out(self, output: Output) -> None:
        if isinstance(output, Deliver):
            streams = self._streams.get(output.request_id)
            if streams is not None:
                streams[output.choice_idx].put(output.event)
        elif isinstance(output, Send):
            self._send(output)
        elif isinstance(output, CallDecode):
            self._call(output)
        elif isinstance(output, Placed):
            output.timeline.started(self._clock.now())
        else:
            assert isinstance(output, Drained)
            self.members.close(output.replica_id)

    def _send(self, output: Send) -> None:
        try:
            self.members.send(output.replica_id, output.message, output.owner)
        except Exception as error:
            if output.request_id:
                self.flow.on_send_failed(output.request_id, error, self._clock.now())
            else:
                logger.exception("a message to %s could not be sent", output.replica_id)

    def _call(self, output: CallDecode) -> None:
        if output.request_id not in self.flow.attempts:
            return
        call = asyncio.ensure_future(self._call_decode(output.replica_id, output.request_id))
        self._calls.add(call)
        call.add_done_callback(partial(self._on_call_done, output.request_id))

    def _on_call_done(self, request_id: str, call: asyncio.Future[None]) -> None:
        self._calls.discard(call)
        error = None if call.cancelled() else call.exception()
        if error is not None:
            self._run(self.flow.on_call_failed, request_id, error)

    def _set_timer(self) -> None:
        at = self.flow.next_timer()
        if self._timer is not None:
            if at is not None and self._timer_at <= at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            delay_s = max(0.0, at - self._clock.now())
            self._timer_at = at
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._run(self.flow.on_timer)
