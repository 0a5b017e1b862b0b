"""Which chunks of a step's tokens the kernels of mixers compute by products (`delta_kernels`,
`mamba_kernels`): those of sequences of LONG tokens and more. Made once a step, on the device, so that a
recorded step finds those of its own lengths. Enqueues; nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.model.states import SpanTensors

LONG, CHUNK = 16, 64  # tokens; those of `mixer_kernels`


@dataclass(frozen=True)
class MixerChunks:
    """int64. A place that no chunk or sequence takes holds S, the number of spans."""

    spans: Tensor  # [T // CHUNK + S]: which span each chunk belongs to
    begins: Tensor  # [S]: number of each span's first chunk
    sequences: Tensor  # [min(S, T // LONG)]: the first spans of these sequences

    @classmethod
    def of(cls, tensors: SpanTensors) -> MixerChunks:
        num_spans, num_tokens = len(tensors.firsts), len(tensors.spans)
        starts, firsts = tensors.starts.long(), tensors.firsts.long()
        device = starts.device
        ends = torch.zeros_like(firsts).scatter_reduce(0, firsts, starts[1:], "amax")
        is_long = (ends - starts[:-1])[firsts] >= LONG
        counts = torch.where(is_long, (starts.diff() + CHUNK - 1) // CHUNK, 0)
        chunks_up_to = counts.cumsum(0)
        is_first = is_long & (firsts == torch.arange(num_spans, device=device))
        numbers = torch.arange(num_tokens // CHUNK + num_spans, device=device)
        ranks = torch.arange(min(num_spans, num_tokens // LONG), device=device)
        return cls(
            torch.searchsorted(chunks_up_to, numbers, right=True), chunks_up_to - counts,
            torch.searchsorted(is_first.long().cumsum(0), ranks, right=True),
        )  # fmt: skip
