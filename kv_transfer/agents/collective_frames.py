"""Small messages between two collective agents, on one TCP connection, whose end shows that the peer is dead.

frame        as on the side channel (`cluster.rpc.frames`)
dialler      Greeting
owner        Ready, if the token is right
both         StoreItem, as many as the group needs while it is made
owner        Ready, when the first byte came through the group
writer       PostHeader, followed by its bytes through the group | Notification
owner        Acknowledgement per PostHeader | Refusal, and the connection ends
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

import msgspec

from cluster.rpc.address import watch_host
from cluster.rpc.frames import FrameBuffer, FrameError, frame
from kv_transfer.agents.agent import PeerLostError, TransferError

Backend = Literal["gloo", "nccl"]

MAX_FRAME_BYTES = 16 << 20  # a million descriptors
MAX_GREETING_BYTES = 4096  # from a connection that has not shown the token


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Greeting(_Frame, frozen=True):
    token: bytes  # of the owner's metadata
    name: str  # the writer's
    backend: Backend


class StoreItem(_Frame, frozen=True):
    key: str
    value: bytes


class Ready(_Frame, frozen=True):
    pass


class PostHeader(_Frame, frozen=True):
    number: int  # counts the link's posts
    rows: bytes  # [n, 2] uint64 little-endian: address and bytes in the owner's memory
    notification: bytes


class Notification(_Frame, frozen=True):
    payload: bytes


class Acknowledgement(_Frame, frozen=True):
    number: int


class Refusal(_Frame, frozen=True):
    reason: str


Frame = Greeting | StoreItem | Ready | PostHeader | Notification | Acknowledgement | Refusal
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


class FrameSocket:
    """One thread may read while another writes. Every method raises PeerLostError after the end of the
    connection."""

    def __init__(self, connection: socket.socket, max_frame_bytes: int = MAX_GREETING_BYTES):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watch_host(connection)
        self._socket = connection
        self._buffer = FrameBuffer(max_frame_bytes)
        self._received: deque[bytes] = deque()  # whole frames

    def allow(self, max_frame_bytes: int) -> None:
        self._buffer.max_frame_bytes = max_frame_bytes

    def read(self, timeout_s: float | None) -> Frame:
        """Waits for the next frame. Raises TransferError if none comes in time or it cannot be read."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._received:
            if not self._fill():
                self._await(select.POLLIN, deadline)
        return self._next_frame()

    def read_available(self) -> Iterator[Frame]:
        """The frames that have arrived; does not wait. Raises after the last one if the connection is
        over."""
        while True:
            while self._received:
                yield self._next_frame()
            if not self._fill():
                return

    def write(self, message: Frame, timeout_s: float) -> None:
        """Returns when the kernel has the frame."""
        rest = memoryview(frame(_encoder.encode(message)))
        deadline = time.monotonic() + timeout_s
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._await(select.POLLOUT, deadline)
            except OSError as error:
                raise PeerLostError(f"the connection broke: {error}") from error

    def shut(self) -> None:
        """End the connection; a thread that waits in it gets PeerLostError. May be repeated."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _next_frame(self) -> Frame:
        try:
            return _decoder.decode(self._received.popleft())
        except msgspec.MsgspecError as error:
            raise TransferError(f"a frame cannot be read: {error}") from error

    def _fill(self) -> bool:
        """Read what the kernel has; False: nothing."""
        try:
            received = self._socket.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLostError(f"the connection broke: {error}") from error
        if not received:
            raise PeerLostError("the peer closed the connection")
        try:
            self._received += self._buffer.feed(received)
        except FrameError as error:
            raise TransferError(str(error)) from error
        return True

    def _await(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        try:
            poll.register(self._socket, event)
        except (OSError, ValueError) as error:
            raise PeerLostError("the connection is closed") from error
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            raise TransferError("the peer did not answer in time")


def refused(frame: Frame) -> PeerLostError:
    """The error for a frame that ends the link: the peer's own reason, or that the frame is out of place."""
    if isinstance(frame, Refusal):
        return PeerLostError(f"the peer dropped the connection: {frame.reason}")
    return PeerLostError(f"the peer sent an unexpected {type(frame).__name__}")
