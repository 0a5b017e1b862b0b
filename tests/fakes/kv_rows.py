"""What stands for a token's KV in memories of engines without models: one number, which can be recognised.

Plain: as it is. Coded: as digits, one for each head of V, so small that a codec of 8 bits gives every one
back exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from cluster.types.request import Prompt
from tests.fakes.requests import kv_value

BLOCK_SIZE = 4
KV_LAYOUT = MemoryLayout((SegmentSpec(BLOCK_SIZE, (1,), torch.int64),))
NUM_DIGITS, BASE = 3, 120
CODED_KV_LAYOUT = MemoryLayout((SegmentSpec(BLOCK_SIZE, (NUM_DIGITS, 1), torch.float32),) * 2)  # K, V
_PLACES = torch.tensor([BASE**i for i in range(NUM_DIGITS)])


def write_token(memory: BlockMemory, block_table: Sequence[int], position: int, value: int) -> None:
    block_id, offset = block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
    if len(memory.segments) == 1:
        memory.segments[0][block_id, offset] = value
    else:
        memory.segments[0][block_id, offset] = 1.0
        memory.segments[1][block_id, offset, :, 0] = (value // _PLACES % BASE).float()


def check_tokens(
    memory: BlockMemory,
    block_table: Sequence[int],
    prompt: Prompt,
    num_tokens: int,
    behind: Sequence[int] = (),
) -> None:
    """The prompt's first tokens, and those behind it."""
    rows = memory.segments[-1][list(block_table)]
    numbers = (
        rows.flatten() if rows.dtype == torch.int64 else (rows[..., 0].round().long() @ _PLACES).flatten()
    )
    expected = [kv_value(prompt, position) for position in range(num_tokens)] + list(behind)
    assert numbers.tolist()[: len(expected)] == expected, "foreign KV"
