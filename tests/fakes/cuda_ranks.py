"""Collectives of simulated GPUs: each is one launch, which a recorded graph repeats, and computes over
Gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from cluster.model.collectives import GATHER
from tests.fakes.cuda_device import CudaTensor, SimulatedCuda
from tests.fakes.leaves import leaves

_NAMES = ("all_reduce", GATHER, "broadcast")


@contextmanager
def collectives_on(device: SimulatedCuda) -> Iterator[None]:
    """The group has been joined."""

    def launched(collective: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> None:
            if any(isinstance(each, CudaTensor) for each in leaves((args, kwargs))):
                device.kernel(collective, *args, **kwargs)
            else:
                collective(*args, **kwargs)

        return launch

    with ExitStack() as stack:
        for name in _NAMES:
            stack.enter_context(mock.patch.object(dist, name, launched(getattr(dist, name))))
        yield
