"""The second tier of a worker's KV cache: blocks that the pool gives up, in host memory, on disk, or in both.

    keep    names blocks that no request holds any more. Their bytes are copied while the engine goes on; a
            block that has been evicted by then is not kept
    load    copies kept blocks back into blocks that the caller holds
    forget  drops everything

A new block enters the first level. A full level gives up the block unused for the longest time, to the next
level; what the last one gives up is lost. A block is found by its hash, and its checksum is compared when it
is read: a record that is damaged or cannot be read is a miss. An error of the disk costs the blocks that it
concerns and is counted; it never reaches a request.

Thread: one, the only one of `executor`, does all copies and owns the levels. `keep`, `load` and `forget` only
give it work, in this order. The index of what is kept may be read by any thread. That thread reads the pool's
generations and the memory while the engine runs: bytes belong to a hash if the block's generation is the same
before and after the copy, because a generation ends before its block is written again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from cluster.clock import Clock
from cluster.kvcache.memory import BlockMemory
from cluster.kvcache.tier_slots import Slots, make_record, read_record
from cluster.types.transfer import TierTotals

logger = logging.getLogger(__name__)

COPIED_TOGETHER = 16  # blocks
OLD_SPEED_WEIGHT = 0.7  # of the speed known so far, against that of a new load
# by which a load that seemed too slow makes the next one seem faster, so that it is tried again
OPTIMISM = 0.9


@dataclass(frozen=True)
class KeptBlock:
    block_id: int
    generation: int
    name: bytes  # its hash


class _Level:
    """Slots and what they hold, the block unused for the longest time first."""

    def __init__(self, slots: Slots):
        self.slots = slots
        self.slot_of: OrderedDict[bytes, int] = OrderedDict()
        self.free = list(reversed(range(slots.num_slots)))


class KvTier:
    def __init__(
        self,
        memory: BlockMemory,
        generation_of: Callable[[int], int],
        levels: Sequence[Slots],
        executor: Executor,
        clock: Clock,
    ):
        """`levels`: at least one, the fastest first. `executor`: has one thread.
        `generation_of(block_id)`: any thread."""
        self._memory = memory
        self._generation_of = generation_of
        self._levels = [_Level(slots) for slots in levels]
        self._executor = executor
        self._clock = clock
        self._lock = threading.Lock()  # of what follows
        self._names: set[bytes] = set()  # what is kept
        self._changed: dict[bytes, None] = {}
        self._totals = TierTotals()
        self._block_s: float | None = None

    def start(self, call: Callable[..., None]) -> None:
        """Begins to find what is kept from an earlier run. `call(function, *args)` runs a function on the
        engine's thread."""
        self._call = call
        self._submit(self._find)

    def close(self) -> Future[None]:
        """Done when everything that was asked has been carried out and the files are closed. Nothing may be
        asked any more."""
        closed = self._executor.submit(self._close)
        self._executor.shutdown(wait=False)
        return closed

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._names

    def __iter__(self) -> Iterator[bytes]:
        with self._lock:
            return iter(tuple(self._names))

    @property
    def totals(self) -> TierTotals:
        with self._lock:
            held_bytes = len(self._names) * self._memory.layout.block_bytes
            return msgspec.structs.replace(self._totals, held_bytes=held_bytes)

    def take_changes(self) -> tuple[bytes, ...]:
        """Names that have come or gone since the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
        return tuple(changed)

    def is_worth(self, num_blocks: int, compute_s: float) -> bool:
        """Whether so many blocks are loaded sooner than computed. Until the first load it is assumed."""
        with self._lock:
            if self._block_s is None or num_blocks * self._block_s <= compute_s:
                return True
            self._block_s *= OPTIMISM
            return False

    def keep(self, blocks: Sequence[KeptBlock]) -> None:
        """Returns at once."""
        self._submit(self._keep, blocks)

    def load(self, names: Sequence[bytes], block_ids: Sequence[int], done: Callable[[int], None]) -> None:
        """Copies the block with names[i] into block block_ids[i] of the memory. `done(n)` is called on the
        engine's thread: the first n are there, and nothing is written to the blocks any more. Returns at
        once."""
        self._submit(self._load, names, block_ids, done, self._clock.now())

    def forget(self) -> None:
        """Drops everything that was named until now. Returns at once."""
        self._submit(self._forget)

    def _submit(self, function: Callable[..., None], *args: Any) -> None:
        self._executor.submit(function, *args).add_done_callback(_log_failure)

    # --- on the executor's thread

    def _close(self) -> None:
        for level in self._levels:
            level.slots.close()

    def _find(self) -> None:
        for level in self._levels:
            try:
                for slot, name in level.slots.names():
                    if name not in level.slot_of:
                        self._note(level, name, slot)
                level.free = sorted(set(level.free) - set(level.slot_of.values()), reverse=True)
            except OSError as error:
                logger.warning("the KV of an earlier run is not used: %s", error)
        self._call(_wake)

    def _keep(self, blocks: Sequence[KeptBlock]) -> None:
        for first in range(0, len(blocks), COPIED_TOGETHER):
            wanted = [block for block in blocks[first : first + COPIED_TOGETHER] if block.name not in self]
            unchanged = [block for block in wanted if self._is_there(block)]
            rows = self._memory.read_blocks([block.block_id for block in unchanged])
            whole = [
                (block, row) for block, row in zip(unchanged, rows, strict=True) if self._is_there(block)
            ]
            self._count(num_stored=len(whole), num_missed=len(wanted) - len(whole))
            for block, row in whole:
                self._put(0, block.name, make_record(block.name, row))
        self._call(_wake)

    def _is_there(self, block: KeptBlock) -> bool:
        return self._generation_of(block.block_id) == block.generation

    def _load(
        self, names: Sequence[bytes], block_ids: Sequence[int], done: Callable[[int], None], asked_at: float
    ) -> None:
        num_loaded = 0
        try:
            while num_loaded < len(names):
                rows = self._read(names[num_loaded : num_loaded + COPIED_TOGETHER])
                if rows:
                    self._memory.write_blocks(block_ids[num_loaded : num_loaded + len(rows)], np.stack(rows))
                    self._memory.synchronize()
                num_loaded += len(rows)
                if len(rows) < COPIED_TOGETHER:
                    break
            if num_loaded:
                self._learn((self._clock.now() - asked_at) / num_loaded)
                self._count(num_loaded=num_loaded)
        finally:
            with suppress(RuntimeError):  # the device is lost; the engine finds out in its next step
                self._memory.synchronize()  # also behind a write that raised
            self._call(done, num_loaded)

    def _read(self, names: Sequence[bytes]) -> list[np.ndarray]:
        """The KV of the first of these blocks, as far as all of them are there."""
        rows: list[np.ndarray] = []
        for name in names:
            row = next((row for level in self._levels if (row := self._get(level, name)) is not None), None)
            if row is None:
                break
            rows.append(row)
        return rows

    def _get(self, level: _Level, name: bytes) -> np.ndarray | None:
        slot = level.slot_of.get(name)
        if slot is None:
            return None
        try:
            row = read_record(name, level.slots.read(slot))
        except OSError as error:
            logger.warning("a block of KV cannot be read: %s", error)
            row = None
        if row is None:
            self._drop(level, name)
            self._count(num_corrupt=1)
        else:
            level.slot_of.move_to_end(name)
        return row

    def _put(self, level_idx: int, name: bytes, record: np.ndarray) -> None:
        level = self._levels[level_idx]
        try:
            if not level.free:
                oldest, slot = next(iter(level.slot_of.items()))
                self._drop(level, oldest)
                if level_idx + 1 < len(self._levels):
                    self._put(level_idx + 1, oldest, level.slots.read(slot))
                else:
                    self._count(num_evicted=1)
            level.slots.write(level.free[-1], record)
        except OSError as error:
            logger.warning("a block of KV cannot be kept: %s", error)
            return self._count(num_failed=1)
        self._note(level, name, level.free.pop())

    def _forget(self) -> None:
        for level in self._levels:
            for name in tuple(level.slot_of):
                self._drop(level, name)
        for level in self._levels:
            level.slots.clear()

    def _note(self, level: _Level, name: bytes, slot: int) -> None:
        level.slot_of[name] = slot
        with self._lock:
            self._names.add(name)
            self._changed[name] = None

    def _drop(self, level: _Level, name: bytes) -> None:
        level.free.append(level.slot_of.pop(name))
        with self._lock:
            self._names.discard(name)
            self._changed[name] = None

    def _count(self, **added: int) -> None:
        with self._lock:
            sums = {field: getattr(self._totals, field) + number for field, number in added.items()}
            self._totals = msgspec.structs.replace(self._totals, **sums)

    def _learn(self, block_s: float) -> None:
        with self._lock:
            old_s = block_s if self._block_s is None else self._block_s
            self._block_s = OLD_SPEED_WEIGHT * old_s + (1 - OLD_SPEED_WEIGHT) * block_s


def _log_failure(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("the second tier of the KV cache stumbles", exc_info=error)


def _wake() -> None:
    """The engine takes a step, in which the doors hear what has changed."""
