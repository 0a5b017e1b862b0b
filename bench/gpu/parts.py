"""The parts of a GPU run. Each gives its measurements as they come: `what`, and numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import yaml

from bench.gpu.steps import SHAPES, DeviceSpeed, TableLine, attention_row, measure_machine, model_rows
from cluster.config.settings import REPOSITORY
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import KvCacheDtype, kv_segments
from kv_transfer.agents.transport_probe import probe_transport
from kv_transfer.codecs.checksum import BlockSums
from kv_transfer.codecs.quantisation import CODECS
from kv_transfer.codecs.wire_memory import Wire

READY_TIMEOUT_S = 150.0
SAID_LINES = 40  # of what pytest says
BATCHES, CONTEXT = (1, 8, 32, 64, 128, 256), 2048
FORMATS: tuple[tuple[KvCacheDtype, int], ...] = (("int8", 16), ("auto", 16), ("auto", 256))
Measurements = Iterator[Mapping[str, object]]


@dataclass(frozen=True)
class Part:
    """limit_s: its process is killed then. run(rehearse): `rehearse`: on the CPU, tiny."""

    limit_s: float
    run: Callable[[bool], Measurements]


def machine(rehearse: bool) -> Measurements:
    speed = _speed(rehearse)
    yield {"what": "copy", "gb_per_s": speed.bytes_per_s / 1e9}
    yield {"what": "matrix product", "tflop_per_s": speed.flops_per_s / 1e12}


def unit_tests(rehearse: bool) -> Measurements:
    """tests/gpu. Without a GPU all of them are skipped. `says`: the last lines, one for each test that failed
    among them."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "tests/gpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    says = done.stdout.strip().splitlines()[-SAID_LINES:]
    yield {"what": "tests/gpu", "ok": done.returncode in (0, 5), "says": says}


def steps(name: str, rehearse: bool) -> Measurements:
    """Decode with graphs and without, and prefill."""
    speed = _speed(rehearse)
    formats: tuple[KvCacheDtype, ...] = ("auto", "int8")
    with torch.inference_mode():
        for kv_cache_dtype in formats:
            shape, batches, context = ("tiny", (1, 2), 32) if rehearse else (name, BATCHES, CONTEXT)
            for line in model_rows(shape, speed, kv_cache_dtype, batches, context):
                yield {**_told(line), "kv": kv_cache_dtype}


def attention(rehearse: bool) -> Measurements:
    speed = _speed(rehearse)
    cases = [("tiny", 2, 32)] if rehearse else [("7b", 1, 8192), ("7b", 16, 2048), ("7b", 64, 8192)]
    with torch.inference_mode():
        for name, batch, context in cases:
            for kv, size in FORMATS:
                title = f"{name} attention, {kv} KV, blocks of {size}, {batch} × {context}"
                yield _told(attention_row(title, kv, size, SHAPES[name], batch, context, speed))


def codecs(rehearse: bool) -> Measurements:
    """Against a copy that reads and writes as many bytes."""
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


def served(roles: tuple[str, ...], shares: tuple[float, ...], rehearse: bool) -> Measurements:
    """A whole cluster in float32 on one device, whose greedy answers are compared with `generate`."""
    from cluster.serving.launch import LocalCluster  # Ray and HAProxy, which only these parts need
    from cluster.serving.ports import free_port

    config = yaml.safe_load((REPOSITORY / "deploy" / "cluster-one-gpu.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    application = config["applications"][0]
    application["args"] |= {"roles": list(roles), "dtype": "float32"}
    application["deployments"] = [
        {"name": role.capitalize(), "ray_actor_options": {"num_cpus": 1, "num_gpus": share}}
        for role, share in zip(roles, shares, strict=True)
    ]
    if rehearse:
        yield {"what": "would serve", "config": application}
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(yaml.safe_dump(config))
        with LocalCluster(path) as cluster:
            cluster.wait_ready(READY_TIMEOUT_S)
            command = [sys.executable, "-m", "bench.equality", "--url", f"http://127.0.0.1:{port}"]
            command += ["--num-requests", "60", "--concurrency", "1", "8"]
            done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield {"what": "answers of a cluster", "roles": list(roles), **json.loads(line)}
    yield {"what": "all equal to generate", "roles": list(roles), "ok": done.returncode == 0}


def _speed(rehearse: bool) -> DeviceSpeed:
    if rehearse:
        return measure_machine(torch.device("cpu"), torch.float32, scale=256)
    return measure_machine(torch.device("cuda"), torch.bfloat16, scale=1)


def _told(line: TableLine) -> Mapping[str, object]:
    return {"what": line.what, "us": 1e6 * line.seconds, "of_bound": line.bound_s / line.seconds}


PARTS: Mapping[str, Part] = {
    "machine": Part(60, machine),
    "tests": Part(300, unit_tests),
    "steps-0.5b": Part(180, partial(steps, "0.5b")),
    "steps-7b": Part(240, partial(steps, "7b")),
    "attention": Part(90, attention),
    "codecs": Part(60, codecs),
    "transfer": Part(100, transfer),
    "epd": Part(230, partial(served, ("whole",), (1.0,))),
    "e-pd": Part(230, partial(served, ("encode", "language"), (0.2, 0.8))),
}
