"""Products of activations with weights that are codes, by our Triton kernels (`coded_kernels`). The weight is
(code - zero) * scale, and activations are never rounded.

    one row               every code is read once, and the matrix unit, which would idle, is not used
    up to CODED_ROWS      tiles of codes become numbers on their way to the matrix unit
    more                  the plain weight is made in the model's dtype, and a library multiplies: the product
                          takes most of the time then, and libraries compute it faster than our tiles

In float32 all of them compute with the same numbers. In 16 bits the last one rounds the weight to the
model's dtype, as a checkpoint is that was dequantised while it was read, and so does the second one where
fewer than `_STEP` columns have one scale (small groups, blocks that ranks have cut). The others scale in
float32.

Everything is enqueued on the current stream, reads nothing on the host and may be recorded. The plain weight
exists during its product only (`scratch_bytes`). Needs triton, which the first call imports.

An H100 gave the right numbers; not timed: the sizes of tiles are those of `layer_calls.product`, and guesses
beyond.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model.cuda.early import early
from cluster.model.cuda.tiles import power_of_two
from cluster.model.layers.codes import Codes

CODED_ROWS = 256  # tokens that our kernels multiply in 16 bits
_FLOAT_ROWS = 16  # in float32, where tiles run on no matrix unit
_ROWS, _MORE_ROWS = 16, 64  # of a tile
_ROW_TILE, _ROW_STEP, _TILE, _FLOAT_TILE, _STEP = 4, 1024, 64, 32, 128
_PLAIN_TILE, _PLAIN_STEP = 16, 256
_PROGRAMS, _MAX_SHARES = 200, 8


def coded_product(x: Tensor, codes: Codes, bias: Tensor | None, *, is_whole: bool = False) -> Tensor:
    """x [T, K] times the weight [N, K], plus bias [N]; x and bias contiguous. Returns shares [S, T, N]:
    partial sums in float32, or one in x's dtype (always, with `is_whole`)."""
    if not 0 < len(x) <= (_FLOAT_ROWS if x.dtype == torch.float32 else CODED_ROWS):
        return F.linear(x, plain_weight(codes, x.dtype), bias)[None]
    from cluster.model.cuda import coded_kernels

    (num_tokens, width), num_outputs = x.shape, len(codes.numbers)
    is_one = num_tokens == 1
    tile = _ROW_TILE if is_one else _FLOAT_TILE if x.dtype == torch.float32 else _TILE
    step = _ROW_STEP if is_one else _STEP
    share_width = width if is_whole else _share_width(is_one, num_outputs, width)
    share_width = -(-share_width // step) * step
    shares = -(-width // share_width)
    tiles = -(-num_outputs // tile)
    dtype = torch.float32 if shares > 1 else x.dtype
    out = torch.empty(shares, num_tokens, num_outputs, dtype=dtype, device=x.device)
    arguments = (x, codes.numbers, codes.scales, codes.zeros, bias, out)
    sizes = (num_outputs, width, share_width, *scale_sizes(codes))
    kind = {
        "KIND": int(codes.kind), "MIDDLE": codes.middle, "TILE": tile, "STEP": step,
        "GROUP": same_scale(codes, step),
    }  # fmt: skip
    if is_one:
        coded_kernels.coded_row[(tiles, shares)](
            *arguments, *sizes, **kind, num_warps=4, num_stages=3, **early(x.device)
        )
    else:
        rows = _ROWS if num_tokens <= _ROWS else _MORE_ROWS
        coded_kernels.coded_rows[(tiles, shares, -(-num_tokens // rows))](
            *arguments, num_tokens, *sizes, **kind, ROWS=rows, num_warps=4, num_stages=3, **early(x.device)
        )
    return out


def whole_product(x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
    """`coded_product` as one sum [T, N], in x's dtype."""
    shares = coded_product(x, codes, bias)
    return shares[0] if len(shares) == 1 else shares.sum(0).to(x.dtype)


def plain_weight(codes: Codes, dtype: torch.dtype) -> Tensor:
    """`Codes.plain`, bit by bit, in one launch."""
    from cluster.model.cuda import coded_kernels

    num_outputs, step = len(codes.numbers), _PLAIN_STEP
    out = torch.empty(num_outputs, codes.width, dtype=dtype, device=codes.numbers.device)
    coded_kernels.plain_weight[(-(-num_outputs // _PLAIN_TILE), -(-codes.width // step))](
        codes.numbers, codes.scales, codes.zeros, out, num_outputs, codes.width, *scale_sizes(codes),
        KIND=int(codes.kind), MIDDLE=codes.middle, TILE=_PLAIN_TILE, STEP=step,
        GROUP=same_scale(codes, step), num_warps=4,
    )  # fmt: skip
    return out


def scratch_bytes(codes: Codes, dtype: torch.dtype) -> int:
    """What a product of many rows takes beside its result."""
    return len(codes.numbers) * codes.width * dtype.itemsize


def scale_sizes(codes: Codes) -> tuple[int, int, int]:
    """Rows and columns that have one scale, and groups of columns: as the kernels take them."""
    return codes.scale_rows, codes.group, codes.scales.shape[1]


def same_scale(codes: Codes, limit: int) -> int:
    """A power of two, at most `limit`: so many columns, from any multiple of it on, have one scale."""
    return limit if codes.scales.shape[1] == 1 else min(limit, codes.group & -codes.group)


def _share_width(is_one: bool, num_outputs: int, width: int) -> int:
    """Columns that a program sums, whatever the number of rows, if it is not one."""
    if is_one:
        return 4 * _ROW_STEP if num_outputs > 2048 else 2 * _ROW_STEP
    return -(-width // min(power_of_two(-(-_PROGRAMS * _TILE // num_outputs)), _MAX_SHARES))
