"""Blocks that a pool gives up come back from host memory or from disk as they were, or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from cluster.kvcache.tier import KeptBlock, KvTier
from cluster.kvcache.tier_slots import FileSlots, HostSlots, Slots
from tests.fakes.clock import ManualClock
from tests.fakes.workers import ManualExecutor

# sizes differ, as those of quantised K and V may
LAYOUT = MemoryLayout(
    tuple(SegmentSpec(4, (width,), torch.int32) for width in (3, 3, 5, 3)),
)
RECORD_BYTES = LAYOUT.block_bytes + 64
NAMES = [bytes([number]) * (32 if number % 2 else 36) for number in range(1, 9)]


class Kept:
    """A tier of a memory in which every block has other bytes."""

    def __init__(self, *levels: Slots):
        self.memory = BlockMemory(LAYOUT, 16)
        self.memory.buffer.copy_(torch.randint(0, 256, self.memory.buffer.shape, dtype=torch.uint8))
        self.generations = [0] * 16
        self.executor, self.clock = ManualExecutor(), ManualClock()
        self.tier = KvTier(self.memory, self.generations.__getitem__, levels, self.executor, self.clock)
        self.tier.start(lambda function, *args: function(*args))
        self.run()

    def run(self) -> None:
        while self.executor.jobs:
            self.executor.run_one()

    def keep(self, *block_ids: int) -> None:
        """Block i under NAMES[i]."""
        self.tier.keep([KeptBlock(i, self.generations[i], NAMES[i]) for i in block_ids])
        self.run()

    def load(self, *block_ids: int) -> list[int]:
        """Which of the blocks [0, 8) came back unchanged, into [8, 16)."""
        done: list[int] = []
        self.tier.load([NAMES[i] for i in block_ids], range(8, 8 + len(block_ids)), done.append)
        self.run()
        loaded = block_ids[: done[0]]
        for target, i in enumerate(loaded, 8):
            assert all(torch.equal(segment[target], segment[i]) for segment in self.memory.segments)
        return list(loaded)


def file_slots(folder: Path, num_slots: int = 4) -> FileSlots:
    return FileSlots(folder, num_slots * RECORD_BYTES, LAYOUT.block_bytes)


def host_slots(num_slots: int = 4) -> HostSlots:
    return HostSlots(num_slots * RECORD_BYTES, LAYOUT.block_bytes)


@pytest.mark.parametrize("kind", ["host", "file"])
def test_a_block_comes_back_as_it_was_and_the_oldest_makes_room(kind: str, tmp_path: Path) -> None:
    kept = Kept(host_slots() if kind == "host" else file_slots(tmp_path))
    kept.keep(0, 1, 2, 3)
    assert kept.load(0, 1) == [0, 1]  # used: 2 is the oldest now
    kept.keep(4)
    assert set(kept.tier) == {NAMES[i] for i in (0, 1, 3, 4)} == set(kept.tier.take_changes()) - {NAMES[2]}
    assert kept.load(0, 2, 3) == [0]  # a prefix ends where a block is missing
    assert kept.load(4, 3) == [4, 3]
    totals = kept.tier.totals
    assert (totals.num_stored, totals.num_loaded, totals.num_evicted) == (5, 5, 1)
    assert totals.held_bytes == 4 * LAYOUT.block_bytes


def test_a_block_that_changes_while_it_is_copied_is_not_kept() -> None:
    kept = Kept(host_slots())
    kept.tier.keep([KeptBlock(0, 0, NAMES[0])])
    kept.generations[0] += 1  # evicted, and written again
    kept.run()
    assert NAMES[0] not in kept.tier
    assert kept.tier.totals.num_missed == 1


def test_a_load_that_fails_ends_when_nothing_is_written_to_its_blocks_any_more(monkeypatch) -> None:
    """A part may have been enqueued on a GPU."""
    kept, happened = Kept(host_slots()), []
    kept.keep(0)

    def half_written(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(kept.memory, "write_blocks", half_written)
    monkeypatch.setattr(kept.memory, "synchronize", lambda: happened.append("waited"))
    kept.tier.load([NAMES[0]], [8], happened.append)
    kept.run()
    assert happened == ["waited", 0]


def test_what_host_memory_loses_goes_to_disk(tmp_path: Path) -> None:
    kept = Kept(host_slots(2), file_slots(tmp_path, 2))
    kept.keep(0, 1, 2, 3)
    assert kept.load(0, 1, 2, 3) == [0, 1, 2, 3]
    kept.keep(4)
    assert kept.load(0) == []
    assert kept.load(1, 2, 3, 4) == [1, 2, 3, 4]


def test_a_later_start_finds_the_file_and_two_workers_never_share_one(tmp_path: Path) -> None:
    first = Kept(file_slots(tmp_path))
    first.keep(0, 1)
    second = Kept(file_slots(tmp_path))
    assert not list(second.tier)
    first.tier.close()
    first.run()
    again = Kept(file_slots(tmp_path))
    assert set(again.tier) == set(again.tier.take_changes()) == {NAMES[0], NAMES[1]}
    again.memory.buffer.copy_(first.memory.buffer)
    assert again.load(0, 1) == [0, 1]
    again.keep(2, 3)  # in other slots
    assert again.load(0, 1, 2, 3) == [0, 1, 2, 3]


def test_damaged_and_missing_records_are_misses(tmp_path: Path) -> None:
    kept = Kept(file_slots(tmp_path))
    kept.keep(0, 1, 2)
    with (tmp_path / "0.kv").open("r+b") as file:
        file.seek(RECORD_BYTES + 60)
        byte = file.read(1)[0]
        file.seek(RECORD_BYTES + 60)
        file.write(bytes([byte ^ 1]))
        file.truncate(2 * RECORD_BYTES + 50)
    assert kept.load(0, 1, 2) == [0]
    assert kept.load(2) == []
    assert list(kept.tier) == [NAMES[0]]
    assert kept.tier.totals.num_corrupt == 2
    kept.keep(1, 2)
    assert kept.load(0, 1, 2) == [0, 1, 2]


def test_a_full_disk_costs_only_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = file_slots(tmp_path)
    kept = Kept(host_slots(1), slots)
    write = slots.write

    def fail(slot: int, record: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(slots, "write", fail)
    kept.keep(0, 1)
    assert kept.load(0) == []
    monkeypatch.setattr(slots, "write", write)
    kept.keep(2)
    assert kept.load(1, 2) == [1, 2]
    assert kept.tier.totals.num_failed == 1


def test_suspect_blocks_are_forgotten_for_good(tmp_path: Path) -> None:
    kept = Kept(host_slots(1), file_slots(tmp_path))
    kept.keep(0, 1, 2)
    kept.tier.forget()
    kept.run()
    assert kept.load(0, 1, 2) == []
    kept.tier.close()
    kept.run()
    assert not list(Kept(file_slots(tmp_path)).tier)


def test_loading_that_is_slower_than_computing_is_tried_again_later() -> None:
    kept = Kept(host_slots())
    kept.keep(0)
    assert kept.tier.is_worth(1, compute_s=0.0)  # nothing is known yet
    kept.tier.load([NAMES[0]], [8], lambda num_loaded: None)
    kept.clock.at += 1.0
    kept.run()
    assert kept.tier.is_worth(2, compute_s=2.0)
    refused = 0
    while not kept.tier.is_worth(2, compute_s=1.5):
        refused += 1
    assert refused == 3


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="others may write"):
        file_slots(tmp_path)
