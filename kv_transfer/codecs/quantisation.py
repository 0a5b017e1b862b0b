"""KV at half or a quarter of its bytes while it travels: the wire layout and the arithmetic of the codecs, in
torch.

A group is 64 tokens of one layer. It is coded with these scales:

    K: one scale per channel over the group's tokens (outliers of K stay in their channels)
    V: one scale per token, head and run of `RUN_CHANNELS` channels; the last run of a head may be shorter

    scale = float16(min(max|x| / C, 65504))     nearest even, before the codes are made
    code  = round(x * (1 / scale))              nearest even, kept within [-C, C]
    x'    = code * scale                        in float32, rounded to the cache's dtype
    C     = 127 (int8) or 7 (int4)

The error of an element is at most half its scale, plus the rounding to the cache's dtype. The limits of
float16 add to that:

    max|x| / C below 2**-14     the scale is subnormal: at most C * 2**-25 more (4e-6 for int8)
    max|x| / C below 2**-25     the scale is 0 and so are all values; also where all values were zero
    max|x| above C * 65504      values saturate there; where the cache is float16, all results saturate at 65504
    NaN or infinity             the scale and all its values become NaN: the damage stays as visible as in raw KV

The wire memory is a block memory as well. One of its blocks holds one group in four segments per layer, so a
layer can be sent alone:

    K codes   int8 [64, H, D], int4 [32, H, D] (low half: token t, high half: token t + 32)
    K scales  float16 [1, H, D]
    V codes   as K's, with V's width
    V scales  float16 [64, H, runs]

The functions keep no state and run on any device and any thread. `codec` calls the faster implementations
where they exist.

Letters: G groups, H KV heads, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.kvcache.memory import MemoryLayout, SegmentSpec
from cluster.types.transfer import GROUP_TOKENS

CodecName = Literal["int8", "int4"]
CODECS: tuple[CodecName, ...] = ("int8", "int4")
# Of KV that can be coded, in the order in which codec.cpp numbers them.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RUN_CHANNELS = 64  # neighbouring channels of a token's V that share a scale
MAX_SCALE = 65504.0  # float16's largest number
BITS: dict[CodecName, int] = {"int8": 8, "int4": 4}


def is_available(kv_layout: MemoryLayout) -> bool:
    """Whether the codecs can code this layout: plain K and V, in blocks whose size divides a group."""
    first = kv_layout.segments[0]
    return (
        len(kv_layout.segments) % 2 == 0
        and GROUP_TOKENS % first.rows == 0
        and first.dtype in DTYPES
        and all(
            (segment.dtype, segment.rows, len(segment.row_shape)) == (first.dtype, first.rows, 2)
            for segment in kv_layout.segments
        )
    )


def wire_layout(kv_layout: MemoryLayout, codec: CodecName) -> MemoryLayout:
    """One block of the result holds one group of all layers. Raises ValueError if the layout cannot be
    coded."""
    if not is_available(kv_layout):
        raise ValueError(f"{codec} needs plain K and V in blocks whose size divides {GROUP_TOKENS}")
    segments = []
    for index, plain in enumerate(kv_layout.segments):
        heads, width = plain.row_shape
        codes = (GROUP_TOKENS, torch.int8) if codec == "int8" else (GROUP_TOKENS // 2, torch.uint8)
        segments.append(SegmentSpec(codes[0], (heads, width), codes[1]))
        if holds_keys(index):
            segments.append(SegmentSpec(1, (heads, width), torch.float16))
        else:
            segments.append(SegmentSpec(GROUP_TOKENS, (heads, num_runs(width)), torch.float16))
    return MemoryLayout(tuple(segments))


def num_runs(width: int, run: int = RUN_CHANNELS) -> int:
    return -(-width // run)


def holds_keys(segment: int) -> bool:
    """K and V segments of a KV layout alternate."""
    return segment % 2 == 0


@dataclass(frozen=True, slots=True)
class Coded:
    """Groups of one segment. codes [G, 64 or 32, H, D]; scales float16, [G, 1, H, D] of K and [G, 64, H,
    runs] of V."""

    codes: Tensor
    scales: Tensor


def quantise(rows: Tensor, codec: CodecName, is_key: bool, run: int = RUN_CHANNELS) -> Coded:
    """rows [G, 64, H, D], on any device."""
    rows = rows.float()
    width = rows.shape[-1]
    largest = rows.abs().amax(1, keepdim=True) if is_key else _runs(rows.abs(), run).amax(-1)
    max_code = 2 ** (BITS[codec] - 1) - 1
    # A tensor: CUDA turns a division by a Python number into a product with its inverse.
    divisor = torch.full((), max_code, dtype=torch.float32, device=rows.device)
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
    # One NaN for all: the bits that torch's conversions give a NaN depend on the tensor's size.
    return rows.masked_fill_(rows.isnan(), torch.nan)


def _packed(codes: Tensor, codec: CodecName) -> Tensor:
    """int32 [G, 64, H, D] to the codes of the wire."""
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
    """[..., D] to [..., runs, run], padded with zeros."""
    width = rows.shape[-1]
    runs = num_runs(width, run)
    return F.pad(rows, (0, runs * run - width)).unflatten(-1, (runs, run))


def _spread(scales: Tensor, run: int, width: int) -> Tensor:
    """[..., runs] to [..., D]."""
    return scales.repeat_interleave(run, dim=-1)[..., :width]
