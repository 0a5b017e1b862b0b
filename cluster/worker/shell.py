"""The sockets of one worker process: doors' messages go to the engine, the engine's answers go to the doors.

A door's end-of-file cancels everything that door asked for. Lives on the event loop; the engine lives on its own thread and
answers through `deliver_from_thread`, one hand-over per step.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

from cluster.errors import to_info
from cluster.rpc import Connection, Server
from cluster.types.messages import AnyMessage, Failed, Ping, Pong, Stalled
from cluster.worker.loop import StepLoop
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.setup import WorkerSetup

logger = logging.getLogger(__name__)


class DropsDoors(Protocol):
    def drop_door(self, door: DoorId) -> None:
        """Cancel everything the door asked for. Engine's thread."""


class WorkerShell:
    def __init__(
        self,
        setup: WorkerSetup,
        outbox: Outbox,
        loop: StepLoop,
        engine: DropsDoors,
        on_message: Callable[[DoorId, AnyMessage], None],
    ):
        """`on_message` runs on the event loop and must not block."""
        self._server = Server(
            setup.address,
            setup.replica_id,
            self._on_connect,
            self._on_message,
            self._on_close,
            secret=setup.secret,
        )
        self._outbox = outbox
        self._loop = loop
        self._engine = engine
        self._handle = on_message
        self._doors: dict[Connection, DoorId] = {}
        self._connections: dict[DoorId, Connection] = {}
        self._num_doors_seen = 0
        self._stalled = Stalled(())
        self._is_alone = asyncio.Event()  # no door is connected
        self._is_alone.set()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._hanging_up: asyncio.Future[None] | None = None

    async def start(self) -> str:
        """Listen; returns the address to dial."""
        self._event_loop = asyncio.get_running_loop()
        self._loop.on_failure(functools.partial(self.call_from_thread, self._hang_up))
        await self._server.start()
        return self._server.address

    async def aclose(self) -> None:
        await self._server.aclose()

    async def wait_alone(self) -> None:
        """Until every door has hung up. A door does so when Serve does not list this worker any more and the last of its requests that
        had a part here is over; a door that ends does, too."""
        await self._is_alone.wait()

    def send(self, door: DoorId, message: AnyMessage) -> None:
        """Event loop only. A door that is gone is ignored."""
        connection = self._connections.get(door)
        if connection is not None:
            connection.send(message)

    def call_from_thread(self, function: Callable[..., None], *args: Any) -> None:
        """Run `function(*args)` on the event loop, in order. Ignored once the loop is closed."""
        assert self._event_loop is not None
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(function, *args)

    def deliver_from_thread(self, batch: list[tuple[DoorId, AnyMessage]]) -> None:
        self.call_from_thread(self._deliver, batch)

    def tell_stalled(self, threads: tuple[str, ...]) -> None:
        """Event loop only."""
        logger.info("threads that do not move: %s", ", ".join(threads) or "none any more")
        self._stalled = Stalled(threads)
        for connection in list(self._doors):
            connection.send(self._stalled)

    def _deliver(self, batch: list[tuple[DoorId, AnyMessage]]) -> None:
        for door, message in batch:
            self.send(door, message)

    def _hang_up(self) -> None:
        """The engine is dead: doors learn it now, from end-of-file, and not from their requests' deadlines."""
        for connection in list(self._doors):
            connection.abort()
        self._hanging_up = asyncio.ensure_future(self._server.aclose())  # nobody may dial a dead engine

    def _on_connect(self, connection: Connection) -> None:
        self._num_doors_seen += 1
        door = self._num_doors_seen
        self._doors[connection] = door
        self._connections[door] = connection
        self._is_alone.clear()
        self._loop.call(self._outbox.add_door, door)
        if self._stalled.threads:
            connection.send(self._stalled)

    def _on_message(self, connection: Connection, message: AnyMessage) -> None:
        """An error ends the request that the message is about, not the connection with all the others."""
        if isinstance(message, Ping):
            return connection.send(Pong())
        try:
            self._handle(self._doors[connection], message)
        except Exception as error:
            logger.exception("a message could not be handled: %s", type(message).__name__)
            request = getattr(message, "request", message)
            request_id, item_idx = getattr(request, "request_id", None), getattr(message, "item_idx", None)
            if request_id is not None:
                connection.send(Failed(request_id, to_info(error), item_idx))

    def _on_close(self, connection: Connection) -> None:
        door = self._doors.pop(connection)
        del self._connections[door]
        if not self._connections:
            self._is_alone.set()
        self._loop.call(self._engine.drop_door, door)
        self._loop.call(self._outbox.remove_door, door)
