"""Prefill's half of the hand-over to decode: which blocks can go, and when the transfer is complete.

Whole blocks go as soon as their chunk is computed, cached prefix blocks at once; the last, partly filled block goes with
the end of the prompt. Posting returns immediately (the transfer thread copies); blocks stay referenced until the sender
reports the end.
"""

from __future__ import annotations

import msgspec

from cluster.types.messages import KvReady
from prefill_service.state import PrefillRequest


def send_computed(request: PrefillRequest, block_size: int) -> None:
    """Post what is computed and not posted yet; after the first token, finish. No-op until decode's grant is there."""
    if request.outgoing is None:
        return
    is_complete = request.first_token is not None
    num_ready = len(request.block_table) if is_complete else request.num_computed_tokens // block_size
    if num_ready > request.num_blocks_sent:
        indices = list(range(request.num_blocks_sent, num_ready))
        request.outgoing.write([request.block_table[i] for i in indices], indices)
        request.num_blocks_sent = num_ready
    if is_complete:
        assert request.first_token is not None
        ready = KvReady(first_token=request.first_token, position_delta=request.positions.delta)
        request.outgoing.finish(msgspec.msgpack.encode(ready))
