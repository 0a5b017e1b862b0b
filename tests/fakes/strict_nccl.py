"""`ProcessGroupNCCL` over Gloo. It refuses what NCCL refuses: CPU tensors, tensors that are not contiguous,
two ranks on one GPU, and a store that cannot be asked by its own threads. Works end later than the calls that
begin them, and a stream that has not waited for a work may not use its bytes."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.fakes.cuda_device import CudaTensor

MADE: list[StrictNccl] = []


class Work:
    def __init__(self, work: dist.Work):
        self._work = work
        self._asked = 0

    def is_completed(self) -> bool:
        self._asked += 1
        if self._asked == 2:
            self._work.wait(timedelta(seconds=120))
        return self._asked >= 2

    def wait(self) -> bool:
        if self._asked < 2:
            raise RuntimeError("the host waited inside NCCL, which has no time limit there")
        return True


class StrictNccl:
    class Options:
        _timeout: timedelta

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options):
        gloo: Any = dist.ProcessGroupGloo
        options_of_gloo = gloo._Options()
        options_of_gloo._devices = [gloo.create_device(hostname="127.0.0.1")]
        options_of_gloo._timeout = timedelta(seconds=120)
        self._group = gloo(store, rank, size, options_of_gloo)
        self._store, self._rank = store, rank
        self._device: torch.device | None = None
        self.ends_process = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0"
        self.is_aborted = False
        MADE.append(self)

    def _checked(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if len(tensors) != 1 or not isinstance(tensors[0], CudaTensor):
            raise RuntimeError("No backend type associated with device type cpu")
        if not tensors[0].held.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if self._device is None:
            self._device = tensors[0].device
            self._store.set(f"gpu/{self._rank}", str(self._device.index))
            if self._store.get(f"gpu/{1 - self._rank}") == str(self._device.index).encode():
                raise RuntimeError("ncclInvalidUsage: Duplicate GPU detected")
        return [tensors[0].held]

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return Work(self._group.send(self._checked(tensors), peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return Work(self._group.recv(self._checked(tensors), peer, tag))

    def abort(self) -> None:
        self.is_aborted = True
