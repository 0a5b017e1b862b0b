"""Attention over block memory with the kernels of `cpu/attention.cpp`: paged decode and prefill chunks, plain
and int8 caches, windows, soft caps, sinks and bidirectional spans. Cases that `can_run` refuses use the
fallback.

Values that the layers of a step share (visible ranges, pointers) are made once per step and window and kept
in `PagedBatch.memo`. Letters as in `attention`.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.model.attention import LayerAttention, ModelAttention, PagedBatch
from cluster.model.batches import visible_ends
from cluster.model.cpu.library import fields
from cluster.model.kv_format import LayerCache, PlainRows, QuantisedRows, RowStore

MAX_WIDTH = 256  # kMaxWidth
MAX_GROUP = 128  # kTile


class _AttentionStep(ctypes.Structure):
    """AttentionStep."""

    _fields_ = (
        *fields(c_void_p, "tables query_starts begins ends"),
        *fields(c_int64, "sequences table_width block_size threads"),
    )


class _AttentionCall(ctypes.Structure):
    """AttentionCall."""

    _fields_ = (
        *fields(c_void_p, "query key key_scales value value_scales sinks out"),
        *fields(
            c_int64, "query_token_stride query_head_stride query_heads kv_heads key_width value_width is_bf16"
        ),
        *fields(c_double, "scale softcap"),
    )


class _WriteCall(ctypes.Structure):
    """WriteCall."""

    _fields_ = (
        *fields(c_void_p, "rows slots target scales"),
        *fields(c_int64, "tokens heads width token_stride head_stride is_bf16 threads"),
    )


@dataclass(frozen=True)
class StepView:
    """A step's arguments and the tensors that they point into. address: of the arguments; valid while this
    object lives."""

    step: _AttentionStep
    tensors: tuple[Tensor, ...]
    address: int


class CpuAttention:
    """`library`: the shared library that holds `paged_attention` and `write_kv`."""

    def __init__(self, library: ctypes.CDLL, fallback: ModelAttention):
        self._fallback = fallback
        # pointers, which ctypes takes of structs in half the time of an address
        self._attend, self._write = library.paged_attention, library.write_kv
        self._attend.argtypes, self._attend.restype = (POINTER(_AttentionStep), POINTER(_AttentionCall)), None
        self._write.argtypes, self._write.restype = (POINTER(_WriteCall), POINTER(_WriteCall)), None

    def can_capture(self, cache: LayerCache) -> bool:
        return False

    def score_bytes(self, num_heads: int, width: int, num_tokens: int, max_context: int) -> int:
        """The kernels hold none."""
        is_native = width <= MAX_WIDTH
        return 0 if is_native else self._fallback.score_bytes(num_heads, width, num_tokens, max_context)

    def write(self, batch: PagedBatch, cache: LayerCache, key: Tensor, value: Tensor) -> None:
        if key.dtype not in _DTYPES or not (_holds(cache.key, key.dtype) and _holds(cache.value, key.dtype)):
            self._fallback.write(batch, cache, key, value)
            return
        key, value = _with_dense_rows(key), _with_dense_rows(value)
        self._write(_write_call(batch, cache.key, key), _write_call(batch, cache.value, value))

    def attend(
        self, batch: PagedBatch, layer: LayerAttention, query: Tensor, new_key: Tensor, new_value: Tensor,
        cache: LayerCache,
    ) -> Tensor:  # fmt: skip
        if not can_run(query, cache):
            return self._fallback.attend(batch, layer, query, new_key, new_value, cache)
        query = _with_dense_rows(query)
        tokens, heads, key_width = query.shape
        kv_heads, value_width = cache.value.row_shape
        out = query.new_empty(tokens, heads, value_width)
        sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
        call = _AttentionCall(
            query.data_ptr(), *row_pointers(cache.key), *row_pointers(cache.value),
            None if sinks is None else sinks.data_ptr(), out.data_ptr(), query.stride(0), query.stride(1),
            heads,
            kv_heads, key_width, value_width, query.dtype == torch.bfloat16, layer.scaling,
            layer.softcap or 0.0,
        )  # fmt: skip
        self._attend(step_view(batch, layer.sliding_window).step, call)
        return out


def can_run(query: Tensor, cache: LayerCache) -> bool:
    """Whether the kernels support these types and sizes."""
    heads, key_width = query.shape[1:]
    kv_heads, value_width = cache.value.row_shape
    return (
        query.dtype in _DTYPES
        and _holds(cache.key, query.dtype)
        and _holds(cache.value, query.dtype)
        and max(key_width, value_width) <= MAX_WIDTH
        and heads // kv_heads <= MAX_GROUP
    )


_DTYPES = (torch.float32, torch.bfloat16)


def _holds(store: RowStore, dtype: torch.dtype) -> bool:
    """Whether the store keeps rows of `dtype`, plain or quantised."""
    return isinstance(store, QuantisedRows) or (isinstance(store, PlainRows) and store.data.dtype == dtype)


def _with_dense_rows(x: Tensor) -> Tensor:
    """The tensor with contiguous rows; its other strides may have any value."""
    return x if x.stride(-1) == 1 else x.contiguous()


def row_pointers(store: RowStore) -> tuple[int, int | None]:
    """Addresses of rows or codes, and of scales."""
    if isinstance(store, QuantisedRows):
        return store.codes.data_ptr(), store.scales.data_ptr()
    assert isinstance(store, PlainRows)
    return store.data.data_ptr(), None


def _write_call(batch: PagedBatch, store: RowStore, rows: Tensor) -> _WriteCall:
    target, scales = row_pointers(store)
    tokens, heads, width = rows.shape
    return _WriteCall(
        rows.data_ptr(), batch.slots.data_ptr(), target, scales, tokens, heads, width, rows.stride(0),
        rows.stride(1),
        rows.dtype == torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip


def step_view(batch: PagedBatch, window: int | None) -> StepView:
    """The arguments of this step and window; made once."""
    memo_key = ("cpu", window)
    if memo_key not in batch.memo:
        begins, ends = visible_ranges(batch, window)
        starts = torch.from_numpy(np.array([0, *batch.query_lens]).cumsum(dtype=np.int32))
        tables = batch.block_tables.contiguous()
        step = _AttentionStep(
            tables.data_ptr(), starts.data_ptr(), begins.data_ptr(), ends.data_ptr(), len(batch.query_lens),
            tables.shape[1], batch.block_size, torch.get_num_threads(),
        )  # fmt: skip
        batch.memo[memo_key] = StepView(step, (tables, starts, begins, ends), ctypes.addressof(step))
    return batch.memo[memo_key]


def visible_ranges(batch: PagedBatch, window: int | None) -> tuple[Tensor, Tensor]:
    """Each new token sees the key positions [begin, end) of its sequence; both [T] int32. A bidirectional
    span moves the end, but never behind the chunk."""
    new = np.array(batch.query_lens)
    last = np.array(batch.context_lens) - new.cumsum()  # of each sequence: index of a token - its place
    positions = np.repeat(last, new).astype(np.int32) + np.arange(new.sum(), dtype=np.int32)
    ends = positions + 1
    if any(batch.bidirectional_spans):
        starts = np.array([0, *batch.query_lens]).cumsum()
        ends = visible_ends(positions, starts, batch.spans(window))
    begins = np.zeros_like(ends) if window is None else np.maximum(positions - (window - 1), 0)
    return torch.from_numpy(begins), torch.from_numpy(ends)
