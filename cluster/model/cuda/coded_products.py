"""Products of activations with weights that are codes, by our Triton kernels (`coded_kernels`). The weight is
(code - zero) * scale, and activations are never rounded.

    up to CODED_ROWS      tiles of codes become numbers in registers, on their way to the matrix unit
    more                  the plain weight is made in the model's dtype, and a library multiplies: the product
                          takes most of the time then, and libraries compute it faster than our tiles

In float32 both compute with the same numbers. In 16 bits the second rounds the weight to the model's dtype,
as a checkpoint is that was dequantised while it was read, and so does the first where fewer than `_STEP`
columns have one scale (small groups, blocks that ranks have cut). Else it scales in float32.

Everything is enqueued on the current stream, reads nothing on the host and may be recorded. The plain weight
exists during its product only (`scratch_bytes`). Needs triton, which the first call imports.

No GPU has run the kernels in this form. How many bytes they can read is reasoned from what they compile to
(`python -m bench.gpu.compiled`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model.cuda.early import early
from cluster.model.cuda.tiles import power_of_two
from cluster.model.layers.codes import CodeKind, Codes

CODED_ROWS = 256  # tokens that our kernels multiply in 16 bits
_FLOAT_ROWS = 16  # in float32, where tiles run on no matrix unit
_ONE_ROW, _ROWS, _MORE_ROWS = 8, 16, 64  # of a tile; the matrix unit has none of fewer than 8
_TILE, _FLOAT_TILE, _STEP = 64, 32, 128
_PLAIN_TILE, _PLAIN_STEP = 16, 256
_PROGRAMS, _MAX_SHARES = 200, 8
# Of Triton's loop. With these, few rows have as many bytes of codes on their way in 4 bits as in 8.
_STAGES, _NIBBLE_STAGES = 3, 5
# Of a thread, so that five programs fit on a multiprocessor: 592 of them are 7B's largest product on an H100.
_REGISTERS = 96


def coded_product(x: Tensor, codes: Codes, bias: Tensor | None, *, is_whole: bool = False) -> Tensor:
    """x [T, K] times the weight [N, K], plus bias [N]; x and bias contiguous. Returns shares [S, T, N]:
    partial sums in float32, or one in x's dtype (always, with `is_whole`)."""
    if not 0 < len(x) <= (_FLOAT_ROWS if x.dtype == torch.float32 else CODED_ROWS):
        return F.linear(x, plain_weight(codes, x.dtype), bias)[None]
    from cluster.model.cuda import coded_kernels

    (num_tokens, width), num_outputs = x.shape, len(codes.numbers)
    tile = _FLOAT_TILE if x.dtype == torch.float32 else _TILE
    steps = -(-width // _STEP)
    share_steps = steps if is_whole else -(-steps // _num_shares(num_outputs))
    shares = -(-steps // share_steps)
    dtype = torch.float32 if shares > 1 else x.dtype
    out = torch.empty(shares, num_tokens, num_outputs, dtype=dtype, device=x.device)
    rows = _ONE_ROW if num_tokens == 1 else _ROWS if num_tokens <= _ROWS else _MORE_ROWS
    is_narrow = rows < _MORE_ROWS
    stages = _NIBBLE_STAGES if is_narrow and codes.kind in (CodeKind.NIBBLE, CodeKind.E2M1) else _STAGES
    form = scale_form(codes, _STEP, x.dtype)
    if form["GROUPS"] == 1:
        form["REAL"] = False  # the scale is applied in float32
    coded_kernels.coded_rows[(-(-num_outputs // tile), shares, -(-num_tokens // rows))](
        x, codes.words, codes.scales, codes.zeros, bias, out, num_tokens, num_outputs, width, share_steps,
        **form, KIND=int(codes.kind), MIDDLE=codes.middle, ROWS=rows, TILE=tile, STEP=_STEP,
        num_warps=4, num_stages=stages, maxnreg=_REGISTERS if is_narrow else None, **early(x.device),
    )  # fmt: skip
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
    form = scale_form(codes, step, torch.float32)
    coded_kernels.plain_weight[(-(-num_outputs // _PLAIN_TILE), -(-codes.width // step))](
        codes.words, codes.scales, codes.zeros, out, num_outputs, codes.width, **form,
        KIND=int(codes.kind), MIDDLE=codes.middle, TILE=_PLAIN_TILE, STEP=step, num_warps=4,
    )  # fmt: skip
    return out


def scratch_bytes(codes: Codes, dtype: torch.dtype) -> int:
    """What a product of many rows takes beside its result."""
    return len(codes.numbers) * codes.width * dtype.itemsize


def scale_form(codes: Codes, step: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns how scales lie, as the kernels take it. scale_rows: rows that have one scale; GROUPS: equal
    parts of a step's columns that have one each; run: successive parts that share it; num_groups: groups of
    columns; REAL: scales are of `dtype`, that of the weights, and of 16 bits."""
    part, num_groups = same_scale(codes, step), codes.scales.shape[1]
    run = -(-codes.width // part) if num_groups == 1 else codes.group // part
    scales = torch.bfloat16 if codes.scales.dtype == torch.uint8 else codes.scales.dtype  # exponents
    return {
        "scale_rows": codes.scale_rows, "run": run, "num_groups": num_groups, "GROUPS": step // part,
        "REAL": scales == dtype and dtype.itemsize == 2,
    }  # fmt: skip


def same_scale(codes: Codes, limit: int) -> int:
    """A power of two, at most `limit`: so many columns, from any multiple of it on, have one scale."""
    return limit if codes.scales.shape[1] == 1 else min(limit, codes.group & -codes.group)


def _num_shares(num_outputs: int) -> int:
    """Programs that divide the columns of one tile, whatever the number of rows."""
    return min(power_of_two(-(-_PROGRAMS * _TILE // num_outputs)), _MAX_SHARES)
