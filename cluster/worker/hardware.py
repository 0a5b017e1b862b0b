"""What a worker computes on, for `Member`."""

from __future__ import annotations

import torch


def hardware_of(device: torch.device, num_ranks: int = 1) -> str:
    """Equal for devices that are equally fast: the model of a GPU, or the number of threads of a CPU."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"cpu, {torch.get_num_threads()} threads"
    return name if num_ranks == 1 else f"{num_ranks} x {name}"
