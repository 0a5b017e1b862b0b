"""Pages of block memories: when they are allocated, in which order, and that nothing else changes."""

from __future__ import annotations

import mmap
import threading
from ctypes import c_int64
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cluster.kvcache import populate
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec

MIB = 1 << 20


def make_memory(num_segments: int = 1, num_bytes: int = 64 * MIB) -> BlockMemory:
    layout = MemoryLayout((SegmentSpec(16, (1024,), torch.float32),) * num_segments)
    return BlockMemory(layout, num_bytes // layout.block_bytes)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture(params=[True, False], ids=["native", "without a compiler"])
def _library(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(populate.native, "load", lambda sources: None)


@pytest.mark.usefixtures("_library")
def test_a_memory_has_no_pages_until_it_is_populated():
    before, left = resident_bytes(), c_int64(65 * MIB)
    memory = make_memory()
    assert resident_bytes() - before < 8 * MIB
    populate.populate([memory], left)
    assert resident_bytes() - before > 60 * MIB and left.value == MIB
    assert not memory.buffer.any()


@pytest.mark.usefixtures("_library")
def test_what_others_write_meanwhile_stays():
    memory = make_memory()
    words, is_done = memory.buffer.view(torch.int64), threading.Event()

    def write() -> None:
        while not is_done.is_set():
            words.add_(1)

    writer = threading.Thread(target=write)
    writer.start()
    populate.populate([memory], c_int64())
    is_done.set()
    writer.join()
    assert words[0] > 0 and words.unique().numel() == 1


def test_the_first_blocks_of_all_segments_come_first():
    memories = [make_memory(2, 10 * MIB), make_memory(1, 3 * MIB)]
    starts = [segment.data_ptr() for memory in memories for segment in memory.segments]
    found = list(populate.pieces(memories))
    assert [address for address, _ in found[:3]] == starts
    assert [size for _, size in found] == [2 * MIB] * 5 + [MIB] + [MIB] * 2
    covered = sorted((address, address + size) for address, size in found)
    assert sum(end - start for start, end in covered) == 13 * MIB
    assert all(end <= start for (_, end), (start, _) in pairwise(covered))
