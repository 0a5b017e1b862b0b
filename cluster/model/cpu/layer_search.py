"""Which decoder layers and which text models one native call can run: the native CPU kernels, as the search
in `cluster.model.layers` knows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import nn

from cluster.model.attention_cpu import MAX_GROUP, MAX_WIDTH
from cluster.model.cpu.adapters import PART_OUTPUTS
from cluster.model.cpu.gated_delta import GatedDelta, gated_delta
from cluster.model.cpu.layer import Head, NativeDecoder, NativeDecoderLayer, NativeTextModel, can_rotate
from cluster.model.cpu.library import Kernels
from cluster.model.cpu.modules import (
    NativeRmsNorm,
    PackedLinear,
    WeightDtype,
    is_gated_by_silu,
    is_servable,
    optimise,
)
from cluster.model.layers.parts import AttentionParts, DecoderParts
from cluster.model.layers.search import Settings, TextParts
from cluster.model.layers.trial import NUM_TOKENS, Heads, Observed
from cluster.model.state_step import StatefulForward

# Largest relative error (2-norm) of what a replacement adds to its input: at least three times the error seen
# on random weights.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_INT8_TOLERANCE = 1e-1
# With adapters that add as much as the layer itself: modules round three times more than the native layer.
_ADAPTED_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
# Of mixers: five times what was seen. In float32 it is the module that errs, where states fade fast: it sums
# the logarithms of the decays of 64 tokens.
_MIXER_TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 2e-3}


class CpuLayerKernels:
    """Implements `LayerKernels`."""

    is_timed = False
    whole_tolerance = 0.0
    mixer_tolerances: Mapping[torch.dtype, float] = _MIXER_TOLERANCES

    def __init__(self, kernels: Kernels, weight_dtype: WeightDtype = "auto"):
        self.name = f"native CPU kernels ({kernels.variant})"
        self.source = kernels.weights
        self._kernels, self._weight_dtype = kernels, weight_dtype

    def can_replace(self, parts: DecoderParts) -> bool:
        """Rows have an even length, because bfloat16 is read in pairs."""
        attention, mlp = parts.attention, parts.mlp
        if attention.inner is None or mlp.inner is None or not is_servable(parts.layer):
            return False
        *inputs, out = (*attention.inner.projections, attention.inner.out)
        return (
            attention.pre is not None
            and mlp.pre is not None
            and attention.post is mlp.post is None
            and len(inputs) == 3
            and len({linear.bias is None for linear in inputs}) == 1
            and is_gated_by_silu(mlp.inner)
            and all(linear.in_features % 2 == 0 for linear in (*inputs, out, mlp.inner.down))
            and not (attention.inner.is_adapted and any(part.out_features % PART_OUTPUTS for part in inputs))
        )

    def candidates(self, parts: DecoderParts, observed: Observed) -> Iterator[Settings]:
        attention, heads, rotary = parts.attention.inner, observed.heads, observed.rotary
        is_pair = isinstance(rotary, tuple) and len(rotary) == 2
        if not is_pair or not can_rotate(*rotary, NUM_TOKENS, parts.dtype):
            return
        if attention is not None and heads is not None and _fit(attention, heads):
            for int8 in (True, False) if self._weight_dtype == "int8" else (False,):
                yield {"int8": int8, "heads": heads.to_json()}

    def build(self, parts: DecoderParts, settings: Settings) -> NativeDecoderLayer:
        heads = Heads.from_json(settings["heads"])
        return NativeDecoderLayer(parts, heads, self._kernels, int8=settings["int8"])

    def tolerance(self, parts: DecoderParts, settings: Settings) -> float:
        if settings["int8"]:
            return _INT8_TOLERANCE
        return (_ADAPTED_TOLERANCE if parts.is_adapted else _TOLERANCE)[parts.dtype]

    def replace_modules(self, text_model: nn.Module, head: nn.Module) -> nn.Module | None:
        return optimise(text_model, head, self._weight_dtype, self._kernels)

    def mixer(self, forward: StatefulForward) -> GatedDelta | None:
        return gated_delta(forward, self._kernels)

    def whole(self, parts: TextParts) -> NativeTextModel | None:
        native = [layer for layer in parts.layers if isinstance(layer, NativeDecoderLayer)]
        if len(native) < len(parts.layers) or len({layer.form for layer in native}) > 1:
            return None
        if not (isinstance(parts.norm, NativeRmsNorm) and isinstance(parts.head, PackedLinear)):
            return None
        decoder = NativeDecoder(native, self._kernels, Head(parts.norm, parts.head))
        return NativeTextModel(parts.rotary, decoder, parts.head.out_features)


def _fit(parts: AttentionParts, heads: Heads) -> bool:
    """Whether the kernels know this kind of attention, and all parts have its sizes."""
    query, key, value = parts.projections
    return (
        heads.attention.softcap is None
        and heads.attention.sinks is None
        and heads.key_width == heads.value_width <= MAX_WIDTH
        and heads.num_query // heads.num_kv <= MAX_GROUP
        and query.out_features == heads.num_query * heads.key_width
        and key.out_features == value.out_features == heads.num_kv * heads.key_width
        and all(cast(nn.Parameter, norm.weight).numel() == heads.key_width for norm in parts.head_norms)
    )
