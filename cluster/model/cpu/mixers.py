"""Mixers that keep states by native kernels: what lies between their products, over states where they lie.
The gated delta rule of Qwen3-Next and Qwen3.5 (`gated_delta.cpp`), the short convolution of LFM2
(`short_convolution.cpp`), and Mamba 2 (`state_space.cpp`).

A mixer is recognised by the names and sizes of its parts, and compared with what transformers computes before
the kernel is used. Native layers take a `NativeMixer`; where the products are modules, `MixerOfModules`
serves, and `StateSpaceOfModules` for Mamba 2, which native layers do not have. Runs on its caller's thread
and on as many OpenMP threads as torch would use.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cluster.model.cpu.library import Kernels, fields
from cluster.model.cpu.modules import pointer
from cluster.model.cpu.weight_source import Matrix, WeightSource
from cluster.model.layers.mixer_parts import (
    MixerInputs,
    is_short_convolution,
    is_state_space,
    mixer_inputs,
)
from cluster.model.layers.parts import epsilon_of
from cluster.model.state_step import StatefulForward, StepState
from cluster.model.states import PackedSpans

_DTYPES = (torch.float32, torch.bfloat16)


class _MixerStep(ctypes.Structure):
    """Mirrors `MixerStep` of kernels.h."""

    _fields_ = (
        *fields(c_void_p, "starts sequences source target memory"), *fields(c_int64, "num_sequences pages")
    )  # fmt: skip


class _Mixer(ctypes.Structure):
    """Mirrors `Mixer` of kernels.h."""

    _fields_ = (("run", c_void_p), *fields(c_int64, "items first_page page_bytes is_bf16"))


class _MixerConvolution(ctypes.Structure):
    """Mirrors `Convolution` of kernels.h."""

    _fields_ = (*fields(c_void_p, "weight bias"), *fields(c_int64, "taps channels row_width state_offset"))


class _DeltaMixer(ctypes.Structure):
    """Mirrors `DeltaMixer` of kernels.h."""

    _fields_ = (
        ("mixer", _Mixer),
        ("convolution", _MixerConvolution),
        *fields(c_void_p, "rates shifts norm"),
        *fields(c_int64, "key_heads value_heads key_width value_width"),
        *fields(c_int64, "query key key_step value gate value_step beta decay gate_step state_offset"),
        ("epsilon", c_double),
    )


class _StateSpaceMixer(ctypes.Structure):
    """Mirrors `StateSpaceMixer` of kernels.h."""

    _fields_ = (
        ("mixer", _Mixer),
        ("convolution", _MixerConvolution),
        *fields(c_void_p, "rates shifts skips"),
        *fields(c_int64, "heads groups head_width state_width first steps state_offset"),
        *fields(c_double, "low high"),
    )


class _ConvolutionMixer(ctypes.Structure):
    """Mirrors `ConvolutionMixer` of kernels.h."""

    _fields_ = (("mixer", _Mixer), *fields(c_void_p, "weight bias"), *fields(c_int64, "channels taps"))


class SpanPages:
    """Where the sequences of a step begin, and the pages of their states. Keeps what the kernels read."""

    def __init__(self, step: StepState | None, num_tokens: int):
        """step None: the tokens are those of one new sequence, of which no state is kept."""
        if step is None:
            self._kept: tuple[Any, ...] = (np.array([0, num_tokens], np.int32), np.array([0, 1]))
            addresses, num_pages = (None, None, None), 0
        else:
            spans = PackedSpans.of(step.sequences, step.layout.num_blocks)
            numbers = np.array([0, *(len(own) for own in step.sequences)]).cumsum()
            places = (torch.from_numpy(spans.source), torch.from_numpy(spans.target))
            source, target = (step.layout.page_ids(blocks, step.kv) for blocks in places)
            self._kept = (spans.starts.astype(np.int32), numbers, source, target)
            memory = step.kv.buffer.data_ptr()
            addresses, num_pages = (source.data_ptr(), target.data_ptr(), memory), source.shape[1]
        starts, numbers = self._kept[:2]
        self._step = _MixerStep(
            starts.ctypes.data, numbers.ctypes.data, *addresses, len(numbers) - 1, num_pages
        )
        self.address: int = ctypes.addressof(self._step)  # valid while this object lives

    @classmethod
    def of(cls, step: StepState | None, num_tokens: int) -> SpanPages:
        """Made once a step."""
        if step is None:
            return cls(None, num_tokens)
        if not isinstance(step.native_spans, cls):
            step.native_spans = cls(step, num_tokens)
        return step.native_spans


@dataclass(frozen=True)
class NativeMixer:
    """A mixer without its products."""

    linears: tuple[nn.Linear, ...]  # of the input: one after the other, they give a row
    out: nn.Linear
    address: int  # of a `Mixer` of kernels.h; valid while this object lives
    out_width: int  # of a row that goes into the last product
    kept: tuple[Any, ...]


def native_mixer(
    forward: StatefulForward, kernels: Kernels, source: WeightSource | None = None
) -> NativeMixer | None:
    """None: it is no mixer that the kernels know. source: of packed weights, among which the convolution's
    are then."""
    if (found := mixer_inputs(forward.mixer)) is not None:
        return _delta(forward, found, kernels, source)
    return _convolution(forward, kernels, source) if is_short_convolution(forward) else None


def _delta(
    forward: StatefulForward, found: MixerInputs, kernels: Kernels, source: WeightSource | None
) -> NativeMixer | None:
    own, norm = cast(Any, forward.mixer), cast(Any, found.norm)
    weight: Tensor = own.conv1d.weight
    channels, _, taps = weight.shape
    kinds = [(tensor.is_recurrent, tensor.dtype, tensor.shape) for tensor in forward.states.tensors]
    norm_weight, lanes = getattr(norm, "weight", None), kernels.cdll.mixer_lanes()
    is_known = (
        weight.dtype in _DTYPES
        and own.conv1d.bias is None
        and getattr(own, "activation", None) == "silu"
        and isinstance(norm_weight, nn.Parameter)
        and (norm_weight.dtype, norm_weight.shape) == (weight.dtype, (own.head_v_dim,))
        and epsilon_of(norm) is not None
        and all(width % lanes == 0 for width in (own.head_k_dim, own.head_v_dim))
        and all(linear.bias is None for linear in found.linears)
        and channels == 2 * own.num_k_heads * own.head_k_dim + own.num_v_heads * own.head_v_dim
        and kinds == [
            (False, weight.dtype, (channels, taps)),
            (True, torch.float32, (own.num_v_heads, own.head_k_dim, own.head_v_dim)),
        ]
    )  # fmt: skip
    if not is_known:
        return None
    convolution = _taps_first(weight, source)
    rates = -own.A_log.detach().float().exp()
    shifts = own.dt_bias.detach().float().contiguous()
    norm_weight = norm_weight.detach().contiguous()
    (conv_offset, state_offset), columns = (place.start for _, place in forward.states.places), found.columns
    row_width = sum(linear.out_features for linear in found.linears)
    mixer = _DeltaMixer(
        _head(forward, kernels.cdll.run_gated_delta, own.num_k_heads, weight.dtype),
        _MixerConvolution(convolution.data_ptr(), None, taps, channels, row_width, conv_offset),
        rates.data_ptr(), shifts.data_ptr(), norm_weight.data_ptr(),
        own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim,
        columns.query, columns.key, columns.key_step, columns.value, columns.gate, columns.value_step,
        columns.beta, columns.decay, columns.gate_step, state_offset, epsilon_of(norm),
    )  # fmt: skip
    out, width = cast(nn.Linear, found.out), own.num_v_heads * own.head_v_dim
    kept = (convolution, rates, shifts, norm_weight, mixer)
    return NativeMixer(found.linears, out, ctypes.addressof(mixer), width, kept)


def _convolution(
    forward: StatefulForward, kernels: Kernels, source: WeightSource | None
) -> NativeMixer | None:
    own = cast(Any, forward.mixer)
    weight: Tensor = own.conv.weight
    channels, _, taps = weight.shape
    is_known = (
        weight.dtype in _DTYPES
        and channels % kernels.cdll.mixer_lanes() == 0
        and taps <= kernels.cdll.convolution_taps()
        and own.in_proj.bias is None
    )
    if not is_known:
        return None
    convolution = _taps_first(weight, source)
    bias = None if own.conv.bias is None else own.conv.bias.detach().float().contiguous()
    items = -(-channels // kernels.cdll.convolution_channels())
    mixer = _ConvolutionMixer(
        _head(forward, kernels.cdll.run_short_convolution, items, weight.dtype),
        convolution.data_ptr(), pointer(bias), channels, taps,
    )  # fmt: skip
    kept = (convolution, bias, mixer)
    return NativeMixer((own.in_proj,), own.out_proj, ctypes.addressof(mixer), channels, kept)


def _head(forward: StatefulForward, run: ctypes._FuncPointer, items: int, dtype: torch.dtype) -> _Mixer:
    layout, address = forward.layout, ctypes.cast(run, c_void_p).value
    is_bf16 = dtype is torch.bfloat16
    return _Mixer(address, items, layout.first_page(forward.number), layout.page_bytes, is_bf16)


def _taps_first(weight: Tensor, source: WeightSource | None) -> Tensor:
    """[taps, channels] float32. The weight is on the meta device where the source has it in a file."""

    def rows() -> Tensor:
        return weight.detach()[:, 0].float().T.contiguous()

    def fill(matrix: Matrix) -> None:
        matrix.packed.copy_(rows().view(torch.uint8).flatten())

    return rows() if source is None else source.matrix(4 * weight.numel(), 0, fill).packed


class MixerOfModules:
    """Implements `MixerKernel`: the products are the mixer's own modules."""

    def __init__(self, forward: StatefulForward, mixer: NativeMixer, kernels: Kernels):
        self._own, self._mixer = cast(Any, forward.mixer), mixer
        # modules take the place of the linears later
        names = {module: name for name, module in forward.mixer.named_children()}
        self._inputs, self._out = [names[linear] for linear in mixer.linears], names[mixer.out]
        self._run = kernels.cdll.run_mixer

    def __call__(self, rows: Tensor, step: StepState) -> Tensor:
        projected = torch.cat([getattr(self._own, name)(rows[None])[0] for name in self._inputs], -1)
        out = torch.empty(len(rows), self._mixer.out_width, dtype=rows.dtype)
        spans = SpanPages.of(step, len(rows))
        self._run(
            self._mixer.address, spans.address, projected.data_ptr(), out.data_ptr(), torch.get_num_threads()
        )
        return getattr(self._own, self._out)(out[None])[0]


