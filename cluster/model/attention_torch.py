"""Attention over block memory in plain torch: any device, any dtype, every feature. Letters as in
`attention`.

* Decode gathers all sequences' blocks into one padded batch. It folds the query heads that share a KV head
  into the query length, which keeps torch's fused kernel on its fast path.
* Prefill runs one kernel per sequence, or several if the scores of a chunk or its mask would take more than
  SCORE_BYTES: a kernel for each slice of its queries. In a mixed step, sequences with one new token are
  decoded together: they get the bits that they get in a step without prompts.
* Soft-capped scores and attention sinks use an explicit softmax instead of the fused kernel.

Masks are made once per step and window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model.attention import LayerAttention, PagedBatch
from cluster.model.kv_format import LayerCache, PlainRows, RowStore

SCORE_BYTES = 512 << 20  # of scores, probabilities and mask of one prefill kernel at once
_BYTES_PER_SCORE = 13  # at most three of them in float32 exist at once, and a byte of the mask's bits


class TorchAttention:
    """Keeps two scratch buffers for the gathered K and V of a decode step instead of allocating them in every
    layer. Measured with the demo model, batch 32, context 256, one busy core: a whole step takes 6.9 ms
    instead of 9.4 at best, and 8.4 instead of 20 in the median.
    """

    def __init__(self) -> None:
        self._scratch: dict[str, Tensor] = {}

    def can_capture(self, cache: LayerCache) -> bool:
        return False

    def score_bytes(self, num_heads: int, width: int, num_tokens: int, max_context: int) -> int:
        return min(SCORE_BYTES, num_heads * num_tokens * max_context * _BYTES_PER_SCORE)

    def write(self, batch: PagedBatch, cache: LayerCache, key: Tensor, value: Tensor) -> None:
        cache.write(batch.slots, key, value)

    def attend(
        self, batch: PagedBatch, layer: LayerAttention, query: Tensor, new_key: Tensor, new_value: Tensor,
        cache: LayerCache,
    ) -> Tensor:  # fmt: skip
        if batch.is_decode:
            return self._attend_decode(batch, layer, query, cache)
        out = query.new_empty(*query.shape[:2], new_value.shape[-1])
        if parts := _mixed_parts(batch):
            for tokens, part in parts:
                own = (rows[tokens] for rows in (query, new_key, new_value))
                out[tokens] = self.attend(part, layer, *own, cache)
            return out
        start = 0
        for seq, query_len in enumerate(batch.query_lens):
            end = start + query_len
            if isinstance(cache.key, PlainRows) and _is_plain_prompt(batch, layer, seq):
                key, value = new_key[start:end], new_value[start:end]
                out[start:end] = _fused(layer, query[start:end], key, value, None, query_len > 1)
            else:
                slots = _prefill_slots(batch, layer.sliding_window, seq)
                key, value = cache.key.rows(slots, query.dtype), cache.value.rows(slots, query.dtype)
                for rows in _slices(layer, query, query_len, key.shape[1], len(slots)):
                    is_whole = len(rows) == query_len
                    mask = _prefill_mask(batch, layer.sliding_window, seq, rows, query.dtype)
                    own = slice(start + rows.start, start + rows.stop)
                    out[own] = _one_sequence(layer, query[own], key, value, mask, is_whole)
            start = end
        return out

    def _attend_decode(
        self, batch: PagedBatch, layer: LayerAttention, query: Tensor, cache: LayerCache
    ) -> Tensor:
        """query [B, Hq, D] → [B, Hq, Dv]."""
        table, mask = _decode_view(batch, layer.sliding_window, query.dtype)
        num_seqs, num_heads, width = query.shape
        kv_heads = cache.key.row_shape[0]
        flat_table, size = table.flatten(), batch.block_size
        key = self._gather("key", cache.key, flat_table, size, query).view(num_seqs, -1, *cache.key.row_shape)
        value = self._gather("value", cache.value, flat_table, size, query)
        value = value.view(num_seqs, -1, *cache.value.row_shape)
        folded = query.view(num_seqs, kv_heads, num_heads // kv_heads, width)
        if not _is_explicit(layer):
            out = F.scaled_dot_product_attention(
                folded, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=layer.scaling
            )
        else:
            sinks = None if layer.sinks is None else layer.sinks.view(1, kv_heads, -1, 1)
            out = _explicit(layer, folded, key.transpose(1, 2), value.transpose(1, 2), mask, sinks)
        return out.reshape(num_seqs, num_heads, -1)

    def _gather(self, name: str, store: RowStore, block_ids: Tensor, block_size: int, like: Tensor) -> Tensor:
        """[n, block_size, Hk, D] in scratch of `like`'s dtype and device; valid until the next gather of the
        same name."""
        size = len(block_ids) * block_size * math.prod(store.row_shape)
        scratch = self._scratch.get(name)
        if (
            scratch is None
            or scratch.numel() < size
            or scratch.dtype != like.dtype
            or scratch.device != like.device
        ):
            scratch = self._scratch[name] = like.new_empty(size)
        return store.blocks(block_ids, like.dtype, scratch)


def _mixed_parts(batch: PagedBatch) -> Sequence[tuple[Tensor, PagedBatch]]:
    """The sequences with one new token and the others apart, which are computed in other ways: which of the
    step's T tokens, int64, and a batch of these sequences. Empty, if there are sequences of one kind only.
    Made once per step."""
    if 1 not in batch.query_lens:
        return ()
    if ("parts",) not in batch.memo:
        is_single = torch.tensor([new == 1 for new in batch.query_lens])
        batch.memo["parts",] = tuple(_part(batch, seqs.nonzero()[:, 0]) for seqs in (is_single, ~is_single))
    return batch.memo["parts",]


def _part(batch: PagedBatch, seqs: Tensor) -> tuple[Tensor, PagedBatch]:
    """seqs: [b] int64, on the CPU. The tables are as wide as in a step of these sequences alone: a long
    prompt beside short answers must not make their decoding longer."""
    owners = torch.arange(len(batch.query_lens)).repeat_interleave(torch.tensor(batch.query_lens))
    device = batch.slots.device
    tokens, rows, chosen = torch.isin(owners, seqs).nonzero()[:, 0].to(device), seqs.to(device), seqs.tolist()
    context_lens = [batch.context_lens[i] for i in chosen]
    width = (max(context_lens) - 1) // batch.block_size + 1
    part = PagedBatch(
        batch.kv,
        batch.block_size,
        slots=batch.slots[tokens],
        query_lens=[batch.query_lens[i] for i in chosen],
        context_lens=context_lens,
        block_tables=batch.block_tables[rows, :width],
        context_lens_tensor=batch.context_lens_tensor[rows],
        bidirectional_spans=[batch.bidirectional_spans[i] for i in chosen],
        windowed_spans=batch.windowed_spans,
    )
    return tokens, part


def _decode_view(batch: PagedBatch, window: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Block table [B, M] and additive mask [B, 1, 1, M * block_size] of one decode step. With a window, only
    blocks that a query still sees are gathered."""
    memo_key = ("decode", window)
    if memo_key not in batch.memo:
        step = batch.device
        table = batch.block_tables if step is None else step.tables[step.rows.long()]
        lens, size = batch.context_lens_tensor, batch.block_size
        first_block = torch.zeros_like(lens)
        if window is not None and max(batch.context_lens) > window:
            first_block = (lens - window).clamp_(min=0) // size
            num_blocks = min(table.shape[1], (window + size - 2) // size + 1)
            columns = first_block[:, None] + torch.arange(num_blocks, device=table.device)
            table = table.gather(1, columns.clamp_(max=table.shape[1] - 1))
        offsets = torch.arange(table.shape[1] * size, device=table.device)
        positions = first_block[:, None] * size + offsets
        hidden = positions >= lens[:, None]
        if window is not None:
            hidden |= positions < lens[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=table.device).masked_fill_(hidden, float("-inf"))
        batch.memo[memo_key] = (table, mask[:, None, None, :])
    return batch.memo[memo_key]


def _is_plain_prompt(batch: PagedBatch, layer: LayerAttention, seq: int) -> bool:
    """Whether this is a whole prompt from its first token, causal and within the window: it needs no gather
    and no mask."""
    query_len, context_len = batch.query_lens[seq], batch.context_lens[seq]
    window = layer.sliding_window
    return (
        query_len == context_len
        and layer.softcap is None
        and layer.sinks is None
        and not batch.spans(window)[seq]
        and (window is None or context_len <= window)
    )


def _slices(
    layer: LayerAttention, query: Tensor, num_queries: int, kv_heads: int, num_keys: int
) -> list[range]:
    """Ranges of a chunk's queries whose scores may be in memory at once; the fused kernels hold none, but
    their mask, on a GPU once for each query head that shares a KV head."""
    num_heads = query.shape[1]
    copies = num_heads if _is_explicit(layer) else num_heads // kv_heads if _is_on_gpu(query) else 1
    size = max(1, SCORE_BYTES // (copies * num_keys * _BYTES_PER_SCORE))
    return [range(first, min(first + size, num_queries)) for first in range(0, num_queries, size)]


def _prefill_slots(batch: PagedBatch, window: int | None, seq: int) -> Tensor:
    """Flat slots [S] of the keys that the chunk's queries may see."""
    memo_key = ("prefill slots", window, seq)
    if memo_key not in batch.memo:
        size = batch.block_size
        keys = _prefill_keys(batch, window, seq)
        batch.memo[memo_key] = batch.block_tables[seq][keys // size] * size + keys % size
    return batch.memo[memo_key]


def _prefill_keys(batch: PagedBatch, window: int | None, seq: int) -> Tensor:
    """Their positions [S]."""
    first_query = batch.context_lens[seq] - batch.query_lens[seq]
    first_key = 0 if window is None else max(0, first_query - window + 1)
    return torch.arange(first_key, batch.context_lens[seq], device=batch.slots.device)


def _prefill_mask(
    batch: PagedBatch, window: int | None, seq: int, rows: range, dtype: torch.dtype
) -> Tensor | None:
    """The additive mask [n, S] of these queries of a chunk (None: all keys are visible). That of a whole
    chunk is made once per step."""
    if batch.query_lens[seq] == 1:
        return None
    memo_key = ("prefill mask", window, seq)
    if memo_key in batch.memo:
        return batch.memo[memo_key][rows.start : rows.stop]  # layers may cut a chunk differently
    keys = _prefill_keys(batch, window, seq)
    first_query = batch.context_lens[seq] - batch.query_lens[seq]
    queries = torch.arange(first_query + rows.start, first_query + rows.stop, device=keys.device)[:, None]
    visible = keys <= queries
    for start, end in batch.spans(window)[seq]:
        visible |= (queries >= start) & (queries < end) & (keys >= start) & (keys < end)
    if window is not None:
        visible &= keys > queries - window
    mask = torch.zeros(visible.shape, dtype=dtype, device=keys.device).masked_fill_(~visible, float("-inf"))
    if len(rows) == batch.query_lens[seq]:
        batch.memo[memo_key] = mask
    return mask


def _is_explicit(layer: LayerAttention) -> bool:
    return layer.softcap is not None or layer.sinks is not None


def _fused(
    layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> Tensor:
    """query [n, Hq, D], key [S, Hk, D], value [S, Hk, Dv], mask [n, S] → [n, Hq, Dv].

    On a GPU `enable_gqa` with a mask or in float32 takes the kernel that holds all scores. With a mask the
    query heads that share a KV head become more queries of one head; a view of the KV head for each of them
    would give wrong numbers (pytorch/pytorch#191937). Without one, K and V, which are those of the prompt
    itself, are copied."""
    (num_queries, num_heads, width), kv_heads = query.shape, key.shape[1]
    group = num_heads // kv_heads
    query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    if _is_on_gpu(query) and group > 1:
        if mask is not None:
            query, mask = query.reshape(kv_heads, group * num_queries, width), mask.repeat(group, 1)
        elif query.dtype == torch.float32:
            key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    out = F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, is_causal=is_causal, scale=layer.scaling,
        enable_gqa=len(query) != len(key),
    )  # fmt: skip
    return out[0].reshape(num_heads, num_queries, -1).transpose(0, 1)


def _is_on_gpu(query: Tensor) -> bool:
    return query.device.type == "cuda"


def _one_sequence(
    layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_whole: bool
) -> Tensor:
    """query [n, Hq, D], key [S, Hk, D], value [S, Hk, Dv], mask [n, S] → [n, Hq, Dv]. is_whole: these are all
    queries of a chunk."""
    if not _is_explicit(layer):
        return _fused(layer, query, key, value, mask, is_causal=False)
    group = query.shape[1] // key.shape[1]
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    if is_whole and not _is_on_gpu(query):
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    sinks = None if layer.sinks is None else layer.sinks.view(1, -1, 1, 1)
    return _explicit(layer, query.transpose(0, 1)[None], key[None], value[None], mask, sinks)[0].transpose(
        0, 1
    )


def _explicit(
    layer: LayerAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [b, h, n, D], key [b, hk, S, D], value [b, hk, S, Dv], where h is a multiple of hk; mask
    broadcasts to [b, h, n, S], sinks to [b, h, n, 1].

    Scores are float32, as in the fused kernels: in bfloat16 a score near a cap of 20 would be rounded to the
    next sixteenth."""
    folded = (*key.shape[:2], -1)  # the query heads that share a KV head, and their queries, as one dimension
    shape = query.shape[:-1]
    queries = query.reshape(*folded, query.shape[-1]).float()
    scores = (queries @ key.transpose(-1, -2).float()).view(*shape, -1) * layer.scaling
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        probs = torch.cat([scores, column], dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]
    else:
        probs = scores.softmax(dim=-1, dtype=torch.float32)
    out = probs.to(value.dtype).reshape(*folded, probs.shape[-1]) @ value
    return out.view(*shape, -1)
