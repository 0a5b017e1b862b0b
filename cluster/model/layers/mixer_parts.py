"""The parts of a mixer with the gated delta rule, with Kimi's delta attention or a short convolution, found
by the names of its modules. The tables hold the names that families use; what the parts compute is left to a
comparison (`mixers`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cluster.model.state_step import StatefulForward

_SIZES = ("conv1d", "A_log", "dt_bias", "head_k_dim", "head_v_dim", "num_k_heads", "num_v_heads")
# Inputs by their order in a row of their products, norm, projection of the output
_GROUPED = (("in_proj_qkvz", "in_proj_ba"), "norm", "out_proj")  # Qwen3-Next: all of a key head together
_APART = (
    (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "norm", "out_proj"),  # Qwen3.5
    (("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), "o_norm", "o_proj"),  # OLMo-Hybrid
)
# Of Mamba 2
_STATE_SPACE = (
    *("in_proj", "out_proj", "conv1d", "norm", "A_log", "D", "dt_bias"),
    *("num_heads", "head_dim", "n_groups", "ssm_state_size"),
)
# Of Kimi's delta attention
_KIMI_SIZES = ("conv1d", "forget_gate", "num_heads", "head_dim", "o_norm", "o_proj")
_KIMI_INPUTS = ("q_proj", "k_proj", "v_proj", "b_proj")


@dataclass(frozen=True)
class Columns:
    """Where the parts of a token begin in a row of the products of all inputs, and the steps from one key
    head to the next: of q and k; of values and of what gates them, whose value heads are neighbours; of two
    numbers a value head."""

    query: int
    key: int
    key_step: int
    value: int
    gate: int
    value_step: int
    beta: int
    decay: int
    gate_step: int


@dataclass(frozen=True)
class MixerInputs:
    linears: tuple[nn.Linear, ...]  # one after the other, they give a row
    columns: Columns
    norm: nn.Module
    out: nn.Module


def mixer_inputs(mixer: nn.Module) -> MixerInputs | None:
    """None: it is no mixer with the gated delta rule."""
    if not all(hasattr(mixer, name) for name in _SIZES):
        return None
    for names, norm, out in (_GROUPED, *_APART):
        parts = [getattr(mixer, name, None) for name in (*names, norm, out)]
        if all(isinstance(part, nn.Module) for part in parts):
            *linears, norm, out = cast("list[Any]", parts)
            return MixerInputs((*linears,), _columns(mixer, is_grouped=len(names) == 2), norm, out)
    return None


@dataclass(frozen=True)
class KimiInputs:
    """A gate is a linear of the input, or two, one after the other."""

    linears: tuple[nn.Linear, ...]  # q, k, v, beta, and the first linears of both gates
    decay: nn.Module | None  # the second one of what is kept
    gate: nn.Module | None  # of the answers


def kimi_inputs(mixer: nn.Module) -> KimiInputs | None:
    """None: it is no mixer with Kimi's delta attention."""
    if not all(hasattr(mixer, name) for name in (*_KIMI_SIZES, *_KIMI_INPUTS)):
        return None
    own = cast(Any, mixer)
    decays, gates = _gate(own.forget_gate, "f"), _gate(mixer, "g")
    if decays is None or gates is None:
        return None
    inputs = [getattr(mixer, name) for name in _KIMI_INPUTS]
    return KimiInputs((*inputs, decays[0], gates[0]), decays[1], gates[1])


def _gate(module: nn.Module, letter: str) -> tuple[nn.Linear, nn.Module | None] | None:
    whole = getattr(module, f"{letter}_proj", None)
    if whole is not None:
        return whole, None
    parts = [getattr(module, f"{letter}_{part}_proj", None) for part in "ab"]
    return cast("tuple[nn.Linear, nn.Module]", (*parts,)) if None not in parts else None


def _columns(mixer: nn.Module, *, is_grouped: bool) -> Columns:
    own = cast(Any, mixer)
    heads, width, group = own.num_k_heads, own.head_k_dim, own.num_v_heads // own.num_k_heads
    values, keys = group * own.head_v_dim, heads * own.head_k_dim
    if is_grouped:
        step, end = 2 * width + 2 * values, heads * (2 * width + 2 * values)
        return Columns(0, width, step, 2 * width, 2 * width + values, step, end, end + group, 2 * group)
    gate, beta = 2 * keys + heads * values, 2 * keys + 2 * heads * values
    return Columns(0, keys, width, 2 * keys, gate, values, beta, beta + heads * group, group)


def is_short_convolution(forward: StatefulForward) -> bool:
    """Whether it is LFM2's."""
    own = cast(Any, forward.mixer)
    if not all(isinstance(getattr(own, name, None), nn.Module) for name in ("conv", "in_proj", "out_proj")):
        return False
    weight: Tensor = own.conv.weight
    kinds = [(tensor.is_recurrent, tensor.dtype, tensor.shape) for tensor in forward.states.tensors]
    return (
        kinds == [(False, weight.dtype, (weight.shape[0], weight.shape[-1]))]
        and getattr(own.in_proj, "out_features", 0) == 3 * weight.shape[0]
    )


def is_state_space(forward: StatefulForward) -> bool:
    """Whether it is Mamba 2's: Bamba, Nemotron-H, Granite, Falcon-H1."""
    own = cast(Any, forward.mixer)
    if not all(hasattr(own, name) for name in _STATE_SPACE):
        return False
    weight: Tensor = own.conv1d.weight
    width, channels = own.num_heads * own.head_dim, len(weight)
    kinds = [(tensor.is_recurrent, tensor.dtype, tensor.shape) for tensor in forward.states.tensors]
    scales: Tensor | None = getattr(own, "mup_vector", None)
    return (
        channels == width + 2 * own.n_groups * own.ssm_state_size
        and getattr(own.in_proj, "out_features", 0) == width + channels + own.num_heads
        and (scales is None or scales.dtype == weight.dtype)
        and (isinstance(own.norm, nn.Identity) or hasattr(own.norm, "variance_epsilon"))
        and kinds == [
            (False, weight.dtype, (channels, weight.shape[-1])),
            (True, torch.float32, (own.num_heads, own.head_dim, own.ssm_state_size)),
        ]
    )  # fmt: skip


def mixer_linears(forward: StatefulForward) -> list[nn.Module]:
    """The products of a mixer with the gated delta rule or a short convolution; of others none."""
    if (found := mixer_inputs(forward.mixer)) is not None:
        return [*found.linears, found.out]
    own = cast(Any, forward.mixer)
    return [own.in_proj, own.out_proj] if is_short_convolution(forward) else []
