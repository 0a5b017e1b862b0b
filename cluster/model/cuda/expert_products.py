"""Experts on CUDA: each of their two products is one launch over all experts. What lies between them, and the
weighted sum after them, is the module's own or torch's.

The grid follows from the numbers of tokens and experts, which the host knows; which rows an expert has is
found on the device. So nothing waits for the device, and a step may be recorded. Needs triton, which the
first call imports; enqueues on the current stream and owns no memory. Matrices of codes (`CodedExperts`) are
decoded by the same launches: no plain matrix exists at any time.

An H100 gave the right numbers for plain matrices; not timed: sizes of tiles are guesses. No GPU has run those
of codes. Their tiles have 16 rows or more, beside 64 outputs or more, so that Hopper multiplies all of them
by one instruction (64 outputs high), whose sums do not depend on how many there are.

Letters: T tokens, K experts of a token, S = T × K, N hidden width, E experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cluster.model.cuda.coded_products import scale_form
from cluster.model.cuda.packed_attention import cut
from cluster.model.layers.codes import CodedExperts

_PLAIN = -1  # no kind of codes: `expert_kernels`


@dataclass(frozen=True)
class ProductTiles:
    """How a product is cut. A row's sums have one order in any step."""

    rows: int
    outputs: int
    step: int  # of the inner dimension
    warps: int = 4
    stages: int = 2  # of Triton's loop


EXACT_TILES = ProductTiles(rows=16, outputs=32, step=32)  # of float32
HALF_TILES = ProductTiles(rows=32, outputs=64, step=64)
# What is read in time counts for few rows, how often a code is decoded for many.
CODED_TILES = ProductTiles(rows=16, outputs=64, step=128, stages=3)
MANY_CODED_TILES = ProductTiles(rows=64, outputs=128, step=128, warps=8, stages=3)
EXACT_CODED_TILES = ProductTiles(rows=16, outputs=32, step=128)
MANY_ROWS = 64  # of an expert, on average


def tiles_for(dtype: torch.dtype, *, is_coded: bool = False, has_many: bool = False) -> ProductTiles:
    if dtype == torch.float32:
        return EXACT_CODED_TILES if is_coded else EXACT_TILES
    if is_coded:
        return MANY_CODED_TILES if has_many else CODED_TILES
    return HALF_TILES


def experts_forward(experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """As transformers calls an experts' function: x [T, N]; chosen [T, K], numbers of this rank's experts,
    and E for one of another rank; weights [T, K]. Returns [T, N]."""
    own: Any = experts
    first = own.gate_up_proj if own.has_gate else own.up_proj
    first_bias = (own.gate_up_proj_bias if own.has_gate else own.up_proj_bias) if own.has_bias else None
    down: Matrices = own.down_proj
    num_experts, num_chosen = len(down), chosen.shape[1]
    of_rows, order = chosen.flatten().sort(stable=True)
    starts = torch.searchsorted(of_rows, torch.arange(num_experts + 1, device=chosen.device))
    has_many = len(order) >= MANY_ROWS * num_experts
    tiles = tiles_for(x.dtype, is_coded=isinstance(down, CodedExperts), has_many=has_many)
    segments = _Segments(cut(starts, len(order), tiles.rows), order, num_chosen, tiles)
    rows = x.new_empty(len(order), _num_outputs(first, own.is_transposed))
    _multiply(x, first, first_bias, segments, rows, own.is_transposed, gathers=True)
    rows = own._apply_gate(rows) if own.has_gate else own.act_fn(rows)
    # the rows of other ranks' experts are not computed
    pairs = (x.new_zeros if own._is_expert_parallel else x.new_empty)(len(order), x.shape[1])
    bias = own.down_proj_bias if own.has_bias else None
    _multiply(rows.contiguous(), down, bias, segments, pairs, own.is_transposed, gathers=False)
    return (pairs.unflatten(0, chosen.shape) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


Matrices = Tensor | CodedExperts


class _Segments(NamedTuple):
    table: Tensor  # of tiles
    order: Tensor
    num_chosen: int
    tiles: ProductTiles


def _num_outputs(weight: Matrices, is_transposed: bool) -> int:
    return weight.num_outputs if isinstance(weight, CodedExperts) else weight.shape[2 if is_transposed else 1]


def _multiply(
    x: Tensor, weight: Matrices, bias: Tensor | None, segments: _Segments, out: Tensor, is_transposed: bool,
    *, gathers: bool,
) -> None:  # fmt: skip
    """weight [E, outputs, width], or [E, width, outputs] if it is transposed, or codes; the others are
    contiguous."""
    from cluster.model.cuda import expert_kernels

    tiles, num_outputs = segments.tiles, out.shape[1]
    if isinstance(weight, CodedExperts):
        codes = weight.codes
        tensors, strides = (codes.words, codes.scales, codes.zeros), (0, 0, 0)
        form = {"KIND": int(codes.kind), "MIDDLE": codes.middle, **scale_form(codes, tiles.step, x.dtype)}
    else:
        tensors, strides = (weight, None, None), weight.stride()
        form = {"KIND": _PLAIN, "MIDDLE": 0, "scale_rows": 0, "run": 0, "num_groups": 0}
        form |= {"GROUPS": 1, "REAL": False}
    if is_transposed:
        strides = strides[0], strides[2], strides[1]
    expert_kernels.multiply_rows[(len(segments.table), -(-num_outputs // tiles.outputs))](
        x, *tensors, bias, segments.order, segments.table, out, *strides, num_outputs,
        x.shape[1], CHOSEN=segments.num_chosen, GATHERS=gathers, **form, ROWS=tiles.rows,
        OUTPUTS=tiles.outputs, STEP=tiles.step, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
