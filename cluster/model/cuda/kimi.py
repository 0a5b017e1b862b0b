"""Mixers with Kimi's delta attention, by `delta_kernels` and `channel_kernels` over the pages where their
states lie: Kimi Linear's and Bailing's. Runs on the engine's thread; enqueues on the current stream and reads
nothing on the host. No GPU has run it."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from cluster.model.cuda import delta
from cluster.model.cuda.early import early
from cluster.model.cuda.mixer_calls import SMALLEST, Convolution, Linears, Pages, convolved
from cluster.model.cuda.mixer_chunks import CHUNK
from cluster.model.cuda.tiles import power_of_two
from cluster.model.layers.mixer_parts import KimiInputs, kimi_inputs
from cluster.model.state_step import StatefulForward, StepState

_BLOCK = 16  # tokens: rows of a chunk that a program of `channel_systems` computes
_SUM_WARPS, _SYSTEM_WARPS = 8, 8


class PagedKimi:
    """Implements `SharesKernel`."""

    def __init__(self, forward: StatefulForward, inputs: KimiInputs):
        own = cast(Any, forward.mixer)
        forget, page_bytes = own.forget_gate, forward.layout.page_bytes
        self._number, self._heads, self._width = forward.number, own.num_heads, own.head_dim
        self._inputs, self._out = Linears(inputs.linears), Linears([own.o_proj])
        self._decay, self._gate = inputs.decay, inputs.gate
        sizes = [linear.out_features for linear in inputs.linears]
        *starts, end = accumulate(sizes, initial=0)
        self._beta_column = starts[3]
        self._decay_columns, self._gate_columns = slice(starts[4], starts[5]), slice(starts[5], end)
        self._conv = Convolution.of_neighbours(own.conv1d, 0, page_bytes)
        self._rates = -forget.A_log.detach().float().exp().flatten()
        self._shifts = forget.dt_bias.detach().float()
        self._lowest = float(forget.lower_bound) if getattr(forget, "safe_gate", False) else 0.0
        self._norm = own.o_norm
        offset = next(place.start for tensor, place in forward.states.places if tensor.is_recurrent)
        pad = max(SMALLEST, power_of_two(own.head_dim))
        self._tile = min(delta.VALUE_TILE, pad)
        self._sizes = {"K": own.head_dim, "K_PAD": pad, "V": own.head_dim}
        self._state = {
            "KEY_HEADS": own.num_heads, "GROUP": 1, **self._sizes, "TILE": self._tile,
            "PAGE": page_bytes // 4, "OFFSET": offset // 4,
        }  # fmt: skip

    def __call__(self, rows: Tensor, step: StepState) -> Tensor:
        return self._out(self._answers(rows, step))

    def shares(self, rows: Tensor, step: StepState) -> Tensor:
        return self._out.shares(self._answers(rows, step))

    def _answers(self, rows: Tensor, step: StepState) -> Tensor:
        """[T, heads * V], in front of the last product."""
        projected, pages = self._inputs(rows.contiguous()), Pages.of(step, self._number)
        decays, gates = projected[:, self._decay_columns], projected[:, self._gate_columns]
        decays = decays if self._decay is None else self._decay(decays)
        gates = gates if self._gate is None else self._gate(gates)
        out = torch.empty(len(rows), self._heads, self._width, dtype=rows.dtype, device=rows.device)
        mixed = convolved(projected, self._conv, pages, step)
        self._few(projected, mixed, decays, pages, step, out)
        if not step.tensors.is_decode:
            self._many(projected, mixed, decays, pages, step, out)
        return self._normed(out, gates).flatten(1)

    def _few(
        self, projected: Tensor, mixed: Tensor, decays: Tensor, pages: Pages, step: StepState, out: Tensor
    ) -> None:
        from cluster.model.cuda import delta_kernels

        delta_kernels.few_tokens[self._grid(pages.num_spans)](
            projected, mixed, decays, self._rates, self._shifts, step.kv.buffer.view(torch.float32),
            pages.source, pages.target, pages.starts, pages.firsts, out, projected.stride(0),
            decays.stride(0), pages.page_stride, pages.first_page, pages.num_spans, **self._state,
            B0=self._beta_column, A0=0, GATE_STEP=1, BETA=1.0, LOWEST=self._lowest,
            IS_DECODE=step.tensors.is_decode, num_warps=4, **early(out.device),
        )  # fmt: skip

    def _many(
        self, projected: Tensor, mixed: Tensor, decays: Tensor, pages: Pages, step: StepState, out: Tensor
    ) -> None:
        from cluster.model.cuda import channel_kernels, delta_kernels

        chunks, device = step.chunks, out.device
        num_chunks, num_long, num_spans = len(chunks.spans), len(chunks.sequences), pages.num_spans
        if not num_long:
            return

        def scratch(*shape: int) -> Tensor:
            return torch.empty(num_chunks, self._heads, *shape, dtype=torch.float32, device=device)

        sums, factors = scratch(CHUNK, self._width), scratch(delta.NUM_FACTORS, CHUNK)
        systems, is_exact = scratch(2, CHUNK, CHUNK), projected.dtype != torch.bfloat16
        channel_kernels.channel_sums[(num_chunks, self._heads)](
            projected, mixed, decays, self._rates, self._shifts, pages.starts, chunks.spans, chunks.begins,
            sums, factors, projected.stride(0), decays.stride(0), num_spans, HEADS=self._heads, **self._sizes,
            B0=self._beta_column, LOWEST=self._lowest, num_warps=_SUM_WARPS, **early(device),
        )  # fmt: skip
        channel_kernels.channel_systems[(num_chunks, self._heads, CHUNK // _BLOCK)](
            mixed, sums, factors, pages.starts, chunks.spans, chunks.begins, systems, num_spans,
            HEADS=self._heads, **self._sizes, EXACT=is_exact, num_warps=_SYSTEM_WARPS, num_stages=1,
            **early(device),
        )  # fmt: skip
        delta_kernels.solve_systems[(num_chunks, self._heads)](
            systems, factors, chunks.spans, num_spans, num_warps=delta.SOLVE_WARPS, **early(device)
        )
        delta_kernels.many_tokens[self._grid(min(num_long, delta.SEQUENCES))](
            mixed, sums, systems, factors, step.kv.buffer.view(torch.float32), pages.source, pages.target,
            pages.starts, pages.firsts, chunks.begins, chunks.sequences, out, pages.page_stride,
            pages.first_page, num_spans, num_long, **self._state, EXACT=is_exact,
            num_warps=delta.CHUNK_WARPS, num_stages=delta.STAGES, **early(device),
        )  # fmt: skip

    def _normed(self, x: Tensor, gates: Tensor) -> Tensor:
        from cluster.model.cuda import delta_kernels

        out, tile = torch.empty_like(x), min(delta.NORM_HEADS, power_of_two(self._heads))
        delta_kernels.gated_norm[(len(x), -(-self._heads // tile))](
            x, gates, self._norm.weight, out, gates.stride(0), self._norm.variance_epsilon, GROUP=1,
            HEADS=self._heads, TILE=tile, V=self._width, PAD=power_of_two(self._width), Z0=0,
            VALUE_STEP=self._width, IS_SIGMOID=True, num_warps=4, **early(out.device),
        )  # fmt: skip
        return out

    def _grid(self, sequences: int) -> tuple[int, int, int]:
        return sequences, self._heads, -(-self._width // self._tile)


def kimi_delta(forward: StatefulForward) -> PagedKimi | None:
    """None: it is no such mixer, or of a form that no kernel knows."""
    inputs = kimi_inputs(forward.mixer)
    if inputs is None:
        return None
    own = cast(Any, forward.mixer)
    weight, heads, width = own.conv1d.weight, own.num_heads, own.head_dim
    kinds = [(tensor.is_recurrent, tensor.dtype, tensor.shape) for tensor in forward.states.tensors]
    is_known = (
        all(hasattr(linear, "out_features") for linear in inputs.linears)
        and own.conv1d.bias is None
        and width <= delta.MAX_WIDTH
        and hasattr(own.o_norm, "variance_epsilon")
        and kinds == [
            (False, weight.dtype, (3 * heads * width, weight.shape[-1])),
            (True, torch.float32, (heads, width, width)),
        ]
    )  # fmt: skip
    return PagedKimi(forward, inputs) if is_known else None
