"""The parts of a GPU run. Each gives its measurements as they come: `what`, and numbers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from bench import reading
from bench.gpu import adapters, encoders, experts, formats, hybrids, served
from bench.gpu.kernels import kernels_of
from bench.gpu.machine import DeviceSpeed, measure_machine, median_s, nominal_bytes_per_s, release, replayed_s
from bench.gpu.models import SHAPES, write_checkpoint
from bench.gpu.offline import OFFLINE_RUN, offline_requests, tokens_read
from bench.gpu.served import Measurements
from bench.gpu.steps import StepSizes, StepTiming, attention_step, model_steps
from bench.gpu.throughput import EngineAlone
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.cuda.products import CANDIDATES, limit_of, product_of_few
from cluster.model.kv_format import KvCacheDtype, kv_segments
from cluster.model.sampling import sample
from cluster.types.request import SamplingParams
from kv_transfer.agents.transport_probe import probe_transport
from kv_transfer.codecs.checksum import BlockSums
from kv_transfer.codecs.quantisation import CODECS
from kv_transfer.codecs.wire_memory import Wire

SAID_LINES = 40  # of what pytest says
BATCHES, CONTEXT = (1, 8, 32, 64, 128, 256), 2048
REHEARSED = StepSizes((1, 2), 32, chunk=24, beside=2, prompt=48)
CASES = ((1, 8192), (16, 2048), (64, 8192))  # of attention: answers, and tokens that each of them sees
_CACHE_BYTES = 200e6  # more than any cache holds
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
    """Measures the attention of 7B's heads. cases: answers, and tokens that each of them sees."""
    speed, name = _speed(rehearse), "tiny" if rehearse else "7b"
    with torch.inference_mode():
        for batch, context in [(2, 32)] if rehearse else cases:
            for kv, size in formats:
                title = f"{name} attention, {kv} KV, blocks of {size}, {batch} × {context}"
                timing = attention_step(title, kv, size, SHAPES[name], batch, context, speed)
                yield _told(timing, speed)


def throughput_engine(rehearse: bool) -> Measurements:
    """nano-vllm's run on the engine alone. of_bound: the time in which bandwidth and peak allow it, if as
    many steps as the longest answer has read the weights, over the time it took."""
    speed = _speed(rehearse)
    requests = offline_requests(4, (5, 20), 99) if rehearse else offline_requests()
    shape = SHAPES["tiny" if rehearse else served.OFFLINE_MODEL]
    with tempfile.TemporaryDirectory() as folder:
        if rehearse:
            model = write_checkpoint(shape, Path(folder), speed.device, speed.dtype)
        else:
            model = served.offline_model()
        engine = EngineAlone(model, speed)
    seconds = engine.compute(requests)
    weight_bytes = max(each.num_tokens for each in requests) * shape.num_weights * speed.dtype.itemsize
    read_s = (weight_bytes + tokens_read(requests) * engine.token_bytes) / speed.bytes_per_s
    products = 2 * shape.layer_weights * sum(len(each.prompt) for each in requests)
    yield {
        "what": OFFLINE_RUN, "tokens_per_s": engine.num_tokens / seconds, "s": seconds,
        "num_tokens": engine.num_tokens, "num_steps": engine.num_steps,
        "of_bound": (read_s + products / speed.flops_per_s) / seconds,
    }  # fmt: skip


