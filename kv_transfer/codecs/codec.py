"""Codes groups of KV from a KV memory into a wire memory and back. `quantisation` defines layout and numbers.

Three implementations make the same bytes:

    native code (codec.cpp)      on the CPU
    Triton (`triton_codec`)      on a GPU, int8
    torch (`quantisation`)       everywhere else

A codec keeps no state. Any thread may call it, several at the same time on distinct groups. Native calls
release the interpreter's lock.

Letters: G groups, n = 64 / block_size blocks of a group, H KV heads, D width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cluster.config.machine import has_triton
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from kv_transfer.codecs import native as native_code
from kv_transfer.codecs.quantisation import (
    BITS,
    DTYPES,
    GROUP_TOKENS,
    RUN_CHANNELS,
    CodecName,
    Coded,
    dequantise,
    holds_keys,
    quantise,
    wire_layout,
)


class Codec:
    """Codes groups of one KV layout. Holds no memory, only the offsets in it; may be shared between
    threads."""

    def __init__(
        self, kv_layout: MemoryLayout, name: CodecName, native: ctypes.CDLL | Literal["auto"] | None = "auto"
    ):
        """`native`: the compiled functions; None: torch on the CPU as well."""
        self.name: CodecName = name
        self.kv_layout = kv_layout
        self.wire_layout = wire_layout(kv_layout, name)
        self.num_layers = len(kv_layout.segments) // 2
        self.block_size = kv_layout.segments[0].rows
        self.blocks_per_group = GROUP_TOKENS // self.block_size
        self._native = native_code.load() if native == "auto" else native
        self._planes = self._plane_table()

    def encode_groups(
        self,
        kv: BlockMemory,
        blocks: Sequence[Sequence[int]] | np.ndarray,
        wire: BlockMemory,
        wire_blocks: Sequence[int] | np.ndarray,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Codes group blocks[g] [n] into block wire_blocks[g] of the wire, in the given layers or in all.

        On CUDA the work is enqueued on the current stream. Raises before a byte is written: IndexError if an
        id is outside its memory, ValueError if a memory has another layout or a group has not n blocks.
        """
        self._code("codec_encode", kv, blocks, wire, wire_blocks, layers)

    def decode_groups(
        self,
        wire: BlockMemory,
        wire_blocks: Sequence[int] | np.ndarray,
        kv: BlockMemory,
        blocks: Sequence[Sequence[int]] | np.ndarray,
    ) -> None:
        """The inverse of `encode_groups`, in all layers."""
        self._code("codec_decode", kv, blocks, wire, wire_blocks)

    def relative_error(
        self, kv: BlockMemory, block_ids: Sequence[int], wire: BlockMemory, wire_block_id: int, layer: int
    ) -> tuple[float, float]:
        """mean |x - x'| / mean |x| of K and of V, for one group that `wire` holds: x lies in `kv`, x' is what
        will arrive.

        0 if all x are zero. Waits for the device.
        """
        errors = []
        for segment in (2 * layer, 2 * layer + 1):
            rows = self._gathered(kv.segments[segment], torch.tensor([block_ids], device=kv.buffer.device))
            codes, scales = (wire.segments[2 * segment + part][[wire_block_id]] for part in (0, 1))
            arrived = dequantise(Coded(codes, scales), self.name, rows.dtype, holds_keys(segment))
            size = rows.float().abs().mean()
            error = (rows.float() - arrived.float()).abs().mean()
            errors.append(float(torch.where(size == 0, 0.0, error / size)))
        return errors[0], errors[1]

    def _code(
        self,
        function: Literal["codec_encode", "codec_decode"],
        kv: BlockMemory,
        blocks: Sequence[Sequence[int]] | np.ndarray,
        wire: BlockMemory,
        wire_blocks: Sequence[int] | np.ndarray,
        layers: Sequence[int] | None = None,
    ) -> None:
        if kv.layout != self.kv_layout or wire.layout != self.wire_layout:
            raise ValueError("the memory has another layout than the codec")
        block_ids = _ids(blocks, kv.num_blocks)
        wire_ids = _ids(wire_blocks, wire.num_blocks)
        if block_ids.shape != (len(wire_ids), self.blocks_per_group):
            raise ValueError(
                f"{len(wire_ids)} groups of {self.blocks_per_group} blocks cannot be {block_ids.shape} blocks"
            )
        chosen = np.arange(self.num_layers) if layers is None else _ids(layers, self.num_layers)
        if self._native is not None and kv.buffer.device.type == "cpu":
            self._call_native(function, kv, block_ids, wire, wire_ids, chosen)
            return
        encodes = function == "codec_encode"
        device = kv.buffer.device
        blocks_tensor, wire_tensor = (torch.from_numpy(ids).to(device) for ids in (block_ids, wire_ids))
        for segment in (chosen[:, None] * 2 + (0, 1)).flatten().tolist():
            rows, codes, scales = kv.segments[segment], *wire.segments[2 * segment : 2 * segment + 2]
            if device.type == "cuda" and self.name == "int8" and has_triton():
                from kv_transfer.codecs import triton_codec

                triton_codec.code_groups(
                    rows, blocks_tensor, codes, scales, wire_tensor, holds_keys(segment), encodes
                )
            elif encodes:
                coded = quantise(self._gathered(rows, blocks_tensor), self.name, holds_keys(segment))
                codes.index_copy_(0, wire_tensor, coded.codes)
                scales.index_copy_(0, wire_tensor, coded.scales)
            else:
                coded = Coded(codes[wire_tensor], scales[wire_tensor])
                groups = dequantise(coded, self.name, rows.dtype, holds_keys(segment))
                rows.index_copy_(0, blocks_tensor.flatten(), groups.reshape(-1, *rows.shape[1:]))

    def _call_native(
        self,
        function: str,
        kv: BlockMemory,
        block_ids: np.ndarray,
        wire: BlockMemory,
        wire_ids: np.ndarray,
        layers: np.ndarray,
    ) -> None:
        planes = self._planes[layers]
        planes[..., 0] = kv.base_address + kv.num_blocks * planes[..., 0]
        planes[..., 1:3] = wire.base_address + wire.num_blocks * planes[..., 1:3]
        call = native_code.CodecCall(
            planes.ctypes.data, block_ids.ctypes.data, wire_ids.ctypes.data, 2 * len(layers), len(wire_ids),
            self.block_size, DTYPES.index(self.kv_layout.segments[0].dtype), BITS[self.name],
        )  # fmt: skip
        getattr(self._native, function)(call)

    def _gathered(self, rows: Tensor, block_ids: Tensor) -> Tensor:
        """[G, 64, H, D] of blocks [G, n]."""
        return rows[block_ids.flatten()].view(len(block_ids), GROUP_TOKENS, *rows.shape[2:])

    def _plane_table(self) -> np.ndarray:
        """[layers, 2 (K, V), 6] int64: the fields of `CodecPlane`. Addresses are given as bytes of a block
        before the segment."""
        kv_starts, wire_starts = _starts(self.kv_layout), _starts(self.wire_layout)
        table = [
            (
                kv_starts[i],
                *wire_starts[2 * i : 2 * i + 2],
                *plain.row_shape,
                0 if holds_keys(i) else RUN_CHANNELS,
            )
            for i, plain in enumerate(self.kv_layout.segments)
        ]
        return np.array(table, dtype=np.int64).reshape(self.num_layers, 2, 6)


def _starts(layout: MemoryLayout) -> list[int]:
    return [0, *accumulate(segment.block_bytes for segment in layout.segments)][:-1]


def _ids(values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray, end: int) -> np.ndarray:
    """Contiguous int64. Raises IndexError unless all lie in [0, end)."""
    ids = np.ascontiguousarray(values, dtype=np.int64)
    if ids.size and ids.view(np.uint64).max() >= end:  # read unsigned, a negative id is large
        raise IndexError(f"ids {ids.min()} to {ids.max()} are not all in [0, {end})")
    return ids
