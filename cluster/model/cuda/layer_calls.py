"""Launches the Triton kernels of a decoder layer (`layer_kernels`): everything between its matrix products
(`products`) but attention. A layer is x ← x + scale · post(body(pre(x))) twice, and ten launches in all:

    add_norm     ends the layer before (residual, its post norm and scale) and norms for this one
    product      one matrix [q; k; v]
    rope_write   norms of q and k, rotary embedding, K and V into their blocks
    attend, merge                                    (`paged_attention`)
    gate_heads   where each head of attention has a gate
    product      of the output projection
    add_norm
    product      one matrix [gate; up]
    gate
    product      of the projection down, which the next layer's `add_norm` adds

On a rank, the sum over the ranks follows the two products that give what is added (`total` before it, where
such a product is cut into shares).

Modules that are not fused write K and V by `write_rows`.

Nothing here reads the host's copy of anything or synchronises, and all shapes follow from the arguments'
shapes, so a call may be recorded in a CUDA graph. It enqueues on the current stream and needs triton, which
is imported by the first call. Owns no memory.

Letters: T tokens, N hidden width, S shares of a product (float32, or one in the model's dtype), Hq query
heads, Hk KV heads, D key width, Dv value width, F width of the MLP, W width of a rotary table.

Which norm, rotation, table or activation a module has is not asked here: the caller tries candidates and
keeps one whose results agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from cluster.model.cuda.early import early
from cluster.model.cuda.tiles import power_of_two, tensors_of
from cluster.model.kv_format import LayerCache

_HEADS_PER_PROGRAM = 4
_GATE_TILE = 1024


class NormForm(IntEnum):
    """Where an RMSNorm multiplies by its weight. The values are constants of `layer_kernels`."""

    ROUNDED = 0  # rounds to the model's dtype, then multiplies and rounds again (Llama, Qwen)
    FLOAT = 1  # multiplies in float32, then rounds (gpt-oss, Gemma 4)
    PLUS_ONE = 2  # multiplies by 1 + weight in float32, then rounds (Gemma 2 and 3)


class Rotation(IntEnum):
    """Which channels turn together."""

    HALVES = 0  # i and i + rotary width / 2
    PAIRS = 1  # 2i and 2i + 1


class Table(IntEnum):
    """Which entry of a row of cos and sin belongs to channel i of a head."""

    FULL = 0  # i
    HALF = 1  # i modulo half of the rotary width (gpt-oss, whose tables have half the width)
    PAIRED = 2  # i // 2 (GLM-4, Ernie 4.5)


class ActivationKind(IntEnum):
    SILU = 0  # x * sigmoid(alpha * x); quick GELU is alpha = 1.702
    GELU = 1  # by erf
    GELU_TANH = 2


@dataclass(frozen=True)
class Norm:
    """An RMSNorm. weight [width] in the model's dtype or float32, contiguous; None: no weight."""

    weight: Tensor | None
    epsilon: float
    form: NormForm = NormForm.ROUNDED


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer, and its norms of q and k, which are per head."""

    rotary_width: int  # of a head's channels, from the first on; 0: none
    rotation: Rotation = Rotation.HALVES
    table: Table = Table.FULL
    query_norm: Norm | None = None
    key_norm: Norm | None = None  # of query_norm's form; there are both or none
    norms_after: bool = False  # the norms follow the rotation (HunYuan)
    is_gated: bool = False  # each head of q is followed by as many columns that gate its answer (Qwen3.5)


@dataclass(frozen=True)
class GateActivation:
    """act(min(gate, limit)) * (clamp(up, -limit, limit) + offset)."""

    kind: ActivationKind = ActivationKind.SILU
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0


def total(shares: Tensor, dtype: torch.dtype) -> Tensor:
    """shares [S, T, M] → their sum [1, T, M] in `dtype`, that of the model; one share is returned itself."""
    return shares if len(shares) == 1 else summed(shares, dtype)


def summed(shares: Tensor, dtype: torch.dtype) -> Tensor:
    """As `total`, of one share, too: one launch."""
    from cluster.model.cuda import layer_kernels

    _, num_tokens, width = shares.shape
    out = torch.empty(1, num_tokens, width, dtype=dtype, device=shares.device)
    tile = min(_GATE_TILE, power_of_two(width))
    layer_kernels.total[(num_tokens, -(-width // tile))](
        shares, out, _share_stride(shares), WIDTH=width, TILE=tile, SHARES=len(shares), num_warps=4,
        **early(shares.device),
    )  # fmt: skip
    return out


def add_norm(
    residual: Tensor, shares: Tensor | None, pre: Norm, *, post: Norm | None = None,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """residual += scale · post(Σ shares); returns pre(residual).

    residual [T, N], contiguous, in the model's dtype, changed in place. shares [S, T, N], contiguous; None:
    the residual stays as it is.

    Rounds to the model's dtype: the sum of the shares, post's result (and its inner rounding), the product
    with `scale`, the new residual, pre's result. The residual equals that of the modules bit by bit where
    there is no `post`; norms differ by the order of a float32 sum."""
    out = torch.empty_like(residual)
    _add_norm(residual, shares, pre, post, scale, out)
    return out


def add(residual: Tensor, shares: Tensor, *, post: Norm | None = None, scale: float | None = None) -> None:
    """`add_norm` without a norm for what follows: the next half has none, or is no fused one."""
    _add_norm(residual, shares, None, post, scale, None)


def _add_norm(
    residual: Tensor, shares: Tensor | None, pre: Norm | None, post: Norm | None, scale: float | None,
    out: Tensor | None,
) -> None:  # fmt: skip
    from cluster.model.cuda import layer_kernels

    num_tokens, width = residual.shape
    pad = power_of_two(width)
    layer_kernels.add_norm[(num_tokens,)](
        residual, shares, out, None if post is None else post.weight, None if pre is None else pre.weight,
        0 if shares is None else _share_stride(shares), scale or 1.0, 0.0 if post is None else post.epsilon,
        0.0 if pre is None else pre.epsilon,
        WIDTH=width, PAD=pad, SHARES=0 if shares is None else len(shares), HAS_POST=post is not None,
        POST_FORM=_form(post), HAS_PRE=pre is not None, PRE_FORM=_form(pre), HAS_SCALE=scale is not None,
        num_warps=min(max(pad // 512, 4), 16), enable_fp_fusion=False, **early(residual.device),
    )  # fmt: skip


def rope_write(
    shares: Tensor, cos: Tensor | None, sin: Tensor | None, slots: Tensor, cache: LayerCache, num_heads: int,
    rope: Rope, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Norms and rotates q and k, and writes K and V into `cache`. Returns q [T, Hq, D].

    shares [S, T, Hq·D + Hk·D + Hk·Dv]: the product with [q; k; v], contiguous (2·Hq·D where q is gated). cos,
    sin [T, W]: rows with one stride and contiguous columns, in any float dtype; None where nothing rotates.
    slots [T] int32 or int64: flat slots; padding tokens have slots in a scratch block. `cache` is plain or
    INT8. out [T, Hq, D] in the model's dtype (that of `out`, else of a plain cache, else of `shares`).

    Rounds to the model's dtype: the sums of shares, norms as their form says, and the rotation once (the
    modules round both of its products as well, so bfloat16 is closer to float32 than theirs; in float32 the
    bits are the modules'). K and V are written from the rounded values: plain ones bit by bit, INT8 ones with
    the codes and scales of `kv_format.quantise`."""
    from cluster.model.cuda import layer_kernels

    num_shares, num_tokens, _ = shares.shape
    key, key_scales = tensors_of(cache.key)
    value, value_scales = tensors_of(cache.value)
    (kv_heads, key_width), (_, value_width) = cache.key.row_shape, cache.value.row_shape
    if out is None:
        dtype = key.dtype if key_scales is None else shares.dtype
        out = torch.empty(num_tokens, num_heads, key_width, dtype=dtype, device=shares.device)
    tiles = -(-num_heads // _HEADS_PER_PROGRAM) + 2 * -(-kv_heads // _HEADS_PER_PROGRAM)
    query_norm, key_norm = rope.query_norm, rope.key_norm
    has_norms = query_norm is not None
    layer_kernels.rope_write[(num_tokens, tiles)](
        shares, cos if cos is not None else shares, sin if sin is not None else shares, slots,
        None if query_norm is None else query_norm.weight, None if key_norm is None else key_norm.weight,
        out, key, key_scales, value, value_scales,
        _share_stride(shares), 0 if cos is None else cos.stride(0),
        0.0 if query_norm is None else query_norm.epsilon, 0.0 if key_norm is None else key_norm.epsilon,
        QUERY_HEADS=num_heads, KV_HEADS=kv_heads, K_WIDTH=key_width, K_PAD=power_of_two(key_width),
        V_WIDTH=value_width, V_PAD=power_of_two(value_width), SHARES=num_shares, HEADS=_HEADS_PER_PROGRAM,
        ROTARY=rope.rotary_width, ROTATION=int(rope.rotation), TABLE=int(rope.table),
        NORM_BEFORE=has_norms and not rope.norms_after, NORM_AFTER=has_norms and rope.norms_after,
        FORM=_form(query_norm), QUERY_STEP=(2 if rope.is_gated else 1) * key_width, num_warps=4,
        enable_fp_fusion=False, **early(shares.device),
    )  # fmt: skip
    return out


def gate_heads(shares: Tensor, x: Tensor) -> Tensor:
    """x [T, Hq, D], attention's answers, times the sigmoid of what follows each head of q in `shares` [S, T,
    2·Hq·D + ...]. Returns the same as x. Rounds to its dtype: sums of shares, the sigmoid, the product."""
    from cluster.model.cuda import layer_kernels

    (num_tokens, num_heads, width), out = x.shape, torch.empty_like(x)
    tile = min(_GATE_TILE, power_of_two(num_heads * width))
    layer_kernels.gate_heads[(num_tokens, -(-num_heads * width // tile))](
        shares, x, out, _share_stride(shares), shares.shape[2], HEADS=num_heads, WIDTH=width, TILE=tile,
        SHARES=len(shares), num_warps=4, enable_fp_fusion=False, **early(shares.device),
    )  # fmt: skip
    return out


def write_rows(key: Tensor, value: Tensor, slots: Tensor, cache: LayerCache) -> None:
    """K and V of modules that are not fused into `cache`, plain or INT8: key [T, Hk, D], value [T, Hk, Dv],
    of any strides, copied only if their columns are not contiguous. slots [T] int32 or int64. Plain rows are
    written bit by bit, INT8 ones with the codes and scales of `kv_format.quantise`."""
    from cluster.model.cuda import layer_kernels

    key_store, key_scales = tensors_of(cache.key)
    value_store, value_scales = tensors_of(cache.value)
    num_tokens, kv_heads, key_width = key.shape
    value_width = value.shape[2]
    key, value = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (key, value))
    tiles = 2 * -(-kv_heads // _HEADS_PER_PROGRAM)
    layer_kernels.write_rows[(num_tokens, tiles)](
        key, value, slots, key_store, key_scales, value_store, value_scales,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KV_HEADS=kv_heads, K_WIDTH=key_width, K_PAD=power_of_two(key_width), V_WIDTH=value_width,
        V_PAD=power_of_two(value_width), HEADS=_HEADS_PER_PROGRAM, num_warps=4, **early(key.device),
    )  # fmt: skip


def gate(shares: Tensor, activation: GateActivation, dtype: torch.dtype) -> Tensor:
    """act(gate) · up. shares [S, T, 2·F]: the product with [gate; up], contiguous. Returns [T, F] in `dtype`,
    the model's. Rounds to it: both sums of shares, the clamped values, act's result, up + offset, the
    product. Differs from the modules by the device's exp and erf only (an alpha other than 1 is rounded less
    often than gpt-oss does)."""
    from cluster.model.cuda import layer_kernels

    num_shares, num_tokens, double = shares.shape
    width = double // 2
    out = torch.empty(num_tokens, width, dtype=dtype, device=shares.device)
    tile = min(_GATE_TILE, power_of_two(width))
    layer_kernels.gate[(num_tokens, -(-width // tile))](
        shares, out, _share_stride(shares), activation.limit or 0.0, activation.alpha, activation.offset,
        WIDTH=width, TILE=tile, SHARES=num_shares, KIND=int(activation.kind),
        HAS_LIMIT=activation.limit is not None, num_warps=4, enable_fp_fusion=False, **early(shares.device),
    )  # fmt: skip
    return out


def _share_stride(shares: Tensor) -> int:
    """Returns 0 for one share, which is not read: a kernel would be compiled for multiples of 16 again."""
    return shares.stride(0) if len(shares) > 1 else 0


def _form(norm: Norm | None) -> int:
    return int(NormForm.ROUNDED if norm is None else norm.form)
