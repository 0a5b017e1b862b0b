"""Blocks of vision and audio towers by our Triton kernels and cuBLAS's products: ten launches a block at
most, whatever the number of images and windows.

    add_norm     norms the rows
    product      one matrix [q; k; v]
    rotate       norms of q's and k's heads, rotary embedding; none where a block has neither
    attention    over packed segments (`packed_attention`); by torch's own where sequences have one length
    product      of the output projection
    add_norm     adds to the residual, and norms
    product      one matrix [gate; up], or up
    gate         the activation, and the product with up if there is one
    product      of the projection down
    add          to the residual

`cluster.model.layers.block_search` finds the blocks, compares them and replaces them. A replaced block reads
nothing on the host, so its call may be recorded. Its weights are the merged ones, held once. Between
products a row's bits depend on its own sequence alone. Runs on the encoder's thread; enqueues on the current
stream.

No GPU has run them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cluster.config.machine import has_triton
from cluster.errors import InternalError
from cluster.model.cuda.forms import activation_of, norm_of
from cluster.model.cuda.layer import Tried
from cluster.model.cuda.layer_calls import GateActivation, Norm, gate
from cluster.model.cuda.merging import merged_linears
from cluster.model.cuda.packed_attention import MAX_WIDTH, PackedAttention
from cluster.model.cuda.tower_calls import LayerNorm, QkvHeads, activate, add_norm, rotate
from cluster.model.layers.block_search import replace_blocks
from cluster.model.layers.blocks import BlockParts
from cluster.model.layers.parts import epsilon_of
from cluster.model.layers.trial import ENCODER_TOLERANCES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Linear:
    """weight [M, K]: of one linear, or of several with one input."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _Recipe:
    """What a block's kernels are given."""

    norms: tuple[Norm | LayerNorm, Norm | LayerNorm]  # before attention, before the MLP
    qkv: _Linear
    heads: QkvHeads
    out: _Linear
    up: _Linear  # or [gate; up]
    activation: GateActivation
    down: _Linear


def optimise_tower_blocks(module: nn.Module) -> int:
    """Replaces blocks anywhere in `module`, in place; returns how many. Call it in evaluation mode, with
    merged weights (`merging`) on the device that computes, and before `optimise_packed_attention`."""
    if not has_triton():
        logger.warning("blocks of towers run by their modules, as triton cannot be used")
        return 0
    return replace_blocks(module, CudaBlockKernels())


class CudaBlockKernels:
    """Implements `BlockKernels`."""

    name = "Triton kernels"
    trial_lengths = (70, 5, 1, 64)  # several tiles of attention, less than one, a whole one

    def __init__(self) -> None:
        self.source = Tried()
        self._attention = PackedAttention()

    def builder(self, parts: BlockParts) -> Callable[[bool], FusedBlock] | None:
        recipe = _recipe(parts)
        if recipe is None:
            return None
        return lambda returns_tuple: FusedBlock(recipe, parts.arguments, self._attention, returns_tuple)


