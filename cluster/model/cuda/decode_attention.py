"""Decode attention over block memory with our Triton kernels (`kernels`), for plain and INT8 KV. Supports any
block size, sliding windows, soft caps, sinks, and K and V of different widths. Shapes do not depend on the
contexts, so calls may be captured in a CUDA graph. Never run on a GPU. Letters as in `attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.config.machine import has_triton
from cluster.model.attention import LayerAttention
from cluster.model.kv_format import LayerCache, PlainRows, QuantizedRows, RowStore

MAX_WIDTH = 256  # channels of a head that fit a program's registers
MAX_SPLITS = 64
_TILE = 64  # keys per inner step
_GATHER_TILE = 16  # rows per program


def is_available() -> bool:
    """Whether Triton is installed, with the C compiler that it calls when it first meets a device."""
    return has_triton()


def can_decode(cache: LayerCache) -> bool:
    return max(cache.key.row_shape[1], cache.value.row_shape[1]) <= MAX_WIDTH


def num_splits_for(num_rows: int, max_context: int, num_processors: int) -> int:
    """Number of shares into which the keys of a sequence are split: enough for about two programs per
    processor, but at most MAX_SPLITS, and no share below four tiles. num_rows: sequences * KV heads."""
    wanted = -(-2 * num_processors // num_rows)
    return max(1, min(wanted, max_context // (4 * _TILE), MAX_SPLITS))


def paged_decode(
    query: Tensor, cache: LayerCache, block_tables: Tensor, context_lens: Tensor, layer: LayerAttention,
    num_splits: int
) -> Tensor:  # fmt: skip
    """query [B, Hq, D]: one new token per sequence, whose K and V are already in the cache. block_tables [B,
    max_blocks]: integers with contiguous rows. context_lens [B]: integers. Returns [B, Hq, Dv] in query's
    dtype. Needs triton; enqueues on the current stream."""
    from cluster.model.cuda import kernels

    num_seqs, num_heads, key_width = query.shape
    key, key_scales = _tensors(cache.key)
    value, value_scales = _tensors(cache.value)
    _, block_size, kv_heads, value_width = value.shape
    group = num_heads // kv_heads
    partial_out = query.new_empty((num_seqs, num_heads, num_splits, value_width), dtype=torch.float32)
    partial_stats = query.new_empty((num_seqs, num_heads, num_splits, 2), dtype=torch.float32)
    kernels.decode_split[(num_seqs, kv_heads, num_splits)](
        query.contiguous(), key, key_scales, value, value_scales, block_tables,
        context_lens.contiguous(), partial_out, partial_stats,
        layer.scaling, layer.softcap or 1.0, num_splits, block_tables.stride(0),
        BLOCK_SIZE=block_size, KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=_padded(group),
        K_WIDTH=key_width, K_PAD=_padded(key_width), V_WIDTH=value_width, V_PAD=_padded(value_width),
        TILE=_TILE, WINDOW=layer.sliding_window or 0, HAS_SOFTCAP=layer.softcap is not None,
        QUANTISED=key_scales is not None,
    )  # fmt: skip
    out = query.new_empty((num_seqs, num_heads, value_width))
    kernels.decode_reduce[(num_seqs * num_heads,)](
        partial_out, partial_stats, layer.sinks, out, num_splits,
        HEADS=num_heads, V_WIDTH=value_width, V_PAD=_padded(value_width),
        SPLITS_PAD=_power_of_two(num_splits),
        HAS_SINKS=layer.sinks is not None,
    )  # fmt: skip
    return out


def write_quantised(store: QuantizedRows, slots: Tensor, rows: Tensor) -> None:
    """`store.write` in one launch: rows [T, Hk, D] to flat slots [T]. Needs triton; enqueues on the current
    stream."""
    from cluster.model.cuda import kernels

    num_tokens, kv_heads, width = rows.shape
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    num_runs = store.scales.shape[-1]
    kernels.write_quantised[(num_tokens, kv_heads)](
        rows, slots, store.codes, store.scales, rows.stride(0), rows.stride(1),
        KV_HEADS=kv_heads, WIDTH=width, RUNS=num_runs, RUNS_PAD=_power_of_two(num_runs),
    )  # fmt: skip


def gather_quantised(store: QuantizedRows, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """`store.rows` in one launch: [T, Hk, D] of flat slots [T]. Needs triton; enqueues on the current
    stream."""
    from cluster.model.cuda import kernels

    kv_heads, width = store.row_shape
    out = torch.empty(len(slots), kv_heads, width, dtype=dtype, device=slots.device)
    kernels.gather_quantised[(-(-len(slots) // _GATHER_TILE), kv_heads)](
        store.codes, store.scales, slots, out, len(slots),
        KV_HEADS=kv_heads, WIDTH=width, PAD=_padded(width), TILE=_GATHER_TILE,
    )  # fmt: skip
    return out


def _tensors(store: RowStore) -> tuple[Tensor, Tensor | None]:
    """Contents [num_blocks, block_size, Hk, width], and their scales if there are any."""
    match store:
        case PlainRows(data):
            return data, None
        case QuantizedRows(codes, scales):
            return codes, scales
    raise TypeError(f"no kernel reads {type(store).__name__}")


def _padded(size: int) -> int:
    """Side of a tile: a power of two, at least the smallest that matrix units take."""
    return max(16, _power_of_two(size))


def _power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
