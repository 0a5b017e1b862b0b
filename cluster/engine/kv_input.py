"""The engine's port for KV that comes in: leases on the blocks of prompts, into which the workers that
compute the prompts write.

Owns the open leases. Used on the engine's thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from cluster.engine.state import LanguageRequest
from cluster.ids import new_lease_id
from cluster.kvcache.blocks import BlockPool
from cluster.types.transfer import Grant
from kv_transfer.lease.transfer import BlockTransfer


@dataclass(eq=False)
class KvInput:
    _transfer_engine: BlockTransfer
    _blocks: BlockPool
    # the sender may leave the end of a prompt to this worker, and is told what a token costs here
    _allows_recompute: bool
    _by_lease: dict[str, LanguageRequest] = field(default_factory=dict)

    @property
    def num_open_leases(self) -> int:
        return len(self._by_lease)

    def grant(self, request: LanguageRequest, token_s: float | None) -> Grant:
        """Lets the sender write to the blocks of the request's prompts that are not cached here, and behind
        those of each prompt to its state. token_s: in which this worker computes a token of a prompt."""
        lease_id = new_lease_id()
        firsts = [sequence.num_cached_tokens // self._blocks.block_size for sequence in request.sequences]
        tables = [[*sequence.block_table, *sequence.state] for sequence in request.sequences]
        granted = [
            block_id for first, table in zip(firsts, tables, strict=True) for block_id in table[first:]
        ]
        generations = self._blocks.generations(granted)
        is_coded = request.codec != "raw"
        lengths = [sequence.num_prompt_tokens for sequence in request.sequences] if is_coded else ()
        grant = self._transfer_engine.grant(
            lease_id, granted, generations, request.timeout_s, lengths, firsts if any(firsts) else ()
        )
        request.lease_blocks(lease_id)
        self._by_lease[lease_id] = request
        return msgspec.structs.replace(grant, token_s=token_s) if self._allows_recompute else grant

    def pop_closed(self, lease_id: str) -> LanguageRequest | None:
        """The request whose lease has closed. None: the lease was granted for no request."""
        return self._by_lease.pop(lease_id, None)

    def try_cancel(self, request: LanguageRequest) -> bool:
        """Asks the writer of the request's blocks to stop; its lease closes later. False: the request has no
        open lease."""
        if request.lease_id not in self._by_lease:
            return False
        self._transfer_engine.cancel(request.lease_id)
        return True
