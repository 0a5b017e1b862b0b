"""One end of a side-channel connection.

Life cycle: socket opens → handshake → `on_open` → `on_message` for every message, in order → `on_close`,
exactly once, however the connection ends. A connection that fails before `on_open` calls no callback of its
owner.

All callbacks run synchronously on the event loop's thread inside the socket's read callback. No task is made
per message, and one read delivers all frames that it contains. A callback must not block. If a callback
raises, the connection ends, because the message may be half handled.

`send` never blocks:

* While the transport's buffer is full, messages wait here in order and are written as the buffer drains.
  Other peers are not affected. A waiting media file is not copied; a Cancel of its request removes it.
* If the peer reads nothing for `STALL_TIMEOUT_S`, or if more than `max_buffered_bytes` of other messages wait
  for it, the connection is cut.
* On an ended connection `send` does nothing; `on_close` tells the owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from cluster.errors import ClusterError, InternalError, UnavailableError
from cluster.rpc.frames import (
    MAX_FRAME_BYTES,
    FrameBuffer,
    FrameError,
    decode_message,
    encode_message,
    without_file,
)
from cluster.rpc.handshake import MAX_HANDSHAKE_FRAME_BYTES, Handshake
from cluster.types.messages import AnyMessage, Cancel, StartEncode

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0  # time for a closing connection to flush its buffers
MAX_BUFFERED_BYTES = 2 * MAX_FRAME_BYTES
# of the transport's buffer: enough that the kernel always has bytes to send while the event loop does other
# work
HIGH_WATER_BYTES = 1 << 20
STALL_TIMEOUT_S = 30.0

OnMessage = Callable[["Connection", AnyMessage], None]
OnConnection = Callable[["Connection"], None]


class Connection(asyncio.Protocol):
    """One end of a connection. Only `connect` and `Server` make it."""

    def __init__(
        self,
        handshake: Handshake,
        *,
        on_open: OnConnection,
        on_message: OnMessage,
        on_close: OnConnection,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ):
        self.peer_name = ""
        self.peer_last_read: str | None = None  # `Hello.last_read` of the peer
        self.error: ClusterError | None = None  # why the connection ended, if not by an orderly close
        self._handshake: Handshake | None = handshake
        self._on_open = on_open
        self._on_message = on_message
        self._on_close = on_close
        self._max_buffered_bytes = max_buffered_bytes
        self._handshake_timeout_s = handshake_timeout_s
        # frames, and messages too large to encode early
        self._waiting: deque[bytearray | StartEncode] = deque()
        self._waiting_bytes = 0  # of the frames
        self._is_full = False  # the transport's buffer
        self._stall: asyncio.TimerHandle | None = None
        self._frames = FrameBuffer(MAX_HANDSHAKE_FRAME_BYTES)
        self.transport: Any = None
        self._is_open = False
        self._is_aborted = False
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self._is_open

    def send(self, message: AnyMessage) -> None:
        if not self._is_open:
            return
        if not self._is_full and not self._waiting:
            self.transport.write(encode_message(message))
            return
        if isinstance(message, Cancel):
            self._withdraw(message)
        if isinstance(message, StartEncode):
            encode_message(without_file(message))  # an encoding error must reach the sender now
            self._waiting.append(message)
            return
        data = encode_message(message)
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > self._max_buffered_bytes:
            self._fail(UnavailableError(f"{self.peer_name} reads too slowly; its connection was cut"))

    async def wait_open(self) -> None:
        """Returns after the handshake. Raises ClusterError if one side refuses the other."""
        await asyncio.shield(self._opened)

    def when_greeted(self, callback: Callable[[], None]) -> None:
        """Runs `callback` from the event loop when the handshake has succeeded or failed."""
        self._opened.add_done_callback(lambda _: callback())

    async def aclose(self) -> None:
        """Sends what is buffered, closes, and waits until `on_close` has run. May be called at any time and
        repeated."""
        if self._is_open:
            self._write_waiting(to_the_end=True)
        self._is_open = False
        if self.transport is not None and not self._ended.done():
            self.transport.close()
            await asyncio.wait([self._ended], timeout=CLOSE_TIMEOUT_S)
            if not self._ended.done():
                self.transport.abort()
                await self._ended

    def abort(self) -> None:
        """Cuts the connection now; buffered messages are lost. The event loop calls `on_close` afterwards."""
        self._is_open = False
        self._is_aborted = True
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, error: ClusterError) -> None:
        if self.error is None:
            self.error = error
        self.abort()

    def _withdraw(self, cancel: Cancel) -> None:
        """Drops waiting media of a cancelled item, or of all items of a cancelled request."""
        self._waiting = deque(
            entry
            for entry in self._waiting
            if isinstance(entry, bytearray)
            or entry.request_id != cancel.request_id
            or cancel.item_idx not in (None, entry.item_idx)
        )

    def _write_waiting(self, *, to_the_end: bool = False) -> None:
        while self._waiting and (to_the_end or not self._is_full):
            entry = self._waiting.popleft()
            if isinstance(entry, bytearray):
                self._waiting_bytes -= len(entry)
                self.transport.write(entry)
            else:
                self.transport.write(encode_message(entry))

    def _check_progress(self, num_bytes_before: int) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes >= num_bytes_before:
            self._fail(UnavailableError(f"{self.peer_name} has stopped reading; its connection was cut"))
        else:
            self._watch()

    def _watch(self) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        self._stall = self._loop.call_later(STALL_TIMEOUT_S, self._check_progress, num_bytes)

    # asyncio.Protocol

    def pause_writing(self) -> None:
        self._is_full = True
        self._watch()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._stall is not None:
            self._stall.cancel()
        if self._is_open:
            self._write_waiting()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert self._handshake is not None
        self.transport = transport
        if self._is_aborted:
            self.transport.abort()
            return
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._deadline = self._loop.call_later(self._handshake_timeout_s, self._handshake_timed_out)
        self.transport.write(self._handshake.opening())

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                if self._handshake is not None:
                    self._greet(self._handshake, payload)
                elif self._is_open:
                    self._on_message(self, decode_message(payload))
                else:
                    return  # closed by a callback: the rest of this read is dropped
        except FrameError as error:
            logger.warning("connection to %s cut: %s", self.peer_name or "an unknown peer", error)
            self._fail(UnavailableError(f"{self.peer_name or 'the peer'} broke the protocol: {error}"))
        except ClusterError as error:
            logger.warning("connection to %s cut: %s", self.peer_name or "an unknown peer", error)
            self._fail(error)
        except Exception:  # process edge: a bug in a callback ends this connection, not the process
            logger.exception("a callback failed; connection to %s cut", self.peer_name)
            self._fail(InternalError("a callback failed"))

    def connection_lost(self, exc: BaseException | None) -> None:
        was_greeted = self._handshake is None
        waiting_for = "" if self._handshake is None else self._handshake.waiting_for
        self._is_open = False
        self._waiting.clear()
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()
        if exc is not None and self.error is None:
            self.error = UnavailableError(f"connection to {self.peer_name or 'the peer'} lost: {exc}")
        if not self._opened.done():
            self._opened.set_exception(
                self.error
                or UnavailableError(f"the peer closed the connection instead of sending {waiting_for}")
            )
            self._opened.exception()  # marks it as retrieved: on a server nothing waits for it
        if not self._ended.done():
            self._ended.set_result(None)
        if was_greeted:
            try:
                self._on_close(self)
            except Exception:  # process edge
                logger.exception("on_close failed for %s", self.peer_name)

    def _greet(self, handshake: Handshake, payload: bytes) -> None:
        answer = handshake.feed(payload)
        if answer:
            self.transport.write(answer)
        if handshake.peer is None:
            return
        self.peer_name, self.peer_last_read = handshake.peer.name, handshake.peer.last_read
        handshake.check_peer()
        self._handshake = None
        if self._deadline is not None:
            self._deadline.cancel()
        self._frames.max_frame_bytes = MAX_FRAME_BYTES
        self._is_open = True
        self._on_open(self)
        if not self._opened.done():
            self._opened.set_result(None)

    def _handshake_timed_out(self) -> None:
        if self._handshake is not None:
            self._fail(UnavailableError(f"the peer did not send {self._handshake.waiting_for} in time"))
