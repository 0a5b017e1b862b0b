"""Mixers that keep states, by Triton kernels over the pages where the states lie (`mixer_kernels`,
`delta_kernels`): the gated delta rule, and short convolutions. One to three launches beside the products
serve all answers of a step, three more all its longer sequences, whatever their number. The sizes that a
launch needs are those of the step's tensors, so every step can be recorded. A mixer is recognised by the
names and sizes of its parts; `replace_mixers` compares it with what transformers computes before it is used.

Runs on the engine's thread; enqueues on the current stream and reads nothing on the host. An H100 gave the
right tokens for tiny models; not timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cluster.model.cuda.delta_chunks import CHUNK
from cluster.model.cuda.early import early
from cluster.model.cuda.layer_calls import product
from cluster.model.cuda.merging import merged
from cluster.model.cuda.tiles import power_of_two
from cluster.model.layers.mixer_parts import MixerInputs, mixer_inputs
from cluster.model.state_step import MixerKernel, StatefulForward, StepState

MAX_WIDTH = 256  # of a head of keys or values, that fits a program's registers
_SMALLEST = 16  # sides of a matrix that units for products take
_VALUE_TILE = 32  # columns of a state, of a program
_CHANNEL_TILE = 256  # of a convolution
# Of a program of a convolution, in steps with prompts. More numbers a thread take seconds to compile.
_CONV_TOKENS, _CONV_WARPS = 8, 8
_NORM_HEADS = 8  # of a program
_NUM_FACTORS = 5  # that `delta_kernels` keeps of a token
# Of programs of `delta_kernels`: heads and warps of `chunk_systems`, warps of `solve_systems`, programs side
# by side for sequences, warps and stages of `many_tokens`
_SYSTEM_HEADS, _SYSTEM_WARPS, _SOLVE_WARPS, _SEQUENCES, _CHUNK_WARPS, _STAGES = 4, 4, 2, 8, 8, 1


@dataclass(frozen=True)
class _Pages:
    """Where the states of the step's sequences lie, as kernels take them, and the spans."""

    source: Tensor
    target: Tensor
    starts: Tensor
    firsts: Tensor
    spans: Tensor
    page_stride: int
    first_page: int
    num_spans: int

    @classmethod
    def of(cls, step: StepState, number: int) -> _Pages:
        """number: of the layer among those with states."""
        tensors, source, target = step.tensors, step.source_pages, step.target_pages
        return cls(
            source, target, tensors.starts, tensors.firsts, tensors.spans, source.stride(0),
            step.layout.first_page(number), len(tensors.firsts),
        )  # fmt: skip


