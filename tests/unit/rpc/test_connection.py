"""Two ends of the side channel, over Unix sockets and TCP on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat

import pytest
from msgspec.structs import replace

from cluster.errors import ConfigError, UnavailableError
from cluster.rpc import Connection, Server, connect, new_address
from cluster.rpc.address import make_private
from cluster.rpc.frames import encode_message, frame
from cluster.rpc.server import MAX_PENDING
from cluster.types.media import MediaGeometry, MediaItem, MediaOptions, Modality
from cluster.types.messages import PROTOCOL_VERSION, Cancel, Hello, StartEncode


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


MIB = 1 << 20


def media(request_id: str, item_idx: int = 0, num_bytes: int = MIB) -> StartEncode:
    geometry = MediaGeometry(3)
    item = MediaItem(Modality.IMAGE, bytes(num_bytes), f"{request_id}-{item_idx}", geometry)
    return StartEncode(request_id, item_idx, item, 60.0)


async def deaf_worker(tmp_path) -> tuple[Worker, Connection]:
    """It reads nothing until it is told to."""
    tmp_path.chmod(0o700)
    worker = Worker(f"unix:{tmp_path}/s.sock")
    await worker.server.start()
    door = await connect(worker.server.address, "door", ignore, max_buffered_bytes=4 * MIB)
    await until(lambda: worker.connections)
    worker.connections[0]._transport.pause_reading()
    return worker, door


async def test_media_wait_for_a_slow_peer_without_a_copy_and_arrive_in_order(tmp_path):
    worker, door = await deaf_worker(tmp_path)
    sent = [media("r", idx) for idx in range(64)]
    for message in sent:
        door.send(message)
        door.send(Cancel(f"other {message.item_idx}"))
    assert door.is_open and door._transport.get_write_buffer_size() < 4 * MIB
    assert sum(entry is message for entry in door._waiting for message in sent) >= 60
    worker.connections[0]._transport.resume_reading()
    await until(lambda: len(worker.messages) == 128)
    assert worker.messages[::2] == sent and not door._waiting
    assert worker.messages[1::2] == [Cancel(f"other {idx}") for idx in range(64)]
    assert door.is_open and door._stall is not None and door._stall.cancelled()
    await door.aclose()
    await worker.server.aclose()


async def test_waiting_media_of_a_cancelled_request_are_never_sent(tmp_path):
    worker, door = await deaf_worker(tmp_path)
    for message in (
        media("first", 0, 3 * MIB),
        media("gone", 0),
        media("one", 0),
        media("gone", 1),
        media("one", 1),
    ):
        door.send(message)
    door.send(Cancel("gone"))
    door.send(Cancel("one", item_idx=1))
    worker.connections[0]._transport.resume_reading()
    await until(lambda: len(worker.messages) == 4)
    started = [(m.request_id, m.item_idx) for m in worker.messages if isinstance(m, StartEncode)]
    assert started == [("first", 0), ("one", 0)]
    assert worker.messages[2:] == [Cancel("gone"), Cancel("one", item_idx=1)]
    await door.aclose()
    await worker.server.aclose()


async def test_what_waits_is_sent_before_an_orderly_close(tmp_path):
    worker, door = await deaf_worker(tmp_path)
    for idx in range(8):
        door.send(media("r", idx))
    closing = asyncio.ensure_future(door.aclose())
    await asyncio.sleep(0)
    worker.connections[0]._transport.resume_reading()
    await closing
    await until(lambda: worker.closed)
    assert len(worker.messages) == 8
    await worker.server.aclose()


async def test_a_peer_that_reads_nothing_for_a_while_is_cut_and_one_that_reads_slowly_is_not(tmp_path):
    worker, door = await deaf_worker(tmp_path)
    door.send(media("r", 0, 8 * MIB))
    left = door._transport.get_write_buffer_size()
    assert door._stall is not None and left > MIB
    door._check_progress(left + 1)  # some of it has been read since
    assert door.is_open
    door._check_progress(left)
    assert not door.is_open and door.error is not None and "stopped reading" in door.error.message
    worker.connections[0]._transport.resume_reading()
    await until(lambda: worker.closed)
    await worker.server.aclose()


async def test_media_that_cannot_be_encoded_are_their_senders_error_even_while_others_wait(tmp_path):
    worker, door = await deaf_worker(tmp_path)
    door.send(media("r", 0, 3 * MIB))
    bad = media("bad")
    options = MediaOptions(max_pixels=2**70)
    with pytest.raises(OverflowError):
        door.send(replace(bad, item=replace(bad.item, options=options)))
    assert door.is_open and not door._waiting
    worker.connections[0]._transport.resume_reading()
    await door.aclose()
    await worker.server.aclose()


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


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    return await asyncio.open_connection(host, int(port))


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
    async with asyncio.timeout(5):
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
    async with asyncio.timeout(5):
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


async def test_both_ends_of_a_tcp_connection_notice_a_host_that_vanished():
    worker = Worker("tcp:127.0.0.1:0", secret="s3cret")
    await worker.server.start()
    door = await connect(worker.server.address, "door", ignore, secret="s3cret")
    await until(lambda: worker.connections)
    for end in (door, worker.connections[0]):
        sock = end._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [2, 1, 3, 5000]
    await door.aclose()
    await worker.server.aclose()


async def test_a_wrong_secret_is_refused():
    worker = Worker("tcp:127.0.0.1:0", secret="s3cret")
    await worker.server.start()
    with pytest.raises(UnavailableError, match="closed the connection"):
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


def test_a_directory_that_is_made_is_private_whatever_the_umask(tmp_path):
    umask = os.umask(0)
    try:
        make_private(tmp_path / "sockets")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "sockets").stat().st_mode) == 0o700


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="of this user"):
        make_private(tmp_path)


@pytest.mark.parametrize("target", ["private", "missing"])
def test_a_link_in_place_of_the_directory_is_refused(tmp_path, target):
    make_private(tmp_path / "private")
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match="must be a directory"):
        make_private(tmp_path / "link")


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(ConfigError, match="must be a directory"):
        make_private(tmp_path / "file")


async def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    address = new_address("unix", name="x" * 120, directory=tmp_path, host="")
    with pytest.raises(ConfigError, match="EPDG_SOCKET_DIR"):
        await Server(address, "worker", ignore, ignore).start()
