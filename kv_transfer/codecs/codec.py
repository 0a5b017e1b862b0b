"""Codes groups of KV from a KV memory into a wire memory and back. `quantisation` defines layout and numbers.

Three implementations make the same bytes:

    native code (codec.cpp)      on the CPU
    Triton (`triton_codec`)      on a GPU
    torch (`quantisation`)       where the other two cannot be built

Any thread may call it, several at the same time on distinct groups. Native calls
release the interpreter's lock.

Letters: G groups, n = 64 / block_size blocks of a group, H KV heads, D width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from cluster.config.machine import has_triton
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from kv_transfer.codecs import native as native_code
from kv_transfer.codecs.pending import Pending, download, upload, when_computed
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

if TYPE_CHECKING:
    from kv_transfer.codecs.triton_codec import SegmentTable


@dataclass(frozen=True, eq=False)
class CodingJob:
    """Groups that are coded in the same layers. Contiguous int64."""

    blocks: np.ndarray  # [G, n]
    wire_blocks: np.ndarray  # [G]
    layers: np.ndarray


class Codec:
    """Codes groups of one KV layout. Holds offsets only, on a GPU also the tables of the memories that it
    coded last; may be shared between threads."""

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
        self.planes = self._plane_table()
        self._table: tuple[BlockMemory, BlockMemory, SegmentTable] | None = None

    def job(
        self,
        kv: BlockMemory,
        blocks: Sequence[Sequence[int]] | np.ndarray,
        wire: BlockMemory,
        wire_blocks: Sequence[int] | np.ndarray,
        layers: Sequence[int] | None = None,
    ) -> CodingJob:
        """Group blocks[g] [n] and block wire_blocks[g] of the wire, in the given layers or in all. Raises
        before a byte is written: IndexError if an id is outside its memory, ValueError if a memory has
        another layout or a group has not n blocks."""
        if kv.layout != self.kv_layout or wire.layout != self.wire_layout:
            raise ValueError("the memory has another layout than the codec")
        block_ids = _ids(blocks, kv.num_blocks)
        wire_ids = _ids(wire_blocks, wire.num_blocks)
        if block_ids.shape != (len(wire_ids), self.blocks_per_group):
            raise ValueError(
                f"{len(wire_ids)} groups of {self.blocks_per_group} blocks cannot be {block_ids.shape} blocks"
            )
        chosen = np.arange(self.num_layers) if layers is None else _ids(layers, self.num_layers)
        return CodingJob(block_ids, wire_ids, chosen)

    def code(self, kv: BlockMemory, wire: BlockMemory, jobs: Sequence[CodingJob], *, encodes: bool) -> None:
        """Codes all jobs into the wire memory, or back. On CUDA the work is enqueued on the current stream;
        with Triton as one launch."""
        device = kv.buffer.device
        if device.type == "cuda" and has_triton():
            return self._table_of(kv, wire).code(places_of(jobs, self.blocks_per_group), encodes=encodes)
        for job in jobs:
            if self._native is not None and device.type == "cpu":
                self._call_native("codec_encode" if encodes else "codec_decode", kv, wire, job)
            else:
                self._code_by_torch(kv, wire, job, encodes)

    def relative_error(
        self, kv: BlockMemory, block_ids: Sequence[int], wire: BlockMemory, wire_block_id: int, layer: int
    ) -> Pending[tuple[float, float]]:
        """mean |x - x'| / mean |x| of K and of V, for one group that `wire` holds: x lies in `kv`, x' is what
        will arrive.

        0 if all x are zero. Enqueued as by `code`.
        """
        errors = []
        for segment in (2 * layer, 2 * layer + 1):
            rows = torch.cat([kv.segments[segment][block_id] for block_id in block_ids])[None]
            codes, scales = (
                wire.segments[2 * segment + part][wire_block_id : wire_block_id + 1] for part in (0, 1)
            )
            arrived = dequantise(Coded(codes, scales), self.name, rows.dtype, holds_keys(segment))
            size = rows.float().abs().mean()
            error = (rows.float() - arrived.float()).abs().mean()
            errors.append(torch.where(size == 0, 0.0, error / size))
        found = download(torch.stack(errors))
        return when_computed(kv, lambda: (float(found[0]), float(found[1])))

    def _code_by_torch(self, kv: BlockMemory, wire: BlockMemory, job: CodingJob, encodes: bool) -> None:
        blocks, wire_ids = (upload(ids, kv.buffer.device) for ids in (job.blocks, job.wire_blocks))
        for segment in (2 * layer + part for layer in job.layers.tolist() for part in (0, 1)):
            rows, codes, scales = kv.segments[segment], *wire.segments[2 * segment : 2 * segment + 2]
            if encodes:
                groups = rows[blocks.flatten()].view(len(blocks), GROUP_TOKENS, *rows.shape[2:])
                coded = quantise(groups, self.name, holds_keys(segment))
                codes.index_copy_(0, wire_ids, coded.codes)
                scales.index_copy_(0, wire_ids, coded.scales)
            else:
                coded = Coded(codes[wire_ids], scales[wire_ids])
                groups = dequantise(coded, self.name, rows.dtype, holds_keys(segment))
                rows.index_copy_(0, blocks.flatten(), groups.reshape(-1, *rows.shape[1:]))

    def _table_of(self, kv: BlockMemory, wire: BlockMemory) -> SegmentTable:
        if self._table is None or self._table[:2] != (kv, wire):
            from kv_transfer.codecs.triton_codec import SegmentTable

            self._table = kv, wire, SegmentTable(kv, wire, self.planes, BITS[self.name])
        return self._table[2]

    def _call_native(
        self,
        function: Literal["codec_encode", "codec_decode"],
        kv: BlockMemory,
        wire: BlockMemory,
        job: CodingJob,
    ) -> None:
        planes = self.planes[job.layers]
        planes[..., 0] = kv.base_address + kv.num_blocks * planes[..., 0]
        planes[..., 1:3] = wire.base_address + wire.num_blocks * planes[..., 1:3]
        call = native_code.CodecCall(
            planes.ctypes.data, job.blocks.ctypes.data, job.wire_blocks.ctypes.data, 2 * len(job.layers),
            len(job.wire_blocks), self.block_size, DTYPES.index(self.kv_layout.segments[0].dtype),
            BITS[self.name],
        )  # fmt: skip
        getattr(self._native, function)(call)

    def _plane_table(self) -> np.ndarray:
        """[layers, 2 (K, V), 6] int64: the fields of `CodecPlane`. Addresses are given as bytes of a block
        before the segment."""
        kv_starts, wire_starts = self.kv_layout.spans[:, 0], self.wire_layout.spans[:, 0]
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


def places_of(jobs: Sequence[CodingJob], num_blocks: int) -> np.ndarray:
    """[J, 2 + num_blocks] int32: layer, wire block and blocks of each group in each layer."""
    sizes = [(len(job.wire_blocks), len(job.layers)) for job in jobs]
    places = np.empty((sum(groups * layers for groups, layers in sizes), 2 + num_blocks), dtype=np.int32)
    first = 0
    for job, (groups, layers) in zip(jobs, sizes, strict=True):
        own = places[first : first + groups * layers].reshape(groups, layers, -1)
        own[:, :, 0], own[:, :, 1], own[:, :, 2:] = job.layers, job.wire_blocks[:, None], job.blocks[:, None]
        first += groups * layers
    return places


def _ids(values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray, end: int) -> np.ndarray:
    """Contiguous int64. Raises IndexError unless all lie in [0, end)."""
    ids = np.ascontiguousarray(values, dtype=np.int64)
    if ids.size and ids.view(np.uint64).max() >= end:  # read unsigned, a negative id is large
        raise IndexError(f"ids {ids.min()} to {ids.max()} are not all in [0, {end})")
    return ids
