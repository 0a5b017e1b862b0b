"""Two ends of the side channel, over Unix sockets and TCP on this machine."""

from __future__ import annotations

import asyncio
import socket

import pytest

from cluster.errors import ConfigError, UnavailableError
from cluster.rpc import Connection, Server, connect, new_address
from cluster.rpc.address import make_private
from cluster.rpc.frames import encode_message
from cluster.types.messages import PROTOCOL_VERSION, Cancel, Hello


class Worker:
    """A server that notes what happens to it."""

    def __init__(self, address: str, secret: str | None = None):
        self.connections: list[Connection] = []
        self.messages: list = []
        self.closed: list[Connection] = []
        self.server = Server(
            address, "worker", self.connections.append, lambda _, message: self.messages.append(message),
            self.closed.append, secret=secret,
        )  # fmt: skip


async def until(condition, timeout_s: float = 5.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def ignore(*_):
    pass


@pytest.fixture
async def worker(tmp_path):
    tmp_path.chmod(0o700)
    worker = Worker(f"unix:{tmp_path}/s.sock")
    await worker.server.start()
    yield worker
    await worker.server.aclose()


async def test_ten_thousand_messages_arrive_in_order(worker):
    door = await connect(worker.server.address, "door", ignore)
    for number in range(10_000):
        door.send(Cancel(str(number)))
    await until(lambda: len(worker.messages) == 10_000)
    assert worker.messages == [Cancel(str(number)) for number in range(10_000)]
    assert (door.peer_name, worker.connections[0].peer_name) == ("worker", "door")
    await door.aclose()


async def test_both_sides_learn_of_the_end_exactly_once(worker):
    closed = []
    door = await connect(worker.server.address, "door", ignore, closed.append)
    await door.aclose()
    await door.aclose()
    await until(lambda: worker.closed)
    await asyncio.sleep(0.02)
    assert (closed, worker.closed) == ([door], worker.connections)
    assert door.error is None


async def test_what_was_sent_before_closing_arrives(worker):
    door = await connect(worker.server.address, "door", ignore)
    door.send(Cancel("x" * 5_000_000))
    await door.aclose()
    await until(lambda: worker.closed)
    assert len(worker.messages) == 1


async def test_a_peer_that_does_not_read_is_cut(tmp_path):
    tmp_path.chmod(0o700)
    server = Server(f"unix:{tmp_path}/s.sock", "worker", lambda c: c._transport.pause_reading(), ignore)
    await server.start()
    closed = []
    door = await connect(server.address, "door", ignore, closed.append, max_buffered_bytes=1_000_000)
    for _ in range(100):
        door.send(Cancel("x" * 100_000))
    await until(lambda: closed)
    assert isinstance(door.error, UnavailableError)
    assert "too slowly" in door.error.message
    await server.aclose()


async def test_a_failing_callback_ends_its_connection_only(tmp_path):
    tmp_path.chmod(0o700)

    def fail(_, message):
        raise ValueError(message)

    closed = []
    server = Server(f"unix:{tmp_path}/s.sock", "worker", ignore, fail, closed.append)
    await server.start()
    first = await connect(server.address, "first", ignore)
    second = await connect(server.address, "second", ignore)
    first.send(Cancel("r"))
    await until(lambda: closed)
    assert second.is_open
    assert closed[0].peer_name == "first"
    await server.aclose()


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


async def test_nobody_listening_is_unavailable(tmp_path):
    with pytest.raises(UnavailableError, match="cannot reach"):
        await connect(f"unix:{tmp_path}/none.sock", "door", ignore)


async def test_a_silent_peer_is_unavailable_within_the_timeout(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s.sock"))
        listener.listen()
        with pytest.raises(UnavailableError, match="in time"):
            await connect(f"unix:{tmp_path}/s.sock", "door", ignore, timeout_s=0.05)


async def test_tcp_peers_that_share_the_secret_talk():
    worker = Worker("tcp:127.0.0.1:0", secret="s3cret")
    await worker.server.start()
    door = await connect(worker.server.address, "door", ignore, secret="s3cret")
    door.send(Cancel("r"))
    await until(lambda: worker.messages)
    assert worker.messages == [Cancel("r")]
    await door.aclose()
    await worker.server.aclose()


async def test_a_wrong_secret_is_refused():
    worker = Worker("tcp:127.0.0.1:0", secret="s3cret")
    await worker.server.start()
    with pytest.raises(UnavailableError, match="hung up"):
        await connect(worker.server.address, "door", ignore, secret="other")
    assert worker.connections == []
    await worker.server.aclose()


def test_tcp_without_a_secret_is_a_configuration_error():
    with pytest.raises(ConfigError, match="EPDG_CLUSTER_SECRET"):
        Server("tcp:127.0.0.1:0", "worker", ignore, ignore)


def test_a_directory_that_others_can_enter_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        make_private(tmp_path)


async def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    address = new_address("unix", name="x" * 120, directory=tmp_path, host="")
    with pytest.raises(ConfigError, match="EPDG_SOCKET_DIR"):
        await Server(address, "worker", ignore, ignore).start()
