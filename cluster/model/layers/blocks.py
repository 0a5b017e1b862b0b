"""The parts of a block of a vision or audio tower, found by the names and types of its modules. The tables
hold the names that families use.

A block is x + out(attention(rotated(qkv(norm(x))))) and then x + mlp(norm(x)). Names do not say what a norm
or an activation computes; a comparison finds out (`block_search`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from cluster.model.layers.parts import is_linear, is_rms_norm, is_unhooked, pick

_NORMS = (
    ("norm1", "norm2"),
    ("layer_norm1", "layer_norm2"),
    ("self_attn_layer_norm", "final_layer_norm"),
    ("attention_norm", "ffn_norm"),
)
_ATTENTIONS = ("attn", "self_attn", "attention")
_PROJECTIONS = (("qkv",), ("q", "k", "v"), ("q_proj", "k_proj", "v_proj"))
_OUTS = ("proj", "out_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_MLPS = ("mlp", "feed_forward")
_GATED_MLP = ("gate_proj", "up_proj", "down_proj")
_PLAIN_MLPS = (("fc1", "fc2"), ("linear_fc1", "linear_fc2"))
_ACTIVATIONS = ("act_fn", "act", "activation_fn")


@dataclass(frozen=True)
class BlockParts:
    """The modules of a block, whatever its family calls them.

    arguments: names of what `block.forward` takes after the rows. With `cu_seqlens` among them, rows of
    several sequences are packed, [T, hidden]; else sequences have one length, [B, L, hidden]."""

    block: nn.Module
    attention_norm: nn.Module
    mlp_norm: nn.Module
    projections: Sequence[nn.Linear]  # one for q, k and v together, or three
    head_norms: Sequence[nn.Module]  # of q and k, or none
    out: nn.Linear
    up: Sequence[nn.Linear]  # one, or gate and up
    down: nn.Linear
    activation: nn.Module
    num_heads: int
    arguments: tuple[str, ...]

    @property
    def is_packed(self) -> bool:
        return "cu_seqlens" in self.arguments

    @property
    def is_rotated(self) -> bool:
        return "position_embeddings" in self.arguments

    @property
    def is_gated(self) -> bool:
        return len(self.up) == 2

    @property
    def hidden_size(self) -> int:
        return self.projections[0].in_features

    @property
    def head_width(self) -> int:
        return self.out.in_features // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        num_rows = sum(linear.out_features for linear in self.projections)
        return (num_rows // self.head_width - self.num_heads) // 2

    @property
    def dtype(self) -> torch.dtype:
        return self.out.weight.dtype


def block_parts(block: nn.Module) -> BlockParts | None:
    """None: this is no block of the known form, has further weights, or something listens to one of its
    modules."""
    children = dict(block.named_children())
    norms = pick(children, *_NORMS)
    attention = next((children[name] for name in _ATTENTIONS if name in children), None)
    if norms is None or attention is None or not is_unhooked(block) or not all(map(_is_norm, norms)):
        return None
    inside = dict(attention.named_children())
    projections, out = pick(inside, *_PROJECTIONS), pick(inside, *((name,) for name in _OUTS))
    body = next((children[name] for name in _MLPS if name in children), None)
    mlp = children if body is None else dict(body.named_children())
    activation = next((mlp[name] for name in _ACTIVATIONS if name in mlp), None)
    linears = pick(mlp, _GATED_MLP, *_PLAIN_MLPS)
    num_heads = getattr(attention, "num_heads", None)
    if projections is None or out is None or linears is None or activation is None:
        return None
    if not isinstance(num_heads, int) or not all(map(is_linear, (*projections, *out, *linears))):
        return None
    *up, down = cast("list[nn.Linear]", linears)
    parts = BlockParts(
        block, norms[0], norms[1], cast("list[nn.Linear]", projections),
        [norm for norm in pick(inside, _HEAD_NORMS) or () if not isinstance(norm, nn.Identity)],
        cast(nn.Linear, out[0]), up, down, activation, num_heads,
        tuple([*inspect.signature(block.forward).parameters][1:]),
    )  # fmt: skip
    return parts if _fits(parts) and _is_all_of(parts) else None


def _is_norm(module: nn.Module) -> bool:
    if is_rms_norm(module):
        return True
    return isinstance(module, nn.LayerNorm) and module.bias is not None and module.weight.ndim == 1


def _fits(parts: BlockParts) -> bool:
    """Whether the sizes of all parts belong together."""
    inner, width = parts.out.in_features, parts.head_width
    num_rows = sum(linear.out_features for linear in parts.projections)
    return (
        inner == parts.num_heads * width
        and parts.num_kv_heads > 0
        and num_rows == (parts.num_heads + 2 * parts.num_kv_heads) * width
        and parts.num_heads % parts.num_kv_heads == 0
        and parts.out.out_features == parts.down.out_features == parts.hidden_size
        and all(
            is_rms_norm(norm) and norm.get_parameter("weight").numel() == width for norm in parts.head_norms
        )
        and len({parameter.dtype for parameter in parts.block.parameters()}) == 1
    )


def _is_all_of(parts: BlockParts) -> bool:
    def modules() -> Iterator[nn.Module]:
        yield from (parts.attention_norm, parts.mlp_norm, *parts.projections, *parts.head_norms)
        yield from (parts.out, *parts.up, parts.down)

    known = {id(parameter) for module in modules() for parameter in module.parameters()}
    return all(id(parameter) in known for parameter in parts.block.parameters())
