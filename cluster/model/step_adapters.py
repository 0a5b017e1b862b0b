"""Which LoRA adapters the tokens of the running step have. Set by the model that runs it, read by every
module that adapters change. Runs on the engine's thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import cast

from torch import Tensor


class StepAdapters:
    """The adapters of one step. slots: int64, of each token its adapter's slot from 1 on, or 0; [T], or as a
    mixer of a hybrid model has its rows, [sequences, tokens of each]. None: no token has one."""

    def __init__(self, num_slots: int = 0, rank: int = 0):
        self.num_slots, self.rank = num_slots, rank
        self.slots: Tensor | None = None
        self._in_order: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def of_step(self, slots: Tensor | None) -> Iterator[None]:
        """The work inside is a step of tokens with these adapters."""
        before = self.slots, self._in_order
        self.slots, self._in_order = slots, None
        try:
            yield
        finally:
            self.slots, self._in_order = before

    def in_order(self) -> tuple[Tensor, Tensor]:
        """Returns the rows in the order of their slots, int64 [T], and these slots. Of a step that has slots,
        [T]; on a GPU enqueued, by the first call in the step."""
        if self._in_order is None:
            slots, rows = cast(Tensor, self.slots).sort(stable=True)
            self._in_order = rows, slots
        return self._in_order

    def of_tokens(self, tokens: slice | Tensor, shape: Sequence[int]) -> AbstractContextManager[None]:
        """The work inside is that of these of the step's tokens. shape: of their rows, [B, N]."""
        slots = self.slots
        return self.of_step(None if slots is None else slots[tokens].view(*shape))
