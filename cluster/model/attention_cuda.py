"""Attention over block memory on CUDA: our kernels for every step (`cluster.model.cuda.paged_attention`),
plain torch for heads that they do not take. Letters as in `attention`.

A library (`cluster.model.cuda.libraries`) may serve long prompt chunks of unrecorded steps: plain KV, nothing
but a causal mask and a window, and no running answer among the sequences, whose bits would depend on its
company, and whose context a library without pages would copy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model.attention import LayerAttention, ModelAttention, PagedBatch
from cluster.model.cuda import paged_attention
from cluster.model.cuda.layer_calls import write_rows
from cluster.model.cuda.libraries import FlashLibrary, StepLengths
from cluster.model.cuda.paged_attention import can_attend, plan_of, step_of, tiles_for
from cluster.model.kv_format import LayerCache, PlainRows

LONG_STEP = 512  # new tokens above which the device, not the host, decides how long a step takes
MAX_ANSWER = 16  # new tokens of a sequence that may be an answer with its drafts
_MAX_LIBRARY_WIDTH = 256


class CudaAttention:
    """The attention backend on CUDA, in any float dtype. num_processors: the device's multiprocessors.
    library: serves what `library_can` and `_is_long_prompts` say; None: our kernels do."""

    def __init__(self, fallback: ModelAttention, num_processors: int, library: FlashLibrary | None = None):
        self.library = library
        self._fallback, self._num_processors = fallback, num_processors

    def can_capture(self, cache: LayerCache) -> bool:
        return can_attend(cache)

    def score_bytes(self, num_heads: int, width: int, num_tokens: int, max_context: int) -> int:
        if width > paged_attention.MAX_WIDTH:
            return self._fallback.score_bytes(num_heads, width, num_tokens, max_context)
        return paged_attention.partial_bytes(num_heads, width, num_tokens)

    def write(self, batch: PagedBatch, cache: LayerCache, key: Tensor, value: Tensor) -> None:
        write_rows(key, value, batch.slots, cache)

    def attend(
        self, batch: PagedBatch, layer: LayerAttention, query: Tensor, new_key: Tensor, new_value: Tensor,
        cache: LayerCache,
    ) -> Tensor:  # fmt: skip
        if not can_attend(cache):
            return self._fallback.attend(batch, layer, query, new_key, new_value, cache)
        return self.attend_blocks(batch, layer, query.contiguous(), cache)

    def attend_blocks(
        self, batch: PagedBatch, layer: LayerAttention, query: Tensor, cache: LayerCache
    ) -> Tensor:
        """`attend` for heads that our kernel takes. query is contiguous; K and V are in the cache only."""
        if (
            self.library is not None
            and _is_long_prompts(batch, layer.sliding_window)
            and library_can(layer, cache)
        ):
            return _by_library(self.library, batch, layer, query, cache)
        tiles = tiles_for(query.shape[1], cache, query.dtype)
        window = layer.sliding_window
        step, plan = step_of(batch, window), plan_of(batch, tiles, window)
        return paged_attention.attend(query, cache, layer, step, plan, tiles, self._num_processors)


def library_can(layer: LayerAttention, cache: LayerCache) -> bool:
    """Whether libraries serve prompts of such a layer."""
    (_, width), is_plain = cache.key.row_shape, isinstance(cache.key, PlainRows)
    is_even = cache.key.row_shape == cache.value.row_shape and width <= _MAX_LIBRARY_WIDTH and width % 8 == 0
    return is_plain and is_even and layer.softcap is None and layer.sinks is None


def _is_long_prompts(batch: PagedBatch, window: int | None) -> bool:
    """Whether the step has many new tokens and no answers, and is not recorded."""
    return (
        batch.device is None
        and len(batch.slots) > LONG_STEP
        and min(batch.query_lens) > MAX_ANSWER
        and not any(batch.spans(window))
    )


def _by_library(
    library: FlashLibrary, batch: PagedBatch, layer: LayerAttention, query: Tensor, cache: LayerCache
) -> Tensor:
    assert isinstance(cache.key, PlainRows) and isinstance(cache.value, PlainRows)
    lengths = _lengths(batch)
    multiple = library.page_multiple
    if multiple is not None and batch.block_size % multiple == 0:
        return library.paged(query, cache.key.data, cache.value.data, lengths, layer)
    slots = _context_slots(batch, lengths)
    key, value = cache.key.rows(slots, query.dtype), cache.value.rows(slots, query.dtype)
    return library.rows(query, key, value, lengths, layer)


def _lengths(batch: PagedBatch) -> StepLengths:
    """The sizes of this step; made once."""
    if ("lengths",) not in batch.memo:
        step = step_of(batch, None)
        context_starts = F.pad(step.contexts.cumsum(0), (1, 0)).int()
        batch.memo["lengths",] = StepLengths(
            step.starts, context_starts, step.contexts, step.tables, max(batch.query_lens),
            max(batch.context_lens),
        )  # fmt: skip
    return batch.memo["lengths",]


def _context_slots(batch: PagedBatch, lengths: StepLengths) -> Tensor:
    """Flat slots [sum of contexts] int64 of every position of every sequence. Made once per step."""
    if ("context slots",) not in batch.memo:
        total, device = sum(batch.context_lens), batch.block_tables.device
        seqs = torch.arange(len(batch.context_lens), device=device)
        seq_of = seqs.repeat_interleave(batch.context_lens_tensor, output_size=total)
        positions = torch.arange(total, device=device) - lengths.context_starts[seq_of]
        blocks = batch.block_tables[seq_of, positions // batch.block_size].long()
        batch.memo["context slots",] = blocks * batch.block_size + positions % batch.block_size
    return batch.memo["context slots",]
