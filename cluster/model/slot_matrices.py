"""What the numbered slots of LoRA adapters add to one or more linears with one input: A and B of all slots
side by side in two matrices of fixed size and place.

A slot may be written while steps run in which no sequence has it: what they compute with its columns they
multiply by 0, or do not compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cluster.model.mixer_shares import RankPiece
from cluster.model.step_adapters import StepAdapters

_NOTHING = torch.empty(0, 0)


@dataclass(frozen=True, eq=False)
class Update:
    """What one adapter adds to one module: B A x. a [rank, inputs]; b [outputs, rank], scaled. float32."""

    a: Tensor
    b: Tensor


Updates = Mapping[str, Update]  # of one adapter, by the path of the module in the text model


@runtime_checkable
class UpdateStore(Protocol):
    """A module that keeps what the slots add to one or more linears."""

    def write_slot(self, slot: int, updates: Updates) -> None:
        """Converts what an adapter adds, and makes it all that the slot has. Any thread; meanwhile no
        sequence of a step has the slot."""
        ...


@dataclass(frozen=True, eq=False)
class SlotPiece:
    """One linear's A or B of one slot. target [R, columns], contiguous; source [rank, some columns]: goes
    into the first rows, from the column `begin` on, and zeros go everywhere else."""

    target: Tensor
    source: Tensor
    begin: int = 0

    def place_in(self, rows: Tensor) -> Tensor:
        """The part of rows [rank, columns] that the source fills."""
        return rows[:, self.begin : self.begin + self.source.shape[1]]


class SlotMatrices(nn.Module):
    """A and B of all slots, for linears with one input. R rows of `down` and of `up` for each linear and
    slot, linear after linear. down [linears * slots * R, inputs], up [linears * slots * R, outputs], 0
    outside of each linear's own outputs, mask [1 + slots, linears * slots * R]; ranks [1 + slots] int32, of
    R how many a slot's adapter has; ends [1 + linears] int32, of the linears' outputs, in order."""

    def __init__(
        self, linears: Sequence[tuple[str, int, int]], inputs: int, outputs: int, step: StepAdapters,
        device: torch.device, dtype: torch.dtype, piece: RankPiece | None = None,
    ):  # fmt: skip
        """linears: path, first output and output after the last. piece: this rank's, of the only linear; its
        inputs and outputs are then the rank's."""
        super().__init__()
        self._linears, self.step, self._piece = linears, step, piece
        rows = len(linears) * step.num_slots * step.rank
        own = torch.block_diag(torch.zeros(1, 0), *[torch.ones(1, step.rank)] * step.num_slots)
        self.register_buffer("down", torch.zeros(rows, inputs, device=device, dtype=dtype), False)
        self.register_buffer("up", torch.zeros(rows, outputs, device=device, dtype=dtype), False)
        self.register_buffer("mask", own.repeat(1, len(linears)).to(device, dtype), False)
        ranks = torch.zeros(1 + step.num_slots, device=device, dtype=torch.int32)
        self.register_buffer("ranks", ranks, False)
        ends = torch.tensor([linears[0][1], *(end for _, _, end in linears)], dtype=torch.int32)
        self.register_buffer("ends", ends.to(device), False)

    @property
    def num_linears(self) -> int:
        return len(self._linears)

    @property
    def largest(self) -> int:
        """Numbers of the largest `SlotPiece`."""
        return self.step.rank * max(self.down.size(1), self.up.size(1))

    def rows(self, linear: int, slot: int) -> slice:
        first = (linear * self.step.num_slots + slot - 1) * self.step.rank
        return slice(first, first + self.step.rank)

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """x [T, inputs]; y [T, outputs] is changed in place. Enqueued."""
        if (slots := self.step.slots) is not None:
            y += ((x @ self.down.T) * self.mask[slots]) @ self.up

    def write_slot(self, slot: int, updates: Updates) -> None:
        """See `UpdateStore`. Copies one by one; to many modules of a GPU: `AdapterStaging`."""
        self.ranks[slot] = self.rank_of(updates)
        for piece in self.pieces(slot, updates):
            piece.target.zero_()
            piece.place_in(piece.target[: len(piece.source)]).copy_(piece.source)

    def rank_of(self, updates: Updates) -> int:
        """The largest in these linears; 0: the adapter changes none of them."""
        return max((len(updates[path].a) for path, _, _ in self._linears if path in updates), default=0)

    def pieces(self, slot: int, updates: Updates) -> Iterator[SlotPiece]:
        """All that a slot has of these linears."""
        for i, (path, begin, _) in enumerate(self._linears):
            every = self.rows(i, slot)
            down, up, update = self.down[every], self.up[every], updates.get(path)
            if update is None:
                yield from (SlotPiece(down, _NOTHING), SlotPiece(up, _NOTHING))
                continue
            a, b = update.a, update.b.T
            if self._piece is not None:
                a, b = self._piece.columns_of(a), self._piece.rows_of(b)
            yield from (SlotPiece(down, a), SlotPiece(up, b, begin))
