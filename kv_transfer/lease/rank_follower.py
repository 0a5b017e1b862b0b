"""The transfers of a rank above 0: its transfer engine repeats what rank 0's did (`group`).

Threads: one reads orders from the pipe, the transfer thread reports events; both write reports to the pipe
under a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from cluster.lost_device import DeviceLostError
from cluster.types.transfer import Mark
from kv_transfer.agents.agent import TransferError
from kv_transfer.lease.events import SendFailed, TransferEngineFailed, TransferEvent
from kv_transfer.lease.outgoing import Outgoing
from kv_transfer.lease.rank_messages import (
    Granted,
    Order,
    OrderAbort,
    OrderCancel,
    OrderFinish,
    OrderGrant,
    OrderNoteWriter,
    OrderOpen,
    OrderRevoke,
    OrderWrite,
    RankEvent,
    Report,
    next_message,
)
from kv_transfer.lease.transfer_engine import TransferEngine


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
        transfer_engine = self._transfer_engine
        match order:
            case OrderGrant(lease_id, block_ids, generations, ttl_s, lengths, firsts):
                grant = transfer_engine.grant(lease_id, block_ids, generations, ttl_s, lengths, firsts)
                self.report(Granted(grant))
            case OrderCancel(lease_id):
                transfer_engine.cancel(lease_id)
            case OrderNoteWriter(lease_id, processes):
                transfer_engine.note_writer(lease_id, processes)
            case OrderRevoke(lease_id, reason):
                transfer_engine.revoke(lease_id, reason)
            case OrderOpen(received):
                try:
                    with self._lock:
                        self._open[received.grant.lease_id] = transfer_engine.open(received)
                except TransferError as error:
                    self.on_event(SendFailed(received.grant.lease_id, error))
            case OrderWrite() | OrderFinish() | OrderAbort():
                if (outgoing := self._open.get(order.lease_id)) is not None:
                    with suppress(TransferError):  # the grant's time is over; the lease's event will say so
                        self._continue(outgoing, order)

    def _continue(self, outgoing: Outgoing, order: OrderWrite | OrderFinish | OrderAbort) -> None:
        match order:
            case OrderWrite(_, local_block_ids, grant_indices, segment_ids, mark):
                outgoing.write(local_block_ids, grant_indices, segment_ids, lambda: self._has(mark))
            case OrderFinish():
                outgoing.finish(b"")
            case OrderAbort(_, reason):
                outgoing.abort(reason)
