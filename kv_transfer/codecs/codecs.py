"""KV at half or a quarter of its bytes while it travels: groups of 64 tokens of a layer, coded into a wire memory and back.

    K: a scale per channel over the group's tokens (outliers of K keep to their channels)
    V: a scale per token, head and run of `RUN_CHANNELS` channels, the last run of a head shorter

    scale = float16(min(max|x| / C, 65504))     C = 127 (int8) or 7 (int4); nearest even, before the codes are made
    code  = round(x * (1 / scale))              nearest even, kept within [-C, C]
    x'    = code * scale                        in float32, rounded to the cache's dtype

An element is off by half its scale, plus the rounding to the cache's dtype. The ends of float16 add to that:

    max|x| / C below 2**-14     the scale is subnormal: off by C * 2**-25 more at most (4e-6 for int8)
    max|x| / C below 2**-25     the scale is 0 and so are all values; also where all were zeros
    max|x| above C * 65504      values saturate there; where the cache is float16, all results do at 65504
    NaN or infinity             the scale is NaN and all its values become NaN: the damage stays as visible as in raw KV

The wire is a block memory as well. A block of it holds one group in four segments per layer, so a layer can be sent alone:

    K codes   int8 [64, H, D], int4 [32, H, D] (low half: token t, high half: token t + 32)
    K scales  float16 [1, H, D]
    V codes   as K's, with V's width
    V scales  float16 [64, H, runs]

Three ways to the same bytes: native code on the CPU, Triton on a GPU (int8), torch everywhere else. No function keeps state;
any thread may call, distinct groups at the same time. Native calls release the interpreter's lock.

Letters: G groups, n = 64 / block_size blocks of a group, T tokens, H KV heads, D width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from cluster.model.cpu import library

CodecName = Literal["int8", "int4"]
CODECS: tuple[CodecName, ...] = ("int8", "int4")
GROUP_TOKENS = 64
RUN_CHANNELS = 64  # neighbouring channels of a token's V that share a scale
MAX_SCALE = 65504.0  # float16's largest number
BITS: dict[CodecName, int] = {"int8": 8, "int4": 4}
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as codec.cpp numbers them


class _Call(ctypes.Structure):
    """Mirrors `CodecCall` of codec.cpp."""

    _fields_ = (
        ("planes", c_void_p),
        ("blocks", c_void_p),
        ("wire_blocks", c_void_p),
        ("num_planes", c_int64),
        ("num_groups", c_int64),
        ("block_size", c_int64),
        ("type", c_int64),
        ("bits", c_int64),
        ("threads", c_int64),
    )


@cache
def _native() -> ctypes.CDLL | None:
    kernels = library.load()
    return declared(kernels.cdll) if kernels else None


def declared(cdll: ctypes.CDLL) -> ctypes.CDLL:
    for name in ("codec_encode", "codec_decode"):
        function = getattr(cdll, name)
        function.argtypes, function.restype = (ctypes.POINTER(_Call),), None
    return cdll


# ------------------------------------------------------------------------------------------------------------- layouts


def is_available(kv_layout: MemoryLayout) -> bool:
    """Whether the codecs take blocks of this layout: plain K and V, in blocks that make up groups."""
    first = kv_layout.segments[0]
    return (
        len(kv_layout.segments) % 2 == 0
        and GROUP_TOKENS % first.rows == 0
        and first.dtype in _TYPES
        and all(
            (segment.dtype, segment.rows, len(segment.row_shape)) == (first.dtype, first.rows, 2)
            for segment in kv_layout.segments
        )
    )


def wire_layout(kv_layout: MemoryLayout, codec: CodecName) -> MemoryLayout:
    """One block of the result holds one group of all layers. ValueError where the codec is not available."""
    if not is_available(kv_layout):
        raise ValueError(f"{codec} needs plain K and V in blocks whose size divides {GROUP_TOKENS}")
    segments = []
    for index, plain in enumerate(kv_layout.segments):
        heads, width = plain.row_shape
        codes = (GROUP_TOKENS, torch.int8) if codec == "int8" else (GROUP_TOKENS // 2, torch.uint8)
        segments.append(SegmentSpec(codes[0], (heads, width), codes[1]))
        if _is_key(index):
            segments.append(SegmentSpec(1, (heads, width), torch.float16))
        else:
            segments.append(SegmentSpec(GROUP_TOKENS, (heads, num_runs(width)), torch.float16))
    return MemoryLayout(tuple(segments))


def num_runs(width: int, run: int = RUN_CHANNELS) -> int:
    return -(-width // run)


def _is_key(segment: int) -> bool:
    return segment % 2 == 0


# --------------------------------------------------------------------------------------------- the arithmetic, in torch


@dataclass(frozen=True, slots=True)
class Coded:
    """Groups of one segment. codes [G, 64 or 32, H, D]; scales float16, [G, 1, H, D] of K and [G, 64, H, runs] of V."""

    codes: Tensor
    scales: Tensor


def quantise(rows: Tensor, codec: CodecName, is_key: bool, run: int = RUN_CHANNELS) -> Coded:
    """rows [G, 64, H, D] of any device."""
    rows = rows.float()
    width = rows.shape[-1]
    largest = rows.abs().amax(1, keepdim=True) if is_key else _runs(rows.abs(), run).amax(-1)
    max_code = 2 ** (BITS[codec] - 1) - 1
    divisor = torch.full(
        (), max_code, dtype=torch.float32, device=rows.device
    )  # a number would be a product on CUDA
    scales = (largest / divisor).clamp_(max=MAX_SCALE).half().masked_fill_(~largest.isfinite(), torch.nan)
    wide = scales.float() if is_key else _spread(scales.float(), run, width)
    is_usable = wide > 0
    inverses = torch.where(is_usable, 1.0 / wide, 0.0)
    codes = (rows * inverses).clamp_(-max_code, max_code).round_().masked_fill_(~is_usable, 0)
    return Coded(_packed(codes.to(torch.int32), codec), scales)


def dequantise(
    coded: Coded, codec: CodecName, dtype: torch.dtype, is_key: bool, run: int = RUN_CHANNELS
) -> Tensor:
    """[G, 64, H, D] of `dtype`."""
    codes = _unpacked(coded.codes, codec)
    scales = coded.scales.float()
    rows = codes.float() * (scales if is_key else _spread(scales, run, codes.shape[-1]))
    rows = rows.clamp_(-MAX_SCALE, MAX_SCALE).half() if dtype == torch.float16 else rows.to(dtype)
    return rows.masked_fill_(
        rows.isnan(), torch.nan
    )  # which NaN torch's conversions make depends on the tensor's size


def _packed(codes: Tensor, codec: CodecName) -> Tensor:
    """int32 [G, 64, H, D] to the wire's."""
    if codec == "int8":
        return codes.to(torch.int8)
    low, high = codes.chunk(2, dim=1)
    return ((low & 15) | ((high & 15) << 4)).to(torch.uint8)


