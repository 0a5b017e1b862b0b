"""Two ends of the side channel, over Unix sockets and TCP on this machine."""

from __future__ import annotations

import asyncio
import socket

import pytest

from cluster.errors import UnavailableError
from cluster.rpc import Server, connect
from cluster.types.messages import Cancel
from tests.fakes.waiting import until
from tests.unit.rpc.two_ends import Worker, ignore


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


async def test_both_ends_of_a_tcp_connection_notice_a_host_that_vanished():
    worker = Worker("tcp:127.0.0.1:0", secret="s3cret")
    await worker.server.start()
    door = await connect(worker.server.address, "door", ignore, secret="s3cret")
    await until(lambda: worker.connections)
    for end in (door, worker.connections[0]):
        sock = end.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [2, 1, 3, 5000]
    await door.aclose()
    await worker.server.aclose()
