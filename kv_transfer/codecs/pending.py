"""Results that a device is still computing, and jobs that are gathered for one launch.

The transfer thread must not wait for a device. What it asks for is a `Pending`: it looks at it in later
polls. On the CPU a job is done before the call returns.

    batch.add(job) -> Pending      while the leases are looked at
    batch.begin()                  once at the end of a poll: all jobs that were added since, as one call
    pending.is_done()              in the next polls; then pending.value()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory

J = TypeVar("J")
R = TypeVar("R")


@dataclass(frozen=True)
class Pending(Generic[R]):
    """`is_done` never waits. `value` may be called when it has said yes, and raises what the job raised."""

    is_done: Callable[[], bool]
    value: Callable[[], R]


def done(value: R) -> Pending[R]:
    return Pending(lambda: True, lambda: value)


class Batch(Generic[J, R]):
    """Belongs to one thread."""

    def __init__(self, memory: BlockMemory, run: Callable[[list[J]], Pending[Sequence[R]]]):
        """`run` enqueues jobs on the current stream of the memory's device and returns their results in
        order."""
        self._memory = memory
        self._run = run
        self._next: _Gathered[J, R] = _Gathered([])

    def add(self, job: J) -> Pending[R]:
        """Runs the job at once where nothing is enqueued; there it raises what the job raises."""
        if not self._memory.enqueues:
            (value,) = self._run([job]).value()
            return done(value)
        gathered, number = self._next, len(self._next.jobs)
        gathered.jobs.append(job)
        return Pending(gathered.is_done, lambda: gathered.values()[number])

    def begin(self) -> None:
        """Does not raise: the jobs' values do."""
        gathered = self._next
        if not gathered.jobs:
            return
        self._next = _Gathered([])
        try:
            gathered.results = self._run(gathered.jobs)
        except Exception as error:  # the jobs' edge: each of them raises it
            gathered.error = error


@dataclass(eq=False)
class _Gathered(Generic[J, R]):
    jobs: list[J]
    results: Pending[Sequence[R]] | None = None
    error: Exception | None = None

    def is_done(self) -> bool:
        return self.error is not None or (self.results is not None and self.results.is_done())

    def values(self) -> Sequence[R]:
        if self.error is not None:
            raise self.error
        assert self.results is not None
        return self.results.value()


def when_computed(memory: BlockMemory, result: Callable[[], R]) -> Pending[R]:
    """`result`, once all that this thread has enqueued so far on the memory's device is computed."""
    is_over = memory.mark()
    return Pending((lambda: True) if is_over is None else is_over, result)


def upload(numbers: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, enqueued from pinned memory. On the CPU the numbers themselves."""
    host = torch.from_numpy(numbers)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def download(numbers: Tensor) -> Tensor:
    """Enqueues a copy to pinned memory, which is read when the device has come so far. On the CPU the tensor
    itself."""
    if numbers.device.type == "cpu":
        return numbers
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)
