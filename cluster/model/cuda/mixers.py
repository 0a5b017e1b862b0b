"""Mixers that keep states, by Triton kernels over the pages where the states lie: the gated delta rule
(`delta`), Kimi's delta attention (`kimi`), Mamba 2 (`mamba`), and short convolutions. One to three launches
beside the products serve all answers of a step, two to four more all its longer sequences, whatever their
number. The sizes that a launch
needs are those of the step's tensors, so every step can be recorded. A mixer is recognised by the names and
sizes of its parts; `replace_mixers` compares it with what transformers computes before it is used.

Runs on the engine's thread; enqueues on the current stream and reads nothing on the host. An H100 gave the
right tokens for tiny models with the gated delta rule and short convolutions; not timed. No GPU has run
Mamba 2 and Kimi's delta attention.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from cluster.model.cuda.delta import gated_delta
from cluster.model.cuda.kimi import kimi_delta
from cluster.model.cuda.mamba import state_space
from cluster.model.cuda.mixer_calls import CHANNEL_TILE, Linears, Pages
from cluster.model.cuda.tiles import power_of_two
from cluster.model.layers.mixer_parts import is_short_convolution
from cluster.model.state_step import MixerKernel, StatefulForward, StepState


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

        projected, pages = self._inputs(rows.contiguous()), Pages.of(step, self._number)
        out = torch.empty(len(rows), self._width, dtype=rows.dtype, device=rows.device)
        tile = min(CHANNEL_TILE, power_of_two(self._width))
        mixer_kernels.short_convolution[(len(rows), -(-self._width // tile))](
            projected, self._conv.weight, self._conv.bias, step.kv.buffer.view(rows.dtype),
            pages.source, pages.target, pages.starts, pages.firsts, pages.spans, out,
            projected.stride(0), pages.page_stride, pages.first_page,
            WIDTH=self._width, TILE=tile, TAPS=self._taps, PAGE=self._page, num_warps=4,
        )  # fmt: skip
        return self._out(out)


def kernel_of(forward: StatefulForward) -> MixerKernel | None:
    """None: it is no such mixer, or of a form that no kernel knows."""
    if forward.layout.page_bytes % 4:
        return None
    if (found := gated_delta(forward) or kimi_delta(forward) or state_space(forward)) is not None:
        return found
    return ShortConvolution(forward) if is_short_convolution(forward) else None