class FusedBlock:
    """Takes the place of a block's `forward`."""

    def __init__(
        self, recipe: _Recipe, argument_names: tuple[str, ...], attention: PackedAttention,
        returns_tuple: bool,
    ):  # fmt: skip
        """argument_names: of the block's positional arguments after the rows."""
        self._recipe, self._attention = recipe, attention
        self._argument_names, self._returns_tuple = argument_names, returns_tuple
        self._scaling = recipe.heads.width**-0.5

    def __call__(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor]:
        """hidden_states [T, N], or [B, L, N]; stays as it is. Returns the same shape."""
        own = self._recipe
        given = {**kwargs, **dict(zip(self._argument_names, args, strict=False))}
        residual = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        residual, normed = add_norm(residual, None, own.norms[0])
        mixed = self._mixed(own.qkv(normed), hidden_states.shape[:-1], given)
        residual, normed = add_norm(residual, own.out(mixed), own.norms[1])
        inner = own.up(normed)
        if inner.shape[-1] == own.down.weight.shape[1]:
            inner = activate(inner, own.activation)
        else:
            inner = gate(inner[None], own.activation, inner.dtype)
        y = residual.add_(own.down(inner)).view(hidden_states.shape)
        return (y,) if self._returns_tuple else y

    def _mixed(self, qkv: Tensor, shape: torch.Size, given: dict[str, object]) -> Tensor:
        """[T, Hq · D]"""
        heads = self._recipe.heads
        rotary = cast("tuple[Tensor, Tensor] | None", given.get("position_embeddings"))
        counts = (heads.num_query, heads.num_kv, heads.num_kv)
        query, key, value = qkv.view(len(qkv), -1, heads.width).split(counts, dim=1)
        if rotary is not None or heads.query_norm is not None:
            rotated = rotate(qkv, heads, None if rotary is None else self._tables(rotary, len(qkv)))
            query, key = rotated.split(counts[:2], dim=1)
        starts = cast("Tensor | None", given.get("cu_seqlens"))
        mask = cast("Tensor | None", given.get("attention_mask"))
        if starts is None and len(shape) == 2:
            return self._attend_batch(query, key, value, shape, mask)
        if starts is None or len(shape) != 1 or mask is not None:
            raise InternalError("a fused block needs packed rows, or sequences of equal length")
        return self._attention.attend(query, key, value, starts, self._scaling).flatten(1)

    def _tables(self, rotary: tuple[Tensor, Tensor], num_rows: int) -> tuple[Tensor, Tensor]:
        width = self._recipe.heads.width
        cos, sin = (table.reshape(-1, table.shape[-1]) for table in rotary)
        if cos.shape != sin.shape or cos.shape[1] != width or cos.stride() != sin.stride():
            raise InternalError(f"a fused block cannot use a rotary embedding of {rotary[0].shape}")
        if cos.stride(1) != 1 or num_rows % len(cos):
            raise InternalError(f"a fused block cannot use a rotary embedding of {rotary[0].shape}")
        return cos, sin

    def _attend_batch(
        self, query: Tensor, key: Tensor, value: Tensor, shape: torch.Size, mask: Tensor | None
    ) -> Tensor:
        """shape: B, L."""
        batched = (rows.unflatten(0, shape).transpose(1, 2) for rows in (query, key, value))
        out = F.scaled_dot_product_attention(
            *batched, attn_mask=mask, scale=self._scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2).reshape(len(query), -1)


def is_fused(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), FusedBlock)


def _recipe(parts: BlockParts) -> _Recipe | None:
    """None: the kernels do not compute such a block, or matrices with one input are not one."""
    width = parts.head_width
    if parts.dtype not in ENCODER_TOLERANCES or width > MAX_WIDTH or width % 2:
        return None
    norms = [_norm(module) for module in (parts.attention_norm, parts.mlp_norm)]
    head_norms = [norm_of(module) for module in parts.head_norms]
    activation = activation_of(parts.activation, parts.out.weight)
    linears = [_linear(own) for own in (parts.projections, [parts.out], parts.up, [parts.down])]
    if None in (*norms, *head_norms, *linears) or activation is None:
        return None
    if len({norm.form for norm in head_norms if norm is not None}) > 1:
        return None
    heads = QkvHeads(parts.num_heads, parts.num_kv_heads, width, *head_norms)
    qkv, out, up, down = cast("list[_Linear]", linears)
    return _Recipe((norms[0], norms[1]), qkv, heads, out, up, activation, down)


def _norm(module: nn.Module) -> Norm | LayerNorm | None:
    if isinstance(module, nn.LayerNorm):
        return LayerNorm(module.weight.detach(), module.bias.detach(), cast(float, epsilon_of(module)))
    return norm_of(module)


def _linear(linears: Sequence[nn.Linear]) -> _Linear | None:
    weight, bias = merged_linears(linears) or (None, None)
    return _Linear(weight, bias) if isinstance(weight, Tensor) else None
