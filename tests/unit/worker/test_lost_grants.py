"""Grants of a worker that no door has read, over real sockets: the worker takes them back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.rpc import Connection, connect
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    DecodeGranted,
    DecodeTarget,
    Goodbye,
    GrantPassed,
    ReturnGrant,
)
from cluster.types.transfer import Contract, Grant
from cluster.worker.outbox import Outbox
from cluster.worker.shell import MAX_DOORS, WorkerShell
from tests.fakes.waiting import until

CONTRACT = Contract(0, "", 16, (), "raw", "")


def granted(lease_id: str) -> DecodeGranted:
    return DecodeGranted("r", Grant(lease_id, b"", 0, 8, CONTRACT, (0,), (0,), 1.0))


class Worker:
    """Its sockets, around an engine that does nothing."""

    def __init__(self, address: str, secret: str | None = None):
        setup: Any = SimpleNamespace(address=address, replica_id="w", secret=secret)
        loop = SimpleNamespace(call=self._call, on_failure=lambda _: None)
        engine, outbox = SimpleNamespace(drop_door=None), Outbox(lambda _: None)
        self.heard: list[AnyMessage] = []
        seat: Any = SimpleNamespace(loop=loop, outbox=outbox, engine=engine)
        self.secret = secret
        self.door = 0  # the last one that has connected
        self.shell = WorkerShell(setup, [seat], lambda _, message: self.heard.append(message))

    async def start(self) -> None:
        self.address = await self.shell.start()

    def _call(self, function: Callable[..., None], door: int) -> None:
        if function is not None:  # the engine has no `drop_door`
            function(door)
        self.door = max(self.door, door)

    async def dial(self, last_read: str | None = "", name: str = "door") -> tuple[Connection, list[Any]]:
        read: list[Any] = []
        num_doors = self.door
        connection = await connect(
            self.address,
            name,
            lambda _, message: read.append(message),
            last_read=last_read,
            secret=self.secret,
        )
        await until(lambda: self.door > num_doors)
        return connection, read

    async def lose(self, connection: Connection) -> None:
        connection.abort()
        await until(lambda: not self.shell.connections)


@pytest.fixture
async def worker(tmp_path) -> AsyncIterator[Worker]:
    tmp_path.chmod(0o700)
    worker = Worker(f"unix:{tmp_path / 'w'}")
    await worker.start()
    yield worker
    await worker.shell.aclose()


async def test_a_grant_for_a_door_that_is_gone_is_taken_back_at_once(worker):
    connection, _ = await worker.dial()
    await worker.lose(connection)
    worker.shell.send(worker.door, granted("a"))
    assert worker.heard == [ReturnGrant("a")]


async def test_a_grant_that_its_door_has_not_read_is_taken_back_when_the_door_dials_again(worker):
    _, read = await worker.dial()
    worker.shell.send(worker.door, granted("a"))
    await until(lambda: read)
    worker.shell.send(worker.door, granted("b"))
    worker.shell.connections[worker.door].abort()  # what was sent is lost, or not: the door says it
    await until(lambda: not worker.shell.connections)
    assert worker.heard == []
    again, _ = await worker.dial("DecodeGranted a")
    assert worker.heard == [ReturnGrant("b")]
    await worker.lose(again)
    await worker.dial("DecodeGranted a")
    assert worker.heard == [ReturnGrant("b")], "once"


@pytest.mark.parametrize("is_tcp", [False, True])
async def test_a_grant_that_a_door_leaves_unread_is_taken_back_when_it_says_goodbye(worker, is_tcp):
    """The worker has drained, so the door does not dial again. The grant lies in its socket, and others are
    ready when the worker has read the farewell (seed 66298)."""
    if is_tcp:
        worker = Worker("tcp:127.0.0.1:0", "secret")
        await worker.start()
    connection, read = await worker.dial()
    worker.shell.send(worker.door, granted("a"))
    await until(lambda: read)
    connection.transport.pause_reading()
    worker.shell.send(worker.door, granted("b"))
    connection.send(Cancel("r"))
    connection.send(Goodbye("DecodeGranted a"))
    closing = asyncio.ensure_future(connection.aclose())
    await until(lambda: len(worker.heard) == 2)
    worker.shell.send(worker.door, granted("c"))
    assert worker.heard == [Cancel("r"), ReturnGrant("b"), ReturnGrant("c")]
    await closing
    await until(lambda: not worker.shell.connections)
    if is_tcp:
        await worker.shell.aclose()


async def test_a_grant_that_was_read_stays_and_so_do_those_of_other_doors(worker):
    connection, read = await worker.dial()
    worker.shell.send(worker.door, granted("a"))
    await until(lambda: read)
    await worker.lose(connection)
    await worker.dial("", "another")
    await worker.dial("DecodeGranted a")
    assert worker.heard == []


async def test_a_door_is_told_what_was_read_last(worker):
    connection, _ = await worker.dial(None)
    assert connection.peer_last_read is None, "it was not known"
    for message in (DecodeTarget("r", granted("a").grant), GrantPassed("b", ())):
        connection.send(message)
    await until(lambda: len(worker.heard) == 2)
    await worker.lose(connection)
    again, _ = await worker.dial()
    assert again.peer_last_read == "GrantPassed b"
    other, _ = await worker.dial(None, "another")
    assert other.peer_last_read is None


async def test_what_an_earlier_connection_still_holds_is_not_read(worker):
    """The door has closed it, and the worker has not noticed: otherwise the door would believe that a grant
    is lost which the worker reads later."""
    former, _ = await worker.dial()
    first = worker.shell.connections[worker.door]
    again, _ = await worker.dial()
    assert not first.is_open and again.peer_last_read == ""
    former.send(DecodeTarget("r", granted("a").grant))
    again.send(GrantPassed("b", ()))
    await until(lambda: worker.heard and len(worker.shell.connections) == 1)
    assert worker.heard == [GrantPassed("b", ())]


async def test_doors_that_do_not_come_back_are_forgotten(worker):
    """Then it is not known what was read of them: not even when one comes back and its greeting is lost."""
    for idx in range(MAX_DOORS + 2):
        connection, _ = await worker.dial("", f"door {idx}")
        await worker.lose(connection)
    kept, _ = await worker.dial("", "door 2")
    assert kept.peer_last_read == "", "one of the last doors is remembered"
    await worker.lose(kept)
    for _ in range(2):
        forgotten, _ = await worker.dial("", "door 0")
        assert forgotten.peer_last_read is None
    forgotten.send(GrantPassed("a", ()))
    await until(lambda: worker.heard)
    again, _ = await worker.dial("", "door 0")
    assert again.peer_last_read == "GrantPassed a"
