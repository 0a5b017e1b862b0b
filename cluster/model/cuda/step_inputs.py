"""The inputs of a recorded step: one pinned buffer on the host, one on the device, one copy a step.

A recorded step has fixed sizes (`StepSizes`): T tokens of up to B sequences, W of which want logits. Its
fields lie at fixed addresses, which a replay reads:

    | unused | token_ids position_ids … contexts rows wanted | blocks | their places |

The fields begin as far before their end as the sizes need. Behind them are the blocks that the step's tables
have gained, and where they go in the tables on the device (`TableRows`): one launch puts them there, in steps
that have some. So the copy, and the host's time for it, do not depend on the length of contexts. All sizes
share the tables, so a row that a step does not use keeps block ids of an earlier step, or the scratch block:
they are always valid. Each field begins at a multiple of 16 bytes, as `StepTensors` asks.

Padding: tokens of no sequence (-1), whose K and V go into the scratch block and which see nothing, and
sequences without new tokens. They have a context of 1, as a kernel with one query for each row needs. Their
states are read and written in scratch blocks, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.model.attention import StepTensors
from cluster.model.batches import SequenceChunk, packed_tokens, visible_ends, visible_spans
from cluster.model.cuda.table_rows import TableRows
from cluster.model.states import PackedSpans, SpanTensors, StateSpan

_ALIGNED = 4  # numbers of 16 bytes
_MORE_SPANS = 16  # of prompts whose states are kept within the step
# Blocks in one copy, 12 bytes each; a step whose tables have gained more waits for further copies.
MAX_BLOCKS_PER_COPY = 1 << 16


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a recorded step, with its padding."""

    num_tokens: int  # T
    num_rows: int  # B, sequences
    num_wanted: int  # W, tokens whose logits are wanted
    is_decode: bool = False  # T = B = W: every sequence has one new token

    @property
    def num_spans(self) -> int:
        """Spans are successive tokens of a sequence; each ends where a state is kept. An answer's drafts are
        a span of their own."""
        return self.num_rows if self.is_decode else 2 * self.num_rows + _MORE_SPANS


def answers_of(batch_size: int) -> StepSizes:
    return StepSizes(batch_size, batch_size, batch_size, is_decode=True)


@dataclass(frozen=True)
class StepInputs:
    """On the model's device, int32. Views of `StepBuffers`, valid until its next fill."""

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T] or [axes, T]
    slots: Tensor  # [T]: where each new token's K and V go
    adapters: Tensor | None  # [T]: numbers, or 0; None: no token has one
    wanted: Tensor  # [W]: which of the T tokens want logits
    step: StepTensors
    states: SpanTensors | None  # None: the model keeps none


@dataclass(frozen=True)
class _Fields:
    """Views of the host's buffer."""

    first: int  # number of the buffer at which they begin
    token_ids: np.ndarray
    position_ids: np.ndarray
    slots: np.ndarray
    adapters: np.ndarray
    seqs: np.ndarray
    indices: np.ndarray
    ends: np.ndarray
    starts: np.ndarray
    contexts: np.ndarray
    rows: np.ndarray
    wanted: np.ndarray
    # of a model that keeps states
    span_starts: np.ndarray
    span_firsts: np.ndarray
    spans: np.ndarray
    sources: np.ndarray
    targets: np.ndarray


