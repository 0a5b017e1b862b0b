"""Launches whose programs begin while the kernel before them ends (programmatic dependent launch, Hopper and
later). The gap between two kernels of a recorded step, and reading what does not depend on the kernel before,
are hidden by its end.

A kernel that is launched so lets its own successor begin and waits for its predecessor (`early_kernels`)
before it reads or writes anything that another kernel writes or reads. Every program waits, so the kernel
ends after its predecessor, and a wait for one kernel is a wait for all before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch

_FIRST = (9, 0)  # compute capability


@cache
def early(device: torch.device) -> Mapping[str, bool]:
    """What a launch on this device is given: for a kernel that has the constant EARLY."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST
    return MappingProxyType({"EARLY": True, "launch_pdl": True} if can else {})
