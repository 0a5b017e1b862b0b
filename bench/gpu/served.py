"""Whole clusters on one GPU: their answers against `generate`, and their times under load.

The load is that of `bench.engine`: prompts of random words, answers of forced lengths, a closed loop of so
many clients. *Handover* is the gap between the first and the second chunk of a stream: where pools are apart,
the first token is drawn by the worker that computed the prompt and the second one by another. Needs Ray and
HAProxy.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from bench import REPOSITORY
from bench.engine.models import TEXT_MODEL, VISION_MODEL
from bench.gpu.offline import OFFLINE_RUN, ClientReport, ask_all
from bench.metrics import grown, model_id, page, samples

READY_TIMEOUT_S = 150.0
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
CONFIG = REPOSITORY / "deploy" / "cluster-one-gpu.yaml"
EPD_KV_BLOCKS = {"prefill": {"kv_blocks": 4096}, "decode": {"kv_blocks": 8192}}
# Of each role the number of workers, and the part of the GPU that Ray counts for each.
TOPOLOGIES: Mapping[str, Mapping[str, tuple[int, float]]] = {
    "whole": {"whole": (1, 1.0)},
    "e-p-d": {"encode": (1, 0.2), "prefill": (1, 0.4), "decode": (1, 0.4)},
    "2e-p-d": {"encode": (2, 0.1), "prefill": (1, 0.4), "decode": (1, 0.4)},
}
# Of `whole` where several clusters share the GPU, and in nano-vllm's run.
SHARED_KV_BLOCKS = {"prefill": {"kv_blocks": 2000}, "decode": {"kv_blocks": 6000}}
OFFLINE_KV_BLOCKS = {"prefill": {"kv_blocks": 2000}, "decode": {"kv_blocks": 12_000}}
# Row, clients, requests.
LOADS = (("text-128/64", 1, 8), ("text-128/64", 16, 64), ("text-1024/32", 16, 48))
IMAGE_LOADS = tuple(("image/32", clients, max(8, 2 * clients)) for clients in (1, 4, 16, 32))
MODELS = Path(tempfile.gettempdir()) / "epdg-bench-gpu"  # written once, by the first part that needs it
LINK = "epdg_transfer_link_bytes_per_second"
STAGES = "epdg_ttft_stage_seconds"
OFFLINE_MODEL = "0.6b"
Measurements = Iterator[Mapping[str, object]]
_turn = threading.Lock()  # one cluster is measured at a time


def together(rehearse: bool) -> Measurements:
    """Starts six clusters at once, because most of their time is their start, and measures them one after the
    other. Records have the names of the parts that measure each alone; "ready" is not theirs."""
    jobs: dict[str, Callable[[bool], Measurements]] = {
        "load-whole": partial(load, "whole", "raw", kv=SHARED_KV_BLOCKS),
        "load-raw": partial(load, "e-p-d", "raw"),
        "load-int8": partial(load, "e-p-d", "int8"),
        "throughput": partial(throughput, kv=OFFLINE_KV_BLOCKS),
        "equal-whole": partial(equality, "whole", kv=SHARED_KV_BLOCKS),
        "equal-e-p-d": partial(equality, "e-p-d"),
    }
    if not rehearse:  # before several write them
        written(TEXT_MODEL), offline_model()
    found: SimpleQueue[Mapping[str, object] | None] = SimpleQueue()

    def measure(part: str, job: Callable[[bool], Measurements]) -> None:
        try:
            for record in job(rehearse):
                if record["what"] != "ready":
                    found.put({"part": part, **record})
        except Exception as error:
            found.put({"part": part, "what": "end", "ok": False, "s": 0.0, "why": repr(error)})
        finally:
            found.put(None)

    for part, job in jobs.items():
        threading.Thread(target=measure, args=(part, job), name=part, daemon=True).start()
    num_running = len(jobs)
    while num_running:
        if (record := found.get()) is None:
            num_running -= 1
        else:
            yield record


def equality(topology: str, rehearse: bool, kv: Mapping[str, Any] = NO_FIELDS) -> Measurements:
    """Compares greedy answers over HTTP with `generate`, in float32. `kv`: fields of the cluster."""
    content = configuration(topology, {"dtype": "float32", **kv})
    if rehearse:
        yield {"what": "would serve", "config": content["applications"][0]}
        return
    began = time.monotonic()
    with running(content) as url:
        yield {"what": "ready", "s": time.monotonic() - began}
        command = [sys.executable, "-m", "bench.equality", "--url", url]
        command += ["--num-requests", "60", "--concurrency", "1", "8"]
        with _turn:
            done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield {"what": "answers of a cluster", **json.loads(line)}
    yield {"what": "all equal to generate", "ok": done.returncode == 0}


def load(topology: str, codec: str, rehearse: bool, kv: Mapping[str, Any] = NO_FIELDS) -> Measurements:
    """Measures a load in bfloat16, with random weights of Qwen2.5-0.5B's shape. `codec`: `transfer.codec`."""
    yield from _loads(topology, codec, TEXT_MODEL, LOADS, rehearse, kv)


def image_load(topology: str, rehearse: bool) -> Measurements:
    """Measures requests with a new image of 224² each, in bfloat16, by a model of Qwen2.5-VL's form with
    random weights. encode_ms: of a request's time to first token, on average, what the image's encoder
    adds."""
    yield from _loads(topology, "raw", VISION_MODEL, IMAGE_LOADS, rehearse, NO_FIELDS)


