"""The cache of embeddings. It lies in registered memory, so that rows are sent from where they are kept.

Keyed by media hash, bounded by the size of the memory. Eviction: first the entries that are not expected to
be used again, then the least recently used ones. So an item that is used once evicts no item that comes back.
An entry gets its room before its rows are computed (`try_reserve`), is filled piece by piece (`write`) and
can be found once it is complete (`complete`). An entry that is being filled or sent (pinned) is never
evicted. Owned by the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass

import torch

from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory
from cluster.types.media_phase import MediaPhase, next_phase
from cluster.types.messages import CacheChanged


@dataclass(eq=False)
class _Entry:
    media_hash: str
    block_ids: list[int]
    phase: MediaPhase = MediaPhase.ENCODING
    num_pins: int = 0
    is_kept: bool = True  # another use is expected

    def move(self, phase: MediaPhase) -> None:
        self.phase = next_phase(self.media_hash, self.phase, phase)


class EmbeddingCache:
    def __init__(self, memory: BlockMemory, blocks: BlockPool):
        self._memory = memory
        self._blocks = blocks
        self._rows = memory.segments[0].flatten(0, 1)  # [num_blocks * block_size, feature_width], a view
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # complete entries in order of eviction
        self._filling: dict[str, _Entry] = {}
        self._num_held_blocks = 0  # blocks of pinned entries and of entries that are being filled
        self._changed: set[str] = set()

    def __contains__(self, media_hash: str) -> bool:
        """Whether the entry is complete."""
        return media_hash in self._entries

    @property
    def max_rows(self) -> int:
        return self._blocks.num_blocks * self._blocks.block_size

    @property
    def num_held_blocks(self) -> int:
        return self._num_held_blocks

    @property
    def num_cached_blocks(self) -> int:
        return self._blocks.num_blocks - self._blocks.num_free - self._num_held_blocks

    @property
    def num_free_blocks(self) -> int:
        """Free blocks after everything that may be evicted is evicted."""
        return self._blocks.num_blocks - self._num_held_blocks

    def num_blocks(self, num_rows: int) -> int:
        return -(-num_rows // self._blocks.block_size)

    def num_bytes(self, media_hash: str) -> int:
        """Bytes of an entry's blocks. Raises KeyError if the item is not cached."""
        return len(self._entries[media_hash].block_ids) * self._memory.layout.block_bytes

    def content(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def note(self, media_hash: str) -> None:
        """The next `take_changes` includes this item: it has been taken into work, or has left work."""
        self._changed.add(media_hash)

    def take_changes(self, coming: Container[str] = ()) -> CacheChanged | None:
        """What was added and evicted since the last call. Items in `coming` count as cached. None: nothing
        changed."""
        if not self._changed:
            return None
        changed, self._changed = sorted(self._changed), set()
        here = {name for name in changed if name in self._entries or name in coming}
        return CacheChanged(
            tuple(name for name in changed if name in here),
            tuple(name for name in changed if name not in here),
        )

    def pin(self, media_hash: str) -> list[int]:
        """The entry's blocks, which stay until `unpin`. Call once per user. Raises KeyError if the item is
        not cached."""
        entry = self._entries[media_hash]
        if entry.is_kept:
            self._entries.move_to_end(media_hash)
        entry.num_pins += 1
        if entry.num_pins == 1:
            entry.move(MediaPhase.SENDING)
            self._num_held_blocks += len(entry.block_ids)
        return entry.block_ids

    def unpin(self, media_hash: str) -> None:
        entry = self._entries[media_hash]
        entry.num_pins -= 1
        if entry.num_pins == 0:
            entry.move(MediaPhase.CACHED)
            self._num_held_blocks -= len(entry.block_ids)

    def blocks(self, media_hash: str) -> torch.Tensor:
        """A copy of the entry's blocks: [num_blocks, block_size, feature_width]. Raises KeyError if the item
        is not cached."""
        block_ids = torch.tensor(self._entries[media_hash].block_ids, device=self._rows.device)
        return self._memory.segments[0].index_select(0, block_ids)

    def keep(self, media_hash: str) -> None:
        """Another use of the entry is expected. Ignored if the item is not cached."""
        if media_hash in self._entries:
            self._entries[media_hash].is_kept = True
            self._entries.move_to_end(media_hash)

    def try_reserve(self, media_hash: str, num_rows: int) -> bool:
        """Reserves room for rows that are about to be computed, and evicts as needed. False: too much of the
        memory is held."""
        num_blocks = self.num_blocks(num_rows)
        if num_blocks > self.num_free_blocks:
            return False
        while (block_ids := self._blocks.try_allocate(num_blocks)) is None:
            self._evict(next(entry for entry in self._entries.values() if entry.num_pins == 0))
        self._filling[media_hash] = _Entry(media_hash, block_ids)
        self._num_held_blocks += num_blocks
        return True

    def write(self, media_hash: str, start: int, rows: torch.Tensor) -> None:
        """Rows [start, start + len(rows)) of an entry that was reserved. rows: [num_rows, feature_width]."""
        block_ids = torch.tensor(self._filling[media_hash].block_ids, device=rows.device)
        positions = torch.arange(start, start + len(rows), device=rows.device)
        size = self._blocks.block_size
        self._rows.index_copy_(
            0, block_ids[positions // size] * size + positions % size, rows.to(self._rows.dtype)
        )

    def complete(self, media_hash: str, num_rows: int, *, keep: bool = True) -> None:
        """All rows of the entry are written. The rest of its last block is filled with zeros. Synchronises
        the device."""
        entry = self._filling[media_hash]
        size = self._blocks.block_size
        self._memory.segments[0][entry.block_ids[-1], (num_rows - 1) % size + 1 :] = 0
        self._memory.synchronize()
        del self._filling[media_hash]
        entry.is_kept = keep
        entry.move(MediaPhase.CACHED)
        self._num_held_blocks -= len(entry.block_ids)
        self._entries[media_hash] = entry
        self._entries.move_to_end(media_hash, last=keep)
        self._changed.add(media_hash)

    def free_reserved(self, media_hash: str) -> None:
        """Frees the room of an entry that will not be completed. Ignored if the item has no such room."""
        entry = self._filling.pop(media_hash, None)
        if entry is not None:
            entry.move(MediaPhase.DISCARDED)
            self._num_held_blocks -= len(entry.block_ids)
            self._blocks.free(entry.block_ids)

    def _evict(self, entry: _Entry) -> None:
        entry.move(MediaPhase.DISCARDED)
        del self._entries[entry.media_hash]
        self._blocks.free(entry.block_ids)
        self._changed.add(entry.media_hash)
