"""Pages of block memories: when they are allocated, in which order, and that nothing else changes."""

from __future__ import annotations

import mmap
import threading
from ctypes import c_int64
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.kvcache import populate
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec

MIB = 1 << 20


def make_memory(num_segments: int = 1, num_bytes: int = 64 * MIB) -> BlockMemory:
    layout = MemoryLayout((SegmentSpec(16, (1024,), torch.float32),) * num_segments)
    return BlockMemory(layout, num_bytes // layout.block_bytes)


def allocated_bytes(memory: BlockMemory) -> int:
    """Of the memory's whole pages, those that the kernel has given, also if it has swapped them out since.
    What else the process has does not count."""
    first, end = -(-memory.base_address // mmap.PAGESIZE), memory.base_address + memory.buffer.numel()
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (end // mmap.PAGESIZE - first)), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(62))) * mmap.PAGESIZE


@pytest.fixture(params=[True, False], ids=["native", "without a compiler"])
def _library(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(populate.native, "load", lambda sources: None)


@pytest.mark.usefixtures("_library")
def test_a_memory_has_no_pages_until_it_is_populated():
    memory, left = make_memory(), c_int64(65 * MIB)
    assert allocated_bytes(memory) == 0
    populate.populate([memory], left)
    assert allocated_bytes(memory) >= 64 * MIB - 2 * mmap.PAGESIZE and left.value == MIB
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
