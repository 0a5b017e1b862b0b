"""The inputs of a decode step as one matrix: one pinned buffer on the host, one on the device, one copy
between them.

There is one row per sequence: token id, position, slot, context length, then the block table. Rows are
independent and contiguous, so a step of any batch size uses the first rows of the matrix. Tried on the CPU
only, where both buffers are plain memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_TOKEN, _POSITION, _SLOT, _CONTEXT, _TABLE = range(5)


@dataclass(frozen=True)
class DecodeInputs:
    """One new token for each of B sequences, on the model's device. Views of a `StepMatrix`, valid until its
    next `fill`."""

    token_ids: Tensor  # [B] int32
    position_ids: Tensor  # [B] int32
    slots: Tensor  # [B] int32: where the new token's K and V go
    context_lens: Tensor  # [B] int32, including the new token
    block_tables: Tensor  # [B, max_blocks] int32; entries behind the context are any valid block ids


class StepMatrix:
    """Owns both buffers. One thread. `fill` may be repeated at once; it waits for the previous copy.

    max_blocks: the longest block table. scratch_block: a block that belongs to no request, for the K and V of
    padding rows.
    """

    def __init__(
        self, max_batch: int, max_blocks: int, block_size: int, scratch_block: int, device: torch.device
    ):
        self.max_batch = max_batch
        self.max_blocks = max_blocks
        self._block_size = block_size
        shape = (max_batch, _TABLE + max_blocks)
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu)
        self._rows = self._host.numpy()
        self._device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._padding = np.zeros(shape[1], dtype=np.int32)
        self._padding[_SLOT] = scratch_block * block_size
        self._padding[_CONTEXT] = 1
        self._padding[_TABLE:] = scratch_block
        self._rows[:] = self._padding

    def fill(
        self,
        token_ids: Sequence[int],
        context_lens: Sequence[int],
        deltas: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        batch_size: int,
    ) -> DecodeInputs:
        """Arguments as in `LanguageModel.decode`. Rows from len(token_ids) to batch_size are padding.
        Enqueues the copy on the current stream."""
        if self._copied is not None:
            self._copied.synchronize()
        count, rows = len(token_ids), self._rows
        contexts = np.asarray(context_lens, dtype=np.int32)
        rows[:count, _TOKEN] = token_ids
        rows[:count, _POSITION] = contexts + np.asarray(deltas, dtype=np.int32)
        rows[:count, _CONTEXT] = contexts + 1
        for row, table in zip(rows, block_tables, strict=False):
            used = min(len(table), self.max_blocks)  # a table may reserve blocks for later
            row[_TABLE : _TABLE + used] = table[:used]
        last_blocks = rows[np.arange(count), _TABLE + contexts // self._block_size]
        rows[:count, _SLOT] = last_blocks * self._block_size + contexts % self._block_size
        rows[count:batch_size] = self._padding
        self._device[:batch_size].copy_(self._host[:batch_size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return self.inputs(batch_size)

    def inputs(self, batch_size: int) -> DecodeInputs:
        """Views of the first rows on the device, always at the same addresses."""
        rows = self._device[:batch_size]
        return DecodeInputs(
            rows[:, _TOKEN], rows[:, _POSITION], rows[:, _SLOT], rows[:, _CONTEXT], rows[:, _TABLE:]
        )
