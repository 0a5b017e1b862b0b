"""LoRA adapters in native products (`LayerAdapter` in kernels.h): A of each adapter in groups of rows, as
adapters.cpp reads it, and B packed as weights are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from cluster.model.adapters import AdaptedLinear, updates_of
from cluster.model.cpu.library import Kernels, Layer, LayerAdapter
from cluster.model.cpu.modules import PackedWeights, in_panels
from cluster.model.slot_matrices import Update, Updates
from cluster.model.step_adapters import StepAdapters

PART_OUTPUTS = 16  # a part of a product, behind which another one follows, is a multiple of the widest vector
_RANK_STEP = 4  # a part's rank in memory is a multiple of it
_GROUP_ROWS, _CHUNK_BYTES = 8, 64  # of A: `kDownRows` and `kDownBytes` of adapters.cpp
_STEP_BYTES = 4  # of an output's B lie side by side


class PackedAdapters(nn.Module):
    """What adapters add to one product of packed weights. parts: its linears, in order; some are adapted. Put
    it into the weights' `Layer` with `attach`. Implements `UpdateStore`."""

    def __init__(self, kernels: Kernels, parts: Sequence[nn.Module], *, gated: bool):
        super().__init__()
        adapted = [part for part in parts if isinstance(part, AdaptedLinear)]
        self._paths = [part.path if isinstance(part, AdaptedLinear) else "" for part in parts]
        self._num_slots, self._largest = adapted[0].step.num_slots, _padded(adapted[0].step.rank)
        self._outputs = [cast(int, part.out_features) for part in parts]
        self._inputs, self._dtype = adapted[0].in_features, adapted[0].added.down.dtype
        self._arena = kernels.adapters
        self._gated, self._panel = gated, kernels.panel_outputs
        self._kept: list[object] = [None] * self._num_slots  # what the entries point to
        self._entries = (LayerAdapter * self._num_slots)()
        for slot in range(1, self._num_slots + 1):
            self.write_slot(slot, updates_of(adapted, slot))

    def attach(self, layer: Layer) -> None:
        """layer: must not outlive this object."""
        layer.adapters = ctypes.addressof(self._entries)
        layer.parts = len(self._outputs)
        layer.down_width = -(-self._largest * layer.parts // _GROUP_ROWS) * _GROUP_ROWS
        ends = np.cumsum(self._outputs)
        never = np.iinfo(np.int64).max
        layer.second, layer.third = (int(ends[i]) if i < len(ends) - 1 else never for i in (0, 1))

    def write_slot(self, slot: int, updates: Updates) -> None:
        """See `UpdateStore`. Native calls read the entries of their rows' slots alone."""
        own = [updates.get(path) for path in self._paths]
        rank = _padded(max((len(update.a) for update in own if update is not None), default=0))
        kept = self._kept[slot - 1] = None if rank == 0 else self._packed(own, rank)
        self._entries[slot - 1] = (
            LayerAdapter() if kept is None else LayerAdapter(kept[0].data_ptr(), kept[1].data_ptr(), rank)
        )

    def _packed(self, updates: Sequence[Update | None], rank: int) -> tuple[Tensor, Tensor]:
        """A and B of all parts, with zeros up to `rank`."""
        down = torch.zeros(len(updates), rank, self._inputs)
        up = [torch.zeros(rank, outputs) for outputs in self._outputs]
        for part, update in enumerate(updates):
            if update is not None:
                down[part, : len(update.a)], up[part][: len(update.a)] = update.a, update.b.T
        rows = in_panels(up if self._gated else [torch.cat(up, 1)], self._panel)
        packed = _in_groups(down.flatten(0, 1).to(self._dtype)), _in_steps(rows.to(self._dtype), self._panel)
        return self._arena.copy(packed[0]), self._arena.copy(packed[1])


def _padded(rank: int) -> int:
    return -(-rank // _RANK_STEP) * _RANK_STEP


def _in_groups(a: Tensor) -> Tensor:
    """[rows, inputs] → [groups, chunks of inputs, rows of a group, inputs of a chunk], with zeros."""
    inputs = _CHUNK_BYTES // a.element_size()
    whole = nn.functional.pad(a, (0, -a.shape[1] % inputs, 0, -a.shape[0] % _GROUP_ROWS))
    return whole.unflatten(1, (-1, inputs)).unflatten(0, (-1, _GROUP_ROWS)).transpose(1, 2)


def _in_steps(b: Tensor, panel: int) -> Tensor:
    """[rank, packed outputs] → [panels, steps of rank, outputs of a panel, rank of a step]."""
    rank = _STEP_BYTES // b.element_size()
    return b.unflatten(1, (-1, panel)).unflatten(0, (-1, rank)).permute(2, 0, 3, 1)


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


@dataclass(frozen=True)
class AdapterRuns:
    """The tokens of a step by adapter. numbers: [T] int32, of each token its adapter's slot, or 0. adapted:
    tokens with an adapter, sorted by it. runs: [n, 3] int64, one for each adapter: its first of `adapted`,
    the one after its last, slot."""

    numbers: np.ndarray
    adapted: np.ndarray
    runs: np.ndarray

    @classmethod
    def of(cls, slots: Tensor) -> AdapterRuns:
        numbers = slots.numpy().astype(np.int32)
        order = np.argsort(numbers, kind="stable")
        adapted = order[np.count_nonzero(numbers == 0) :]
        of_adapted = numbers[adapted]
        begins = np.flatnonzero(np.diff(of_adapted, prepend=0))
        ends = np.append(begins[1:], len(adapted))
        runs = np.stack([begins, ends, of_adapted[begins]], 1).astype(np.int64)
        return cls(numbers, adapted, np.ascontiguousarray(runs))

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """Addresses of all three, valid while this object lives, and the number of runs."""
        arrays = (self.numbers, self.adapted, self.runs)
        return *(array.ctypes.data for array in arrays), len(self.runs)  # type: ignore[return-value]


NO_RUNS = AdapterRuns(np.empty(0, np.int32), np.empty(0, np.int64), np.empty((0, 3), np.int64))
