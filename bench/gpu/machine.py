"""How fast the device is: a large copy and a large matrix product, measured. Everything else is a share of
these."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceSpeed:
    device: torch.device
    dtype: torch.dtype
    bytes_per_s: float
    flops_per_s: float


def median_s(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of one call, after two calls to warm up."""
    times = []
    for attempt in range(repeats + 2):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        if attempt >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def replayed_s(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Seconds of one of these calls, on a GPU from a graph of all of them, so that none waits for the
    host."""
    if device.type != "cuda":
        return median_s(lambda: [call() for call in calls], device, 3) / len(calls)
    with torch.inference_mode():
        calls[0]()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    return median_s(graph.replay, device, 10) / len(calls)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Gives back what nothing refers to any more: torch would keep it."""
    gc.collect()  # modules refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_machine(device: torch.device, dtype: torch.dtype, scale: int) -> DeviceSpeed:
    """scale: 1 means 1 GiB to copy and a product of 8192-wide square matrices; larger divides both."""
    source = torch.ones((1 << 30) // scale, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device, 10)
    side = 8192 // scale
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    product_s = median_s(lambda: matrix @ matrix, device, 10)
    return DeviceSpeed(device, dtype, 2 * source.numel() / copy_s, 2 * side**3 / product_s)


def nominal_bytes_per_s(device: torch.device) -> float | None:
    """What the product's data sheet gives its memory: two transfers a clock. None: not a GPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return 2 * 1e3 * found.memory_clock_rate * found.memory_bus_width / 8
