"""Mixers with Kimi's delta attention, by `delta_kernels` and `channel_kernels` over the pages where their
states lie: Kimi Linear's and Bailing's. Runs on the engine's thread; enqueues on the current stream and reads
nothing on the host. No GPU has run it."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from cluster.model.cuda.delta import MAX_WIDTH, DeltaRows, PagedDeltaRule, is_exact
from cluster.model.cuda.early import early
from cluster.model.cuda.mixer_calls import Convolution, Pages, kinds_of
from cluster.model.cuda.mixer_chunks import CHUNK, MixerChunks
from cluster.model.layers.mixer_parts import KimiInputs, kimi_inputs
from cluster.model.state_step import StatefulForward

_BLOCK = 16  # tokens: rows of a chunk that a program of `channel_systems` computes
_SUM_WARPS, _SYSTEM_WARPS = 8, 8


class PagedKimi(PagedDeltaRule):
    """A decay for each channel of a head."""

    def __init__(self, forward: StatefulForward, inputs: KimiInputs):
        own = cast(Any, forward.mixer)
        forget, heads, widths = own.forget_gate, (own.num_heads,) * 2, (own.head_dim,) * 2
        conv = Convolution.of_neighbours(own.conv1d, 0, forward.layout.page_bytes)
        super().__init__(forward, inputs.linears, conv, own.o_norm, own.o_proj, heads, widths)
        self._rates = -forget.A_log.detach().float().exp().flatten()
        self._shifts = forget.dt_bias.detach().float()
        self._decay, self._gate = inputs.decay, inputs.gate
        *starts, end = accumulate((linear.out_features for linear in inputs.linears), initial=0)
        self._decay_columns, self._gate_columns = slice(starts[4], starts[5]), slice(starts[5], end)
        lowest = float(forget.lower_bound) if getattr(forget, "safe_gate", False) else 0.0
        self._of_channels = {"B0": starts[3], "LOWEST": lowest}
        self._betas = {**self._of_channels, "A0": 0, "GATE_STEP": 1, "BETA": 1.0}
        self._gates = {"Z0": 0, "VALUE_STEP": own.head_dim, "IS_SIGMOID": True}

    def _rows(self, projected: Tensor, mixed: Tensor) -> DeltaRows:
        decays, gates = projected[:, self._decay_columns], projected[:, self._gate_columns]
        decays = decays if self._decay is None else self._decay(decays)
        return DeltaRows(projected, mixed, decays, gates if self._gate is None else self._gate(gates))

    def _systems(
        self, rows: DeltaRows, pages: Pages, chunks: MixerChunks, systems: Tensor, factors: Tensor
    ) -> Tensor:
        from cluster.model.cuda import channel_kernels

        projected, decays, device = rows.projected, cast(Tensor, rows.decays), systems.device
        num_chunks, num_spans = len(chunks.spans), pages.num_spans
        sums = systems.new_empty(num_chunks, self._heads, CHUNK, self._values)
        channel_kernels.channel_sums[(num_chunks, self._heads)](
            projected, rows.mixed, decays, self._rates, self._shifts, pages.starts, chunks.spans,
            chunks.begins, sums, factors, projected.stride(0), decays.stride(0), num_spans, HEADS=self._heads,
            **self._widths, **self._of_channels, num_warps=_SUM_WARPS, **early(device),
        )  # fmt: skip
        channel_kernels.channel_systems[(num_chunks, self._heads, CHUNK // _BLOCK)](
            rows.mixed, sums, factors, pages.starts, chunks.spans, chunks.begins, systems, num_spans,
            HEADS=self._heads, **self._widths, EXACT=is_exact(projected), num_warps=_SYSTEM_WARPS,
            num_stages=1, **early(device),
        )  # fmt: skip
        return sums


def kimi_delta(forward: StatefulForward) -> PagedKimi | None:
    """None: it is no such mixer, or of a form that no kernel knows."""
    inputs = kimi_inputs(forward.mixer)
    if inputs is None:
        return None
    own = cast(Any, forward.mixer)
    weight, heads, width = own.conv1d.weight, own.num_heads, own.head_dim
    is_known = (
        all(hasattr(linear, "out_features") for linear in inputs.linears)
        and own.conv1d.bias is None
        and width <= MAX_WIDTH
        and hasattr(own.o_norm, "variance_epsilon")
        and kinds_of(forward) == [
            (False, weight.dtype, (3 * heads * width, weight.shape[-1])),
            (True, torch.float32, (heads, width, width)),
        ]
    )  # fmt: skip
    return PagedKimi(forward, inputs) if is_known else None
