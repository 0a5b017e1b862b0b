"""The transfers of a rank above 0: its transfer engine repeats what rank 0's did (`group`).

What runs through the pipe between the two is pickled; both are the same version of this code. An order is a
call of rank 0's transfer engine, or of a lease that was opened there: a method with its arguments.

Threads: one reads orders from the pipe, the transfer thread reports events; both write reports to the pipe
under a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from cluster.lost_device import DeviceLostError
from cluster.types.transfer import Grant, Mark, ReceivedGrant, ReceivedTotals, SentTotals
from kv_transfer.agents.agent import TransferError
from kv_transfer.lease.events import SendFailed, TransferEngineFailed, TransferEvent
from kv_transfer.lease.outgoing import Outgoing
from kv_transfer.lease.transfer_engine import TransferEngine


@dataclass(frozen=True)
class EngineOrder:
    """A call of the transfer engine. "grant" is answered by Granted."""

    method: Literal["grant", "cancel", "note_writer", "revoke"]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class OpenOrder:
    received: ReceivedGrant


@dataclass(frozen=True)
class LeaseOrder:
    """A call of the outgoing lease that was opened with this id."""

    lease_id: str
    method: Literal["write", "finish", "abort"]
    arguments: tuple[Any, ...]
    mark: Mark | None = None  # a write is ready when this rank's forward has come so far


Order = EngineOrder | OpenOrder | LeaseOrder


@dataclass(frozen=True)
class RankReady:
    """The rank has loaded its share of the model, and its transfer engine runs."""

    rank: int


@dataclass(frozen=True)
class RankFailed:
    """The last report: the rank ends, because of this error."""

    rank: int
    message: str
    param: str | None  # of a ConfigError
    at: float  # `time.monotonic`, which the processes of a host share
    is_own: bool = True  # False: it says that another rank has failed


@dataclass(frozen=True)
class Granted:
    grant: Grant


@dataclass(frozen=True)
class RankEvent:
    event: TransferEvent
    sent: SentTotals
    received: ReceivedTotals


Report = RankReady | RankFailed | Granted | RankEvent


def next_message(connection: Connection) -> Any:
    """Blocks. None: the pipe has ended."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


class RankFollower:
    """Made before the transfer engine, whose events it reports; then `attach`, then the first order."""

    def __init__(self, connection: Connection, has: Callable[[Mark], bool]):
        """`has`: whether this rank's forward has come to that mark, and what it wrote is in the memory.
        Called on any thread."""
        self._connection = connection
        self._has = has
        self._lock = threading.Lock()  # guards the pipe's writing end and the table
        self._open: dict[str, Outgoing] = {}

    def attach(self, transfer_engine: TransferEngine) -> None:
        """Once, before the first order."""
        self._transfer_engine = transfer_engine

    def on_event(self, event: TransferEvent) -> None:
        """Reports an event of the transfer engine. Called on its thread."""
        if isinstance(event, TransferEngineFailed):
            if not isinstance(event.error, DeviceLostError):  # it is in the log
                return
        else:
            with self._lock:
                self._open.pop(event.lease_id, None)
        self.report(RankEvent(event, self._transfer_engine.sent, self._transfer_engine.received))

    def report(self, report: Report) -> None:
        with self._lock, suppress(OSError):  # rank 0 is gone: `run` notices it too
            self._connection.send(report)

    def run(self) -> None:
        """Blocks until the pipe ends; for a thread of its own."""
        while (order := next_message(self._connection)) is not None:
            self.follow(order)

    def follow(self, order: Order) -> None:
        match order:
            case EngineOrder(method, arguments):
                result = getattr(self._transfer_engine, method)(*arguments)
                if method == "grant":
                    self.report(Granted(result))
            case OpenOrder(received):
                try:
                    with self._lock:
                        self._open[received.grant.lease_id] = self._transfer_engine.open(received)
                except TransferError as error:
                    self.on_event(SendFailed(received.grant.lease_id, error))
            case LeaseOrder(lease_id, method, arguments, mark):
                if mark is not None:
                    arguments = (*arguments, lambda: self._has(mark))
                if (outgoing := self._open.get(lease_id)) is not None:
                    with suppress(TransferError):  # the grant's time is over; the lease's event will say so
                        getattr(outgoing, method)(*arguments)
