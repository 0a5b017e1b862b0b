"""Experts on CUDA: each of their two products is one launch over all experts. What lies between them, and the
weighted sum after them, is the module's own or torch's.

The grid follows from the numbers of tokens and experts, which the host knows; which rows an expert has is
found on the device. So nothing waits for the device, and a step may be recorded. Needs triton, which the
first call imports; enqueues on the current stream and owns no memory.

An H100 gave the right numbers; not timed: sizes of tiles are guesses.

Letters: T tokens, K experts of a token, S = T × K, N hidden width, E experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cluster.model.cuda.packed_attention import cut

_STAGES = 2  # of Triton's loop


@dataclass(frozen=True)
class ProductTiles:
    """How a product is cut; by its dtype alone, so that a row's sums have one order in any step."""

    rows: int
    outputs: int
    step: int  # of the inner dimension


EXACT_TILES = ProductTiles(rows=16, outputs=32, step=32)  # of float32
HALF_TILES = ProductTiles(rows=32, outputs=64, step=64)


def tiles_for(dtype: torch.dtype) -> ProductTiles:
    return EXACT_TILES if dtype == torch.float32 else HALF_TILES


def experts_forward(experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """As transformers calls an experts' function: x [T, N]; chosen [T, K], numbers of this rank's experts,
    and E for one of another rank; weights [T, K]. Returns [T, N]."""
    own: Any = experts
    first = own.gate_up_proj if own.has_gate else own.up_proj
    first_bias = (own.gate_up_proj_bias if own.has_gate else own.up_proj_bias) if own.has_bias else None
    num_experts, num_chosen = len(own.down_proj), chosen.shape[1]
    of_rows, order = chosen.flatten().sort(stable=True)
    starts = torch.searchsorted(of_rows, torch.arange(num_experts + 1, device=chosen.device))
    tiles = cut(starts, len(order), tiles_for(x.dtype).rows)
    rows = x.new_empty(len(order), first.shape[2 if own.is_transposed else 1])
    _multiply(x, first, first_bias, order, tiles, rows, own.is_transposed, num_chosen, gathers=True)
    rows = own._apply_gate(rows) if own.has_gate else own.act_fn(rows)
    # the rows of other ranks' experts are not computed
    pairs = (x.new_zeros if own._is_expert_parallel else x.new_empty)(len(order), x.shape[1])
    bias = own.down_proj_bias if own.has_bias else None
    _multiply(
        rows.contiguous(), own.down_proj, bias, order, tiles, pairs, own.is_transposed, num_chosen,
        gathers=False,
    )  # fmt: skip
    return (pairs.unflatten(0, chosen.shape) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, table: Tensor, out: Tensor,
    is_transposed: bool, num_chosen: int, *, gathers: bool,
) -> None:  # fmt: skip
    """weight [E, outputs, width], or [E, width, outputs] if it is transposed; the others are contiguous."""
    from cluster.model.cuda import expert_kernels

    tiles = tiles_for(x.dtype)
    expert_stride, output_stride, width_stride = weight.stride()
    if is_transposed:
        output_stride, width_stride = width_stride, output_stride
    num_outputs = out.shape[1]
    expert_kernels.multiply_rows[(len(table), -(-num_outputs // tiles.outputs))](
        x, weight, bias, order, table, out, expert_stride, output_stride, width_stride, num_outputs,
        x.shape[1], CHOSEN=num_chosen, GATHERS=gathers, ROWS=tiles.rows, OUTPUTS=tiles.outputs,
        STEP=tiles.step, num_warps=4, num_stages=_STAGES,
    )  # fmt: skip
