"""HTTP clients that cost little: plain sockets on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_TEXT = re.compile(rb'"content":"((?:[^"\\]|\\.)+)"')
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
SMALL_BUFFER = 4096  # bytes of a socket that is not read


@dataclass
class Lags:
    """Seconds from a step at the worker to its token at the client."""

    words: Mapping[str, int]  # text of a token → step
    sent_at: Sequence[float]
    values: list[float] = field(default_factory=list)

    def note(self, data: bytes) -> None:
        now = time.monotonic()
        for text in _TEXT.findall(data):
            for word in text.decode().split():
                self.values.append(now - self.sent_at[self.words[word]])


def body(max_tokens: int, stream: bool) -> bytes:
    fields = {
        "model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": max_tokens,
        "ignore_eos": True, "stream": stream,
    }  # fmt: skip
    data = json.dumps(fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: door\r\ncontent-length: {len(data)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + data


async def read_stream(port: int, max_tokens: int, lags: Lags | None = None) -> None:
    """Reads to the end of the answer."""
    loop = asyncio.get_running_loop()
    transport, stream = await loop.create_connection(lambda: _Stream(lags), "127.0.0.1", port)
    try:
        transport.write(body(max_tokens, True))
        await stream.ended
    finally:
        transport.close()


class _Stream(asyncio.Protocol):
    """The client's end of a stream. Callbacks, because a task's wake-up for each token would cost more."""

    def __init__(self, lags: Lags | None):
        self._lags = lags
        self._tail = b""  # of what has come: the beginning of an event
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        events, _, self._tail = (self._tail + data).rpartition(b"\n\n")
        if self._lags is not None:
            self._lags.note(events)
        if b"data: [DONE]" in events and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError("the door has closed a stream"))


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    """The status of one answer, on a connection that stays."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    await reader.readexactly(int(length[1]) if length else 0)
    return int(head[9:12])


def open_unread(port: int, max_tokens: int) -> socket.socket:
    """A stream whose client does not read. To be closed."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    client.connect(("127.0.0.1", port))
    client.sendall(body(max_tokens, True))
    return client


async def leave(port: int, max_tokens: int) -> None:
    """A stream whose client is gone after the first bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(body(max_tokens, True))
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
    finally:  # also when it is cancelled
        writer.transport.abort()
