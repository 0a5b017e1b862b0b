"""Attention over block memory on CUDA, with a library of attention kernels or our own decode kernel. Letters
as in `attention`.

Prompts and answers may be served by different libraries (`cluster.model.cuda.libraries`), answers by none of
them. `route` decides:

* Pages are read by a library that can.
* Other blocks and INT8 blocks are decoded by `cluster.model.cuda.decode_attention`, and prefilled from rows
  that are gathered into one tensor.
* Where pages cannot be read, or are read for prompts alone, the sequences of a mixed step with one new token
  are decoded apart from the others: to gather their rows would copy their whole contexts in every layer.
* Bidirectional spans use the fallback. In prefill, sinks and different widths of K and V use it as well.

Untried on a GPU. Routing and arguments are tested on the CPU with stand-ins for the libraries.
"""

from __future__ import annotations

from enum import Enum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model.attention import LayerAttention, ModelAttention, PagedBatch, attend_parts, mixed_parts
from cluster.model.cuda import decode_attention
from cluster.model.cuda.libraries import FlashLibrary, StepLengths
from cluster.model.kv_format import LayerCache, PlainRows, QuantizedRows, RowStore

_MAX_FLASH_WIDTH = 256


class Route(Enum):
    """How one call of `attend` is computed."""

    PAGES = auto()  # flash-attn over the blocks
    DECODE_KERNEL = auto()  # our kernel over the blocks
    ROWS = auto()  # flash-attn over gathered rows
    FALLBACK = auto()


def route(
    batch: PagedBatch,
    layer: LayerAttention,
    cache: LayerCache,
    library: FlashLibrary | None,
    has_kernels: bool,
    prefers_kernel: bool = False,
) -> Route:
    """has_kernels: whether our Triton kernels work here. prefers_kernel: they decode what the library could,
    too."""
    kernel_can = batch.is_decode and has_kernels and decode_attention.can_decode(cache)
    if kernel_can and prefers_kernel:
        return Route.DECODE_KERNEL
    flash_can = (
        library is not None
        and (library.has_softcap or layer.softcap is None)
        and layer.sinks is None
        and cache.key.row_shape == cache.value.row_shape
        and cache.key.row_shape[1] <= _MAX_FLASH_WIDTH
        and cache.key.row_shape[1] % 8 == 0
        and not any(batch.bidirectional_spans)
    )
    if flash_can and isinstance(cache.key, PlainRows) and reads_pages(library, batch.block_size):
        return Route.PAGES
    if kernel_can:
        return Route.DECODE_KERNEL
    return Route.ROWS if flash_can else Route.FALLBACK


def reads_pages(library: FlashLibrary | None, block_size: int) -> bool:
    multiple = None if library is None else library.page_multiple
    return multiple is not None and block_size % multiple == 0


