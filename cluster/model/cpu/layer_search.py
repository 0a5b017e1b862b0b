"""Which decoder layers and which text models one native call can run: the native CPU kernels, as the search
in `cluster.model.layers` knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import nn

from cluster.model.attention_cpu import MAX_GROUP, MAX_WIDTH
from cluster.model.cpu.adapters import PART_OUTPUTS
from cluster.model.cpu.layer import (
    Head,
    NativeDecoder,
    NativeDecoderLayer,
    NativeTextModel,
    can_rotate,
    is_gated_attention,
)
from cluster.model.cpu.library import Kernels
from cluster.model.cpu.mixers import mixer_of_modules
from cluster.model.cpu.modules import (
    NativeRmsNorm,
    PackedLinear,
    WeightDtype,
    is_gated_by_silu,
    is_servable,
    is_shifted,
    optimise,
)
from cluster.model.layers.mixer_parts import mixer_linears
from cluster.model.layers.mixers import MixerTrial
from cluster.model.layers.parts import AttentionParts, DecoderParts, Linear, MlpParts, is_linear
from cluster.model.layers.search import Settings, TextParts
from cluster.model.layers.trial import NUM_TOKENS, Heads, Observed
from cluster.model.state_step import MixerKernel, StatefulForward

# Largest relative error (2-norm) of what a replacement adds to its input: at least three times the error seen
# on random weights.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_INT8_TOLERANCE = 1e-1
# With adapters that add as much as the layer itself: modules round three times more than the native layer.
_ADAPTED_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
# Of mixers: five times what was seen in float32, where it is the module that errs if states fade fast (it
# sums the logarithms of the decays of 64 tokens); twice in bfloat16, in which modules of Mamba 2 multiply the
# state of a single token.
_MIXER_TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 1e-2}


class CpuLayerKernels:
    """Implements `LayerKernels`."""

    is_timed = False
    whole_tolerance = 0.0
    mixer_tolerances: Mapping[torch.dtype, float] = _MIXER_TOLERANCES

    def __init__(self, kernels: Kernels, weight_dtype: WeightDtype = "auto"):
        self.name = f"native CPU kernels ({kernels.variant})"
        self.source = kernels.weights
        self._kernels, self._weight_dtype = kernels, weight_dtype
        self._mixers = MixerTrial(self.name, self.mixer_tolerances)

    def can_replace(self, parts: DecoderParts) -> bool:
        """Rows have an even length, because bfloat16 is read in pairs."""
        attention, mlp = parts.attention, parts.mlp
        linears = _linears(parts)
        if linears is None or mlp.inner is None or not is_servable(parts.layer):
            return False
        return (
            attention.pre is not None
            and mlp.pre is not None
            and attention.post is mlp.post is None
            and is_gated_by_silu(mlp.inner)
            and all(linear.in_features % 2 == 0 for linear in (*linears, mlp.inner.down))
        )

    def candidates(self, parts: DecoderParts, observed: Observed) -> Iterator[Settings]:
        attention, heads, rotary = parts.attention.inner, observed.heads, observed.rotary
        is_pair = isinstance(rotary, tuple) and len(rotary) == 2
        if not is_pair or not can_rotate(*rotary, NUM_TOKENS, parts.dtype):
            return
        if attention is None:
            head_norms, is_known = (), heads is None and self._knows_mixer(parts)
        else:
            head_norms, is_known = attention.head_norms, heads is not None and _fit(attention, heads)
        norms = [cast(nn.Module, parts.attention.pre), cast(nn.Module, parts.mlp.pre), *head_norms]
        if not is_known or (shifted := is_shifted(norms, self._kernels)) is None:
            return
        for int8 in (True, False) if self._weight_dtype == "int8" else (False,):
            yield {"int8": int8, "heads": None if heads is None else heads.to_json(), "shifted": shifted}

    def _knows_mixer(self, parts: DecoderParts) -> bool:
        """Compares what lies between its products, over steps with states: the trial of a layer has none."""
        forward = cast(StatefulForward, parts.attention.body.forward)
        kernel, mlp = mixer_of_modules(forward, self._kernels), cast(MlpParts, parts.mlp.inner)
        hidden_size = mlp.inputs[0].in_features
        return kernel is not None and self._mixers.agrees(forward, kernel, hidden_size)

    def build(self, parts: DecoderParts, settings: Settings) -> NativeDecoderLayer:
        heads = None if settings["heads"] is None else Heads.from_json(settings["heads"])
        return NativeDecoderLayer(
            parts, heads, self._kernels, int8=settings["int8"], shifted=settings["shifted"]
        )

    def tolerance(self, parts: DecoderParts, settings: Settings) -> float:
        if settings["int8"]:
            return _INT8_TOLERANCE
        return (_ADAPTED_TOLERANCE if parts.is_adapted else _TOLERANCE)[parts.dtype]

    def replace_modules(self, text_model: nn.Module, head: nn.Module) -> nn.Module | None:
        return optimise(text_model, head, self._kernels, self._weight_dtype)

    def mixer(self, forward: StatefulForward) -> MixerKernel | None:
        return mixer_of_modules(forward, self._kernels)

    def whole(self, parts: TextParts) -> NativeTextModel | None:
        native = [layer for layer in parts.layers if isinstance(layer, NativeDecoderLayer)]
        shapes = {(layer.states is None, layer.shape) for layer in native}
        has_one_shape = len(shapes) == len({has_attention for has_attention, _ in shapes})
        if len(native) < len(parts.layers) or len({layer.form for layer in native}) > 1 or not has_one_shape:
            return None
        if not (isinstance(parts.norm, NativeRmsNorm) and isinstance(parts.head, PackedLinear)):
            return None
        decoder = NativeDecoder(native, self._kernels, Head(parts.norm, parts.head))
        return NativeTextModel(parts.rotary, decoder, parts.head.out_features)


def _linears(parts: DecoderParts) -> list[Linear] | None:
    """Those of the first half; None: it cannot be part of a native layer."""
    if parts.attention.inner is None:
        forward = vars(parts.attention.body).get("forward")
        linears = mixer_linears(forward) if isinstance(forward, StatefulForward) else []
        return cast("list[Linear]", linears) if linears and all(map(is_linear, linears)) else None
    *inputs, out = (*parts.attention.inner.projections, parts.attention.inner.out)
    is_uneven = any(linear.out_features % PART_OUTPUTS for linear in inputs)
    if len(inputs) != 3 or len({linear.bias is None for linear in inputs}) > 1:
        return None
    return None if parts.attention.inner.is_adapted and is_uneven else [*inputs, out]


def _fit(parts: AttentionParts, heads: Heads) -> bool:
    """Whether the kernels know this kind of attention, and all parts have its sizes."""
    query, key, value = parts.projections
    num_gates = heads.num_query * heads.key_width if is_gated_attention(parts, heads) else 0
    return (
        heads.attention.softcap is None
        and heads.attention.sinks is None
        and heads.key_width == heads.value_width <= MAX_WIDTH
        and heads.num_query // heads.num_kv <= MAX_GROUP
        and query.out_features == heads.num_query * heads.key_width + num_gates
        and not (num_gates and (query.bias is not None or parts.is_adapted))
        and key.out_features == value.out_features == heads.num_kv * heads.key_width
        and all(cast(nn.Parameter, norm.weight).numel() == heads.key_width for norm in parts.head_norms)
    )
