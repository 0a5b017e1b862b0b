"""The parts of a GPU run. Each gives its measurements as they come: `what`, and numbers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.gpu import served
from bench.gpu.machine import DeviceSpeed, measure_machine, nominal_bytes_per_s
from bench.gpu.models import SHAPES, write_checkpoint
from bench.gpu.offline import OFFLINE_RUN, offline_requests
from bench.gpu.served import Measurements
from bench.gpu.steps import StepSizes, StepTiming, attention_step, model_steps
from bench.gpu.throughput import EngineAlone
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import KvCacheDtype, kv_segments
from kv_transfer.agents.transport_probe import probe_transport
from kv_transfer.codecs.checksum import BlockSums
from kv_transfer.codecs.quantisation import CODECS
from kv_transfer.codecs.wire_memory import Wire

SAID_LINES = 40  # of what pytest says
BATCHES, CONTEXT = (1, 8, 32, 64, 128, 256), 2048
REHEARSED = StepSizes((1, 2), 32, chunk=24, beside=2, prompt=48)
CASES = ((1, 8192), (16, 2048), (64, 8192))  # of attention: answers, and tokens that each of them sees
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
    """Whole steps as workers compute them, and the kernels of each."""
    speed = _speed(rehearse)
    sizes = REHEARSED if rehearse else StepSizes(batches, CONTEXT, chunk=512, beside=32, prompt=2048)
    for name in ("tiny",) if rehearse else names:
        for kv_cache_dtype in formats:
            for timing in model_steps(name, speed, kv_cache_dtype, sizes):
                yield {**_told(timing, speed), "kv": kv_cache_dtype}
                yield {"what": f"{timing.what}, {kv_cache_dtype} KV", "kernels_of": timing.kernels.record()}


def attention(
    cases: Sequence[tuple[int, int]], formats: Sequence[tuple[KvCacheDtype, int]], rehearse: bool
) -> Measurements:
    """Of 7B's heads. cases: answers, and tokens that each of them sees."""
    speed, name = _speed(rehearse), "tiny" if rehearse else "7b"
    with torch.inference_mode():
        for batch, context in [(2, 32)] if rehearse else cases:
            for kv, size in formats:
                title = f"{name} attention, {kv} KV, blocks of {size}, {batch} × {context}"
                timing = attention_step(title, kv, size, SHAPES[name], batch, context, speed)
                yield _told(timing, speed)


def throughput_engine(rehearse: bool) -> Measurements:
    """nano-vllm's run on the engine alone."""
    speed = _speed(rehearse)
    requests = offline_requests(4, (5, 20), 99) if rehearse else offline_requests()
    with tempfile.TemporaryDirectory() as folder:
        if rehearse:
            model = write_checkpoint(SHAPES["tiny"], Path(folder), speed.device, speed.dtype)
        else:
            model = served.offline_model()
        engine = EngineAlone(model, speed)
    seconds = engine.compute(requests)
    rate = engine.num_tokens / seconds
    yield {"what": OFFLINE_RUN, "tokens_per_s": rate, "s": seconds, "num_tokens": engine.num_tokens}


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


def _told(timing: StepTiming, speed: DeviceSpeed) -> dict[str, object]:
    """us: until the tokens are on the host; step_us: until the device has computed them."""
    how = "recorded" if timing.kernels.num_replays else "from Python"
    times = {"us": 1e6 * timing.seconds, "step_us": 1e6 * timing.step_s, "of_bound": timing.share}
    return {"what": timing.what, "how": how, **times, **_of_nominal(speed, timing.share)}


def _of_nominal(speed: DeviceSpeed, share: float) -> dict[str, float]:
    """`share`: of the copy. Without the product's figures: nothing."""
    nominal = nominal_bytes_per_s(speed.device)
    return {} if nominal is None else {"of_nominal": share * speed.bytes_per_s / nominal}


# What one run answers, most telling first: as far as it comes in RUN_S. A limit is what a part may take if it
# is slower than it should be.
RUN_S = 480.0
RUN: dict[str, Part] = {
    "machine": Part(30, machine),
    "equal-whole": Part(80, partial(served.equality, "whole")),
    "steps": Part(150, partial(steps, ("0.5b", "7b"), ("auto",), (1, 32, 64))),
    "attention-int8": Part(30, partial(attention, CASES[-1:], FORMATS[:1])),
    "throughput": Part(110, served.throughput),
    "load-whole": Part(65, partial(served.load, "whole", "raw")),
    "throughput-engine": Part(70, throughput_engine),
    "equal-e-p-d": Part(70, partial(served.equality, "e-p-d")),
    "wire": Part(25, wire),
    "transfer": Part(30, transfer),
    "load-raw": Part(75, partial(served.load, "e-p-d", "raw")),
    "load-int8": Part(75, partial(served.load, "e-p-d", "int8")),
}
# Longer looks.
MORE: dict[str, Part] = {
    "tests": Part(300, unit_tests),
    "steps-0.5b": Part(180, partial(steps, ("0.5b",), ("auto", "int8"), BATCHES)),
    "steps-7b": Part(240, partial(steps, ("7b",), ("auto", "int8"), BATCHES)),
    "attention": Part(90, partial(attention, CASES, FORMATS)),
}
PARTS = RUN | MORE
