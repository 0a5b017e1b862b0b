"""Peers that do not finish the handshake: they get nothing, are bounded and end."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from cluster.errors import ConfigError, UnavailableError
from cluster.rpc import Server, connect
from cluster.rpc.frames import encode_message, frame
from cluster.rpc.server import MAX_PENDING
from cluster.types.messages import PROTOCOL_VERSION, Hello
from tests.fakes.waiting import until
from tests.unit.rpc.two_ends import Worker, dial, ignore


async def test_a_stranger_gets_nothing_and_is_never_announced(worker):
    reader, writer = await asyncio.open_unix_connection(worker.server.address.removeprefix("unix:"))
    writer.write((1 << 30).to_bytes(4, "little"))
    assert await reader.read() == b""
    writer.close()
    assert worker.connections == []


async def test_another_version_is_refused_by_name(worker):
    reader, writer = await asyncio.open_unix_connection(worker.server.address.removeprefix("unix:"))
    writer.write(encode_message(Hello(PROTOCOL_VERSION + 1, "old door")))
    answer = await reader.read()
    writer.close()
    assert b"worker" in answer  # the worker says who and which version it is, then hangs up
    assert worker.connections == []


async def test_a_client_refuses_a_server_that_does_not_know_the_secret():
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(bytes(32)))
        await reader.readexactly(4 + 64)
        writer.write(frame(bytes(32)) + encode_message(Hello(PROTOCOL_VERSION, "worker")))
        await reader.read()
        writer.close()

    impostor = await asyncio.start_server(pretend, "127.0.0.1", 0)
    port = impostor.sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match="secret"):
        await connect(f"tcp:127.0.0.1:{port}", "door", ignore, secret="s3cret")
    impostor.close()


async def test_a_stranger_that_says_nothing_is_cut_when_its_time_is_over():
    server = Server("tcp:127.0.0.1:0", "worker", ignore, ignore, secret="s3cret", handshake_timeout_s=0.05)
    await server.start()
    reader, writer = await dial(server.address)
    assert len(await reader.readexactly(4 + 32)) == 36  # the challenge
    writer.write(b"\0\0")  # half a header keeps it waiting, but no longer
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    await server.aclose()


@pytest.fixture
async def patient():
    """A server that ends no stranger for its silence while a test runs."""
    server = Server("tcp:127.0.0.1:0", "worker", ignore, ignore, secret="s3cret", handshake_timeout_s=600)
    await server.start()
    yield server
    await server.aclose()


async def end_of(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(4096):
                pass


async def test_silent_strangers_are_bounded_and_keep_no_door_out(patient):
    strangers = [await dial(patient.address) for _ in range(MAX_PENDING)]
    for reader, _ in strangers:
        await reader.readexactly(4 + 32)  # each was accepted
    door = await connect(patient.address, "door", ignore, secret="s3cret")
    one_more, _ = await dial(patient.address)
    await one_more.readexactly(4 + 32)
    await end_of(strangers[0][0])
    youngest, _ = strangers[-1]
    assert door.is_open and not youngest.at_eof() and youngest.exception() is None
    await door.aclose()
    await patient.aclose()
    await end_of(youngest)  # the server's end is theirs, too


async def test_strangers_that_come_all_at_once_are_bounded(patient):
    host, _, port = patient.address.removeprefix("tcp:").rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(MAX_PENDING + 30)]

    def num_open() -> int:
        return sum(is_open(stranger) for stranger in strangers)

    await until(lambda: num_open() <= MAX_PENDING)
    door = await connect(patient.address, "door", ignore, secret="s3cret")
    assert num_open() >= MAX_PENDING - 1
    await door.aclose()
    for stranger in strangers:
        stranger.close()


def is_open(stranger: socket.socket) -> bool:
    try:
        while stranger.recv(4096, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


async def test_a_wrong_secret_is_refused():
    worker = Worker("tcp:127.0.0.1:0", secret="s3cret")
    await worker.server.start()
    with pytest.raises(UnavailableError, match="closed the connection"):
        await connect(worker.server.address, "door", ignore, secret="other")
    assert worker.connections == []
    await worker.server.aclose()