def wire(rehearse: bool) -> Measurements:
    """Codecs and checksums of 7B's KV. gb_per_s: as a worker measures them for a prompt of 2,048 tokens, and
    checksums of as much, until the host knows that they are done. device_gb_per_s: what the device's kernels
    need of it. of_copy: against a copy that reads and writes as many bytes."""
    speed = _speed(rehearse)
    layout = MemoryLayout(kv_segments([(4, 128)] * (4 if rehearse else 56), 16, speed.dtype))
    kv = BlockMemory(layout, 128, speed.device)
    for segment in kv.segments:
        segment.normal_()
    num_bytes, groups = kv.buffer.numel(), [range(4 * i, 4 * i + 4) for i in range(kv.num_blocks // 4)]
    for codec in CODECS:
        wire = Wire(kv, codec, kv.num_blocks * 16)
        layers = range(wire.codec.num_layers)

        def encode(wire: Wire = wire, layers: range = layers) -> None:
            wire.encode(groups, range(len(groups)), layers)
            wire.begin()

        def decode(wire: Wire = wire) -> None:
            wire.decode(range(len(groups)), groups)
            wire.begin()

        for what, coding, work in (("codes", wire.encoding, encode), ("decodes", wire.decoding, decode)):
            rate = 1 / coding.s_per_byte
            of_copy = rate * (1 + wire.ratio) / speed.bytes_per_s
            on_device = _device_rate(work, num_bytes, speed)
            yield {"what": f"{codec} {what}", "gb_per_s": rate / 1e9, "of_copy": of_copy, **on_device}
    sums = BlockSums(kv)

    def sum_all() -> None:
        found = sums.of(range(kv.num_blocks))
        sums.begin()
        kv.synchronize()
        found.value()

    rate = num_bytes / 1e9 / median_s(sum_all, speed.device, 5)
    yield {"what": "checksum", "gb_per_s": rate, **_device_rate(sum_all, num_bytes, speed)}


def _device_rate(work: Callable[[], None], num_bytes: int, speed: DeviceSpeed) -> dict[str, float]:
    """The rate by the profiler. Nothing on the CPU, whose native code it does not see."""
    if speed.device.type != "cuda":
        return {}
    return {"device_gb_per_s": num_bytes / 1e3 / kernels_of(work, speed.device).busy_us}


def products(rehearse: bool) -> Measurements:
    """Matrices of decode steps, times few tokens, from graphs and by turns on several copies, so that none is
    read from the cache. us: by our kernels, by each cut that is tried when a model is loaded; torch_us: by
    cuBLAS."""
    speed, sizes = _speed(rehearse), ((1, 16) if rehearse else (1, 4, 16, 32, 64))
    for name in ("tiny",) if rehearse else ("0.5b", "7b"):
        for matrix, (num_outputs, width) in SHAPES[name].matrices.items():
            num_bytes = num_outputs * width * speed.dtype.itemsize
            weights = [
                torch.randn(num_outputs, width, device=speed.device, dtype=speed.dtype)
                for _ in range(min(24, 2 + int(_CACHE_BYTES // num_bytes)))
            ]
            for num_tokens in sizes:
                x = torch.randn(num_tokens, width, device=speed.device, dtype=speed.dtype)
                theirs = replayed_s([partial(F.linear, x, weight) for weight in weights], speed.device)
                for cut in CANDIDATES[limit_of(num_tokens) or 1]:
                    # which needs triton
                    few = F.linear if rehearse else partial(product_of_few, cut=cut)
                    ours = replayed_s([partial(few, x, weight, None) for weight in weights], speed.device)
                    yield {
                        "what": f"{name} {matrix}, {num_tokens} tokens, {cut}", "us": 1e6 * ours,
                        "torch_us": 1e6 * theirs, "gb_per_s": num_bytes / 1e9 / ours,
                    }  # fmt: skip


def weight_formats(rehearse: bool) -> Measurements:
    """Steps with linears that keep their codes, against bfloat16."""
    yield from formats.measure(_speed(rehearse), rehearse)


def steps_with_adapters(rehearse: bool) -> Measurements:
    """Steps of answers with 0, 1 and 8 adapters."""
    yield from adapters.measure(_speed(rehearse), rehearse)


def hybrid_steps(rehearse: bool) -> Measurements:
    """Steps of a hybrid model, by kernels and by transformers' code for its mixers."""
    yield from hybrids.measure(_speed(rehearse), rehearse)


def draws(rehearse: bool) -> Measurements:
    """Draws of whole vocabularies. us: until the tokens are on the host; device_us: what the device's kernels
    need of it."""
    device = torch.device("cpu" if rehearse else "cuda")
    vocab_size = 999 if rehearse else 151_936
    plain = SamplingParams(temperature=0.8, seed=1)
    both = SamplingParams(temperature=0.8, top_k=20, top_p=0.8, seed=1)
    most, floor = (
        SamplingParams(temperature=0.8, top_p=p, min_p=m, seed=1) for p, m in ((0.95, 0.0), (1.0, 0.05))
    )
    kinds = {
        "greedy": [SamplingParams()], "T = 0.8": [plain], "T = 0.8, top-k 20, top-p 0.8": [both],
        "T = 0.8, top-p 0.95": [most], "all kinds by turns": [SamplingParams(), plain, both, most, floor],
    }  # fmt: skip
    for num_rows in (1, 2) if rehearse else (1, 64):
        logits = 3 * torch.randn(num_rows, vocab_size, device=device)
        for kind, params in kinds.items():
            asked = [params[row % len(params)] for row in range(num_rows)]
            work = partial(sample, logits, asked, range(num_rows))
            record = {"what": f"{num_rows} rows, {kind}", "us": 1e6 * median_s(work, device, 20)}
            yield record if rehearse else {**record, "device_us": kernels_of(work, device).busy_us}


def encoder(rehearse: bool) -> Measurements:
    """Latencies of towers of 12 and 24 blocks."""
    yield from encoders.latencies(_speed(rehearse), rehearse)


def encoder_batches(rehearse: bool) -> Measurements:
    """Latencies by modality, size and number of items."""
    yield from encoders.batches(_speed(rehearse), rehearse)


def experts_of_a_layer(rehearse: bool) -> Measurements:
    """Products of experts."""
    yield from experts.times(_speed(rehearse), rehearse)


def preparing(rehearse: bool) -> Measurements:
    """Images and clips that threads of one process, or so many processes, prepare at once; on the CPUs of the
    machine."""
    from bench import DEMO_MODEL
    from bench.encoder.preparing import measure  # needs PyAV

    for record in measure(DEMO_MODEL, (0,) if rehearse else (0, 1, 2, 4, 8), 1):
        way = f"{record['processes']} processes" if record["processes"] else "threads"
        rates = {f"{how}_per_s": record["items"] / record[f"{how}_s"] for how in ("alone", "encoded")}
        lags = {name: 1e6 * record[f"lag_{name}_s"] for name in ("p50", "p99")}
        yield {
            "what": f"{record['kind']}, {way}",
            **rates,
            "lag_p50_us": lags["p50"],
            "lag_p99_us": lags["p99"],
        }


def loading(rehearse: bool) -> Measurements:
    """A text model's weights in the device's memory, against reading the same files. of_read: the median of
    the rounds' ratios. The files lie where temporary files do."""
    name, rounds = ("tiny", 1) if rehearse else ("7b", 3)
    device, dtype = torch.device("cpu" if rehearse else "cuda"), torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(SHAPES[name], Path(folder), device, dtype)
        release(device)
        for what, reads, loads in reading.measure(Path(folder), dtype, device, rounds):
            yield {
                "what": f"{name}, {what}", "read_s": median(reads), "load_s": median(loads),
                "of_read": median(load / read for load, read in zip(loads, reads, strict=True)),
            }  # fmt: skip


def transfer(rehearse: bool) -> Measurements:
    """Measures transfers between two processes on one device, by NIXL."""
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
    "draws": Part(20, draws),
    "encoder": Part(25, encoder),
    "wire": Part(25, wire),
    "transfer": Part(30, transfer),
    "load-raw": Part(75, partial(served.load, "e-p-d", "raw")),
    "images-e-p-d": Part(90, partial(served.image_load, "e-p-d")),
    "load-int8": Part(75, partial(served.load, "e-p-d", "int8")),
    "formats": Part(120, weight_formats),
}
# Longer looks.
MORE: dict[str, Part] = {
    "tests": Part(300, unit_tests),
    "clusters": Part(200, served.together),
    "steps-0.5b": Part(180, partial(steps, ("0.5b",), ("auto", "int8"), BATCHES)),
    "steps-7b": Part(240, partial(steps, ("7b",), ("auto", "int8"), BATCHES)),
    "attention": Part(90, partial(attention, CASES, FORMATS)),
    "products": Part(60, products),
    "experts": Part(120, experts_of_a_layer),
    "adapters": Part(120, steps_with_adapters),
    "hybrids": Part(300, hybrid_steps),
    "loading": Part(180, loading),
    "preparing": Part(90, preparing),
    "encoder-batches": Part(60, encoder_batches),
    "images-whole": Part(90, partial(served.image_load, "whole")),
    "images-two-encoders": Part(90, partial(served.image_load, "2e-p-d")),
}
PARTS = RUN | MORE
