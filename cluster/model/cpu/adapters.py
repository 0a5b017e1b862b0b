"""LoRA adapters in native products: A of each adapter packed as weights are, B in the order of the packed
outputs (kernels.h, `LayerAdapter`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from cluster.model.adapters import AdaptedLinear, StepAdapters
from cluster.model.cpu.library import Kernels, Layer, LayerAdapter
from cluster.model.cpu.modules import PackedWeights, in_panels
from cluster.model.cpu.weight_source import FreshWeights

PART_OUTPUTS = 16  # a part of a product, behind which another one follows, is a multiple of the widest vector
MAX_RUN = 32  # tokens: more of one adapter are several runs, which threads share


class PackedAdapters:
    """What adapters add to one product of packed weights. parts: its linears, in order; some are adapted. Put
    it into the weights' `Layer` with `attach`."""

    def __init__(self, kernels: Kernels, parts: Sequence[nn.Module], *, gated: bool):
        adapted = [part if isinstance(part, AdaptedLinear) else None for part in parts]
        given = [part for part in adapted if part is not None]
        num_adapters = len(given[0].ranks)
        largest = max(rank for part in given for rank in part.ranks)
        self._rank = largest + largest % 2
        self._outputs = [part.out_features for part in parts]
        self._inputs, self._dtype = given[0].in_features, given[0].down.dtype
        self._gated, self._panel = gated, kernels.panel_outputs
        self._kernels = replace(kernels, weights=FreshWeights())  # no file of packed weights has adapters
        self._kept: list[object] = []
        self._adapters = (LayerAdapter * num_adapters)(
            *(self._adapter(adapted, slot) for slot in range(1, num_adapters + 1))
        )

    def attach(self, layer: Layer) -> None:
        """layer: must not outlive this object."""
        layer.adapters = ctypes.addressof(self._adapters)
        layer.rank, layer.down_width = self._rank, self._rank * len(self._outputs)
        ends = np.cumsum(self._outputs)
        never = np.iinfo(np.int64).max
        layer.second, layer.third = (int(ends[i]) if i < len(ends) - 1 else never for i in (0, 1))

    def _adapter(self, parts: Sequence[AdaptedLinear | None], slot: int) -> LayerAdapter:
        down = torch.zeros(len(parts), self._rank, self._inputs)
        up = [torch.zeros(self._rank, outputs) for outputs in self._outputs]
        is_changed = False
        for part, linear in enumerate(parts):
            if linear is None or not (rank := linear.ranks[slot - 1]):
                continue
            down[part, :rank], up[part][:rank] = linear.update(slot)
            is_changed = True
        if not is_changed:
            return LayerAdapter()
        packed = PackedWeights(self._kernels, down.flatten(0, 1).to(self._dtype))
        rows = in_panels(up if self._gated else [torch.cat(up, 1)], self._panel).to(self._dtype)
        self._kept += [packed, rows]
        return LayerAdapter(packed.address, rows.data_ptr())


def attach_adapters(
    weights: PackedWeights, kernels: Kernels, parts: Sequence[nn.Module], *, gated: bool
) -> object:
    """What must live as long as the weights do."""
    if not any(isinstance(part, AdaptedLinear) for part in parts):
        return None
    packed = PackedAdapters(kernels, parts, gated=gated)
    packed.attach(weights.layer)
    return packed


def step_of(modules: Sequence[nn.Module]) -> StepAdapters | None:
    """Returns what says which adapters the tokens of a step have; None: no module is adapted."""
    return next((module.step for module in modules if isinstance(module, AdaptedLinear)), None)


def runs_of(slots: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the adapters [T] int32, and the runs of tokens that have one: [n, 3] int64, first token,
    token after the last, number."""
    numbers = slots.numpy().astype(np.int32)
    begins = np.flatnonzero(np.diff(numbers, prepend=-1))
    ends = [*begins[1:], len(numbers)]
    runs = [
        (first, min(first + MAX_RUN, end), numbers[begin])
        for begin, end in zip(begins, ends, strict=True)
        if numbers[begin]
        for first in range(begin, end, MAX_RUN)
    ]
    return numbers, np.array(runs, dtype=np.int64).reshape(-1, 3)