class StateSpaceOfModules:
    """Implements `MixerKernel`: Mamba 2, with products and gated norm of the mixer's own modules."""

    def __init__(self, forward: StatefulForward, kernels: Kernels):
        own = self._own = cast(Any, forward.mixer)
        weight: Tensor = own.conv1d.weight
        channels, _, taps = weight.shape
        self._width, self._scale = own.num_heads * own.head_dim, getattr(own, "ssm_in_multiplier", 1.0)
        self._scales: Tensor | None = getattr(own, "mup_vector", None)
        bias = None if own.conv1d.bias is None else own.conv1d.bias.detach().float().contiguous()
        convolution, rates = _taps_first(weight, None), -own.A_log.detach().float().exp()
        skips, shifts = own.D.detach().float(), own.dt_bias.detach().to(weight.dtype).float()
        limits = torch.tensor(getattr(own, "time_step_limit", (0.0, float("inf")))).to(weight.dtype).tolist()
        conv_offset, state_offset = (place.start for _, place in forward.states.places)
        row_width = self._width + channels + own.num_heads
        mixer = _StateSpaceMixer(
            _head(forward, kernels.cdll.run_state_space, own.num_heads, weight.dtype),
            _MixerConvolution(convolution.data_ptr(), pointer(bias), taps, channels, row_width, conv_offset),
            rates.data_ptr(), shifts.data_ptr(), skips.data_ptr(),
            own.num_heads, own.n_groups, own.head_dim, own.ssm_state_size,
            self._width, self._width + channels, state_offset, *limits,
        )  # fmt: skip
        self._kept = (convolution, bias, rates, skips, shifts, mixer)
        self._address, self._run = ctypes.addressof(mixer), kernels.cdll.run_mixer

    def __call__(self, rows: Tensor, step: StepState) -> Tensor:
        own = self._own
        projected = own.in_proj((rows * self._scale if self._scale != 1 else rows)[None])
        if self._scales is not None:
            projected = projected * self._scales
        projected = projected[0].contiguous()
        out = torch.empty(len(rows), self._width)  # not rounded before the norm, as in transformers
        spans = SpanPages.of(step, len(rows))
        self._run(self._address, spans.address, projected.data_ptr(), out.data_ptr(), torch.get_num_threads())
        gate = projected[:, : self._width]
        is_bare = isinstance(own.norm, nn.Identity)
        normed = out * F.silu(gate) if is_bare else own.norm(out[None], gate[None])[0]
        return own.out_proj(normed.to(rows.dtype)[None])[0]


def _is_state_space(forward: StatefulForward, kernels: Kernels) -> bool:
    own = cast(Any, forward.mixer)
    if not is_state_space(forward):
        return False
    weight, lanes = own.conv1d.weight, kernels.cdll.mixer_lanes()
    return weight.dtype in _DTYPES and own.head_dim % lanes == own.ssm_state_size % lanes == 0


def mixer_of_modules(
    forward: StatefulForward, kernels: Kernels
) -> MixerOfModules | StateSpaceOfModules | None:
    """None: it is no mixer that the kernels know."""
    if _is_state_space(forward, kernels):
        return StateSpaceOfModules(forward, kernels)
    mixer = native_mixer(forward, kernels)
    return None if mixer is None else MixerOfModules(forward, mixer, kernels)
