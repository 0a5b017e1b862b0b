"""How many descriptors a prompt's KV is posted in."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import kv_segments
from kv_transfer.agents.regions import merged
from kv_transfer.lease import lease_writer
from kv_transfer.lease.events import Completed
from tests.fakes.leases import TTL_S, LeasePair

LAYERS, BLOCK_SIZE = 28, 16  # a model of 7B; its rows are narrower here
PROMPT = 2048 // BLOCK_SIZE
LAYOUT = MemoryLayout(kv_segments([(1, 4)] * (2 * LAYERS), BLOCK_SIZE, torch.float16))
NUM_BLOCKS = 3 * PROMPT


def used(pool: BlockPool, rng: Random, lengths: range) -> None:
    """The pool after many prompts of such lengths, which ended in any order."""
    held: list[list[int]] = []
    for _ in range(200):
        while (blocks := pool.try_allocate(rng.choice(lengths))) is None:
            pool.free(held.pop(rng.randrange(len(held))))
        held.append(blocks)
    rng.shuffle(held)
    for blocks in held:
        pool.free(blocks)


@pytest.mark.parametrize(
    ("lengths", "num_runs"),
    [
        (None, 1),
        (range(PROMPT, PROMPT + 1), 1),  # both pools give falling runs
        (range(32, 65), 107),  # in pools that prompts of many lengths have used, few blocks are neighbours
    ],
)
def test_blocks_that_are_successive_on_both_sides_are_one_descriptor(lengths, num_runs, monkeypatch) -> None:
    """Of a prompt of 2,048 tokens: alone, its 128 blocks in 56 segments are 7,168."""
    pair = LeasePair(BlockMemory(LAYOUT, NUM_BLOCKS), BlockMemory(LAYOUT, NUM_BLOCKS))
    pair.source.buffer.random_(0, 256)
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    if lengths is not None:
        used(pool, Random(1), lengths)
        used(pair.pool, Random(2), lengths)
    counts = {"before": 0, "after": 0}

    def counted(local, remote):
        counts["before"] += len(local)
        rows = merged(local, remote)
        counts["after"] += len(rows[0])
        return rows

    monkeypatch.setattr(lease_writer, "merged", counted)
    outgoing = pair.open(pair.owner.grant("lease", *pair.take("lease", PROMPT), TTL_S))
    sources = pool.allocate(PROMPT)
    for layer in range(LAYERS):
        outgoing.write(sources, range(PROMPT), [2 * layer, 2 * layer + 1])
    outgoing.finish(b"")
    targets = list(pair.held["lease"])
    pair.step(2)
    assert pair.received == [Completed("lease", b"")]
    for here, there in zip(pair.source.segments, pair.target.segments, strict=True):
        assert torch.equal(here[sources].view(torch.int16), there[targets].view(torch.int16))
    assert counts["before"] == 2 * LAYERS * PROMPT == 7168
    assert counts["after"] == 2 * LAYERS * num_runs


def test_blocks_that_fill_whole_segments_are_one_descriptor() -> None:
    memory = BlockMemory(LAYOUT, 4)
    rows = memory.descriptors([3, 0, 2, 1])
    (local,), (remote,) = merged(rows, rows)
    assert local.tolist() == remote.tolist() == [memory.base_address, memory.buffer.numel()]


@given(st.permutations(range(9)), st.permutations(range(9)), st.integers(1, 9))
def test_merged_rows_copy_the_same_bytes(here: list[int], there: list[int], count: int) -> None:
    def copies(local: np.ndarray, remote: np.ndarray) -> set[tuple[int, int]]:
        return {
            (source + i, target + i)
            for (source, size), (target, _) in zip(local.tolist(), remote.tolist(), strict=True)
            for i in range(size)
        }

    local, remote = (
        np.array([[100 + 5 * block, 5] for block in blocks[:count]], dtype=np.uint64)
        for blocks in (here, there)
    )
    found = merged(local, remote)
    assert copies(*found) == copies(local, remote) and found[0].dtype == np.uint64
    assert len(found[0]) <= count and (found[0][:, 1] == found[1][:, 1]).all()
