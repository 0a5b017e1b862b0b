"""Small messages between two collective agents, on one TCP connection, whose end shows that the peer is dead.

frame        4 bytes little-endian length, then msgpack
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
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

import msgspec

from kv_transfer.agents.agent import PeerLostError, TransferError

Backend = Literal["gloo", "nccl"]

MAX_FRAME_BYTES = 16 << 20  # a million descriptors
MAX_GREETING_BYTES = 4096  # from a connection that has not shown the token
_LENGTH = struct.Struct("<I")
# A host that vanishes sends no end-of-file: probe an idle connection after 2 s, give it up after 3 more
# seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
_UNACKNOWLEDGED_MS = 5000


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
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        self.max_frame_bytes = max_frame_bytes
        self._socket = connection
        self._received = bytearray()

    def read(self, timeout_s: float | None) -> Frame:
        """Waits for the next frame. Raises TransferError if none comes in time or it cannot be read."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (frame := self._next_frame()) is None:
            if not self._fill():
                self._await(select.POLLIN, deadline)
        return frame

    def read_available(self) -> Iterator[Frame]:
        """The frames that have arrived; does not wait. Raises after the last one if the connection is
        over."""
        while True:
            while (frame := self._next_frame()) is not None:
                yield frame
            if not self._fill():
                return

    def write(self, frame: Frame, timeout_s: float) -> None:
        """Returns when the kernel has the frame."""
        body = _encoder.encode(frame)
        rest = memoryview(_LENGTH.pack(len(body)) + body)
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

    def _next_frame(self) -> Frame | None:
        if len(self._received) < _LENGTH.size:
            return None
        (num_bytes,) = _LENGTH.unpack_from(self._received)
        if num_bytes > self.max_frame_bytes:
            raise TransferError(
                f"a frame of {num_bytes} bytes is longer than the limit of {self.max_frame_bytes}"
            )
        end = _LENGTH.size + num_bytes
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        try:
            return _decoder.decode(body)
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
        self._received += received
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
