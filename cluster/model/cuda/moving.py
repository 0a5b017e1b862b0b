"""Moves the weights of a model to a GPU while they are read: matrices with one input merged
(`cluster.model.cuda.merging`), everything else as it is, in the order of the modules, which is about that of
the files.

Weights in their own dtype are mapped files until then, so this is where they are read. A part of a tensor is
copied into pinned memory by all of torch's threads, and from there by the device while the next part is
copied; the thread waits only for the part whose memory it takes again.

Runs on the thread that loads the model. Not measured on hardware.
"""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch import Tensor, nn

from cluster.model.cuda.merging import merge_layer

PART_BYTES = 32 << 20
_NUM_PARTS = 3


class Staging:
    """Pinned memory through which tensors go to a device, in the order of the calls."""

    def __init__(self, device: torch.device, part_bytes: int = PART_BYTES):
        self._device, self._part_bytes = device, part_bytes
        self._parts = [torch.empty(part_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_PARTS)]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_PARTS
        self._order = itertools.cycle(range(_NUM_PARTS))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target: contiguous, on the device. source: of its shape and dtype, on the CPU; it may be dropped
        when this returns, and the target be used on the current stream."""
        into, given = _bytes(target), _bytes(source.detach().contiguous())
        size = self._part_bytes
        for number, part, piece in zip(self._order, into.split(size), given.split(size), strict=False):
            if (copied := self._copied[number]) is not None:
                copied.synchronize()
            staged = self._parts[number][: len(piece)]
            staged.copy_(piece)
            part.copy_(staged, non_blocking=True)
            self._copied[number] = torch.cuda.current_stream(self._device).record_event()

    def moved(self, source: Tensor) -> Tensor:
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self.copy(target, source)
        return target

    def finish(self) -> None:
        """Blocks until everything is copied."""
        for copied in self._copied:
            if copied is not None:
                copied.synchronize()


def move_weights(model: nn.Module, device: torch.device) -> None:
    """Moves all parameters, which lie on the CPU, and what merging moves. Other buffers stay. Blocks until
    all is there. Memory of the CPU is free as soon as it is copied."""
    staging = Staging(device)
    modules = list(model.modules())
    num_names = Counter(id(own) for module in modules for own in module.parameters(recurse=False))
    tied: dict[Tensor, nn.Parameter] = {}
    for module in modules:
        merge_layer(module, device, staging.copy)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type != "cpu":
                continue
            if (moved := tied.get(parameter)) is None:
                moved = nn.Parameter(staging.moved(parameter), parameter.requires_grad)
            if num_names[id(parameter)] > 1:
                tied[parameter] = moved
            module.register_parameter(name, moved)
    staging.finish()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
