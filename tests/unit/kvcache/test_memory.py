"""Where block memories lie."""

from __future__ import annotations

import torch

from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec, on_huge_pages


def test_memories_on_huge_pages_are_zero_and_do_not_touch_each_other():
    one, other = on_huge_pages(8192), on_huge_pages(8192)
    assert not one.any() and one.numel() == 8192
    assert abs(one.data_ptr() - other.data_ptr()) > 8192
    assert on_huge_pages(0).numel() == 0


def test_a_block_lies_where_its_descriptors_say():
    memory = BlockMemory(
        MemoryLayout((SegmentSpec(4, (2,), torch.float32), SegmentSpec(4, (3,), torch.int8))), 5
    )
    rows = memory.descriptors([3, 1])
    expected = [segment[block].data_ptr() for segment in memory.segments for block in (3, 1)]
    assert rows[:, 0].tolist() == expected and rows[:, 1].tolist() == [32, 32, 12, 12]
    assert rows[:, 0].min() >= memory.base_address
