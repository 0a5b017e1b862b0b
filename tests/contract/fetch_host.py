"""A media host on loopback that a test scripts; it counts the requests that reach it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

Handler = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]  # names in lower case


def answer(body: bytes, status: str = "200 OK", **headers: str) -> Handler:
    """One complete answer; the connection can be used again."""
    fields = {"content-length": str(len(body))} | {k.replace("_", "-"): v for k, v in headers.items()}

    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
        writer.write(f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1") + body)
        await writer.drain()

    return handle


def redirect(location: str, status: str = "302 Found", **headers: str) -> Handler:
    return answer(b"", status, location=location, **headers)


class MediaHost:
    """`handlers[path]` answers a GET of that path; other paths get 404. `async with` listens, and closes
    everything at the end."""

    def __init__(self, handlers: dict[str, Handler] | None = None, *, address: str = "127.0.0.1"):
        self.handlers = handlers or {}
        self.address = address
        self.port = 0
        self.num_connections = 0
        self.num_open = 0
        self.requests: list[Request] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def at(self) -> str:
        return f"{self.address}:{self.port}"

    def url(self, path: str = "/", *, scheme: str = "http", host: str | None = None) -> str:
        return f"{scheme}://{host or self.address}:{self.port}{path}"

    async def start(self, tls: ssl.SSLContext | None = None) -> MediaHost:
        self._server = await asyncio.start_server(self._serve, self.address, self.port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aenter__(self) -> MediaHost:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def until_closed(self) -> None:
        """Waits until all clients have disconnected."""
        async with asyncio.timeout(60):
            while self.num_open:
                await asyncio.sleep(0.002)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        self.num_open += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError):
                while True:
                    await self._one(reader, writer)
        finally:
            self.num_open -= 1
            self._tasks.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        fields = (line.partition(":") for line in lines)
        request = Request(first.split(" ")[1], {name.lower(): value.strip() for name, _, value in fields})
        self.requests.append(request)
        await self.handlers.get(request.path, answer(b"nothing", "404 Not Found"))(request, writer)