class StepBuffers:
    """Owns both buffers. One thread. A fill enqueues one copy on the current stream, and may be repeated at
    once: it waits for the previous copy.

    largest: no step has more tokens, sequences or wanted tokens. max_blocks: the longest block table. axes:
    of a position. scratch_block: a block that belongs to no request, for the K and V of padding tokens.
    scratch_state: blocks of a state that belongs to no request; empty: the model keeps none.
    """

    def __init__(
        self, largest: StepSizes, max_blocks: int, axes: int, block_size: int, scratch_block: int,
        device: torch.device, scratch_state: Sequence[int] = (),
    ):  # fmt: skip
        self._scratch_state = np.array(scratch_state, dtype=np.int32)
        self._axes, self._block_size = axes, block_size
        self._scratch_slot = scratch_block * block_size
        self._end_of_fields = sum(_aligned(count) for count in self._counts(largest))
        size = self._end_of_fields + 3 * _aligned(min(largest.num_rows * max_blocks, MAX_BLOCKS_PER_COPY))
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._numbers = self._host.numpy()
        self._rows = TableRows(largest.num_rows, max_blocks, scratch_block)
        self._tables = torch.full(
            (largest.num_rows, max_blocks), scratch_block, dtype=torch.int32, device=device
        )
        self._fields: dict[StepSizes, _Fields] = {}
        self._inputs: dict[StepSizes, StepInputs] = {}

    def fill_answers(
        self,
        sizes: StepSizes,
        token_ids: Sequence[int] | np.ndarray | int,
        context_lens: Sequence[int],
        deltas: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        adapters: Sequence[int] = (),
        states: Sequence[StateSpan] = (),
    ) -> StepInputs:
        """One token for each sequence. Arguments as in `LanguageModel.decode`; one number stands for every
        token. A sequence without a state gets the scratch state."""
        fields, count = self._begin(sizes), len(context_lens)
        fields.token_ids[:count] = token_ids
        fields.indices[:count] = context_lens
        fields.position_ids[..., :count] = fields.indices[:count] + np.array(deltas, dtype=np.int32)
        fields.ends[:count] = fields.indices[:count] + 1
        fields.contexts[:count] = fields.ends[:count]
        fields.adapters[:] = 0
        fields.adapters[: len(adapters)] = adapters
        # these three do not depend on the step; behind the last sequence they are padding
        numbers = np.arange(count)
        fields.seqs[:count] = fields.starts[:count] = fields.wanted[:count] = numbers
        if len(self._scratch_state):
            self._fill_states_of_answers(fields, count, states)
        return self._end(sizes, fields, count, block_tables, count)

    def fill_chunks(
        self, sizes: StepSizes, token_ids: Sequence[int] | np.ndarray, chunks: Sequence[SequenceChunk]
    ) -> StepInputs:
        """`token_ids`: those of the chunks as the embedding reads them. Their positions are whole numbers.
        Raises InternalError for a chunk that ends inside a span of tokens that see each other."""
        fields, tokens = self._begin(sizes), packed_tokens(chunks)
        num_tokens, num_rows = len(tokens.indices), len(chunks)
        fields.token_ids[:num_tokens] = token_ids
        fields.position_ids[..., :num_tokens] = tokens.position_ids.numpy()
        fields.seqs[:num_tokens] = tokens.seqs
        fields.adapters[:num_tokens], fields.adapters[num_tokens:] = tokens.adapters, 0
        fields.indices[:num_tokens] = tokens.indices
        fields.starts[0] = 0
        fields.starts[1 : num_rows + 1] = tokens.counts.cumsum()
        fields.contexts[:num_rows] = tokens.computed + tokens.counts
        spans = visible_spans(chunks)
        fields.ends[:num_tokens] = visible_ends(tokens.indices, fields.starts, spans)
        fields.wanted[: len(tokens.wanted)] = tokens.wanted
        if len(self._scratch_state):
            spans = [chunk.states or (StateSpan(len(chunk.token_ids)),) for chunk in chunks]
            self._fill_states(fields, PackedSpans.of(spans, len(self._scratch_state)))
        tables = [chunk.block_table for chunk in chunks]
        return self._end(sizes, fields, num_tokens, tables, len(tokens.wanted))

    def inputs(self, sizes: StepSizes) -> StepInputs:
        """Always the same views."""
        if sizes not in self._inputs:
            views = self._views(sizes, self._device)
            token_ids, position_ids, slots, adapters, *of_step = views[:10]
            wanted, of_states = views[10], views[11:]
            step = StepTensors(*of_step, self._tables, self._block_size, sizes.is_decode)
            spans = SpanTensors(*of_states, sizes.is_decode) if len(self._scratch_state) else None
            self._inputs[sizes] = StepInputs(token_ids, position_ids, slots, adapters, wanted, step, spans)
        return self._inputs[sizes]

    def _begin(self, sizes: StepSizes) -> _Fields:
        """The fields of such a step, which may be written now."""
        if self._copied is not None:
            self._copied.synchronize()
        if sizes not in self._fields:
            first = self._first_field(sizes)
            self._fields[sizes] = _Fields(first, *self._views(sizes, self._numbers))
        return self._fields[sizes]

    def _fill_states_of_answers(self, fields: _Fields, count: int, states: Sequence[StateSpan]) -> None:
        fields.span_starts[: count + 1] = np.arange(count + 1)
        fields.span_starts[count + 1 :] = count
        fields.span_firsts[:] = np.arange(len(fields.span_firsts))
        fields.spans[:count], fields.spans[count:] = fields.span_firsts[:count], -1
        for row, span in enumerate(states):
            fields.sources[row], fields.targets[row] = span.source, span.target
        for field in (fields.sources, fields.targets):
            field[len(states) :] = self._scratch_state

    def _fill_states(self, fields: _Fields, spans: PackedSpans) -> None:
        num_spans, num_tokens = len(spans.firsts), len(spans.spans)
        fields.span_starts[: num_spans + 1], fields.span_starts[num_spans + 1 :] = spans.starts, num_tokens
        fields.span_firsts[:] = np.arange(len(fields.span_firsts))
        fields.span_firsts[:num_spans] = spans.firsts
        fields.spans[:num_tokens], fields.spans[num_tokens:] = spans.spans, -1
        fields.sources[:num_spans], fields.targets[:num_spans] = spans.source, spans.target
        for field in (fields.sources, fields.targets):
            field[num_spans:] = self._scratch_state

    def _end(
        self, sizes: StepSizes, fields: _Fields, num_tokens: int, block_tables: Sequence[Sequence[int]],
        num_wanted: int,
    ) -> StepInputs:  # fmt: skip
        """Tables, slots and padding, then the copy."""
        num_rows = len(block_tables)
        fields.rows[:num_rows], changed = self._rows.place(block_tables)
        fields.rows[num_rows:] = 0
        blocks, places = np.divmod(fields.indices[:num_tokens], self._block_size)
        slots = self._rows.numbers[fields.rows[fields.seqs[:num_tokens]], blocks]
        slots *= self._block_size
        slots += places
        fields.slots[:num_tokens] = slots
        fields.token_ids[num_tokens:] = fields.indices[num_tokens:] = fields.ends[num_tokens:] = 0
        fields.position_ids[..., num_tokens:] = 0
        fields.slots[num_tokens:] = self._scratch_slot
        fields.seqs[num_tokens:] = -1
        fields.starts[num_rows:] = num_tokens
        fields.contexts[num_rows:] = 1
        fields.wanted[num_wanted:] = 0
        self._send(fields.first, changed)
        return self.inputs(sizes)

    def _send(self, first: int, changed: np.ndarray) -> None:
        """Copies the numbers from `first` on, and the tables' changed ones."""
        while True:
            some, changed = changed[:MAX_BLOCKS_PER_COPY], changed[MAX_BLOCKS_PER_COPY:]
            end_of_blocks = self._end_of_fields + len(some)
            first_place = _aligned(end_of_blocks)
            end = first_place + 2 * len(some)
            if len(some):
                self._numbers[self._end_of_fields : end_of_blocks] = self._rows.numbers.reshape(-1)[some]
                self._numbers[first_place:end].view(np.int64)[:] = some
            self._device[first:end].copy_(self._host[first:end], non_blocking=True)
            if self._copied is not None:
                self._copied.record()
            if len(some):
                places = self._device[first_place:end].view(torch.int64)
                blocks = self._device[self._end_of_fields : end_of_blocks]
                self._tables.view(-1).scatter_(0, places, blocks)
            if not len(changed):
                return self._rows.sent()
            if self._copied is not None:
                self._copied.synchronize()
            first = self._end_of_fields

    def _first_field(self, sizes: StepSizes) -> int:
        return self._end_of_fields - sum(_aligned(count) for count in self._counts(sizes))

    def _counts(self, sizes: StepSizes) -> list[int]:
        """Returns how many numbers each field has, in the order of `_Fields`."""
        tokens, rows = sizes.num_tokens, sizes.num_rows
        of_tokens = [tokens, self._axes * tokens, tokens, tokens, tokens, tokens, tokens]
        blocks, spans = len(self._scratch_state), sizes.num_spans
        of_states = [spans + 1, spans, tokens, spans * blocks, spans * blocks] if blocks else [0] * 5
        return [*of_tokens, rows + 1, rows, rows, sizes.num_wanted, *of_states]

    def _views(self, sizes: StepSizes, buffer: Any) -> list[Any]:
        """Returns the fields as views of a tensor or an array."""
        first, views = self._first_field(sizes), []
        for count in self._counts(sizes):
            views.append(buffer[first : first + count])
            first += _aligned(count)
        if self._axes > 1:
            views[1] = views[1].reshape(self._axes, sizes.num_tokens)
        if len(self._scratch_state):
            views[-2:] = [view.reshape(sizes.num_spans, -1) for view in views[-2:]]
        return views


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
