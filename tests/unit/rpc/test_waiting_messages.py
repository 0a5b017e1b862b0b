"""What a connection does with messages that its peer does not read yet."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from cluster.errors import UnavailableError
from cluster.rpc import Connection, Server, connect
from cluster.rpc.connection import STALL_TIMEOUT_S
from cluster.types.media import MediaGeometry, MediaItem, MediaOptions, Modality
from cluster.types.messages import Cancel, StartEncode
from tests.fakes.waiting import until
from tests.unit.rpc.two_ends import Worker, ignore

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
    worker.connections[0].transport.pause_reading()
    return worker, door


class Look:
    """A timer of asyncio, which the test lets run out."""

    def __init__(self, timer: asyncio.TimerHandle, call: Callable[[], None]):
        self.cancelled = timer.cancelled
        self._timer, self._call = timer, call

    def happen(self) -> None:
        self._timer.cancel()
        self._call()


@pytest.fixture
async def looks(monkeypatch) -> list[Look]:
    """At whether a peer reads on: those that connections have ordered."""
    loop, found = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def recorded(delay_s, call, *args, **options):
        timer = call_later(delay_s, call, *args, **options)
        if delay_s == STALL_TIMEOUT_S:
            found.append(Look(timer, partial(call, *args)))
        return timer

    monkeypatch.setattr(loop, "call_later", recorded)
    return found


async def test_a_peer_that_does_not_read_is_cut(tmp_path):
    tmp_path.chmod(0o700)
    server = Server(f"unix:{tmp_path}/s.sock", "worker", lambda c: c.transport.pause_reading(), ignore)
    await server.start()
    closed = []
    door = await connect(server.address, "door", ignore, closed.append, max_buffered_bytes=1_000_000)
    for _ in range(100):
        door.send(Cancel("x" * 100_000))
    await until(lambda: closed)
    assert isinstance(door.error, UnavailableError)
    assert "too slowly" in door.error.message
    await server.aclose()


async def test_media_wait_for_a_slow_peer_without_a_copy_and_arrive_in_order(tmp_path, looks):
    worker, door = await deaf_worker(tmp_path)
    sent = [media("r", idx) for idx in range(64)]
    tracemalloc.start()
    for message in sent:
        door.send(message)
        door.send(Cancel(f"other {message.item_idx}"))
    (num_bytes, _), _ = tracemalloc.get_traced_memory(), tracemalloc.stop()
    assert door.is_open and num_bytes < 8 * MIB
    worker.connections[0].transport.resume_reading()
    await until(lambda: len(worker.messages) == 128)
    assert worker.messages[::2] == sent
    assert worker.messages[1::2] == [Cancel(f"other {idx}") for idx in range(64)]
    assert door.is_open and looks and all(look.cancelled() for look in looks)
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
    worker.connections[0].transport.resume_reading()
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
    worker.connections[0].transport.resume_reading()
    await closing
    await until(lambda: worker.closed)
    assert len(worker.messages) == 8
    await worker.server.aclose()


async def test_a_peer_that_reads_nothing_for_a_while_is_cut_but_no_slow_one(tmp_path, looks):
    worker, door = await deaf_worker(tmp_path)
    door.send(media("r", 0, 8 * MIB))
    left = door.transport.get_write_buffer_size()
    assert left > MIB
    worker.connections[0].transport.resume_reading()
    await until(lambda: door.transport.get_write_buffer_size() < left)
    worker.connections[0].transport.pause_reading()
    looks.pop().happen()
    assert door.is_open, "some of it has been read"
    looks.pop().happen()
    assert not door.is_open and door.error is not None and "stopped reading" in door.error.message
    worker.connections[0].transport.resume_reading()
    await until(lambda: worker.closed)
    await worker.server.aclose()


async def test_media_that_cannot_be_encoded_are_their_senders_error_even_while_others_wait(tmp_path):
    worker, door = await deaf_worker(tmp_path)
    door.send(media("r", 0, 3 * MIB))
    bad = media("bad")
    options = MediaOptions(max_pixels=2**70)
    with pytest.raises(OverflowError):
        door.send(replace(bad, item=replace(bad.item, options=options)))
    assert door.is_open
    worker.connections[0].transport.resume_reading()
    await door.aclose()
    assert [message.request_id for message in worker.messages] == ["r"]
    await worker.server.aclose()
