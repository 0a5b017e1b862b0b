"""The sockets of one worker process: messages of doors go to the engine, messages of the engine go to the
doors.

When a door's connection ends, everything that the door requested is cancelled. A grant that the door has not
read is taken back: at once, if it was not sent; if it was on its way, when the door says so, because it
closes the connection itself or has dialled again. Lives on the event loop. The engine lives on its own thread
and sends through `deliver_from_thread`, once per step.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from cluster.errors import to_info
from cluster.ids import new_process_name
from cluster.rpc import Connection, SentLog, Server, grant_name
from cluster.types.members import Phase
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    DecodeGranted,
    Failed,
    FeatureGranted,
    Goodbye,
    ItemMessage,
    PhasesAssigned,
    Ping,
    Pong,
    RequestMessage,
    ReturnGrant,
    Stalled,
    StartDecode,
    StartPrefill,
)
from cluster.worker.outbox import DoorId
from cluster.worker.seat import EngineSeat
from cluster.worker.setup import WorkerSetup

logger = logging.getLogger(__name__)

MAX_DOORS = 64  # that are remembered without a connection


class WorkerShell:
    def __init__(
        self,
        setup: WorkerSetup,
        seats: Sequence[EngineSeat],
        on_message: Callable[[DoorId, AnyMessage], None],
        make_server: Callable[..., Server] = Server,
    ):
        """`on_message` runs on the event loop and must not block."""
        self.name = new_process_name(setup.replica_id)
        self._server = make_server(
            setup.address,
            self.name,
            self._on_connect,
            self._on_message,
            self._on_close,
            secret=setup.secret,
            last_read=self._last_read,
        )
        self._seats = seats
        self._handle = on_message
        self._doors: dict[Connection, DoorId] = {}
        self.connections: dict[DoorId, Connection] = {}  # of all doors that are connected
        # By the door's name, in the order of their last connections: leases whose grants it was sent
        self._logs: dict[str, SentLog[str]] = {}
        self._has_forgotten = False  # a log
        self._num_doors_seen = 0
        self._stalled = Stalled(())
        self._assigned = PhasesAssigned((), 0)  # epoch 0: all phases of the role
        self._is_alone = asyncio.Event()  # no door is connected
        self._is_alone.set()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._hanging_up: asyncio.Future[None] | None = None

    async def start(self) -> str:
        """Listens. Returns the address to dial."""
        self._event_loop = asyncio.get_running_loop()
        for seat in self._seats:
            seat.loop.on_failure(functools.partial(self.call_from_thread, self._hang_up))
        await self._server.start()
        return self._server.address

    async def aclose(self) -> None:
        await self._server.aclose()

    async def wait_alone(self) -> None:
        """Returns when every door has closed its connection. A door does so when Serve does not list this
        worker any more and its last request that had a part here is over. A door that ends does so, too."""
        await self._is_alone.wait()

    def send(self, door: DoorId, message: AnyMessage) -> None:
        """Event loop only. If the door is gone, a grant is taken back, and everything else ignored."""
        connection = self.connections.get(door)
        is_grant = isinstance(message, DecodeGranted | FeatureGranted)
        if connection is None or not connection.is_open:
            return self._handle(door, ReturnGrant(message.grant.lease_id)) if is_grant else None
        if is_grant:
            self._logs[connection.peer_name].sent(grant_name(message), message.grant.lease_id)
        connection.send(message)

    def call_from_thread(self, function: Callable[..., None], *args: Any) -> None:
        """Runs `function(*args)` on the event loop, in order. Ignored after the loop is closed."""
        assert self._event_loop is not None
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(function, *args)

    def deliver_from_thread(self, batch: list[tuple[DoorId, AnyMessage]]) -> None:
        self.call_from_thread(self._deliver, batch)

    def tell_stalled(self, threads: tuple[str, ...]) -> None:
        """Event loop only."""
        logger.info("threads that do not move: %s", ", ".join(threads) or "none any more")
        self._stalled = Stalled(threads)
        self._broadcast(self._stalled)

    def assign(self, phases: Collection[Phase]) -> None:
        """Makes new requests use this worker for these phases. Event loop only."""
        self._assigned = PhasesAssigned(tuple(sorted(phases)), self._assigned.epoch + 1)
        logger.info("assigned phases: %s (epoch %d)", ", ".join(phases), self._assigned.epoch)
        self._broadcast(self._assigned)

    def _broadcast(self, message: AnyMessage) -> None:
        for connection in list(self._doors):
            connection.send(message)

    def _deliver(self, batch: list[tuple[DoorId, AnyMessage]]) -> None:
        for door, message in batch:
            self.send(door, message)

    def _hang_up(self) -> None:
        """An engine has failed. Its doors learn it now, from the end of the connection, and not from the
        deadlines of their requests."""
        for connection in list(self._doors):
            connection.abort()
        # No door may dial a worker whose engine has failed.
        self._hanging_up = self._hanging_up or asyncio.ensure_future(self._server.aclose())

    def _last_read(self, door_name: str) -> str | None:
        """The door dials again. What an earlier connection still holds is not read any more."""
        for connection in list(self._doors):
            if connection.peer_name == door_name:
                connection.abort()
        log = self._logs.get(door_name)
        return None if log is None else log.last_read

    def _on_connect(self, connection: Connection) -> None:
        self._num_doors_seen += 1
        door = self._num_doors_seen
        self._doors[connection] = door
        self.connections[door] = connection
        name, last_read = connection.peer_name, None if self._has_forgotten else ""
        log = self._logs[name] = self._logs.pop(name, None) or SentLog(name, last_read)
        self._take_back(door, log, connection.peer_last_read)
        self._is_alone.clear()
        for seat in self._seats:
            seat.loop.call(seat.outbox.add_door, door)
        if self._stalled.threads:
            connection.send(self._stalled)
        if self._assigned.epoch:
            connection.send(self._assigned)

    def _take_back(self, door: DoorId, log: SentLog[str], last_read: str | None) -> None:
        """Grants that were sent to the door after the last one that it has read."""
        for lease_id in log.take_unread(last_read):
            self._handle(door, ReturnGrant(lease_id))

    def _on_message(self, connection: Connection, message: AnyMessage) -> None:
        """An error ends the request that the message is about, not the connection with its other requests."""
        if isinstance(message, Ping):
            return connection.send(Pong())
        if isinstance(message, Goodbye):
            # The door reads nothing more: grants that are ready later must not be sent.
            connection.abort()
            return self._take_back(
                self._doors[connection], self._logs[connection.peer_name], message.last_read
            )
        if name := grant_name(message):
            self._logs[connection.peer_name].last_read = name
        try:
            self._handle(self._doors[connection], message)
        except Exception as error:
            logger.exception("a message could not be handled: %s", type(message).__name__)
            if (failed := _failure_of(message, error)) is not None:
                connection.send(failed)

    def _on_close(self, connection: Connection) -> None:
        door = self._doors.pop(connection)
        del self.connections[door]
        self._forget_doors()
        if not self.connections:
            self._is_alone.set()
        for seat in self._seats:
            seat.loop.call(seat.engine.drop_door, door)
            seat.loop.call(seat.outbox.remove_door, door)

    def _forget_doors(self) -> None:
        """The log of a door that is not connected is kept in case it dials again: of the last MAX_DOORS."""
        connected = {connection.peer_name for connection in self._doors}
        away = [name for name in self._logs if name not in connected]
        for name in away[:-MAX_DOORS]:
            del self._logs[name]
            self._has_forgotten = True


def _failure_of(message: AnyMessage, error: Exception) -> Failed | None:
    """What the door is told if a message cannot be handled. None: the message is about no request."""
    match message:
        case StartPrefill() | StartDecode():
            return Failed(message.request.request_id, to_info(error))
        case ItemMessage() | Cancel():
            return Failed(message.request_id, to_info(error), message.item_idx)
        case RequestMessage():
            return Failed(message.request_id, to_info(error))
        case _:
            return None
