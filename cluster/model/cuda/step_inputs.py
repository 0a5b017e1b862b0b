"""The inputs of a recorded step: one pinned buffer on the host, one on the device, one copy a step.

A recorded step has fixed sizes (`StepSizes`): T tokens of up to B sequences, W of which want logits. Its
fields lie at fixed addresses, which a replay reads:

    | unused | token_ids position_ids … contexts wanted | table of row 0 | row 1 | … |

The fields begin as far before the tables as the sizes need. A step copies them and the tables of its own
sequences. All sizes share the tables, so a row that a step does not use keeps block ids of an earlier step,
or the scratch block: they are always valid. A row is written only if its table has changed. Each field
begins at a multiple of 16 bytes, as `StepTensors` asks.

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
from cluster.model.states import PackedSpans, SpanTensors, StateSpan

_ALIGNED = 4  # numbers of 16 bytes
_MORE_SPANS = 16  # of prompts whose states are kept within the step


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
        self._max_blocks, self._axes, self._block_size = max_blocks, axes, block_size
        self._scratch_slot = scratch_block * block_size
        self._first_table = sum(_aligned(count) for count in self._counts(largest))
        size = self._first_table + largest.num_rows * max_blocks
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._numbers = self._host.numpy()
        self._tables = self._numbers[self._first_table :].reshape(largest.num_rows, max_blocks)
        self._tables[:] = scratch_block
        self._device.copy_(self._host)
        self._held: list[Sequence[int]] = [()] * largest.num_rows  # the tables that the rows begin with
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
        self._take_tables(block_tables)
        if len(self._scratch_state):
            self._fill_states_of_answers(fields, count, states)
        return self._end(sizes, fields, count, count, count)

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
        self._take_tables([chunk.block_table for chunk in chunks])
        if len(self._scratch_state):
            spans = [chunk.states or (StateSpan(len(chunk.token_ids)),) for chunk in chunks]
            self._fill_states(fields, PackedSpans.of(spans, len(self._scratch_state)))
        return self._end(sizes, fields, num_tokens, num_rows, len(tokens.wanted))

    def inputs(self, sizes: StepSizes) -> StepInputs:
        """Always the same views."""
        if sizes not in self._inputs:
            views = self._views(sizes, self._device)
            token_ids, position_ids, slots, adapters, *of_step = views[:9]
            wanted, of_states = views[9], views[10:]
            tables = self._device[self._first_table :][: sizes.num_rows * self._max_blocks]
            tables = tables.view(sizes.num_rows, self._max_blocks)
            step = StepTensors(*of_step, tables, self._block_size, sizes.is_decode)
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

    def _take_tables(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Tables are compared as lists, whose equal numbers are mostly the same objects: to convert them all
        takes ten times as long."""
        for row, table in enumerate(block_tables):
            if self._held[row] != table:
                used = min(len(table), self._max_blocks)  # a table may reserve blocks for later
                self._tables[row, :used] = table[:used]
                self._held[row] = table[:]

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
        self, sizes: StepSizes, fields: _Fields, num_tokens: int, num_rows: int, num_wanted: int
    ) -> StepInputs:
        """Slots and padding, then the copy."""
        blocks, places = np.divmod(fields.indices[:num_tokens], self._block_size)
        slots = self._tables[fields.seqs[:num_tokens], blocks]
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
        used = slice(fields.first, self._first_table + num_rows * self._max_blocks)
        self._device[used].copy_(self._host[used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return self.inputs(sizes)

    def _first_field(self, sizes: StepSizes) -> int:
        return self._first_table - sum(_aligned(count) for count in self._counts(sizes))

    def _counts(self, sizes: StepSizes) -> list[int]:
        """Returns how many numbers each field has, in the order of `_Fields`."""
        tokens, rows = sizes.num_tokens, sizes.num_rows
        of_tokens = [tokens, self._axes * tokens, tokens, tokens, tokens, tokens, tokens]
        blocks, spans = len(self._scratch_state), sizes.num_spans
        of_states = [spans + 1, spans, tokens, spans * blocks, spans * blocks] if blocks else [0] * 5
        return [*of_tokens, rows + 1, rows, sizes.num_wanted, *of_states]

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
