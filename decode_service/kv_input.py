"""The decode engine's port for KV that comes in: leases on the blocks of prompts, into which prefill workers
write.

Owns the open leases. Used on the engine's thread only.
"""

from __future__ import annotations

import msgspec

from cluster.ids import new_lease_id
from cluster.kvcache.blocks import BlockPool
from cluster.types.transfer import Grant, ReceivedTotals
from decode_service.state import DecodeRequest
from kv_transfer.lease.transfer import BlockTransfer


class KvInput:
    def __init__(self, transfer_engine: BlockTransfer, blocks: BlockPool, allows_recompute: bool):
        """`allows_recompute`: prefill workers may leave the end of a prompt to this worker, and are told what
        a token costs here."""
        self._transfer_engine = transfer_engine
        self._blocks = blocks
        self._allows_recompute = allows_recompute
        self._by_lease: dict[str, DecodeRequest] = {}

    @property
    def num_open_leases(self) -> int:
        return len(self._by_lease)

    @property
    def received(self) -> ReceivedTotals:
        return self._transfer_engine.received

    def grant(self, request: DecodeRequest, token_s: float | None) -> Grant:
        """Lets a prefill worker write to the blocks of the request's prompts. token_s: in which this worker
        computes a token of a prompt."""
        lease_id = new_lease_id()
        granted = [block_id for table in request.prompt_blocks for block_id in table]
        generations = self._blocks.generations(granted)
        is_coded = request.codec != "raw"
        lengths = [len(prompt.token_ids) for prompt in request.request.prompts] if is_coded else ()
        grant = self._transfer_engine.grant(lease_id, granted, generations, request.timeout_s, lengths)
        request.lease_id = lease_id
        self._by_lease[lease_id] = request
        return msgspec.structs.replace(grant, token_s=token_s) if self._allows_recompute else grant

    def pop_closed(self, lease_id: str) -> DecodeRequest | None:
        """The request whose lease has closed. None: the lease was granted for no request."""
        return self._by_lease.pop(lease_id, None)

    def try_cancel(self, request: DecodeRequest) -> bool:
        """Asks the writer of the request's blocks to stop; its lease closes later. False: the request has no
        open lease."""
        if request.lease_id not in self._by_lease:
            return False
        self._transfer_engine.cancel(request.lease_id)
        return True
