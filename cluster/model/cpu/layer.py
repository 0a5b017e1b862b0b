"""A decoder layer that runs in one native call (`layer.cpp`).

The call does norms, fused q/k/v, rotary embedding, writing of K and V, paged attention, projection, gated MLP
and both residuals. Its kernels and roundings are those of `modules` and `attention_cpu`.

Runs on its caller's thread and on as many OpenMP threads as torch would use there. `layer_search` decides
which layers it replaces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import c_double, c_int64, c_void_p
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cluster.errors import InternalError
from cluster.model.attention import AttentionBackend, LayerAttention, PagedBatch
from cluster.model.attention_cpu import row_pointers, step_view
from cluster.model.cpu.library import Kernels
from cluster.model.cpu.modules import PackedWeights, dtype_of, epsilon_of
from cluster.model.kv_format import layer_cache


class _DecoderLayer(ctypes.Structure):
    """Mirrors `DecoderLayer` of layer.cpp."""

    _fields_ = (
        ("qkv", c_void_p), ("out", c_void_p), ("gate_up", c_void_p), ("down", c_void_p),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p), ("query_norm", c_void_p), ("key_norm", c_void_p), ("query_heads", c_int64),
        ("kv_heads", c_int64), ("head_width", c_int64), ("is_bf16", c_int64), ("input_epsilon", c_double),
        ("post_epsilon", c_double), ("query_epsilon", c_double), ("key_epsilon", c_double),
        ("scale", c_double),
    )  # fmt: skip


class _LayerStep(ctypes.Structure):
    """Mirrors `LayerStep` of layer.cpp."""

    _fields_ = (
        ("slots", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("tokens", c_int64),
        ("rotary_width", c_int64),
    )  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """The shape of one layer's attention, and its settings."""

    num_query: int
    num_kv: int
    width: int  # of a row of Q, K and V
    attention: LayerAttention

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Heads:
        return cls(**{**fields, "attention": LayerAttention(**fields["attention"])})


class NativeDecoderLayer(nn.Module):
    """hidden_states [1, T, hidden] → the same shape; writes K and V of the T tokens into the batch's slots.

    Holds a packed copy of all weights: the layer that it was made from can be deleted.
    """

    def __init__(self, layer: nn.Module, heads: Heads, kernels: Kernels, *, int8: bool = False):
        super().__init__()
        attention, mlp = cast(nn.Module, layer.self_attn), cast(nn.Module, layer.mlp)
        projections = [cast(nn.Linear, getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")]
        out, gate, up, down = (
            cast(nn.Linear, linear)
            for linear in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        biases = [linear.bias for linear in projections]
        bias = torch.cat(biases) if biases[0] is not None else None
        weights = (
            PackedWeights(
                kernels, torch.cat([linear.weight for linear in projections]), bias=bias, int8=int8
            ),
            PackedWeights(kernels, out.weight, bias=out.bias, int8=int8),
            PackedWeights(kernels, gate.weight, up=up.weight, int8=int8),
            PackedWeights(kernels, down.weight, int8=int8),
        )
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._dtype = dtype_of(layer)
        self._hidden = projections[0].in_features
        self._layer_idx = cast(int, attention.layer_idx)
        self._window = heads.attention.sliding_window
        self._kept = (weights, [_weight(norm) for norm in norms])
        self._layer = _DecoderLayer(
            *(packed.address for packed in weights),
            *(None if weight is None else weight.data_ptr() for weight in self._kept[1]),
            heads.num_query, heads.num_kv, heads.width, self._dtype == torch.bfloat16,
            *(0.0 if norm is None else cast(float, epsilon_of(norm)) for norm in norms),
            heads.attention.scaling,
        )  # fmt: skip
        self._address = ctypes.addressof(self._layer)
        self._run: Callable[..., None] = kernels.cdll.decoder_layer
        self._run.argtypes, self._run.restype = (c_void_p,) * 9, None
        if hasattr(layer, "attention_type"):  # some text models choose the mask by it
            self.attention_type = layer.attention_type

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        paged: tuple[PagedBatch, AttentionBackend],
        **_kwargs: object,
    ) -> Tensor:
        """Blocks. position_embeddings: cos and sin, [1, T, rotary width] of the model's dtype."""
        batch = paged[0]
        x = hidden_states.contiguous()
        if x.dtype is not self._dtype or x.shape != (1, len(batch.slots), self._hidden):
            raise InternalError(
                f"a native layer needs [1, {len(batch.slots)}, {self._hidden}] {self._dtype}, not {x.shape} "
                f"{x.dtype}"
            )
        cache = layer_cache(batch.kv, self._layer_idx)
        y = torch.empty_like(x)
        self._run(
            self._address,
            self._step_address(batch, *position_embeddings),
            step_view(batch, self._window).address,
            x.data_ptr(),
            y.data_ptr(),
            *row_pointers(cache.key),
            *row_pointers(cache.value),
        )
        if batch.on_layer is not None:
            batch.on_layer(self._layer_idx)
        return y

    def _step_address(self, batch: PagedBatch, cos: Tensor, sin: Tensor) -> int:
        memo_key = ("decoder layer", cos.data_ptr(), sin.data_ptr())
        if memo_key not in batch.memo:
            if not can_rotate(cos, sin, len(batch.slots), self._dtype):
                raise InternalError(
                    f"a native layer cannot use a rotary embedding of {cos.shape}, {cos.dtype}"
                )
            tensors = (batch.slots.contiguous(), cos.contiguous(), sin.contiguous(), cos, sin)
            step = _LayerStep(*(tensor.data_ptr() for tensor in tensors[:3]), *cos.shape[1:])
            batch.memo[memo_key] = (ctypes.addressof(step), step, tensors)
        return batch.memo[memo_key][0]


def can_rotate(cos: Tensor, sin: Tensor, num_tokens: int, dtype: torch.dtype) -> bool:
    """Whether the kernels support rotary embeddings of this form."""
    return (
        cos.shape == sin.shape
        and cos.shape[:-1] == (1, num_tokens)
        and cos.shape[-1] % 2 == 0
        and cos.dtype is dtype
        and sin.dtype is dtype
    )


def _weight(norm: object) -> Tensor | None:
    return None if norm is None else cast(Tensor, cast(nn.Module, norm).weight).detach().contiguous()
