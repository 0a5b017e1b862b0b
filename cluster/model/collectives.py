"""What the modules and kernels of a rank ask of the other ranks of its worker, over torch's default group
(NCCL, or Gloo on the CPU).

All ranks make the same calls in the same order. Two things follow for whatever a rank decides by itself, such
as whether a kernel serves or a step can be recorded:

* The ranks decide it together (`all_agree`). NCCL wants a collective to be in a CUDA graph on all ranks or on
  none, and all ranks to launch their graphs in one order.
* What may fail on one rank alone is tried first without collectives (`rehearse`): in the middle of them a
  failure would leave the other ranks waiting until the group's timeout, which ends them.

`sum` and `gather` enqueue on the current stream and may be recorded; the others wait for the device. Runs on
the thread that runs the model. Not tried over NCCL.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # torch 2.11


class RanksDisagreeError(RuntimeError):
    """This rank, or another one, cannot do what all would have to do."""


class OtherRankError(RanksDisagreeError):
    """This rank could go on, but another one has failed."""


class Collectives:
    def __init__(self, device: torch.device):
        """device: of the model. The group has been joined."""
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._device = device
        self.is_rehearsing = False

    def sum(self, parts: Tensor) -> Tensor:
        """parts: contiguous, becomes the sum over the ranks, in its dtype. Returns it."""
        if not self.is_rehearsing:
            dist.all_reduce(parts)
        return parts

    def gather(self, part: Tensor, width: int) -> Tensor:
        """part [..., this rank's columns], as `torch.chunk` divides them → [..., width]."""
        columns = -(-width // self.num_ranks)
        if part.shape[-1] < columns:  # of the last rank
            part = F.pad(part, (0, columns - part.shape[-1]))
        parts = part.new_empty(self.num_ranks, *part.shape)
        if not self.is_rehearsing:
            # flat: Gloo takes no stacked tensor. A list would be copied once for each rank
            getattr(dist, GATHER)(parts.view(-1), part.contiguous().view(-1))
        return parts.movedim(0, -2).flatten(-2)[..., :width]

    def all_agree(self, agrees: bool) -> bool:
        """Whether all ranks pass True."""
        return self.largest(float(not agrees)) == 0.0

    def all_agree_on(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether all ranks pass True. All pass equally many."""
        if not flags:
            return []
        numbers = torch.tensor(flags, dtype=torch.float32, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return [number == 1.0 for number in numbers.tolist()]

    def union(self, names: Sequence[str]) -> list[str]:
        """Returns the names that one rank or more passes, in one order on all ranks."""
        found: list[list[str]] = [[] for _ in range(self.num_ranks)]
        dist.all_gather_object(found, list(names))
        return sorted({name for own in found for name in own})

    def largest(self, number: float) -> float:
        """Returns the largest of the numbers that the ranks pass."""
        numbers = torch.tensor([number], dtype=torch.float32, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return float(numbers)

    def rehearse(self, work: Callable[[], object]) -> None:
        """Runs `work` without these collectives. Raises RanksDisagreeError on all ranks if it raises on
        one."""
        error: Exception | None = None
        self.is_rehearsing = True
        try:
            work()
        except Exception as raised:
            error = raised
        finally:
            self.is_rehearsing = False
        self.settle(error)

    def settle(self, error: Exception | None) -> None:
        """Raises RanksDisagreeError if this rank, or another one, has an error."""
        if not self.all_agree(error is None):
            if error is None:
                raise OtherRankError("another rank has failed; its log says why")
            raise RanksDisagreeError(repr(error)) from error
