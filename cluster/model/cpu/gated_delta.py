"""The gated delta rule of Qwen3-Next and Qwen3.5 by native kernels: what lies between a mixer's products, over
states where they lie (`gated_delta.cpp`).

A mixer is recognised by the names and sizes of its parts, and compared with what transformers computes before
the kernel is used. `GatedDelta` serves where the products are modules; native layers take `DeltaMixer` alone.
Runs on its caller's thread and on as many OpenMP threads as torch would use.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from cluster.model.cpu.library import Kernels
from cluster.model.cpu.modules import pointer
from cluster.model.cpu.weight_source import Matrix, WeightSource
from cluster.model.layers.mixer_parts import MixerInputs, mixer_inputs
from cluster.model.layers.parts import epsilon_of
from cluster.model.state_step import StatefulForward, StepState
from cluster.model.states import PackedSpans

_DTYPES = (torch.float32, torch.bfloat16)


class _MixerStep(ctypes.Structure):
    """Mirrors `MixerStep` of kernels.h."""

    _fields_ = (
        ("starts", c_void_p), ("sequences", c_void_p), ("source", c_void_p), ("target", c_void_p),
        ("memory", c_void_p), ("num_sequences", c_int64), ("pages", c_int64),
    )  # fmt: skip


class _NativeMixer(ctypes.Structure):
    """Mirrors `DeltaMixer` of kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "rates", "shifts", "norm")),
        *(
            (name, c_int64)
            for name in (
                "key_heads", "value_heads", "key_width", "value_width", "taps", "is_bf16",
                "row_width", "query", "key", "key_step", "value", "gate", "value_step", "beta", "decay",
                "gate_step", "first_page", "page_bytes", "conv_offset", "delta_offset",
            )
        ),
        ("epsilon", c_double),
    )  # fmt: skip


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
class DeltaMixer:
    """A mixer without its products. It was recognised (`delta_mixer`)."""

    inputs: MixerInputs
    address: int  # of a `DeltaMixer` of kernels.h; valid while this object lives
    out_width: int  # of a row that goes into the last product
    kept: tuple[Any, ...]


def delta_mixer(
    forward: StatefulForward, kernels: Kernels, source: WeightSource | None = None
) -> DeltaMixer | None:
    """None: it is no such mixer, or of a form that the kernel does not know. source: of packed weights, among
    which the convolution's are then."""
    found = mixer_inputs(forward.mixer)
    if found is None or not _is_known(forward, found, kernels.cdll.gated_delta_lanes()):
        return None
    own = cast(Any, forward.mixer)
    weight: Tensor = own.conv1d.weight
    channels, _, taps = weight.shape

    def fill(matrix: Matrix) -> None:
        matrix.packed.copy_(_taps_first(weight).view(torch.uint8).flatten())

    num_bytes = 4 * taps * channels
    packed = _taps_first(weight) if source is None else source.matrix(num_bytes, 0, fill).packed
    rates = -own.A_log.detach().float().exp()
    shifts = own.dt_bias.detach().float().contiguous()
    norm = cast(Any, found.norm)
    norm_weight = norm.weight.detach().contiguous()
    places = {tensor.is_recurrent: place.start for tensor, place in forward.states.places}
    layout, columns = forward.layout, found.columns
    mixer = _NativeMixer(
        packed.data_ptr(), rates.data_ptr(), shifts.data_ptr(), pointer(norm_weight),
        own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim, taps,
        weight.dtype == torch.bfloat16, sum(linear.out_features for linear in found.linears),
        columns.query, columns.key, columns.key_step, columns.value, columns.gate, columns.value_step,
        columns.beta, columns.decay, columns.gate_step,
        layout.first_page(forward.number), layout.page_bytes, places[False], places[True],
        epsilon_of(norm),
    )  # fmt: skip
    kept = (packed, rates, shifts, norm_weight, mixer)
    return DeltaMixer(found, ctypes.addressof(mixer), own.num_v_heads * own.head_v_dim, kept)


def _taps_first(weight: Tensor) -> Tensor:
    """[taps, channels] float32"""
    return weight.detach()[:, 0].float().T.contiguous()


def _is_known(forward: StatefulForward, found: MixerInputs, multiple: int) -> bool:
    own = cast(Any, forward.mixer)
    weight: Tensor = own.conv1d.weight
    channels = 2 * own.num_k_heads * own.head_k_dim + own.num_v_heads * own.head_v_dim
    kinds = [(tensor.is_recurrent, tensor.dtype, tensor.shape) for tensor in forward.states.tensors]
    norm_weight = getattr(found.norm, "weight", None)
    return (
        weight.dtype in _DTYPES
        and own.conv1d.bias is None
        and getattr(own, "activation", None) == "silu"
        and isinstance(norm_weight, nn.Parameter)
        and (norm_weight.dtype, norm_weight.shape) == (weight.dtype, (own.head_v_dim,))
        and epsilon_of(found.norm) is not None
        and all(width % multiple == 0 for width in (own.head_k_dim, own.head_v_dim))
        and all(linear.bias is None for linear in found.linears)
        and kinds == [
            (False, weight.dtype, (channels, weight.shape[-1])),
            (True, torch.float32, (own.num_v_heads, own.head_k_dim, own.head_v_dim)),
        ]
    )  # fmt: skip


class GatedDelta:
    """Implements `MixerKernel`."""

    def __init__(self, forward: StatefulForward, mixer: DeltaMixer, kernels: Kernels):
        self._own, self._mixer = cast(Any, forward.mixer), mixer
        # modules take the place of the linears later
        names = {module: name for name, module in forward.mixer.named_children()}
        self._inputs = [names[linear] for linear in mixer.inputs.linears]
        self._out = names[mixer.inputs.out]
        self._run = kernels.cdll.gated_delta
        self._run.argtypes, self._run.restype = (*[c_void_p] * 4, ctypes.c_int), None

    def __call__(self, rows: Tensor, step: StepState) -> Tensor:
        projected = torch.cat([getattr(self._own, name)(rows[None])[0] for name in self._inputs], -1)
        out = torch.empty(len(rows), self._mixer.out_width, dtype=rows.dtype)
        spans = SpanPages.of(step, len(rows))
        self._run(
            self._mixer.address, spans.address, projected.data_ptr(), out.data_ptr(), torch.get_num_threads()
        )
        return getattr(self._own, self._out)(out[None])[0]


def gated_delta(forward: StatefulForward, kernels: Kernels) -> GatedDelta | None:
    """None: it is no such mixer, or of a form that the kernel does not know."""
    mixer = delta_mixer(forward, kernels)
    return None if mixer is None else GatedDelta(forward, mixer, kernels)
