"""How an engine sees the transfer of KV: the same interface for a worker of one process and for a worker of
several ranks.

`TransferEngine` and `Outgoing` implement these protocols for one process, `GroupTransferEngine` and
`GroupOutgoing` for a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from cluster.types.curves import CodecSpeed, Link
from cluster.types.members import ProcessId
from cluster.types.transfer import Grant, ReceivedGrant, ReceivedTotals, SentTotals


class KvWriter(Protocol):
    """One lease from the writer's side; see `Outgoing`."""

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


class KvTransfer(Protocol):
    """Opens leases of other workers for writing, and grants leases on blocks of this worker; see
    `TransferEngine`."""

    @property
    def sent(self) -> SentTotals: ...

    @property
    def received(self) -> ReceivedTotals: ...

    @property
    def links(self) -> Mapping[str, Link]: ...

    @property
    def codecs(self) -> Mapping[str, CodecSpeed]: ...

    def open(self, received: ReceivedGrant) -> KvWriter: ...

    def grant(
        self,
        lease_id: str,
        block_ids: Sequence[int],
        generations: Sequence[int],
        ttl_s: float,
        run_lengths: Sequence[int] = (),
    ) -> Grant: ...

    def cancel(self, lease_id: str) -> None: ...

    def note_writer(self, lease_id: str, processes: Sequence[ProcessId]) -> None: ...

    def revoke(self, lease_id: str, reason: str) -> None: ...
