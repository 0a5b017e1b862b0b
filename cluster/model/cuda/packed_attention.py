"""Attention over packed segments on CUDA: one launch for all segments of a block. Rows, heads and channels
are written [T, H, D]; a segment is one image, window, frame or piece of sound, and its rows see all of it.

The grid follows from the numbers of rows and segments, which the host knows, so nothing waits for the device.
Which rows a program computes stands in a table on the device: made once for all blocks that get the same
tensor of segments (windows and whole images are two). Needs triton, which the first call imports; enqueues on
the current stream. Runs on the encoder's thread alone.

An H100 gave the right rows (bench/gpu/README.md); sizes of tiles are guesses.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cluster.model.cuda.tiles import power_of_two

MAX_WIDTH = 256  # channels of a head that fit a program's registers
_SMALLEST_TILE = 16  # rows and channels that matrix units take
_TILE_WIDTH = 4  # as in `packed_kernels`
_STAGES = 2  # of Triton's loop; with three, heads of 256 channels in float32 take too much shared memory
_TILES_PER_PROGRAM = 128
_ALIGNMENT = 16  # numbers; more do not make loads wider
_SEGMENTS_PER_PASS, _TABLE_WARPS = 32, 8  # more at once take all registers


@dataclass(frozen=True)
class SegmentTiles:
    """How heads are cut; of their width and dtype alone, so that a row's sums have one order in any call."""

    run: int  # channels that are worked on at once
    rest: int  # the same, after `run`; 0: there are none
    rows: int
    keys: int  # of an inner step
    warps: int


@cache
def tiles_for(width: int, is_exact: bool) -> SegmentTiles:
    """is_exact: of float32, whose products are exact ones. A tile has as many rows as the windows of
    Qwen2.5-VL."""
    run = max(_SMALLEST_TILE, power_of_two(width + 1) // 2)
    rest = 0 if width <= run else max(_SMALLEST_TILE, power_of_two(width - run))
    if is_exact:
        return SegmentTiles(run, rest, rows=_SMALLEST_TILE, keys=32, warps=4)
    is_wide = width > 128
    return SegmentTiles(run, rest, 64, keys=32 if is_wide else 64, warps=8 if is_wide else 4)


class PackedAttention:
    """The tables of segments, which live as long as these do, and the launches."""

    def __init__(self) -> None:
        # by the segments as they came: rows of a tile, table
        self._tables: MutableMapping[Tensor, dict[int, Tensor]] = WeakTensorKeyDictionary()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scaling: float) -> Tensor:
        """query [T, Hq, D], key and value [T, Hk, D], of one float dtype and any strides, channels side by
        side. starts [segments + 1], integers: exclusive prefix sums of their rows, T in all. Returns
        [T, Hq, D], contiguous."""
        from cluster.model.cuda import packed_kernels

        num_rows, num_heads, width = query.shape
        tiles = tiles_for(width, query.dtype == torch.float32)
        table = self._table(starts, num_rows, tiles.rows)
        out = query.new_empty(num_rows, num_heads, width)
        packed_kernels.attend_segments[(len(table), num_heads)](
            query, key, value, out, table, scaling, query.stride(0), key.stride(0), value.stride(0),
            query.stride(1), key.stride(1), value.stride(1), GROUP=num_heads // key.shape[1], WIDTH=width,
            RUN=tiles.run, REST=tiles.rest, ROWS=tiles.rows, KEYS=tiles.keys, num_warps=tiles.warps,
            ALIGNMENT=gcd(_ALIGNMENT, query.stride(1), key.stride(1), value.stride(1)), num_stages=_STAGES,
        )  # fmt: skip
        return out

    def _table(self, starts: Tensor, num_rows: int, tile_rows: int) -> Tensor:
        tables = self._tables.setdefault(starts, {})
        if tile_rows not in tables:
            tables[tile_rows] = cut(starts, num_rows, tile_rows)
        return tables[tile_rows]


def cut(starts: Tensor, num_rows: int, tile_rows: int) -> Tensor:
    """[at least as many as there are tiles, 4] int32: as `packed_kernels.cut_segments` says."""
    from cluster.model.cuda import packed_kernels

    num_segments = len(starts) - 1
    # each segment with rows has at most one tile that is not full
    capacity = num_rows // tile_rows + min(num_segments, num_rows)
    table = torch.empty(capacity, _TILE_WIDTH, dtype=torch.int32, device=starts.device)
    packed_kernels.cut_segments[(-(-capacity // _TILES_PER_PROGRAM),)](
        starts, table, num_segments, capacity, ROWS=tile_rows, TILES=_TILES_PER_PROGRAM,
        SEGMENTS=_SEGMENTS_PER_PASS, num_warps=_TABLE_WARPS,
    )  # fmt: skip
    return table