class FlashAttention:
    """The attention backend on CUDA, for float16 and bfloat16. `prompts`, `answers`: what serves them; None:
    our kernels where they can, else the fallback. `num_processors`: the device's multiprocessors."""

    def __init__(
        self,
        fallback: ModelAttention,
        prompts: FlashLibrary | None,
        answers: FlashLibrary | None,
        has_kernels: bool,
        num_processors: int,
    ):
        self._fallback = fallback
        self._prompts = prompts
        self._answers = answers
        self._has_kernels = has_kernels
        self._num_processors = num_processors

    def can_capture(self, block_size: int, cache: LayerCache) -> bool:
        kernel = self._has_kernels and decode_attention.can_decode(cache)
        return kernel or (reads_pages(self._answers, block_size) and isinstance(cache.key, PlainRows))

    def score_bytes(self, num_heads: int, width: int, num_tokens: int, max_context: int) -> int:
        return self._fallback.score_bytes(num_heads, width, num_tokens, max_context)

    def write(self, batch: PagedBatch, cache: LayerCache, key: Tensor, value: Tensor) -> None:
        for store, rows in ((cache.key, key), (cache.value, value)):
            if self._has_kernels and isinstance(store, QuantizedRows):
                decode_attention.write_quantised(store, batch.slots, rows)
            else:
                store.write(batch.slots, rows)

    def attend(
        self, batch: PagedBatch, layer: LayerAttention, query: Tensor, new_key: Tensor, new_value: Tensor,
        cache: LayerCache,
    ) -> Tensor:  # fmt: skip
        library = self._answers if batch.is_decode else self._prompts
        chosen = route(batch, layer, cache, library, self._has_kernels, self._answers is None)
        is_one_call = chosen is Route.PAGES and self._answers is self._prompts
        if not is_one_call and (parts := mixed_parts(batch)):
            return attend_parts(parts, self, layer, query, new_key, new_value, cache)
        if chosen is Route.DECODE_KERNEL:
            return self._decode(batch, layer, query, cache)
        if chosen is Route.FALLBACK or library is None:
            return self._fallback.attend(batch, layer, query, new_key, new_value, cache)
        lengths = _lengths(batch)
        if isinstance(cache.key, PlainRows) and isinstance(cache.value, PlainRows):
            if chosen is Route.PAGES:
                return library.paged(query.contiguous(), cache.key.data, cache.value.data, lengths, layer)
            if list(batch.query_lens) == list(batch.context_lens):
                return library.rows(query.contiguous(), new_key, new_value, lengths, layer)
        slots = _context_slots(batch, lengths)
        key = self._gather(cache.key, slots, query.dtype)
        value = self._gather(cache.value, slots, query.dtype)
        return library.rows(query.contiguous(), key, value, lengths, layer)

    def _gather(self, store: RowStore, slots: Tensor, dtype: torch.dtype) -> Tensor:
        if self._has_kernels and isinstance(store, QuantizedRows):
            return decode_attention.gather_quantised(store, slots, dtype)
        return store.rows(slots, dtype)

    def _decode(self, batch: PagedBatch, layer: LayerAttention, query: Tensor, cache: LayerCache) -> Tensor:
        num_rows = len(batch.query_lens) * cache.key.row_shape[0]
        max_context = batch.block_tables.shape[1] * batch.block_size
        splits = decode_attention.num_splits_for(num_rows, max_context, self._num_processors)
        return decode_attention.paged_decode(
            query, cache, batch.block_tables, batch.context_lens_tensor, layer, splits
        )


def _lengths(batch: PagedBatch) -> StepLengths:
    """The sizes of this step; made once."""
    memo_key = ("flash", "lengths")
    if memo_key not in batch.memo:
        contexts = batch.context_lens_tensor
        if batch.is_decode:  # without reading the host: the step may be under capture
            query_starts = torch.arange(len(batch.query_lens) + 1, dtype=torch.int32, device=contexts.device)
        else:
            query_starts = _starts(torch.tensor(batch.query_lens)).to(contexts.device, non_blocking=True)
        batch.memo[memo_key] = StepLengths(
            query_starts, _starts(contexts), contexts.int(), batch.block_tables.int(),
            max(batch.query_lens), max(batch.context_lens),
        )  # fmt: skip
    return batch.memo[memo_key]


def _starts(lengths: Tensor) -> Tensor:
    """[B] → [B + 1] int32: exclusive prefix sums."""
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def _context_slots(batch: PagedBatch, lengths: StepLengths) -> Tensor:
    """Flat slots [sum of contexts] int64 of every position of every sequence. Made once per step."""
    memo_key = ("flash", "slots")
    if memo_key not in batch.memo:
        total, device = sum(batch.context_lens), batch.block_tables.device
        seqs = torch.arange(len(batch.context_lens), device=device)
        seq_of = seqs.repeat_interleave(batch.context_lens_tensor, output_size=total)
        positions = torch.arange(total, device=device) - lengths.context_starts[seq_of]
        blocks = batch.block_tables[seq_of, positions // batch.block_size].long()
        batch.memo[memo_key] = blocks * batch.block_size + positions % batch.block_size
    return batch.memo[memo_key]
