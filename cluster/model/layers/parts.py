"""The parts of a decoder layer, found by the names and types of its modules. The tables hold the names that
families use.

A layer is two halves, attention (or a mixer that keeps states) and MLP. Each half is x + scale *
post(body(pre(x))), where `pre` and `post` are norms of which one may be missing. If the body of a half is of
another kind (experts, compressed KV), the half has no `inner` parts, but the other half of the layer may
have.

Names do not say what a norm, an activation or a rotary embedding computes. Kernels offer forms of it, and the
comparison finds the right one (`search`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from cluster.model.adapters import AdaptedLinear
from cluster.model.layers.codes import CodedLinear
from cluster.model.rank_linears import SummedLinear

Linear = nn.Linear | AdaptedLinear

_NORMS = (  # before attention, after it, before the MLP, after it
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", None, "post_attention_layernorm", None),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("operator_norm", None, "ffn_norm", None),
)
_BODIES = ("self_attn", "linear_attn", "conv")  # of the first half
_SECOND_BODIES = ("mlp", "feed_forward")
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_OUTS = (("o_proj",), ("out_proj",))
_HEAD_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm"))
_MLPS = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"), ("w1", "w3", "w2"))
_ACTIVATIONS = ("act_fn", "activation_fn")
_SCALE = "residual_multiplier"


@dataclass(frozen=True)
class AttentionParts:
    projections: tuple[Linear, ...]  # q, k and v, or one for all three
    out: Linear
    head_norms: tuple[nn.Module, ...]  # of q and k, or none

    @property
    def is_adapted(self) -> bool:
        return any(isinstance(linear, AdaptedLinear) for linear in (*self.projections, self.out))


@dataclass(frozen=True)
class MlpParts:
    """down(activation(gate(x)) * up(x))."""

    inputs: tuple[Linear, ...]  # gate and up, or one for both
    down: Linear
    activation: nn.Module

    @property
    def is_adapted(self) -> bool:
        return any(isinstance(linear, AdaptedLinear) for linear in (*self.inputs, self.down))


Inner = TypeVar("Inner", AttentionParts, MlpParts)


@dataclass(frozen=True)
class LayerHalf(Generic[Inner]):
    pre: nn.Module | None
    body: nn.Module
    post: nn.Module | None
    scale: float
    inner: Inner | None  # None: the body is not recognised, and its own module runs

    def run_modules(self, x: Tensor, **keywords: object) -> Tensor:
        """The half as the layer computes it, for a replacement of the other half alone. `keywords`: those of
        the body."""
        result = self.body(x if self.pre is None else self.pre(x), **keywords)
        added = result[0] if isinstance(result, tuple) else result
        return x + self.scale * (added if self.post is None else self.post(added))


@dataclass(frozen=True)
class DecoderParts:
    """At least one half is recognised."""

    layer: nn.Module
    attention: LayerHalf[AttentionParts]
    mlp: LayerHalf[MlpParts]

    @property
    def is_adapted(self) -> bool:
        """Whether LoRA adapters change it."""
        halves = (self.attention.inner, self.mlp.inner)
        return any(inner is not None and inner.is_adapted for inner in halves)

    @property
    def layer_idx(self) -> int:
        return cast(int, self.attention.body.layer_idx)

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.layer)


def decoder_parts(layer: nn.Module) -> DecoderParts | None:
    """None: this is no decoder layer of the known form, or something listens to one of its modules."""
    children = _children_of(layer)
    attention, mlp = (_pop_only(children, names) for names in (_BODIES, _SECOND_BODIES))
    names = next((names for names in _NORMS if children.keys() == {*names} - {None}), None)
    if attention is None or mlp is None or names is None or not is_unhooked(layer):
        return None
    norms = [None if name is None else children[name] for name in names]
    if not all(norm is None or is_rms_norm(norm) for norm in norms):
        return None
    scale = float(getattr(layer, _SCALE, 1.0))
    parts = DecoderParts(
        layer,
        LayerHalf(norms[0], attention, norms[1], scale, attention_parts(attention)),
        LayerHalf(norms[2], mlp, norms[3], scale, mlp_parts(mlp)),
    )
    return None if parts.attention.inner is None and parts.mlp.inner is None else parts


def _pop_only(children: dict[str, nn.Module], names: Sequence[str]) -> nn.Module | None:
    """The one child that has one of these names; None: there is none, or several."""
    found = [children.pop(name) for name in names if name in children]
    return found[0] if len(found) == 1 else None


def attention_parts(attention: nn.Module) -> AttentionParts | None:
    children = _children_of(attention)
    projections, out = pick(children, *_PROJECTIONS), pick(children, *_OUTS)
    head_norms = pick(children, *_HEAD_NORMS) or []
    if projections is None or out is None:
        return None
    linears = [*projections, *out]
    if len(children) > len(linears) + len(head_norms):
        return None
    if not (_are_projections(linears) and all(map(is_rms_norm, head_norms))):
        return None
    *inputs, output = cast("list[Linear]", linears)
    return AttentionParts(tuple(inputs), output, tuple(head_norms))


def mlp_parts(mlp: nn.Module) -> MlpParts | None:
    children = _children_of(mlp)
    linears = pick(children, *_MLPS)
    activation = next((children[name] for name in _ACTIVATIONS if name in children), None)
    if linears is None or len(children) > len(linears) + (activation is not None):
        return None
    activation = activation or nn.SiLU()  # called as a function
    if not _are_projections(linears):
        return None
    *inputs, down = cast("list[Linear]", linears)
    return MlpParts(tuple(inputs), down, activation)


def pick(children: Mapping[str, nn.Module], *choices: tuple[str, ...]) -> list[nn.Module] | None:
    """The children of the first choice of names that are all there."""
    names = next((names for names in choices if all(name in children for name in names)), None)
    return None if names is None else [children[name] for name in names]


def _children_of(module: nn.Module) -> dict[str, nn.Module]:
    """By name, without those that compute nothing in evaluation mode."""
    idle = (nn.Dropout, nn.Identity)
    return {name: child for name, child in module.named_children() if not isinstance(child, idle)}


def is_linear(module: nn.Module) -> bool:
    """Whether it is a whole linear, or a rank's piece of its outputs. One with a `forward` of its own is
    divided in another way."""
    return type(module) in (nn.Linear, CodedLinear) and "forward" not in vars(module)


def _are_projections(linears: Sequence[nn.Module]) -> bool:
    """The last one gives what is added to the residual: on a rank, a part of it."""
    *inputs, output = linears
    return all(map(_is_projection, inputs)) and (_is_projection(output) or isinstance(output, SummedLinear))


def _is_projection(module: nn.Module) -> bool:
    return is_linear(module) or isinstance(module, AdaptedLinear)


def is_rms_norm(module: nn.Module) -> bool:
    """Decides by name and parts. The comparison finds out whether it adds 1 to its weight or rounds at
    another place."""
    weight = getattr(module, "weight", None)
    is_named_so = (
        type(module).__name__.endswith("RMSNorm") and isinstance(weight, nn.Parameter) and weight.ndim == 1
    )
    return is_named_so and epsilon_of(module) is not None


def is_unhooked(module: nn.Module) -> bool:
    return not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def epsilon_of(norm: nn.Module) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def dtype_of(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
