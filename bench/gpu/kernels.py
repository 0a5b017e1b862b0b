"""Which kernels a step launches, and how long the device is busy with each kind, by torch's profiler.

A kind is found by a kernel's name: our Triton kernels by their whole names, those of libraries by a part. A
name that no kind knows counts as *other*, and the table lists it, so that nothing hides. torch's general
elementwise kernels are among these: the norms, rotations and sums of a layer that is not fused are made of
them, and their names do not distinguish them.

On the CPU, operators stand for kernels, so that this can be rehearsed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu.machine import wait
from bench.tables import table

OTHER, MIXERS = "other", "mixers"
OURS = {
    "total": "products",
    "attend": "attention", "merge": "attention", "plan": "attention", "attend_segments": "attention",
    "cut_segments": "attention", "add_norm": "norms",
    "rope_write": "rope, write", "write_rows": "rope, write", "gate": "activation",
    "coded_rows": "products", "plain_weight": "products",
    "convolve": MIXERS, "few_tokens": MIXERS, "chunk_systems": MIXERS, "solve_systems": MIXERS,
    "many_tokens": MIXERS, "gated_norm": MIXERS, "short_convolution": MIXERS, "gate_heads": "activation",
    "product_row": "products", "product_rows": "products", "product_tile": "products",
    "tile_scores": "draw", "draw_rows": "draw",
}  # fmt: skip
# The first that is found in a name, in this order: flash-attn's names hold "cutlass".
PARTS = (
    ("attention", r"flash|fmha|attention|softmax"),
    ("products", r"nvjet|cutlass|cublas|gemm|gemv|xmma|splitk|wgmma|dot_kernel"),
    ("draw", r"argmax|topk|sort|gumbel|draw_"),
    ("norms", r"meanops|rsqrt|rms_?norm|layer_?norm"),
    ("rope, write", r"catarray|index_copy|index_put|neg_kernel|cos_kernel|sin_kernel|write_quantised"),
    ("activation", r"silu|gelu|swiglu"),
    ("copies", r"memcpy|memset|copy_kernel|fillfunctor|gather|index_?select|index_kernel|arange"),
)
KINDS = ("products", "attention", MIXERS, "norms", "rope, write", "activation", "draw", "copies", OTHER)
_LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
_GRAPH_LAUNCH = "cudaGraphLaunch"
MAX_NAME = 160  # characters of a kernel's name in the table
SMALL = 0.01


def kind_of(name: str) -> str:
    if (kind := OURS.get(name)) is not None:
        return kind
    found = (kind for kind, part in PARTS if re.search(part, name, re.IGNORECASE))
    return next(found, OTHER)


@dataclass
class KernelSums:
    """The kernels of one call. sums: by kernel name, how many and microseconds. num_launches: kernels that
    the host launched one by one. num_replays: recorded graphs that it launched."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    num_launches: float = 0.0
    num_replays: float = 0.0

    @property
    def num_kernels(self) -> float:
        return sum(count for count, _ in self.sums.values())

    @property
    def busy_us(self) -> float:
        return sum(us for _, us in self.sums.values())

    def by_kind(self) -> dict[str, tuple[float, float]]:
        """Kinds that are there, in the order of KINDS."""
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for name, numbers in self.sums.items():
            found[kind_of(name)].append(numbers)
        return {kind: _total(found[kind]) for kind in KINDS if kind in found}

    def others(self) -> dict[str, tuple[float, float]]:
        """Names of no kind, the longest time first."""
        names = [name for name in self.sums if kind_of(name) == OTHER]
        return {name: self.sums[name] for name in sorted(names, key=lambda name: -self.sums[name][1])}

    def record(self) -> dict[str, object]:
        """The sums as JSON holds them."""
        return {
            "kernels": self.num_kernels, "busy_us": self.busy_us, "launches": self.num_launches,
            "replays": self.num_replays, "kinds": self.by_kind(), "others": self.others(),
        }  # fmt: skip


def _total(numbers: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(count for count, _ in numbers), sum(us for _, us in numbers)


def kernels_of(work: Callable[[], object], device: torch.device) -> KernelSums:
    """The kernels of one call, on average. Two calls come first, which are not counted. Blocks."""
    calls = 3 if device.type == "cuda" else 1  # a rehearsal: the profiler takes longer than the calls
    for _ in range(2):
        work()
    wait(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as seen:
        for _ in range(calls):
            work()
        wait(device)
    return summed(seen.key_averages(), device.type == "cuda", calls)


def summed(events: Iterable[Any], is_cuda: bool, calls: int) -> KernelSums:
    """events: the profiler's, one for each name and device."""
    result = KernelSums()
    for event in events:
        if is_cuda and event.device_type != DeviceType.CUDA:
            result.num_launches += event.count / calls if event.key in _LAUNCHES else 0
            result.num_replays += event.count / calls if event.key == _GRAPH_LAUNCH else 0
            continue
        us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        if us > 0:
            count, before_us = result.sums.get(event.key, (0.0, 0.0))
            result.sums[event.key] = (count + event.count / calls, before_us + us / calls)
    return result


def kernel_table(records: Sequence[Mapping[str, Any]]) -> str:
    """A table of records that `KernelSums.record` has made, each with its step's name as `what`: number and
    microseconds of each kind, and below the names of no kind."""
    heads = ("step", "kernels", "busy, us", "launched by the host", *KINDS)
    rows = []
    for record in records:
        kinds = [record["kinds"].get(kind) for kind in KINDS]
        host = f"{record['launches']:.0f} and {record['replays']:.0f} graphs"
        cells = ("–" if each is None else f"{each[0]:.0f} · {each[1]:.0f}" for each in kinds)
        rows.append((record["what"], f"{record['kernels']:.0f}", f"{record['busy_us']:.0f}", host, *cells))
    names = [line for record in records for line in _other_lines(record)]
    return "\n".join((*table(heads, rows), "", *names))


def _other_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """One for each name; names that take less than SMALL of the step's time share one."""
    least_us = SMALL * record["busy_us"]
    small = [numbers for numbers in record["others"].values() if numbers[1] < least_us]
    for name, (count, us) in record["others"].items():
        if us >= least_us:
            yield f"other, {record['what']}: {count:.0f} · {us:.0f} us  {name[:MAX_NAME]}"
    if small:
        count, us = _total(small)
        yield f"other, {record['what']}: {count:.0f} · {us:.0f} us  {len(small)} more names"
