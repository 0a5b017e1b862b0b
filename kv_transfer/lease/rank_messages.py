"""What runs through the pipe between rank 0 of a worker and another of its ranks, pickled. Both are the same
version of this code."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from cluster.types.members import ProcessId
from cluster.types.transfer import Grant, Mark, ReceivedGrant, ReceivedTotals, SentTotals
from kv_transfer.lease.events import TransferEvent

# ------------------------------------------------------------- orders of rank 0: calls of the transfer engine


@dataclass(frozen=True)
class OrderGrant:
    """Answered by Granted."""

    lease_id: str
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    ttl_s: float
    run_lengths: tuple[int, ...]
    first_blocks: tuple[int, ...]


@dataclass(frozen=True)
class OrderCancel:
    lease_id: str


@dataclass(frozen=True)
class OrderNoteWriter:
    lease_id: str
    processes: tuple[ProcessId, ...]


@dataclass(frozen=True)
class OrderRevoke:
    lease_id: str
    reason: str


@dataclass(frozen=True)
class OrderOpen:
    received: ReceivedGrant


@dataclass(frozen=True)
class OrderWrite:
    lease_id: str
    local_block_ids: tuple[int, ...]
    grant_indices: tuple[int, ...]
    segment_ids: tuple[int, ...] | None
    mark: Mark  # the write is ready when this rank's forward has come so far


@dataclass(frozen=True)
class OrderFinish:
    lease_id: str


@dataclass(frozen=True)
class OrderAbort:
    lease_id: str
    reason: str


Order = (
    OrderGrant
    | OrderCancel
    | OrderNoteWriter
    | OrderRevoke
    | OrderOpen
    | OrderWrite
    | OrderFinish
    | OrderAbort
)

# --------------------------------------------------------------------------------- reports of the other ranks


@dataclass(frozen=True)
class RankReady:
    """The rank has loaded its share of the model, and its transfer engine runs."""

    rank: int


@dataclass(frozen=True)
class Granted:
    grant: Grant


@dataclass(frozen=True)
class RankEvent:
    event: TransferEvent
    sent: SentTotals
    received: ReceivedTotals


Report = RankReady | Granted | RankEvent


def next_message(connection: Connection) -> Any:
    """Blocks. None: the pipe has ended."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None
