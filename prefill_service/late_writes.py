"""What a worker does when an encoder has written into room that was given to others meanwhile (`LateWrite` of `kv_transfer.lease.receiver`).

Everything computed from those rows is suspect: the requests that read them, the prefix cache, and the requests that share blocks with
them. All these fail; none may answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cluster.errors import ClusterError, UnavailableError
from cluster.kvcache.blocks import BlockPool
from prefill_service.features import FeatureStore
from prefill_service.state import Phase, PrefillRequest


def fail_harmed(
    block_ids: Sequence[int],
    features: FeatureStore,
    blocks: BlockPool,
    requests: Mapping[str, PrefillRequest],
    fail: Callable[[PrefillRequest, ClusterError], None],
) -> None:
    """`block_ids`: of the embeddings' room. Engine thread."""
    readers = [requests[name] for name in features.harmed_by(block_ids) if name in requests]
    if not readers:
        return
    blocks.forget_all()
    tables = {block_id for reader in readers for block_id in _blocks_of(reader)}
    for request in list(requests.values()):
        if request.phase is not Phase.CLOSING and (request in readers or tables & _blocks_of(request)):
            fail(request, UnavailableError("its embeddings were overwritten by an encoder that came late"))


def _blocks_of(request: PrefillRequest) -> set[int]:
    return {block_id for sequence in request.sequences for block_id in sequence.block_table}
