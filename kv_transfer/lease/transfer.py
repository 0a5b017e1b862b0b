"""What a service sees of transfer: the same whether its worker is one process or several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.types.curves import CodecSpeed, Link
from cluster.types.members import ProcessId
from cluster.types.transfer import Grant, ReceivedGrant, ReceivedTotals, SentTotals


class OutgoingLease(Protocol):
    """One lease from the writer's side; `Outgoing` says more. Implemented by `Outgoing` and
    `GroupOutgoing`."""

    lease_id: str

    @property
    def blocks_together(self) -> int: ...

    @property
    def block_s(self) -> float | None: ...

    def write(
        self,
        local_block_ids: Sequence[int],
        grant_indices: Sequence[int],
        segment_ids: Sequence[int] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None: ...

    def finish(self, payload: bytes) -> None: ...

    def abort(self, reason: str) -> None: ...


class BlockTransfer(Protocol):
    """Grants and takes up leases; every call returns at once. Implemented by `TransferEngine` and
    `GroupTransferEngine`.

    `grant`, `cancel`, `note_writer` and `revoke` are the owner's: see `Receiver`. `open` is the writer's: see
    `Sender`.
    """

    @property
    def sent(self) -> SentTotals: ...

    @property
    def received(self) -> ReceivedTotals: ...

    @property
    def links(self) -> dict[str, Link]: ...

    @property
    def codecs(self) -> dict[str, CodecSpeed]: ...

    def grant(
        self,
        lease_id: str,
        block_ids: Sequence[int],
        generations: Sequence[int],
        ttl_s: float,
        run_lengths: Sequence[int] = (),
        first_blocks: Sequence[int] = (),
    ) -> Grant: ...

    def cancel(self, lease_id: str) -> None: ...

    def note_writer(self, lease_id: str, processes: Sequence[ProcessId]) -> None: ...

    def revoke(self, lease_id: str, reason: str) -> None: ...

    def open(self, received: ReceivedGrant) -> OutgoingLease: ...
