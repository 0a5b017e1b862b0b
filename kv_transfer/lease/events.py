"""How leases end: the events that a transfer engine delivers to its owner, on the transfer thread."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.agents.agent import TransferError

# --------------------------------------------------------------------------------- to the owner of the memory


@dataclass(frozen=True)
class Completed:
    """All bytes are in the blocks."""

    lease_id: str
    payload: bytes  # what the writer passed to `finish`


@dataclass(frozen=True)
class Aborted:
    """The writer has stopped, or the owner discarded the bytes. The content of the blocks is undefined."""

    lease_id: str
    reason: str


@dataclass(frozen=True)
class Expired:
    """No word of the writer came in time; its right to write is over."""

    lease_id: str


LeaseEvent = Completed | Aborted | Expired


@dataclass(frozen=True)
class LateWrite:
    """A lease that was taken back has been written to later. This is not the end of a lease. What reads these
    blocks must fail."""

    lease_id: str
    block_ids: tuple[int, ...]


# ---------------------------------------------------------------------------------------------- to the writer


@dataclass(frozen=True)
class Finished:
    """All bytes are in the owner's memory, and the owner was notified."""

    lease_id: str


@dataclass(frozen=True)
class SendAborted:
    """The caller's abort is complete: nothing is in flight, and the owner was notified, if it lives."""

    lease_id: str
    reason: str


@dataclass(frozen=True)
class SendFailed:
    lease_id: str
    error: TransferError


SendEvent = Finished | SendAborted | SendFailed

# ---------------------------------------------------------------------------------------------------- to both


@dataclass(frozen=True)
class TransferEngineFailed:
    """A bug, a broken transport or a lost device (DeviceLostError): a step raised. Delivered once per series
    of failing steps."""

    error: Exception


TransferEvent = LeaseEvent | LateWrite | SendEvent | TransferEngineFailed
