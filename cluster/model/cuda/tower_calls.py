"""Launches the Triton kernels of a block of a tower (`tower_kernels`). Nothing here reads the device or
synchronises, and grids follow from the arguments' shapes, so a call may be recorded in a CUDA graph. Enqueues
on the current stream; the first call imports triton. Owns no memory.

No GPU has run them.

Letters: T rows, N hidden width, Hq query heads, Hk KV heads, D width of a head, F width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from cluster.model.cuda.early import early
from cluster.model.cuda.layer_calls import GateActivation, Norm, NormForm
from cluster.model.cuda.tiles import power_of_two

_HEADS_PER_PROGRAM = 16
_ALIGNMENT = 16  # numbers; more do not make loads wider
_TILE = 1024


@dataclass(frozen=True)
class LayerNorm:
    """weight, shift [width], contiguous."""

    weight: Tensor
    shift: Tensor
    epsilon: float


@dataclass(frozen=True)
class QkvHeads:
    """How the heads of q, k and v lie in a row of their product. Norms are per head: both or none, of one
    form."""

    num_query: int
    num_kv: int
    width: int  # even
    query_norm: Norm | None = None
    key_norm: Norm | None = None


def add_norm(x: Tensor, added: Tensor | None, norm: Norm | LayerNorm) -> tuple[Tensor, Tensor]:
    """x [T, N] and added [T, N], of one dtype, contiguous. Returns their sum, in memory of its own, and the
    norm of it; without `added`, x itself and its norm. Rounds to the dtype: the sum, and the norm as its
    form says."""
    from cluster.model.cuda import tower_kernels

    num_rows, width = x.shape
    pad, out = power_of_two(width), torch.empty_like(x)
    total = x if added is None else torch.empty_like(x)
    is_rms = isinstance(norm, Norm)
    tower_kernels.add_norm_row[(num_rows,)](
        x, added, None if added is None else total, out, norm.weight, None if is_rms else norm.shift,
        norm.epsilon, WIDTH=width, PAD=pad, FORM=int(norm.form if is_rms else NormForm.FLOAT),
        num_warps=min(max(pad // 512, 1), 16), enable_fp_fusion=False, **early(x.device),
    )  # fmt: skip
    return total, out


def rotate(qkv: Tensor, heads: QkvHeads, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """qkv [T, (Hq + 2·Hk)·D], contiguous. rotary: cos and sin [R, D], in any float dtype, rows with one
    stride and contiguous columns; row t has the angles t modulo R. Returns q and k [T, Hq + Hk, D], normed
    and then rotated: channels i and i + D / 2 turn together. Rounds to qkv's dtype: norms as their form says,
    and the rotation once."""
    from cluster.model.cuda import tower_kernels

    num_rows, tile = len(qkv), min(_HEADS_PER_PROGRAM, power_of_two(heads.num_query))
    tiles = -(-heads.num_query // tile) + -(-heads.num_kv // tile)
    out = qkv.new_empty(num_rows, heads.num_query + heads.num_kv, heads.width)
    cos, sin = rotary or (None, None)
    query_norm, key_norm = heads.query_norm, heads.key_norm
    stride = 0 if cos is None else cos.stride(0)
    tower_kernels.rotate_heads[(num_rows, tiles)](
        qkv, out, cos, sin, None if query_norm is None else query_norm.weight,
        None if key_norm is None else key_norm.weight, 0.0 if query_norm is None else query_norm.epsilon,
        0.0 if key_norm is None else key_norm.epsilon, 1 if cos is None else len(cos),
        stride, QUERY_HEADS=heads.num_query, KV_HEADS=heads.num_kv, ALIGNMENT=gcd(_ALIGNMENT, stride),
        WIDTH=heads.width, HALF_PAD=power_of_two(heads.width // 2), HEADS=tile,
        FORM=int(NormForm.ROUNDED if query_norm is None else query_norm.form), num_warps=4,
        enable_fp_fusion=False, **early(qkv.device),
    )  # fmt: skip
    return out


def activate(x: Tensor, activation: GateActivation) -> Tensor:
    """x [T, F], contiguous → the same, by the activation alone: nothing is gated."""
    from cluster.model.cuda import tower_kernels

    out, size = torch.empty_like(x), x.numel()
    tower_kernels.activate[(-(-size // _TILE),)](
        x, out, activation.alpha, size, TILE=_TILE, KIND=int(activation.kind), num_warps=4,
        enable_fp_fusion=False, **early(x.device),
    )  # fmt: skip
    return out
