"""Steps by recorded sizes: what is packed, padded, recorded and replayed. The capture is a stand-in that,
like a CUDA graph, runs on the recorded buffers and writes into the recorded output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench.step_inputs import CountedCopies
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from cluster.model.cuda import step_inputs
from cluster.model.cuda.graphs import GraphedModel, RecordedSizes, Replay, batch_sizes
from cluster.model.cuda.step_inputs import StepBuffers, StepInputs, StepSizes, answers_of
from cluster.model.language import SequenceChunk

BLOCK_SIZE, MAX_BLOCKS, SCRATCH = 4, 6, 50
MIXED = StepSizes(num_tokens=64, num_rows=10, num_wanted=30)


def buffers(axes: int = 1) -> StepBuffers:
    return StepBuffers(MIXED, MAX_BLOCKS, axes, BLOCK_SIZE, SCRATCH, torch.device("cpu"))


chunks = st.builds(
    lambda context, token_ids, first, table, num_logits: SequenceChunk(
        token_ids[: BLOCK_SIZE * MAX_BLOCKS - context], first, context, table, num_logits=min(num_logits, 1)
    ),
    st.integers(0, BLOCK_SIZE * MAX_BLOCKS - 1),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(0, 9),
    st.permutations(range(9)),  # longer than any context wants
    st.integers(0, 3),
)


def check_padding(inputs: StepInputs, num_tokens: int, num_rows: int) -> None:
    step = inputs.step
    assert set(inputs.slots[num_tokens:].tolist()) <= {SCRATCH * BLOCK_SIZE}
    assert set(step.seqs[num_tokens:].tolist()) <= {-1}
    assert set(step.starts[num_rows:].tolist()) == {num_tokens}
    for field in (inputs.token_ids, inputs.position_ids, step.indices, step.ends):
        assert not field[..., num_tokens:].any()
    assert set(step.contexts[num_rows:].tolist()) <= {1}
    assert set(step.tables.flatten().tolist()) <= {*range(9), SCRATCH}


@given(steps=st.lists(st.lists(chunks, min_size=1, max_size=10), min_size=1, max_size=4))
def test_every_token_gets_its_own_inputs_whatever_was_run_before(steps) -> None:
    """Steps of answers, whose fields lie at other places of the same buffers, run in between."""
    packed = buffers()
    for step in steps:
        inputs = packed.fill_chunks(MIXED, [token for chunk in step for token in chunk.token_ids], step)
        assert inputs is packed.inputs(MIXED)
        check_packed(inputs, step)
        answers = [chunk.num_computed_tokens for chunk in step]
        tables = [chunk.block_table for chunk in step]
        deltas = range(len(step))
        sizes = answers_of(10)
        inputs = packed.fill_answers(sizes, [7] * len(step), answers, deltas, tables)
        assert inputs.step.is_decode
        alone = [
            SequenceChunk([7], context + delta, context, table)
            for context, delta, table in zip(answers, deltas, tables, strict=True)
        ]
        check_packed(inputs, alone)


def check_packed(inputs: StepInputs, step: Sequence[SequenceChunk]) -> None:
    token, wanted = 0, []
    for row, chunk in enumerate(step):
        assert int(inputs.step.starts[row]) == token
        context = chunk.num_computed_tokens + len(chunk.token_ids)
        assert int(inputs.step.contexts[row]) == context
        assert inputs.step.tables[inputs.step.rows[row]].tolist() == [*chunk.block_table][:MAX_BLOCKS]
        wanted += range(token + len(chunk.token_ids) - chunk.num_logits, token + len(chunk.token_ids))
        for i, token_id in enumerate(chunk.token_ids):
            index = chunk.num_computed_tokens + i
            slot = chunk.block_table[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE
            found = [
                int(field[token])
                for field in (
                    inputs.token_ids, inputs.position_ids, inputs.slots, inputs.step.seqs,
                    inputs.step.indices, inputs.step.ends,
                )
            ]  # fmt: skip
            assert found == [token_id, chunk.position_ids + i, slot, row, index, index + 1]
            token += 1
    assert inputs.wanted.tolist() == wanted + [0] * (len(inputs.wanted) - len(wanted))
    check_padding(inputs, token, len(step))


def test_tokens_of_a_span_see_its_end_and_positions_have_their_axes() -> None:
    positions = torch.arange(15).view(3, 5)
    step = [
        SequenceChunk([1] * 5, positions, 2, [7, 8], bidirectional_spans=((3, 6), (0, 2))),
        SequenceChunk([2, 3], 4, 0, [9]),
    ]
    inputs = buffers(axes=3).fill_chunks(MIXED, [0] * 7, step)
    assert inputs.step.ends[:7].tolist() == [3, 6, 6, 6, 7, 1, 2]
    assert torch.equal(inputs.position_ids[:, :5].long(), positions)
    assert inputs.position_ids[:, 5:8].tolist() == [[4, 5, 0]] * 3


@pytest.mark.parametrize("sizes", [MIXED, answers_of(5), StepSizes(17, 3, 9)])
def test_every_field_begins_at_a_multiple_of_16_bytes(sizes: StepSizes) -> None:
    packed = buffers()
    inputs, step = packed.inputs(sizes), packed.inputs(sizes).step
    fields = (
        inputs.token_ids, inputs.position_ids, inputs.slots, inputs.wanted, step.seqs, step.indices,
        step.ends, step.starts, step.contexts, step.rows,
    )  # fmt: skip
    assert step.tables.is_contiguous()
    assert all(field.is_contiguous() and field.storage_offset() % 4 == 0 for field in fields)
    assert len({field.untyped_storage().data_ptr() for field in fields}) == 1
    ends = sorted((field.storage_offset(), field.storage_offset() + field.numel()) for field in fields)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_a_table_may_be_shorter_than_the_longest_and_grow() -> None:
    packed, sizes, table = buffers(), answers_of(1), [7, 8]
    inputs = packed.fill_answers(sizes, [1], [5], [0], [table])
    assert int(inputs.slots[0]) == 8 * BLOCK_SIZE + 1
    assert inputs.step.tables[inputs.step.rows[0]].tolist() == [7, 8, *[SCRATCH] * 4]
    table.append(3)
    packed.fill_answers(sizes, [1], [9], [0], [table])
    assert int(inputs.slots[0]) == 3 * BLOCK_SIZE + 1
    with pytest.raises(IndexError):  # a step that fails is tried again
        packed.fill_answers(sizes, [1], [BLOCK_SIZE * MAX_BLOCKS], [0], [[*table, 2]])
    packed.fill_answers(sizes, [1], [13], [0], [again := [*table, 2]])
    assert inputs.step.tables[inputs.step.rows[0]].tolist() == [*again, *[SCRATCH] * 2]


grown = st.lists(st.tuples(st.integers(0, 13), st.integers(0, MAX_BLOCKS), st.booleans()), max_size=10)


@given(steps=st.lists(grown, min_size=1, max_size=30), most=st.sampled_from([1, 7, 1 << 16]))
def test_the_devices_tables_are_those_of_the_step(steps, most) -> None:
    """Of more sequences than there are rows; each grows, or begins again with other blocks."""
    with mock.patch.object(step_inputs, "MAX_BLOCKS_PER_COPY", most):
        packed = buffers()
        tables: list[list[int]] = [[seq] for seq in range(14)]
        for number, step in enumerate(steps):
            for seq, length, begins in step:
                own = [] if begins else tables[seq]
                own += range(20 * number, 20 * number + max(1, length - len(own)))
                tables[seq] = own
            own = [tables[seq] for seq, *_ in step]
            inputs = packed.fill_answers(answers_of(10), 7, [0] * len(own), [0] * len(own), own)
            for row, table in zip(inputs.step.rows.tolist(), own, strict=False):
                held = table[:MAX_BLOCKS]
                assert inputs.step.tables[row, : len(held)].tolist() == held


class CountedTable(list):
    """Counts how many of its block ids are read."""

    num_reads = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        CountedTable.num_reads += len(found) if isinstance(index, slice) else 1
        return found


def test_a_step_reads_and_copies_what_its_tables_have_gained() -> None:
    """Whatever their length, and whichever of them are in the step."""
    packed = StepBuffers(answers_of(3), 5000, 1, BLOCK_SIZE, SCRATCH, torch.device("cpu"))
    tables = [CountedTable(range(4000)) for _ in range(3)]

    def fill(held: Sequence[list[int]]) -> int:
        """Returns bytes."""
        CountedTable.num_reads = 0
        with CountedCopies() as copies:
            packed.fill_answers(answers_of(3), 1, [9000] * len(held), [0] * len(held), held)
        return copies.num_bytes

    assert fill(tables) > 3 * 4000 and CountedTable.num_reads == 3 * 4000
    least = fill(tables)
    assert CountedTable.num_reads == 0
    for table in tables[1:]:
        table.append(7)
    assert fill([tables[2], tables[1]]) <= least + 12 * 4 and CountedTable.num_reads == 2
    assert least < 1000


class FakeCapture:
    """Records once, then repeats into the same tensor."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, work: Callable[[], Tensor]) -> Replay:
        self.num_recorded += 1
        out = work()
        return lambda: out.copy_(work())


