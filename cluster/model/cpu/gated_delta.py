"""The gated delta rule of Qwen3-Next and Qwen3.5 in one native call, with the convolution in front of it,
over states in place. Linears and the gated norm stay the mixer's own modules.

A mixer is recognised by the names and sizes of its parts; `choose_mixers` compares it with what transformers
computes before it is used. Runs on its caller's thread and on as many OpenMP threads as torch would use.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.model.cpu.library import Kernels
from cluster.model.state_step import StatefulForward, StepState, over_copies

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_PARTS = (
    "conv1d",
    "A_log",
    "dt_bias",
    "norm",
    "out_proj",
    "head_k_dim",
    "head_v_dim",
    "num_k_heads",
    "num_v_heads",
)


class _Shape(ctypes.Structure):
    """Mirrors `Shape` of gated_delta.cpp."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            "sequences", "tokens", "key_heads", "value_heads", "key_width", "value_width", "taps",
            "state_bytes", "conv_offset", "delta_offset",
        )
    )  # fmt: skip


class _Projected(Protocol):
    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class GatedDelta:
    """Implements `MixerKernel`."""

    def __init__(self, forward: StatefulForward, kernels: Kernels):
        own = cast(Any, forward.mixer)
        self._own = own
        weight: Tensor = own.conv1d.weight
        self._project: _Projected = self._separate if hasattr(own, "in_proj_qkv") else self._interleaved
        # [taps, channels]
        self._weight = weight.detach()[:, 0].float().T.contiguous()
        self._number = forward.number
        places = {tensor.is_recurrent: place.start for tensor, place in forward.states.places}
        self._shape = (own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim, len(self._weight))
        self._offsets = places[False], places[True]
        self._dtype = weight.dtype
        self._rates = -own.A_log.detach().float().exp()
        self._run = getattr(kernels.cdll, f"gated_delta_{_SUFFIX[weight.dtype]}")
        self._run.argtypes = (*[c_void_p] * 8, ctypes.c_int)
        self._run.restype = None

    def __call__(self, rows: Tensor, step: StepState) -> Tensor:
        return over_copies(rows, step, self._number, self.compute)

    def compute(self, rows: Tensor, states: Tensor, is_first: bool = False) -> Tensor:
        """rows [B, N, hidden_size], states [B, bytes] uint8, which become those after the tokens. Returns the
        same as rows. Blocks."""
        (num_sequences, num_tokens, _), own = rows.shape, self._own
        mixed, gate, beta, decay = self._project(rows)
        shape = _Shape(num_sequences, num_tokens, *self._shape, states.stride(0), *self._offsets)
        channels, num_heads, width = mixed.shape[-1], own.num_v_heads, own.head_v_dim
        scratch = torch.empty(
            num_sequences
            * ((2 * num_tokens + len(self._weight)) * channels + 2 * own.num_k_heads * num_tokens)
        )
        out = torch.empty(num_sequences, num_tokens, num_heads, width, dtype=self._dtype)
        self._run(
            ctypes.byref(shape), mixed.contiguous().data_ptr(), self._weight.data_ptr(), decay.data_ptr(),
            beta.data_ptr(), states.data_ptr(), scratch.data_ptr(), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        normed = own.norm(out.view(-1, width), gate.reshape(-1, width))
        return own.out_proj(normed.view(num_sequences, num_tokens, -1))

    def _separate(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own = self._own
        return (
            own.in_proj_qkv(rows),
            own.in_proj_z(rows),
            *self._gates(own.in_proj_b(rows), own.in_proj_a(rows)),
        )

    def _interleaved(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own = self._own
        query, key, value, gate, beta, decay = own.fix_query_key_value_ordering(
            own.in_proj_qkvz(rows), own.in_proj_ba(rows)
        )
        mixed = torch.cat([each.flatten(2) for each in (query, key, value)], -1)
        return mixed, gate, *self._gates(beta, decay)

    def _gates(self, beta: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N, heads] float32 each: how much of new values is written, and what of the old ones is kept."""
        own = self._own
        log = self._rates * F.softplus(decay.float() + own.dt_bias)
        return beta.sigmoid().float().contiguous(), log.exp().contiguous()


def gated_delta(forward: StatefulForward, kernels: Kernels) -> GatedDelta | None:
    """None: it is no such mixer, or of a form that the kernel does not know."""
    mixer, states = forward.mixer, forward.states
    if not all(hasattr(mixer, name) for name in _PARTS):
        return None
    own, lanes = cast(Any, mixer), kernels.cdll.gated_delta_lanes()
    weight: Tensor = own.conv1d.weight
    channels = 2 * own.num_k_heads * own.head_k_dim + own.num_v_heads * own.head_v_dim
    kinds = [(tensor.is_recurrent, tensor.dtype, tensor.shape) for tensor in states.tensors]
    is_known = (
        weight.dtype in _SUFFIX
        and own.conv1d.bias is None
        and getattr(own, "activation", None) == "silu"
        and (hasattr(own, "in_proj_qkv") or hasattr(own, "in_proj_qkvz"))
        and all(width % lanes == 0 for width in (own.head_k_dim, own.head_v_dim))
        and kinds == [
            (False, weight.dtype, (channels, weight.shape[-1])),
            (True, torch.float32, (own.num_v_heads, own.head_k_dim, own.head_v_dim)),
        ]
    )  # fmt: skip
    return GatedDelta(forward, kernels) if is_known else None
