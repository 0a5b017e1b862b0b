"""LoRA adapters in native products: A of each adapter packed as weights are, B in the order of the packed
outputs (kernels.h, `LayerAdapter`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from cluster.model.adapters import AdaptedLinear, StepAdapters, Update, Updates, updates_of
from cluster.model.cpu.library import Kernels, Layer, LayerAdapter
from cluster.model.cpu.modules import PackedWeights, in_panels
from cluster.model.cpu.weight_source import FreshWeights

PART_OUTPUTS = 16  # a part of a product, behind which another one follows, is a multiple of the widest vector
MAX_RUN = 32  # tokens: more of one adapter are several runs, which threads share


class PackedAdapters(nn.Module):
    """What adapters add to one product of packed weights. parts: its linears, in order; some are adapted. Put
    it into the weights' `Layer` with `attach`. Implements `UpdateStore`."""

    def __init__(self, kernels: Kernels, parts: Sequence[nn.Module], *, gated: bool):
        super().__init__()
        adapted = [part for part in parts if isinstance(part, AdaptedLinear)]
        self._paths = [part.path if isinstance(part, AdaptedLinear) else "" for part in parts]
        self._num_slots, self._largest = adapted[0].step.num_slots, _even(adapted[0].step.rank)
        self._outputs = [cast(int, part.out_features) for part in parts]
        self._inputs, self._dtype = adapted[0].in_features, adapted[0].added.down.dtype
        self._gated, self._panel = gated, kernels.panel_outputs
        self._kernels = replace(kernels, weights=FreshWeights())  # no file of packed weights has adapters
        self._kept: list[object] = [None] * self._num_slots  # what the entries point to
        self._entries = (LayerAdapter * self._num_slots)()
        for slot in range(1, self._num_slots + 1):
            self.prepare(updates_of(adapted, slot))(slot)

    def attach(self, layer: Layer) -> None:
        """layer: must not outlive this object."""
        layer.adapters = ctypes.addressof(self._entries)
        layer.down_width = self._largest * len(self._outputs)
        ends = np.cumsum(self._outputs)
        never = np.iinfo(np.int64).max
        layer.second, layer.third = (int(ends[i]) if i < len(ends) - 1 else never for i in (0, 1))

    def prepare(self, updates: Updates) -> Callable[[int], None]:
        """See `UpdateStore`. The layers must not run while the result is called."""
        own = [updates.get(path) for path in self._paths]
        rank = max((len(update.a) for update in own if update is not None), default=0)
        kept = None if rank == 0 else self._packed(own, _even(rank))

        def write(slot: int) -> None:
            self._kept[slot - 1] = kept
            self._entries[slot - 1] = (
                LayerAdapter() if kept is None else LayerAdapter(kept[0].address, kept[1].data_ptr(), kept[2])
            )

        return write

    def _packed(self, updates: Sequence[Update | None], rank: int) -> tuple[PackedWeights, Tensor, int]:
        """A of all parts, and B in the order of the packed outputs, with zeros up to `rank`."""
        down = torch.zeros(len(updates), rank, self._inputs)
        up = [torch.zeros(rank, outputs) for outputs in self._outputs]
        for part, update in enumerate(updates):
            if update is not None:
                down[part, : len(update.a)], up[part][: len(update.a)] = update.a, update.b.T
        packed = PackedWeights(self._kernels, down.flatten(0, 1).to(self._dtype))
        rows = in_panels(up if self._gated else [torch.cat(up, 1)], self._panel).to(self._dtype)
        return packed, rows, rank


def _even(rank: int) -> int:
    return rank + rank % 2


def attach_adapters(
    weights: PackedWeights, kernels: Kernels, parts: Sequence[nn.Module], *, gated: bool
) -> PackedAdapters | None:
    """What must live as long as the weights do. None: no linear of these is adapted."""
    if not any(isinstance(part, AdaptedLinear) for part in parts):
        return None
    packed = PackedAdapters(kernels, parts, gated=gated)
    packed.attach(weights.layer)
    return packed


def step_of(modules: Sequence[nn.Module]) -> StepAdapters | None:
    """Returns what says which adapters the tokens of a step have; None: no module is adapted."""
    return next((module.step for module in modules if isinstance(module, AdaptedLinear)), None)


def runs_of(slots: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns, of each token, its adapter's slot, or 0, and the first token of its run: [T, 2] int32. And the
    runs of tokens that have one adapter: [n, 3] int64, first token, token after the last, slot."""
    numbers = slots.numpy().astype(np.int32)
    begins = np.flatnonzero(np.diff(numbers, prepend=-1))
    ends = [*begins[1:], len(numbers)]
    runs = [
        (first, min(first + MAX_RUN, end), numbers[begin])
        for begin, end in zip(begins, ends, strict=True)
        if numbers[begin]
        for first in range(begin, end, MAX_RUN)
    ]
    tokens = np.zeros((len(numbers), 2), np.int32)
    tokens[:, 0] = numbers
    for first, end, _ in runs:
        tokens[first:end, 1] = first
    return tokens, np.array(runs, dtype=np.int64).reshape(-1, 3)
