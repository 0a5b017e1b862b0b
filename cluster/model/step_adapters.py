"""Which LoRA adapters the tokens of the running step have. Set by the model that runs it, read by every
module that adapters change. Runs on the engine's thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor


class StepAdapters:
    """The adapters of one step. slots: int64, of each token its adapter's slot from 1 on, or 0; [T], or as a
    mixer of a hybrid model has its rows, [sequences, tokens of each]. None: no token has one."""

    def __init__(self, num_slots: int = 0, rank: int = 0):
        self.num_slots, self.rank = num_slots, rank
        self.slots: Tensor | None = None

    @contextmanager
    def of_step(self, slots: Tensor | None) -> Iterator[None]:
        """The work inside is a step of tokens with these adapters."""
        before, self.slots = self.slots, slots
        try:
            yield
        finally:
            self.slots = before

    def of_tokens(self, tokens: slice | Tensor, shape: Sequence[int]) -> AbstractContextManager[None]:
        """The work inside is that of these of the step's tokens. shape: of their rows, [B, N]."""
        slots = self.slots
        return self.of_step(None if slots is None else slots[tokens].view(*shape))
