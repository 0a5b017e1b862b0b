"""Prefill's half of the hand-over to decode: which blocks can go, and when the transfer is complete.

Whole blocks go as soon as their chunk is computed, cached prefix blocks at once; the last, partly filled block goes with
the end of its prompt. A grant names the prompt's blocks, then the companion's. Posting returns immediately (the transfer
thread copies); blocks stay referenced until the sender reports the end.
"""

from __future__ import annotations

import msgspec

from cluster.types.messages import KvReady
from prefill_service.state import PrefillRequest


def send_computed(request: PrefillRequest, block_size: int) -> None:
    """Post what is computed and not posted yet; after the first tokens, finish. No-op until decode's grant is there."""
    if request.outgoing is None:
        return
    first_block = 0  # of the sequence, in the grant
    for sequence in request.sequences:
        num_ready = sequence.num_computed_tokens // block_size
        if sequence.is_complete:
            num_ready = len(sequence.block_table)
        if num_ready > sequence.num_blocks_sent:
            new = range(sequence.num_blocks_sent, num_ready)
            request.outgoing.write([sequence.block_table[i] for i in new], [first_block + i for i in new])
            sequence.num_blocks_sent = num_ready
        first_block += len(sequence.block_table)
    if request.first_tokens:
        ready = KvReady(request.first_tokens, tuple(s.positions.delta for s in request.sequences))
        request.outgoing.finish(msgspec.msgpack.encode(ready))
