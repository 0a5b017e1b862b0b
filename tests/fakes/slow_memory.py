"""A block memory in CPU memory that behaves like a GPU's: what is enqueued on it is computed `num_looks`
looks later, and until then it is `unfinished`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cluster.kvcache.memory import BlockMemory, MemoryLayout


class SlowMemory(BlockMemory):
    def __init__(
        self,
        layout: MemoryLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        num_looks: Callable[[], int] = lambda: 3,
    ):
        super().__init__(layout, num_blocks, device)
        self.num_looks = num_looks
        self.unfinished: list[_Mark] = []

    @property
    def enqueues(self) -> bool:
        return True

    def use_own_stream(self, priority: int = 0) -> None:
        pass

    def beside(self, layout: MemoryLayout, num_blocks: int) -> SlowMemory:
        return SlowMemory(layout, num_blocks, num_looks=self.num_looks)

    def mark(self) -> Callable[[], bool]:
        mark = _Mark(self.num_looks())
        self.unfinished.append(mark)

        def is_over() -> bool:
            if mark in self.unfinished:
                mark.num_looks_left -= 1
                if mark.num_looks_left < 0:
                    self.unfinished.remove(mark)
            return mark not in self.unfinished

        return is_over

    def synchronize(self) -> None:
        self.unfinished.clear()


@dataclass(eq=False)
class _Mark:
    num_looks_left: int  # that say no