class EchoModel:
    """Writes what it is given into block memory: segment 0 takes the token id at its slot. "Logits" are token
    ids."""

    block_size = BLOCK_SIZE
    max_model_len = BLOCK_SIZE * MAX_BLOCKS - 1
    hidden_size = feature_width = 2
    vocab_size = position_axes = num_layers = 1
    recorded_tokens = state_blocks = num_adapter_slots = 0
    dtype = torch.float32
    inputs = SimpleNamespace(known_ids=np.array, known_on_device=lambda token_ids: token_ids)

    def step(
        self, inputs: StepInputs, kv: BlockMemory, embeds: Tensor | None = None, on_layer=None
    ) -> Tensor:
        kv.segments[0].flatten()[inputs.slots.long()] = inputs.token_ids.float()
        tokens = inputs.token_ids[:, None] if embeds is None else embeds[:, :1]
        return tokens[inputs.wanted].double()

    def place_embeds(self, token_ids: Tensor, chunks, embeds: Tensor) -> None:
        embeds.copy_(token_ids[:, None])

    def forward(self, chunks, kv, on_layer=None) -> Tensor:
        return torch.tensor([[-1.0]])

    def copy_blocks(self, sources, targets, kv) -> None: ...

    def decode(self, token_ids, context_lens, deltas, block_tables, kv, adapters=(), states=()) -> Tensor:
        return torch.tensor([[-1.0]])


