"""How the K and V of a layer lie in block memory, and how rows are written and read.

    auto: 2 segments per layer, K then V, in the model's dtype.
    int8: 4 segments per layer: K codes (int8), K scales (float16), V codes, V scales. `GROUP_WIDTH`
          neighbouring channels of one row and head share a scale; value = code * scale.

A memory's layout says which format it has, so nothing else stores the choice. Runs on the engine's thread.
Does not synchronise the device. Owns no memory.

Letters: N blocks, T rows, H KV heads, D width of a row (K and V may differ), G = ceil(D / GROUP_WIDTH).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.kvcache.memory import BlockMemory, SegmentSpec

KvCacheDtype = Literal["auto", "int8"]
GROUP_WIDTH = 64  # channels that share a scale
MAX_CODE = 127


class RowStore(Protocol):
    """The K or the V of one layer in all blocks."""

    @property
    def row_shape(self) -> tuple[int, int]:
        """(H, D)."""
        ...

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """rows [T, H, D] to flat slots [T] int64."""
        ...

    def rows(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, H, D] of flat slots [T], a copy."""
        ...

    def blocks(self, block_ids: Tensor, dtype: torch.dtype, out: Tensor) -> Tensor:
        """[n, block_size, H, D] of n blocks, copied to the start of the flat buffer `out`, which has that
        dtype."""
        ...


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows as they were written. `data` [N, block_size, H, D]."""

    data: Tensor

    @property
    def row_shape(self) -> tuple[int, int]:
        return self.data.shape[2], self.data.shape[3]

    def write(self, slots: Tensor, rows: Tensor) -> None:
        self.data.flatten(0, 1).index_copy_(0, slots, rows)

    def rows(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        return self.data.flatten(0, 1)[slots].to(dtype)

    def blocks(self, block_ids: Tensor, dtype: torch.dtype, out: Tensor) -> Tensor:
        target = _front(out, (len(block_ids), *self.data.shape[1:]))
        if dtype == self.data.dtype:
            return torch.index_select(self.data, 0, block_ids, out=target)
        return target.copy_(self.data[block_ids])


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """codes [N, block_size, H, D] int8, scales [N, block_size, H, G] float16."""

    codes: Tensor
    scales: Tensor

    @property
    def row_shape(self) -> tuple[int, int]:
        return self.codes.shape[2], self.codes.shape[3]

    def write(self, slots: Tensor, rows: Tensor) -> None:
        codes, scales = quantise(rows)
        self.codes.flatten(0, 1).index_copy_(0, slots, codes)
        self.scales.flatten(0, 1).index_copy_(0, slots, scales)

    def rows(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantise(self.codes.flatten(0, 1)[slots], self.scales.flatten(0, 1)[slots], dtype)

    def blocks(self, block_ids: Tensor, dtype: torch.dtype, out: Tensor) -> Tensor:
        target = _front(out, (len(block_ids), *self.codes.shape[1:]))
        return target.copy_(dequantise(self.codes[block_ids], self.scales[block_ids], dtype))


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's K and V, both plain or both quantised."""

    key: RowStore
    value: RowStore

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """key [T, H, D], value [T, H, Dv] to flat slots [T] int64."""
        self.key.write(slots, key)
        self.value.write(slots, value)


def kv_segments(
    row_shapes: Sequence[tuple[int, int]],
    block_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> tuple[SegmentSpec, ...]:
    """`row_shapes`: (H, D) of K, then of V, of every layer. `dtype`: the model's."""
    if kv_cache_dtype == "auto":
        return tuple(SegmentSpec(block_size, shape, dtype) for shape in row_shapes)
    specs = []
    for heads, width in row_shapes:
        specs.append(SegmentSpec(block_size, (heads, width), torch.int8))
        specs.append(SegmentSpec(block_size, (heads, num_groups(width)), torch.float16))
    return tuple(specs)


def layer_cache(memory: BlockMemory, layer_idx: int) -> LayerCache:
    """Views of the layer's segments."""
    if memory.layout.segments[0].dtype == torch.int8:
        key, key_scales, value, value_scales = memory.segments[4 * layer_idx : 4 * layer_idx + 4]
        return LayerCache(QuantisedRows(key, key_scales), QuantisedRows(value, value_scales))
    key, value = memory.segments[2 * layer_idx : 2 * layer_idx + 2]
    return LayerCache(PlainRows(key), PlainRows(value))


def num_groups(width: int) -> int:
    return -(-width // GROUP_WIDTH)


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] → codes [..., D] int8 and scales [..., G] float16. A row of zeros gets scale 0 and codes 0.
    The scale is rounded before the codes are made, so the error of an element is at most half a scale (plus
    4e-6 if the scale is below float16's normal range)."""
    grouped = _grouped(rows.float())
    # A tensor: CUDA turns a division by a Python number into a product with its inverse.
    largest_code = torch.full((), MAX_CODE, dtype=torch.float32, device=rows.device)
    scales = (grouped.abs().amax(-1) / largest_code).half()
    divisors = scales.float().masked_fill_(scales == 0, 1.0)
    codes = (grouped / divisors[..., None]).round_().clamp_(-MAX_CODE, MAX_CODE)
    return codes.flatten(-2)[..., : rows.shape[-1]].to(torch.int8), scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantise`: products in float32, rounded to `dtype`."""
    rows = _grouped(codes.float()).mul_(scales.float()[..., None])
    return rows.flatten(-2)[..., : codes.shape[-1]].to(dtype)


def _grouped(rows: Tensor) -> Tensor:
    """[..., D] → [..., G, group width], padded with zeros. The input may be reused."""
    width = rows.shape[-1]
    groups = num_groups(width)
    if groups == 1:
        return rows.unsqueeze(-2)
    return F.pad(rows, (0, groups * GROUP_WIDTH - width)).unflatten(-1, (groups, GROUP_WIDTH))


def _front(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)
