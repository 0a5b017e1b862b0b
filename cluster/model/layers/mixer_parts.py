"""The parts of a mixer with the gated delta rule, found by the names of its modules. The tables hold the
names that families use; what the parts compute is left to a comparison (`mixers`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn

_SIZES = ("conv1d", "A_log", "dt_bias", "head_k_dim", "head_v_dim", "num_k_heads", "num_v_heads")
# Inputs by their order in a row of their products, norm, projection of the output
_GROUPED = (("in_proj_qkvz", "in_proj_ba"), "norm", "out_proj")  # Qwen3-Next: all of a key head together
_APART = (
    (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "norm", "out_proj"),  # Qwen3.5
    (("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), "o_norm", "o_proj"),  # OLMo-Hybrid
)


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


def _columns(mixer: nn.Module, *, is_grouped: bool) -> Columns:
    own = cast(Any, mixer)
    heads, width, group = own.num_k_heads, own.head_k_dim, own.num_v_heads // own.num_k_heads
    values, keys = group * own.head_v_dim, heads * own.head_k_dim
    if is_grouped:
        step, end = 2 * width + 2 * values, heads * (2 * width + 2 * values)
        return Columns(0, width, step, 2 * width, 2 * width + values, step, end, end + group, 2 * group)
    gate, beta = 2 * keys + heads * values, 2 * keys + 2 * heads * values
    return Columns(0, keys, width, 2 * keys, gate, values, beta, beta + heads * group, group)
