"""Frames: a length of 4 bytes (little endian), then as many bytes. A message is one frame of msgpack.

Pure: no sockets, no clock. `FrameBuffer` belongs to one connection and keeps an incomplete frame until the
rest comes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from cluster.types.messages import AnyMessage, StartEncode

HEADER_BYTES = 4
MAX_FRAME_BYTES = 256 << 20  # one media file with its envelope; a longer frame is a bug or an attack

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


class FrameError(ValueError):
    """The byte stream violates the protocol; the connection must end."""


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


def encode_message(message: AnyMessage) -> bytearray:
    """One whole frame. Raises FrameError when it is longer than any peer would take."""
    buffer = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, buffer, HEADER_BYTES)
    size = len(buffer) - HEADER_BYTES
    if size > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    buffer[:HEADER_BYTES] = size.to_bytes(HEADER_BYTES, "little")
    return buffer


def without_file(message: StartEncode) -> StartEncode:
    """The same message without the bytes of its media file."""
    return replace(message, item=replace(message.item, data=b""))


def decode_message(payload: bytes | memoryview) -> AnyMessage:
    """Raises FrameError for anything that is not a known message."""
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise FrameError(f"not a message: {error}") from error


class FrameBuffer:
    """Turns received bytes, in pieces of any size, into whole payloads."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES):
        self.max_frame_bytes = max_frame_bytes  # raised once the peer is authenticated
        self._tail = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Whole payloads in order. Exhaust the iterator, or do not use the buffer again. Raises
        FrameError."""
        if self._tail:
            self._tail += data
            if not self._has_frame():
                return
            data = bytes(self._tail)
            self._tail.clear()
        start, end = 0, len(data)
        while end - start >= HEADER_BYTES:
            size = int.from_bytes(data[start : start + HEADER_BYTES], "little")
            if size > self.max_frame_bytes:
                raise FrameError(f"a frame of {size} bytes is over the limit of {self.max_frame_bytes}")
            stop = start + HEADER_BYTES + size
            if stop > end:
                break
            yield data[start + HEADER_BYTES : stop]
            start = stop
        if start < end:
            self._tail += data[start:]

    def _has_frame(self) -> bool:
        """Whether the tail holds a whole frame or one to refuse. Without this check every read would copy a
        large incomplete frame."""
        if len(self._tail) < HEADER_BYTES:
            return False
        size = int.from_bytes(self._tail[:HEADER_BYTES], "little")
        return size > self.max_frame_bytes or len(self._tail) >= HEADER_BYTES + size
