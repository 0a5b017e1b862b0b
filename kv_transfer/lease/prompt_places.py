"""Where the blocks of a request's prompts lie in a grant, for the writer.

A grant names the blocks that its owner lacks: of each prompt those from `Grant.first_blocks` on, prompt after
prompt. A writer asks here before each write:

    places = PromptPlaces(grant, [len(table) for table in block_tables])       once, when the grant comes
    wanted, indices = places.of(prompt_idx, range(first, end))                 blocks that are final now
    outgoing.write([block_tables[prompt_idx][i] for i in wanted], indices)     nothing, if the owner has them
    outgoing.finish(payload)                                                   always

Groups that travel coded are counted from the start of their prompt. A writer that sends up to multiples of
`OutgoingLease.blocks_together` needs no more care: what the owner lacks of a group of which it has the rest
travels raw.

Pure values: any thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from cluster.types.transfer import Grant
from kv_transfer.agents.agent import TransferError


class PromptPlaces:
    def __init__(self, grant: Grant, num_blocks: Sequence[int]):
        """`num_blocks`: of each prompt, its last, partly filled block included. Raises TransferError if the
        grant was made for other prompts."""
        self._firsts = grant.first_blocks or (0,) * len(num_blocks)
        if len(self._firsts) != len(num_blocks):
            raise TransferError(
                f"lease {grant.lease_id} is for {len(self._firsts)} prompts, not for {len(num_blocks)}"
            )
        wanted = [count - first for count, first in zip(num_blocks, self._firsts, strict=True)]
        if min(wanted, default=0) < 0 or sum(wanted) != len(grant.block_ids):
            raise TransferError(
                f"lease {grant.lease_id} grants {len(grant.block_ids)} blocks from {list(self._firsts)} on; "
                f"the prompts have {list(num_blocks)} blocks"
            )
        starts = itertools.accumulate(wanted, initial=0)
        # of each prompt: what to add to a block's index in the prompt
        self._shifts = [start - first for start, first in zip(starts, self._firsts, strict=False)]

    def of(self, prompt_idx: int, blocks: range) -> tuple[range, range]:
        """Those of these successive blocks of a prompt that the owner lacks, and their indices in the
        grant."""
        first = max(blocks.start, self._firsts[prompt_idx])
        wanted = range(first, max(first, blocks.stop))
        shift = self._shifts[prompt_idx]
        return wanted, range(wanted.start + shift, wanted.stop + shift)

    def first_block(self, prompt_idx: int) -> int:
        """The prompt's first block that travels."""
        return self._firsts[prompt_idx]