def _unpacked(codes: Tensor, codec: CodecName) -> Tensor:
    if codec == "int8":
        return codes
    both = codes.view(torch.int8).to(torch.int32)
    return torch.cat([both << 28 >> 28, both >> 4], dim=1)


def _runs(rows: Tensor, run: int) -> Tensor:
    """[..., D] to [..., runs, run], filled up with zeros."""
    width = rows.shape[-1]
    runs = num_runs(width, run)
    return F.pad(rows, (0, runs * run - width)).unflatten(-1, (runs, run))


def _spread(scales: Tensor, run: int, width: int) -> Tensor:
    """[..., runs] to [..., D]."""
    return scales.repeat_interleave(run, dim=-1)[..., :width]


# ----------------------------------------------------------------------------------------------------------- the codec


class Codec:
    """Codes groups of one KV layout. Holds no memory, only where things lie; may be shared between threads.

    native: the compiled functions, or None for torch.
    """

    def __init__(
        self, kv_layout: MemoryLayout, name: CodecName, native: ctypes.CDLL | Literal["auto"] | None = "auto"
    ):
        self.name: CodecName = name
        self.kv_layout = kv_layout
        self.wire_layout = wire_layout(kv_layout, name)
        self.num_layers = len(kv_layout.segments) // 2
        self.block_size = kv_layout.segments[0].rows
        self.blocks_per_group = GROUP_TOKENS // self.block_size
        self._native = _native() if native == "auto" else native
        self._planes = self._plane_table()

    def encode(
        self, kv: BlockMemory, block_ids: Sequence[int], wire: BlockMemory, wire_block_id: int, layer: int
    ) -> None:
        """One group of one layer. block_ids: the n blocks in order of their tokens."""
        self.encode_groups(kv, [block_ids], wire, [wire_block_id], [layer])

    def decode(
        self, wire: BlockMemory, wire_block_id: int, layer: int, kv: BlockMemory, block_ids: Sequence[int]
    ) -> None:
        """The inverse of `encode`."""
        self.decode_groups(wire, [wire_block_id], kv, [block_ids], [layer])

    def encode_groups(
        self,
        kv: BlockMemory,
        blocks: Sequence[Sequence[int]] | np.ndarray,
        wire: BlockMemory,
        wire_blocks: Sequence[int] | np.ndarray,
        layers: Sequence[int] | None = None,
        threads: int = 1,
    ) -> None:
        """Group blocks[g] [n] to block wire_blocks[g] of the wire, in the layers given or all. On CUDA: enqueued on the
        current stream. Raises before a byte is written: IndexError where an id is outside its memory, ValueError where a memory
        has another layout or a group not n blocks."""
        self._code("codec_encode", kv, blocks, wire, wire_blocks, layers, threads)

    def decode_groups(
        self,
        wire: BlockMemory,
        wire_blocks: Sequence[int] | np.ndarray,
        kv: BlockMemory,
        blocks: Sequence[Sequence[int]] | np.ndarray,
        layers: Sequence[int] | None = None,
        threads: int = 1,
    ) -> None:
        """The inverse of `encode_groups`."""
        self._code("codec_decode", kv, blocks, wire, wire_blocks, layers, threads)

    def relative_error(
        self, kv: BlockMemory, block_ids: Sequence[int], wire: BlockMemory, wire_block_id: int, layer: int
    ) -> tuple[float, float]:
        """Of K and of V of one group that `wire` holds: mean |x - x'| / mean |x|, x as it lies in `kv` and x' as it will
        arrive. 0 where all are zeros. Waits for the device."""
        errors = []
        for segment in (2 * layer, 2 * layer + 1):
            rows = self._gathered(kv.segments[segment], torch.tensor([block_ids], device=kv.buffer.device))
            codes, scales = (wire.segments[2 * segment + part][[wire_block_id]] for part in (0, 1))
            arrived = dequantise(Coded(codes, scales), self.name, rows.dtype, _is_key(segment))
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
        layers: Sequence[int] | None,
        threads: int,
    ) -> None:
        if kv.layout != self.kv_layout or wire.layout != self.wire_layout:
            raise ValueError("a memory of another layout")
        block_ids = _ids(blocks, kv.num_blocks)
        wire_ids = _ids(wire_blocks, wire.num_blocks)
        if block_ids.shape != (len(wire_ids), self.blocks_per_group):
            raise ValueError(
                f"blocks {block_ids.shape} for {len(wire_ids)} groups of {self.blocks_per_group}"
            )
        chosen = np.arange(self.num_layers) if layers is None else _ids(layers, self.num_layers)
        if self._native is not None and kv.buffer.device.type == "cpu":
            self._call_native(function, kv, block_ids, wire, wire_ids, chosen, threads)
            return
        encodes = function == "codec_encode"
        device = kv.buffer.device
        blocks_tensor, wire_tensor = (torch.from_numpy(ids).to(device) for ids in (block_ids, wire_ids))
        for segment in (chosen[:, None] * 2 + (0, 1)).flatten().tolist():
            rows, codes, scales = kv.segments[segment], *wire.segments[2 * segment : 2 * segment + 2]
            if device.type == "cuda" and self.name == "int8" and _has_triton():
                from cluster.model.cuda import codec as gpu

                gpu.code_groups(rows, blocks_tensor, codes, scales, wire_tensor, _is_key(segment), encodes)
            elif encodes:
                coded = quantise(self._gathered(rows, blocks_tensor), self.name, _is_key(segment))
                codes.index_copy_(0, wire_tensor, coded.codes)
                scales.index_copy_(0, wire_tensor, coded.scales)
            else:
                coded = Coded(codes[wire_tensor], scales[wire_tensor])
                groups = dequantise(coded, self.name, rows.dtype, _is_key(segment))
                rows.index_copy_(0, blocks_tensor.flatten(), groups.reshape(-1, *rows.shape[1:]))

    def _call_native(
        self,
        function: str,
        kv: BlockMemory,
        block_ids: np.ndarray,
        wire: BlockMemory,
        wire_ids: np.ndarray,
        layers: np.ndarray,
        threads: int,
    ) -> None:
        planes = self._planes[layers]
        planes[..., 0] = kv.base_address + kv.num_blocks * planes[..., 0]
        planes[..., 1:3] = wire.base_address + wire.num_blocks * planes[..., 1:3]
        call = _Call(
            planes.ctypes.data, block_ids.ctypes.data, wire_ids.ctypes.data, 2 * len(layers), len(wire_ids),
            self.block_size, _TYPES[self.kv_layout.segments[0].dtype], BITS[self.name], threads,
        )  # fmt: skip
        getattr(self._native, function)(call)

    def _gathered(self, rows: Tensor, block_ids: Tensor) -> Tensor:
        """[G, 64, H, D] of blocks [G, n]."""
        return rows[block_ids.flatten()].view(len(block_ids), GROUP_TOKENS, *rows.shape[2:])

    def _plane_table(self) -> np.ndarray:
        """[layers, 2 (K, V), 6] int64, the fields of `CodecPlane`; in place of addresses the bytes of a block that lie
        before the segment."""
        kv_starts, wire_starts = _starts(self.kv_layout), _starts(self.wire_layout)
        table = [
            (
                kv_starts[i],
                *wire_starts[2 * i : 2 * i + 2],
                *plain.row_shape,
                0 if _is_key(i) else RUN_CHANNELS,
            )
            for i, plain in enumerate(self.kv_layout.segments)
        ]
        return np.array(table, dtype=np.int64).reshape(self.num_layers, 2, 6)


def _starts(layout: MemoryLayout) -> list[int]:
    return [0, *accumulate(segment.block_bytes for segment in layout.segments)][:-1]


def _ids(values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray, end: int) -> np.ndarray:
    """Contiguous int64. IndexError unless all lie in [0, end)."""
    ids = np.ascontiguousarray(values, dtype=np.int64)
    if ids.size and ids.view(np.uint64).max() >= end:  # a negative one is a large one
        raise IndexError(f"ids {ids.min()} to {ids.max()} of {end}")
    return ids


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