class Linears:
    """Several linears with one input, as one product where their weights are one matrix (`merging`)."""

    def __init__(self, linears: Sequence[nn.Module]):
        self._linears = linears
        plain = [linear for linear in linears if type(linear) is nn.Linear]
        has_bias = {linear.bias is not None for linear in plain}
        self._weight = self._bias = None
        if len(plain) == len(linears) and len(has_bias) == 1:
            self._weight = merged([linear.weight for linear in plain])
            self._bias = merged([linear.bias for linear in plain]) if has_bias == {True} else None
            if has_bias == {True} and self._bias is None:
                self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, N] → [T, sum of outputs], rows contiguous."""
        if self._weight is not None:
            return product(x, self._weight, self._bias, is_whole=True)[0]
        return torch.cat([linear(x) for linear in self._linears], -1)

    def shares(self, x: Tensor) -> Tensor:
        """[T, N] → shares [S, T, sum of outputs], as `product` gives them."""
        return self(x)[None] if self._weight is None else product(x, self._weight, self._bias)


class ShortConvolution:
    """Implements `MixerKernel`: LFM2's."""

    def __init__(self, forward: StatefulForward):
        own = cast(Any, forward.mixer)
        self._number = forward.number
        self._inputs, self._out = Linears([own.in_proj]), Linears([own.out_proj])
        self._conv: nn.Conv1d = own.conv
        weight = self._conv.weight
        self._width, self._taps = weight.shape[0], weight.shape[-1]
        self._page = forward.layout.page_bytes // weight.dtype.itemsize

    def __call__(self, rows: Tensor, step: StepState) -> Tensor:
        from cluster.model.cuda import mixer_kernels

        projected, pages = self._inputs(rows.contiguous()), _Pages.of(step, self._number)
        out = torch.empty(len(rows), self._width, dtype=rows.dtype, device=rows.device)
        tile = min(_CHANNEL_TILE, power_of_two(self._width))
        mixer_kernels.short_convolution[(len(rows), -(-self._width // tile))](
            projected, self._conv.weight, self._conv.bias, step.kv.buffer.view(rows.dtype),
            pages.source, pages.target, pages.starts, pages.firsts, pages.spans, out,
            projected.stride(0), pages.page_stride, pages.first_page,
            WIDTH=self._width, TILE=tile, TAPS=self._taps, PAGE=self._page, num_warps=4,
        )  # fmt: skip
        return self._out(out)


class PagedDelta:
    """Implements `SharesKernel`: Qwen3-Next's, Qwen3.5's and OLMo-Hybrid's."""

    def __init__(self, forward: StatefulForward, inputs: MixerInputs):
        own = cast(Any, forward.mixer)
        self._number, self._layout = forward.number, forward.layout
        self._inputs, self._out = Linears(inputs.linears), Linears([inputs.out])
        self._conv_weight: Tensor = own.conv1d.weight
        self._norm = cast(Any, inputs.norm)
        self._epsilon: float = getattr(self._norm, "variance_epsilon", 1e-6)
        self._rates, self._shifts = -own.A_log.detach().float().exp(), own.dt_bias.detach().float()
        self._heads, self._values = own.num_v_heads, own.head_v_dim
        page_bytes, dtype = forward.layout.page_bytes, self._conv_weight.dtype
        offset = next(place.start for tensor, place in forward.states.places if tensor.is_recurrent)
        value_pad = max(_SMALLEST, power_of_two(own.head_v_dim))
        self._tile = min(_VALUE_TILE, value_pad)
        group = own.num_v_heads // own.num_k_heads
        self._sizes = {
            "KEY_HEADS": own.num_k_heads, "GROUP": group, "K": own.head_k_dim, "V": own.head_v_dim,
        }  # fmt: skip
        self._key_pad = max(_SMALLEST, power_of_two(own.head_k_dim))
        self._taps, self._conv_page = self._conv_weight.shape[-1], page_bytes // dtype.itemsize
        self._delta_page, self._offset = page_bytes // 4, offset // 4
        columns = inputs.columns
        self._gates = {
            "B0": columns.beta, "A0": columns.decay, "GATE_STEP": columns.gate_step,
            "BETA": 2.0 if getattr(own, "allow_neg_eigval", False) else 1.0,
        }  # fmt: skip
        self._columns = {
            "Q0": columns.query, "K0": columns.key, "V0": columns.value, "KEY_STEP": columns.key_step,
            "VALUE_STEP": columns.value_step,
        }  # fmt: skip
        self._gate_column = columns.gate

    def __call__(self, rows: Tensor, step: StepState) -> Tensor:
        return self._out(self._answers(rows, step))

    def shares(self, rows: Tensor, step: StepState) -> Tensor:
        return self._out.shares(self._answers(rows, step))

    def _answers(self, rows: Tensor, step: StepState) -> Tensor:
        """[T, heads * V], in front of the last product."""
        projected, pages = self._inputs(rows.contiguous()), _Pages.of(step, self._number)
        out = torch.empty(len(rows), self._heads, self._values, dtype=rows.dtype, device=rows.device)
        mixed = self._convolved(projected, pages, step)
        self._few(projected, mixed, pages, step, out)
        if not step.tensors.is_decode:
            self._many(projected, mixed, pages, step, out)
        return self._normed(out, projected).flatten(1)

    def _convolved(self, projected: Tensor, pages: _Pages, step: StepState) -> Tensor:
        from cluster.model.cuda import delta_kernels

        num_tokens, width = len(projected), self._conv_weight.shape[0]
        mixed = torch.empty(num_tokens, width, dtype=projected.dtype, device=projected.device)
        tile = min(_CHANNEL_TILE, power_of_two(width))
        tokens, warps = (1, 4) if step.tensors.is_decode else (_CONV_TOKENS, _CONV_WARPS)
        delta_kernels.convolve[(-(-num_tokens // tokens), -(-width // tile))](
            projected, self._conv_weight, step.kv.buffer.view(projected.dtype), pages.source, pages.target,
            pages.starts, pages.firsts, pages.spans, mixed, num_tokens, projected.stride(0),
            pages.page_stride, pages.first_page, **self._sizes, TOKENS=tokens, TILE=tile, TAPS=self._taps,
            PAGE=self._conv_page, **self._columns, num_warps=warps, **early(projected.device),
        )  # fmt: skip
        return mixed

    def _few(self, projected: Tensor, mixed: Tensor, pages: _Pages, step: StepState, out: Tensor) -> None:
        from cluster.model.cuda import delta_kernels

        delta_kernels.few_tokens[self._grid(pages)](
            projected, mixed, self._rates, self._shifts, step.kv.buffer.view(torch.float32), pages.source,
            pages.target, pages.starts, pages.firsts, out, projected.stride(0), pages.page_stride,
            pages.first_page, pages.num_spans, **self._sizes, K_PAD=self._key_pad, TILE=self._tile,
            PAGE=self._delta_page, OFFSET=self._offset, **self._gates, IS_DECODE=step.tensors.is_decode,
            num_warps=4, **early(out.device),
        )  # fmt: skip

    def _many(self, projected: Tensor, mixed: Tensor, pages: _Pages, step: StepState, out: Tensor) -> None:
        from cluster.model.cuda import delta_kernels

        chunks = step.chunks
        num_chunks, num_long = len(chunks.spans), len(chunks.sequences)
        if not num_long:
            return
        systems = projected.new_empty(num_chunks, self._heads, 2, CHUNK, CHUNK, dtype=torch.float32)
        factors = projected.new_empty(num_chunks, self._heads, _NUM_FACTORS, CHUNK, dtype=torch.float32)
        is_exact = projected.dtype != torch.bfloat16
        delta_kernels.chunk_systems[(num_chunks, -(-self._heads // _SYSTEM_HEADS))](
            projected, mixed, self._rates, self._shifts, pages.starts, chunks.spans, chunks.begins, systems,
            factors, projected.stride(0), pages.num_spans, **self._sizes, K_PAD=self._key_pad, **self._gates,
            EXACT=is_exact, HEADS=_SYSTEM_HEADS, num_warps=_SYSTEM_WARPS, num_stages=1,
            **early(out.device),
        )  # fmt: skip
        delta_kernels.solve_systems[(num_chunks, self._heads)](
            systems, factors, chunks.spans, pages.num_spans, num_warps=_SOLVE_WARPS, **early(out.device)
        )
        delta_kernels.many_tokens[(min(num_long, _SEQUENCES), *self._grid(pages)[1:])](
            mixed, systems, factors, step.kv.buffer.view(torch.float32), pages.source, pages.target,
            pages.starts, pages.firsts, chunks.begins, chunks.sequences, out, pages.page_stride,
            pages.first_page, pages.num_spans, num_long, **self._sizes, K_PAD=self._key_pad, TILE=self._tile,
            PAGE=self._delta_page, OFFSET=self._offset, EXACT=is_exact, num_warps=_CHUNK_WARPS,
            num_stages=_STAGES, **early(out.device),
        )  # fmt: skip

    def _normed(self, x: Tensor, projected: Tensor) -> Tensor:
        from cluster.model.cuda import delta_kernels

        out, tile = torch.empty_like(x), min(_NORM_HEADS, power_of_two(self._heads))
        delta_kernels.gated_norm[(len(x), -(-self._heads // tile))](
            x, projected, self._norm.weight, out, projected.stride(0), self._epsilon,
            GROUP=self._sizes["GROUP"], HEADS=self._heads, TILE=tile, V=self._values,
            PAD=power_of_two(self._values), Z0=self._gate_column, VALUE_STEP=self._columns["VALUE_STEP"],
            num_warps=4, **early(out.device),
        )  # fmt: skip
        return out

    def _grid(self, pages: _Pages) -> tuple[int, int, int]:
        return pages.num_spans, self._heads, -(-self._values // self._tile)


def kernel_of(forward: StatefulForward) -> MixerKernel | None:
    """None: it is no such mixer, or of a form that no kernel knows."""
    if forward.layout.page_bytes % 4:
        return None
    inputs = mixer_inputs(forward.mixer)
    if inputs is not None:
        return PagedDelta(forward, inputs) if _is_gated_delta(forward) else None
    return ShortConvolution(forward) if _is_short_convolution(forward) else None


def _is_gated_delta(forward: StatefulForward) -> bool:
    own = cast(Any, forward.mixer)
    weight: Tensor = own.conv1d.weight
    channels = 2 * own.num_k_heads * own.head_k_dim + own.num_v_heads * own.head_v_dim
    kinds = [(tensor.is_recurrent, tensor.dtype, tensor.shape) for tensor in forward.states.tensors]
    return (
        own.conv1d.bias is None
        and max(own.head_k_dim, own.head_v_dim) <= MAX_WIDTH
        and kinds == [
            (False, weight.dtype, (channels, weight.shape[-1])),
            (True, torch.float32, (own.num_v_heads, own.head_k_dim, own.head_v_dim)),
        ]
    )  # fmt: skip


def _is_short_convolution(forward: StatefulForward) -> bool:
    own = cast(Any, forward.mixer)
    if not all(isinstance(getattr(own, name, None), nn.Module) for name in ("conv", "in_proj", "out_proj")):
        return False
    weight: Tensor = own.conv.weight
    kinds = [(tensor.is_recurrent, tensor.dtype, tensor.shape) for tensor in forward.states.tensors]
    return (
        kinds == [(False, weight.dtype, (weight.shape[0], weight.shape[-1]))]
        and getattr(own.in_proj, "out_features", 0) == 3 * weight.shape[0]
    )
