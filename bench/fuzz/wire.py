"""One HTTP/1.1 request as bytes, valid or not, and the reply. Each request has a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from urllib.parse import urlsplit

from bench.fuzz.mutator import HttpCase

TIMEOUT_S = 150.0


@dataclass(frozen=True)
class Reply:
    """`status`: 0 if no answer came; then `error` says how the connection ended."""

    status: int
    headers: dict[str, str]
    body: bytes
    error: str = ""

    @property
    def is_overload(self) -> bool:
        return self.status in (429, 503) and "retry-after" in self.headers


async def send(url: str, case: HttpCase) -> Reply:
    """Raises nothing."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                return await _exchange(reader, writer, case)
            finally:
                writer.transport.abort()
    except (OSError, EOFError, ValueError) as error:
        return Reply(0, {}, b"", type(error).__name__)


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, case: HttpCase) -> Reply:
    reading = asyncio.ensure_future(_read(reader))
    with contextlib.suppress(OSError):  # the server refused before it read all: the answer has been sent
        await _write(writer, case)
    if case.is_cut:
        writer.write_eof()
    return await reading


async def _write(writer: asyncio.StreamWriter, case: HttpCase) -> None:
    length = (
        "transfer-encoding: chunked" if case.chunk_bytes else f"content-length: {case.length}"
    )  # fmt: skip
    lines = [f"{case.method} {case.path} HTTP/1.1", "host: fuzz", "connection: close", length]
    lines += [f"{name}: {value}" for name, value in case.headers]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1", "replace"))
    if not case.chunk_bytes:
        writer.write(case.body)
        return await writer.drain()
    for start in range(0, len(case.body), case.chunk_bytes):
        chunk = case.body[start : start + case.chunk_bytes]
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        await writer.drain()
    if not case.is_cut:
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Reply:
    head = await reader.readuntil(b"\r\n\r\n")
    while head.split(b" ", 2)[1] == b"100":
        head = await reader.readuntil(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    headers = {name.lower(): value.strip() for name, value in pairs}
    return Reply(int(status_line.split()[1]), headers, await reader.read())