def _loads(
    topology: str, codec: str, model: str, loads: Sequence[tuple[str, int, int]], rehearse: bool,
    kv: Mapping[str, Any],
) -> Measurements:  # fmt: skip
    content = configuration(topology, {"dtype": "bfloat16", "transfer": {"codec": codec}, **kv})
    if rehearse:
        yield {"what": "would serve", "config": content["applications"][0]}
        return
    began = time.monotonic()
    with running(content, EPDG_MODEL=str(written(model))) as url:
        yield {"what": "ready", "s": time.monotonic() - began}
        with _turn:
            _asked(url, loads[0][0], 4, 8)  # what is compiled or allocated once
            for name, concurrency, num_requests in loads:
                yield {"what": f"{name} at {concurrency}", **_asked(url, name, concurrency, num_requests)}
        links = [each.value for each in samples(page(url), LINK)]
    if links:
        yield {"what": "fastest measured link", "gb_per_s": max(links) / 1e9}


def throughput(rehearse: bool, kv: Mapping[str, Any] = NO_FIELDS) -> Measurements:
    """nano-vllm's run over HTTP, by clients in several processes."""
    content = configuration("whole", {"dtype": "bfloat16", **kv})
    if rehearse:
        yield {"what": "would serve", "config": content["applications"][0]}
        return
    folder = offline_model()
    began = time.monotonic()
    with running(content, EPDG_MODEL=str(folder)) as url:
        yield {"what": "ready", "s": time.monotonic() - began}
        with _turn:
            _asked(url, "text-128/64", 4, 8)  # what is compiled or allocated once
            yield {"what": OFFLINE_RUN, **_joined(ask_all(url, model_id(url)))}


def _joined(reports: Sequence[ClientReport]) -> Mapping[str, object]:
    wall_s = max(report.ended_at for report in reports) - min(report.started_at for report in reports)
    failures = [failure for report in reports for failure in report.failures]
    return {
        "tokens_per_s": sum(report.num_tokens for report in reports) / wall_s,
        "s": wall_s,
        "num_prompt_tokens": sum(report.num_prompt_tokens for report in reports),
        "num_tokens": sum(report.num_tokens for report in reports),
        **_times("ttft", [each for report in reports for each in report.ttfts_s]),
        **_times("itl", [each for report in reports for each in report.gaps_s]),
        "num_failed": len(failures),
        "failures": sorted(set(failures))[:3],
    }


def configuration(topology: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """A Serve configuration for one GPU, on a free port."""
    from bench import clusters

    roles = TOPOLOGIES[topology]
    content = clusters.configuration(base=CONFIG)
    application = content["applications"][0]
    application["args"] |= {"roles": list(roles), **({} if topology == "whole" else EPD_KV_BLOCKS), **args}
    application["deployments"] = [
        {
            "name": role.capitalize(),
            "num_replicas": num,
            "ray_actor_options": {"num_cpus": 1, "num_gpus": share},
        }
        for role, (num, share) in roles.items()
    ]
    return content


@contextmanager
def running(content: Mapping[str, Any], **environment: str) -> Iterator[str]:
    """The URL of a cluster that is ready. Its lines of progress go to stderr."""
    from bench import clusters

    with clusters.running(content, say=_say, ready_s=READY_TIMEOUT_S, **environment) as cluster:
        yield cluster.url


def written(model: str) -> Path:
    """One of `bench.engine`'s models."""
    from bench.engine.models import write_model

    folder = MODELS / model
    if not (folder / "config.json").exists():
        write_model(folder)
    return folder


def offline_model() -> Path:
    """Drawn on the CPU: a context on the GPU would take memory from the cluster."""
    import torch

    from bench.gpu.models import SHAPES, write_served

    folder = MODELS / f"text-{OFFLINE_MODEL}"
    return write_served(SHAPES[OFFLINE_MODEL], folder, torch.device("cpu"), torch.bfloat16)


def _asked(url: str, row_name: str, concurrency: int, num_requests: int) -> Mapping[str, object]:
    from bench.client import Endpoint
    from bench.engine.measure import closed_loop
    from bench.engine.prompts import Prompts
    from bench.engine.rows import ROWS

    row = next(row for row in ROWS if row.name == row_name)
    dialogues = row.dialogues(Prompts(seed=0), concurrency, num_requests, num_requests)
    began, before = time.perf_counter(), page(url)
    answers = asyncio.run(closed_loop(Endpoint(url, model_id(url), {}), dialogues, concurrency))
    wall_s = time.perf_counter() - began
    complete = [answer for answer in answers if not answer.failure]
    encode_s = grown(before, page(url), f"{STAGES}_sum", stage="encode") or 0.0
    return {
        "encode_ms": 1e3 * encode_s / max(1, len(complete)),
        "tokens_per_s": sum(answer.num_tokens for answer in complete) / wall_s,
        **_times("ttft", [answer.ttft_s for answer in complete]),
        **_times("itl", [gap for answer in complete for gap in answer.gaps_s]),
        **_times("handover", [answer.gaps_s[0] for answer in complete if answer.gaps_s]),
        "num_failed": num_requests - len(complete),
    }


def _times(name: str, seconds: Sequence[float]) -> Mapping[str, float]:
    from deploy.simulator.results import percentile

    return {f"{name}_p{int(100 * share)}_ms": 1e3 * percentile(seconds, share) for share in (0.5, 0.99)}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