echo_model: Any = EchoModel()


def memory() -> BlockMemory:
    return BlockMemory(MemoryLayout((SegmentSpec(BLOCK_SIZE, (1,), torch.float32),)), num_blocks=10)


def test_a_graphed_model_replays_steps_and_keeps_requests_blocks_from_padding() -> None:
    kv = memory()
    kv.buffer.fill_(1)
    before = kv.segments[0].clone()
    model = GraphedModel(echo_model, kv, RecordedSizes.up_to(4, 20), FakeCapture())
    model.warm_up()
    assert torch.equal(kv.segments[0][:-1], before[:-1])
    out = model.decode([6, 7, 8], [1, 5, 9], [0, 0, 0], [[0], [1, 2], [3, 4, 5]], kv)
    assert out.dtype == torch.float32 and out.tolist() == [[6], [7], [8]]
    chunks = [
        SequenceChunk([3, 4, 5], 0, 0, [6], num_logits=2),
        SequenceChunk([9, 9], 0, 0, [7], num_logits=0),
    ]
    assert model.forward(chunks, kv).tolist() == [[4], [5]]
    written = (kv.segments[0] != before).nonzero()[:, :2].tolist()
    places = [[0, 1], [2, 1], [5, 1], [6, 0], [6, 1], [6, 2], [7, 0], [7, 1]]
    assert [row for row in written if row[0] != 9] == places
    assert model.forward(chunks, kv, print) == -1


def test_more_choices_than_a_step_of_answers_has_sequences_run_unrecorded() -> None:
    kv = memory()
    model = GraphedModel(echo_model, kv, RecordedSizes.up_to(2, 0), FakeCapture())
    model.warm_up()
    assert model.decode([6] * 3, [1] * 3, [0] * 3, [[0]] * 3, kv) == -1


def test_warming_up_records_everything_that_a_step_can_ask_for_once() -> None:
    kv, capture = memory(), FakeCapture()
    model = GraphedModel(echo_model, kv, RecordedSizes.up_to(40, 20), capture)
    model.warm_up()
    recorded = capture.num_recorded
    for count in range(1, 41):
        tokens = [count] * count
        model.decode(tokens, [2] * count, [0] * count, [[4]] * count, kv)
        if count <= 23:
            assert model.forward([SequenceChunk(tokens, 0, 0, [*range(6)])], kv).tolist() == [[count]]
    assert capture.num_recorded == recorded == len(batch_sizes(40)) + 3


@pytest.mark.parametrize("max_batch", [1, 2, 3, 8, 9, 64, 100, 256])
def test_sizes_grow_from_one_to_the_largest_batch(max_batch: int) -> None:
    sizes = batch_sizes(max_batch)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_batch
    assert all(larger <= 2 * smaller for smaller, larger in pairwise(sizes))
