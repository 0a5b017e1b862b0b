"""What a worker computes on, as `Member` says it."""

from __future__ import annotations

import os
import platform

import torch


def hardware_of(device: torch.device, num_ranks: int = 1) -> str:
    """Equal for devices that are equally fast: a GPU's model, or so many threads of a CPU."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"cpu, {torch.get_num_threads()} threads"
    return name if num_ranks == 1 else f"{num_ranks} x {name}"


def device_of(device: torch.device) -> str:
    """Equal for those who take it from each other: the host and its GPU, or the cores that this process may run on."""
    if device.type == "cuda":
        return f"{platform.node()} GPU {torch.cuda.get_device_properties(device).uuid}"
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    return f"{platform.node()} cores {cores}"
