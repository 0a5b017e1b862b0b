"""Which blocks the choices of a request hold: they take over the blocks of the prompts, grow, and free the
blocks behind a window.

Functions of the engine's thread over the records of a request and the pool. The runner copies the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.kvcache.blocks import BlockPool
from cluster.worker.blame import bookkeeping
from decode_service.state import Branch, DecodeChoice, DecodeRequest


def allocate_prompt_blocks(request: DecodeRequest, blocks: BlockPool) -> None:
    """Admission has checked that these blocks are free."""
    lengths = [len(prompt.token_ids) for prompt in request.request.prompts]
    for length in lengths:
        request.prompt_blocks.append(blocks.allocate(-(-length // blocks.block_size)))
    num_copies = request.num_admission_blocks(blocks.block_size) - sum(map(len, request.prompt_blocks))
    request.copy_blocks = blocks.allocate(num_copies)


def share_prompt_blocks(
    request: DecodeRequest, position_deltas: Sequence[int], blocks: BlockPool
) -> tuple[list[int], list[int]]:
    """The first live choice takes over the blocks of the prompts. The other choices share the full blocks and
    get a copy of the last one: from here on every choice writes to its own blocks only. Returns the blocks to
    be copied, and their targets."""
    sources: list[int] = []
    targets: list[int] = []
    choices = request.live_choices
    for i, (prompt, delta) in enumerate(zip(request.request.prompts, position_deltas, strict=True)):
        length, held = len(prompt.token_ids), request.prompt_blocks[i]
        full = held[: length // blocks.block_size]
        for choice in choices:
            if choice is choices[0]:
                table, request.prompt_blocks[i] = list(held), []
            else:
                blocks.share(full)
                table = list(full)
                if length % blocks.block_size:
                    sources.append(held[-1])
                    targets.append(request.copy_blocks.pop())
                    table.append(targets[-1])
            choice.branches.append(Branch(length, delta, table))
    spare, request.copy_blocks = request.copy_blocks, []
    blocks.free(spare)  # blocks for choices that have ended already
    return sources, targets


def try_grow(request: DecodeRequest, blocks: BlockPool) -> bool:
    """Allocates blocks for the next token of every choice, and for its drafts if there is room. False: there
    is no room for the next tokens."""
    if _try_cover(request, blocks):
        return True
    for choice in request.live_choices:
        choice.drafts = []
    return _try_cover(request, blocks)


def _try_cover(request: DecodeRequest, blocks: BlockPool) -> bool:
    tables = [
        (branch.block_table, (choice.context_len(branch) + len(choice.drafts)) // blocks.block_size + 1)
        for choice in request.live_choices
        for branch in choice.branches
    ]
    missing = sum(max(0, wanted - len(table)) for table, wanted in tables)
    if missing == 0:
        return True
    fresh = blocks.try_allocate(missing)
    if fresh is None:
        return False
    for table, wanted in tables:
        while len(table) < wanted:
            table.append(fresh.pop())
    return True


@bookkeeping
def free_blocks_behind_window(choice: DecodeChoice, blocks: BlockPool, window: int | None) -> None:
    """Frees the blocks that no later step of the choice can see. A block that other choices share loses one
    reference."""
    if window is None:
        return
    for branch in choice.branches:
        first_visible = max(0, choice.context_len(branch) + 1 - window)
        blocks.free(branch.drop_behind_window(first_visible // blocks.block_size))
