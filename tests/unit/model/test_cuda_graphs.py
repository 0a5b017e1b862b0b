"""Decode by recorded batch sizes: what is packed, padded, recorded and replayed. The capture is a stand-in
that, like a CUDA graph, runs on the recorded buffers and writes into the recorded output."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from cluster.model.cuda.copies import DecodeInputs, StepMatrix
from cluster.model.cuda.graphs import DecodeGraphs, GraphedModel, Replay, batch_sizes

BLOCK_SIZE, MAX_BLOCKS, SCRATCH = 4, 6, 50


class FakeCapture:
    """Records once, then repeats into the same tensor."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, work: Callable[[], Tensor]) -> Replay:
        self.num_recorded += 1
        out = work()
        return lambda: out.copy_(work())


def echo(inputs: DecodeInputs) -> Tensor:
    """'Logits' from which every input can be read back."""
    columns = (inputs.token_ids, inputs.position_ids, inputs.slots, inputs.context_lens)
    return torch.cat([torch.stack(columns, 1), inputs.block_tables], 1).float()


def matrix(max_batch: int = 8) -> StepMatrix:
    return StepMatrix(max_batch, MAX_BLOCKS, BLOCK_SIZE, SCRATCH, torch.device("cpu"))


sequences = st.lists(
    st.tuples(
        st.integers(0, 9),  # token
        st.integers(0, BLOCK_SIZE * MAX_BLOCKS - 1),  # context
        st.integers(-3, 3),  # delta
        st.permutations(range(9)),  # table, longer than any context wants
    ),
    min_size=1,
    max_size=8,
)


@given(steps=st.lists(sequences, min_size=1, max_size=4))
def test_every_sequence_gets_its_own_inputs_whatever_was_run_before(steps) -> None:
    graphs = DecodeGraphs(echo, matrix(), FakeCapture())
    for step in steps:
        tokens, contexts, deltas, tables = zip(*step, strict=True)
        out = graphs.decode(tokens, contexts, deltas, tables).long()
        assert out.shape == (len(step), 4 + MAX_BLOCKS)
        for row, (token, context, delta, table) in zip(out.tolist(), step, strict=True):
            slot = table[context // BLOCK_SIZE] * BLOCK_SIZE + context % BLOCK_SIZE
            assert row[:4] == [token, context + delta, slot, context + 1]
            assert row[4:] == list(table[:MAX_BLOCKS])


def test_a_table_may_be_shorter_than_the_longest() -> None:
    out = DecodeGraphs(echo, matrix(), FakeCapture()).decode([1], [5], [0], [[7, 8]])
    assert out[0, 2] == 8 * BLOCK_SIZE + 1
    assert out[0, 4:6].tolist() == [7, 8]


def test_rows_that_fill_up_a_batch_touch_the_scratch_block_only() -> None:
    seen: list[Tensor] = []

    def step(inputs: DecodeInputs) -> Tensor:
        out = echo(inputs)
        seen.append(out)
        return out

    graphs = DecodeGraphs(step, matrix(), FakeCapture())
    graphs.decode([3] * 4, [9] * 4, [0] * 4, [[1, 2, 3]] * 4)
    seen.clear()
    graphs.decode([5] * 3, [9] * 3, [0] * 3, [[1, 2, 3]] * 3)
    padding = seen[-1][3]
    assert len(seen[-1]) == 4
    assert padding[:4].tolist() == [0, 0, SCRATCH * BLOCK_SIZE, 1]
    assert (padding[4:] == SCRATCH).all()


def test_each_size_is_recorded_once() -> None:
    capture = FakeCapture()
    graphs = DecodeGraphs(echo, matrix(), capture)
    for count in (1, 3, 4, 8, 3, 5, 1):
        graphs.decode([1] * count, [2] * count, [0] * count, [[4]] * count)
    assert capture.num_recorded == 3  # 1, 4, 8


def test_warming_up_records_everything_that_a_step_can_ask_for() -> None:
    capture = FakeCapture()
    graphs = DecodeGraphs(echo, matrix(max_batch=40), capture)
    graphs.warm_up()
    recorded = capture.num_recorded
    for count in range(1, 41):
        graphs.decode([1] * count, [2] * count, [0] * count, [[4]] * count)
    assert capture.num_recorded == recorded == len(batch_sizes(40))


@pytest.mark.parametrize("max_batch", [1, 2, 3, 8, 9, 64, 100, 256])
def test_sizes_grow_from_one_to_the_largest_batch(max_batch: int) -> None:
    sizes = batch_sizes(max_batch)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_batch
    assert all(larger <= 2 * smaller for smaller, larger in pairwise(sizes))


class EchoModel:
    """Writes what it is told into block memory: segment 0 takes the token id at its slot."""

    block_size = BLOCK_SIZE
    max_model_len = BLOCK_SIZE * MAX_BLOCKS - 1

    def decode_step(self, inputs: DecodeInputs, kv: BlockMemory) -> Tensor:
        kv.segments[0].flatten()[inputs.slots.long()] = inputs.token_ids.float()
        return echo(inputs)

    def forward(self, chunks, kv, on_layer=None) -> Tensor:
        return torch.tensor([1.0])

    def decode(self, token_ids, context_lens, deltas, block_tables, kv) -> Tensor:
        raise AssertionError("decode steps are replayed")

    def copy_blocks(self, sources, targets, kv) -> None:
        raise AssertionError("no block is copied")


def test_a_graphed_model_replays_decode_steps_and_keeps_requests_blocks_from_padding() -> None:
    layout = MemoryLayout((SegmentSpec(BLOCK_SIZE, (1,), torch.float32),))
    kv = BlockMemory(layout, num_blocks=10)
    kv.buffer.fill_(1)
    before = kv.segments[0].clone()
    model = GraphedModel(EchoModel(), kv, 4, FakeCapture())
    model.warm_up()
    assert torch.equal(kv.segments[0][:-1], before[:-1])
    out = model.decode([6, 7, 8], [1, 5, 9], [0, 0, 0], [[0], [1, 2], [3, 4, 5]], kv)
    assert out[:, 0].tolist() == [6, 7, 8]
    written = (kv.segments[0] != before).nonzero()[:, :2].tolist()
    assert [row for row in written if row[0] != 9] == [[0, 1], [2, 1], [5, 1]]
    assert model.forward([], kv) == 1
