"""Where embeddings live: in registered memory, so that they are sent from where they are kept.

Keyed by media hash, bounded by the memory's size, least recently used first out. An entry in use (pinned) is never
evicted. Owned by the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory


@dataclass(eq=False)
class _Entry:
    block_ids: list[int]
    num_pins: int = 0


class EmbeddingCache:
    def __init__(self, memory: BlockMemory, blocks: BlockPool):
        self._memory = memory
        self._blocks = blocks
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_pinned_blocks = 0

    def __contains__(self, media_hash: str) -> bool:
        return media_hash in self._entries

    @property
    def max_rows(self) -> int:
        return self._blocks.num_blocks * self._blocks.block_size

    @property
    def num_pinned_blocks(self) -> int:
        return self._num_pinned_blocks

    @property
    def num_cached_blocks(self) -> int:
        return self._blocks.num_blocks - self._blocks.num_free - self._num_pinned_blocks

    def pin(self, media_hash: str) -> list[int]:
        """The entry's blocks, which stay until `unpin`. Once per user; KeyError when not cached."""
        entry = self._entries[media_hash]
        self._entries.move_to_end(media_hash)
        entry.num_pins += 1
        if entry.num_pins == 1:
            self._num_pinned_blocks += len(entry.block_ids)
        return entry.block_ids

    def unpin(self, media_hash: str) -> None:
        entry = self._entries[media_hash]
        entry.num_pins -= 1
        if entry.num_pins == 0:
            self._num_pinned_blocks -= len(entry.block_ids)

    def has_room(self, num_rows: int) -> bool:
        """Whether `num_rows` more rows fit once everything unpinned is evicted."""
        return self._num_blocks(num_rows) <= self._blocks.num_blocks - self._num_pinned_blocks

    def try_insert(self, media_hash: str, rows: torch.Tensor) -> bool:
        """Copy `rows` [num_rows, feature_width] in, evicting as needed. False when pinned entries leave no room."""
        num_blocks = self._num_blocks(len(rows))
        if not self.has_room(len(rows)):
            return False
        while (block_ids := self._blocks.try_allocate(num_blocks)) is None:
            self._evict_one()
        blocks = self._memory.segments[0]
        padded = rows.new_zeros(num_blocks * self._blocks.block_size, rows.shape[1])
        padded[: len(rows)] = rows
        blocks[block_ids] = padded.view(num_blocks, self._blocks.block_size, -1).to(blocks.dtype)
        self._memory.synchronize()
        self._entries[media_hash] = _Entry(block_ids)
        return True

    def _num_blocks(self, num_rows: int) -> int:
        return -(-num_rows // self._blocks.block_size)

    def _evict_one(self) -> None:
        media_hash = next(key for key, entry in self._entries.items() if entry.num_pins == 0)
        self._blocks.free(self._entries.pop(media_hash).block_ids)
