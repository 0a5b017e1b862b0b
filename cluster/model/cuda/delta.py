"""Mixers with the gated delta rule, by `delta_kernels` over the pages where their states lie. Runs on the
engine's thread; enqueues on the current stream and reads nothing on the host. An H100 gave the right tokens
for tiny models; not timed."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from cluster.model.cuda.early import early
from cluster.model.cuda.mixer_calls import SMALLEST, Convolution, Linears, Pages, convolved
from cluster.model.cuda.mixer_chunks import CHUNK
from cluster.model.cuda.tiles import power_of_two
from cluster.model.layers.mixer_parts import MixerInputs, mixer_inputs
from cluster.model.state_step import StatefulForward, StepState

MAX_WIDTH = 256  # of a head of keys or values, that fits a program's registers
VALUE_TILE = 32  # columns of a state, of a program
NORM_HEADS = 8  # of a program
NUM_FACTORS = 5  # that `delta_kernels` keeps of a token
# Of programs of `delta_kernels`: heads and warps of `chunk_systems`, warps of `solve_systems`, programs side
# by side for sequences, warps and stages of `many_tokens`
_SYSTEM_HEADS, _SYSTEM_WARPS = 2, 4
SOLVE_WARPS, SEQUENCES, CHUNK_WARPS, STAGES = 2, 8, 8, 1


class PagedDelta:
    """Implements `SharesKernel`: Qwen3-Next's, Qwen3.5's and OLMo-Hybrid's."""

    def __init__(self, forward: StatefulForward, inputs: MixerInputs):
        own = cast(Any, forward.mixer)
        self._number, self._layout = forward.number, forward.layout
        self._inputs, self._out = Linears(inputs.linears), Linears([inputs.out])
        self._norm = cast(Any, inputs.norm)
        self._epsilon: float = getattr(self._norm, "variance_epsilon", 1e-6)
        self._rates, self._shifts = -own.A_log.detach().float().exp(), own.dt_bias.detach().float()
        self._heads, self._values = own.num_v_heads, own.head_v_dim
        page_bytes = forward.layout.page_bytes
        offset = next(place.start for tensor, place in forward.states.places if tensor.is_recurrent)
        value_pad = max(SMALLEST, power_of_two(own.head_v_dim))
        self._tile = min(VALUE_TILE, value_pad)
        group = own.num_v_heads // own.num_k_heads
        self._sizes = {
            "KEY_HEADS": own.num_k_heads, "GROUP": group, "K": own.head_k_dim, "V": own.head_v_dim,
        }  # fmt: skip
        self._key_pad = max(SMALLEST, power_of_two(own.head_k_dim))
        self._delta_page, self._offset = page_bytes // 4, offset // 4
        columns = inputs.columns
        self._gates = {
            "B0": columns.beta, "A0": columns.decay, "GATE_STEP": columns.gate_step,
            "BETA": 2.0 if getattr(own, "allow_neg_eigval", False) else 1.0,
        }  # fmt: skip
        where = {
            "Q0": columns.query, "K0": columns.key, "V0": columns.value, "KEY_STEP": columns.key_step,
            "VALUE_STEP": columns.value_step,
        }  # fmt: skip
        weight: Tensor = own.conv1d.weight
        page = page_bytes // weight.dtype.itemsize
        self._conv = Convolution(weight, None, {**self._sizes, **where}, page)
        self._gate_column, self._value_step = columns.gate, columns.value_step

    def __call__(self, rows: Tensor, step: StepState) -> Tensor:
        return self._out(self._answers(rows, step))

    def shares(self, rows: Tensor, step: StepState) -> Tensor:
        return self._out.shares(self._answers(rows, step))

    def _answers(self, rows: Tensor, step: StepState) -> Tensor:
        """[T, heads * V], in front of the last product."""
        projected, pages = self._inputs(rows.contiguous()), Pages.of(step, self._number)
        out = torch.empty(len(rows), self._heads, self._values, dtype=rows.dtype, device=rows.device)
        mixed = convolved(projected, self._conv, pages, step)
        self._few(projected, mixed, pages, step, out)
        if not step.tensors.is_decode:
            self._many(projected, mixed, pages, step, out)
        return self._normed(out, projected).flatten(1)

    def _few(self, projected: Tensor, mixed: Tensor, pages: Pages, step: StepState, out: Tensor) -> None:
        from cluster.model.cuda import delta_kernels

        delta_kernels.few_tokens[self._grid(pages)](
            projected, mixed, None, self._rates, self._shifts, step.kv.buffer.view(torch.float32),
            pages.source, pages.target, pages.starts, pages.firsts, out, projected.stride(0), 0,
            pages.page_stride, pages.first_page, pages.num_spans, **self._sizes, K_PAD=self._key_pad,
            TILE=self._tile, PAGE=self._delta_page, OFFSET=self._offset, **self._gates, LOWEST=0.0,
            IS_DECODE=step.tensors.is_decode, num_warps=4, **early(out.device),
        )  # fmt: skip

    def _many(self, projected: Tensor, mixed: Tensor, pages: Pages, step: StepState, out: Tensor) -> None:
        from cluster.model.cuda import delta_kernels

        chunks = step.chunks
        num_chunks, num_long = len(chunks.spans), len(chunks.sequences)
        if not num_long:
            return
        systems = projected.new_empty(num_chunks, self._heads, 2, CHUNK, CHUNK, dtype=torch.float32)
        factors = projected.new_empty(num_chunks, self._heads, NUM_FACTORS, CHUNK, dtype=torch.float32)
        is_exact = projected.dtype != torch.bfloat16
        delta_kernels.chunk_systems[(num_chunks, -(-self._heads // _SYSTEM_HEADS))](
            projected, mixed, self._rates, self._shifts, pages.starts, chunks.spans, chunks.begins, systems,
            factors, projected.stride(0), pages.num_spans, **self._sizes, K_PAD=self._key_pad, **self._gates,
            EXACT=is_exact, HEADS=_SYSTEM_HEADS, num_warps=_SYSTEM_WARPS, num_stages=1,
            **early(out.device),
        )  # fmt: skip
        delta_kernels.solve_systems[(num_chunks, self._heads)](
            systems, factors, chunks.spans, pages.num_spans, num_warps=SOLVE_WARPS, **early(out.device)
        )
        delta_kernels.many_tokens[(min(num_long, SEQUENCES), *self._grid(pages)[1:])](
            mixed, None, systems, factors, step.kv.buffer.view(torch.float32), pages.source, pages.target,
            pages.starts, pages.firsts, chunks.begins, chunks.sequences, out, pages.page_stride,
            pages.first_page, pages.num_spans, num_long, **self._sizes, K_PAD=self._key_pad, TILE=self._tile,
            PAGE=self._delta_page, OFFSET=self._offset, EXACT=is_exact, num_warps=CHUNK_WARPS,
            num_stages=STAGES, **early(out.device),
        )  # fmt: skip

    def _normed(self, x: Tensor, projected: Tensor) -> Tensor:
        from cluster.model.cuda import delta_kernels

        out, tile = torch.empty_like(x), min(NORM_HEADS, power_of_two(self._heads))
        delta_kernels.gated_norm[(len(x), -(-self._heads // tile))](
            x, projected, self._norm.weight, out, projected.stride(0), self._epsilon,
            GROUP=self._sizes["GROUP"], HEADS=self._heads, TILE=tile, V=self._values,
            PAD=power_of_two(self._values), Z0=self._gate_column, VALUE_STEP=self._value_step,
            IS_SIGMOID=False, num_warps=4, **early(out.device),
        )  # fmt: skip
        return out

    def _grid(self, pages: Pages) -> tuple[int, int, int]:
        return pages.num_spans, self._heads, -(-self._values // self._tile)


def gated_delta(forward: StatefulForward) -> PagedDelta | None:
    """None: it is no such mixer, or of a form that no kernel knows."""
    inputs = mixer_inputs(forward.mixer)
    return None if inputs is None or not _is_known(forward) else PagedDelta(forward, inputs)


def _is_known(forward: StatefulForward) -> bool:
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
