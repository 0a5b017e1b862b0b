"""The parts of a GPU run. Each gives its measurements as they come: `what`, and numbers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bench.gpu import served
from bench.gpu.served import Measurements
from bench.gpu.steps import (
    SHAPES,
    DeviceSpeed,
    TableLine,
    attention_row,
    measure_machine,
    model_rows,
    nominal_bytes_per_s,
)  # fmt: skip
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import KvCacheDtype, kv_segments
from kv_transfer.agents.transport_probe import probe_transport
from kv_transfer.codecs.checksum import BlockSums
from kv_transfer.codecs.quantisation import CODECS
from kv_transfer.codecs.wire_memory import Wire

SAID_LINES = 40  # of what pytest says
BATCHES, CONTEXT = (1, 8, 32, 64, 128, 256), 2048
FORMATS: tuple[tuple[KvCacheDtype, int], ...] = (("int8", 16), ("auto", 16), ("auto", 256))


@dataclass(frozen=True)
class Part:
    """limit_s: its process is killed then. run(rehearse): `rehearse`: on the CPU, tiny."""

    limit_s: float
    run: Callable[[bool], Measurements]


def machine(rehearse: bool) -> Measurements:
    speed = _speed(rehearse)
    yield {"what": "copy", "gb_per_s": speed.bytes_per_s / 1e9, **_of_nominal(speed, 1.0)}
    yield {"what": "matrix product", "tflop_per_s": speed.flops_per_s / 1e12}


def unit_tests(rehearse: bool) -> Measurements:
    """tests/gpu. Without a GPU all of them are skipped. `says`: the last lines, one for each test that failed
    among them."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "tests/gpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    says = done.stdout.strip().splitlines()[-SAID_LINES:]
    yield {"what": "tests/gpu", "ok": done.returncode in (0, 5), "says": says}


def steps(
    names: Sequence[str], formats: Sequence[KvCacheDtype], batches: Sequence[int], rehearse: bool
) -> Measurements:
    """Decode with graphs and without, and prefill."""
    speed = _speed(rehearse)
    with torch.inference_mode():
        for name in ("tiny",) if rehearse else names:
            for kv_cache_dtype in formats:
                sizes, context = ((1, 2), 32) if rehearse else (batches, CONTEXT)
                for line in model_rows(name, speed, kv_cache_dtype, sizes, context):
                    yield {**_told(line, speed), "kv": kv_cache_dtype}


def attention(rehearse: bool) -> Measurements:
    speed = _speed(rehearse)
    cases = [("tiny", 2, 32)] if rehearse else [("7b", 1, 8192), ("7b", 16, 2048), ("7b", 64, 8192)]
    with torch.inference_mode():
        for name, batch, context in cases:
            for kv, size in FORMATS:
                title = f"{name} attention, {kv} KV, blocks of {size}, {batch} × {context}"
                line = attention_row(title, kv, size, SHAPES[name], batch, context, speed)
                yield _told(line, speed)


def wire(rehearse: bool) -> Measurements:
    """Codecs, against a copy that reads and writes as many bytes, and checksums, of 7B's KV."""
    speed = _speed(rehearse)
    layout = MemoryLayout(kv_segments([(4, 128)] * (4 if rehearse else 56), 16, speed.dtype))
    kv = BlockMemory(layout, 64, speed.device)
    for segment in kv.segments:
        segment.normal_()
    for codec in CODECS:
        wire = Wire(kv, codec, 1024)
        for what, coding in (("codes", wire.encoding), ("decodes", wire.decoding)):
            rate = 1 / coding.s_per_byte
            of_copy = rate * (1 + wire.ratio) / speed.bytes_per_s
            yield {"what": f"{codec} {what}", "gb_per_s": rate / 1e9, "of_copy": of_copy}
    took_s = min(_summed_in(kv) for _ in range(5))
    yield {"what": "checksum", "gb_per_s": kv.buffer.numel() / 1e9 / took_s}


def _summed_in(kv: BlockMemory) -> float:
    """Seconds, until the host has the sum."""
    sums = BlockSums(kv)
    start = time.perf_counter()
    found = sums.of(range(kv.num_blocks))
    sums.begin()
    kv.synchronize()
    found.value()
    return time.perf_counter() - start


def transfer(rehearse: bool) -> Measurements:
    """Between two processes on one device, by NIXL."""
    speed = probe_transport(torch.device("cpu" if rehearse else "cuda"))
    yield {"what": "NIXL between two processes", "gb_per_s": speed / 1e9}


def _speed(rehearse: bool) -> DeviceSpeed:
    if rehearse:
        return measure_machine(torch.device("cpu"), torch.float32, scale=256)
    return measure_machine(torch.device("cuda"), torch.bfloat16, scale=1)


def _told(line: TableLine, speed: DeviceSpeed) -> dict[str, object]:
    share = line.bound_s / line.seconds
    return {"what": line.what, "us": 1e6 * line.seconds, "of_bound": share, **_of_nominal(speed, share)}


def _of_nominal(speed: DeviceSpeed, share: float) -> dict[str, float]:
    """`share`: of the copy. Without the product's figures: nothing."""
    nominal = nominal_bytes_per_s(speed.device)
    return {} if nominal is None else {"of_nominal": share * speed.bytes_per_s / nominal}


# What one run of eight minutes answers, most telling first.
RUN: dict[str, Part] = {
    "machine": Part(20, machine),
    "equal-whole": Part(70, partial(served.equality, "whole")),
    "equal-e-p-d": Part(70, partial(served.equality, "e-p-d")),
    "load-raw": Part(75, partial(served.load, "e-p-d", "raw")),
    "load-int8": Part(75, partial(served.load, "e-p-d", "int8")),
    "load-whole": Part(65, partial(served.load, "whole", "raw")),
    "transfer": Part(30, transfer),
    "wire": Part(25, wire),
    "steps": Part(50, partial(steps, ("0.5b", "7b"), ("auto",), (1, 32))),
}
# Longer looks.
MORE: dict[str, Part] = {
    "tests": Part(300, unit_tests),
    "steps-0.5b": Part(180, partial(steps, ("0.5b",), ("auto", "int8"), BATCHES)),
    "steps-7b": Part(240, partial(steps, ("7b",), ("auto", "int8"), BATCHES)),
    "attention": Part(90, attention),
}
PARTS = RUN | MORE
