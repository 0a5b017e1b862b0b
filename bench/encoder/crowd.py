"""Many clients at the same moment.

burst    images and texts together, at one cluster or at several in turn: how soon each is answered
single   all ask about the same video, which the cluster has never seen: how often is it encoded?
flood    each sends another image: every client must be answered or refused with Retry-After, and the
         encoder's memory must stay within its plan
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from bench.client import ChatRequest, Endpoint, endpoint
from bench.encoder.clients import at_once, request, required, tally, text_part
from bench.engine.prompts import Prompts
from bench.metrics import grown, page, wait_idle
from bench.processes import cpu_s, processes_at, status_bytes
from bench.records import Record
from cluster.worker.memory_plan import encoder_step_bytes
from deploy.simulator.results import percentile
from encoder_service.service import MAX_BATCH_ROWS

ENCODER_ITEMS = "epdg_encoder_items_total"
NUM_TOKENS = 8  # of an answer
TEXT_WORDS = 64
IDLE_TIMEOUT_S = 10.0  # a door knows a worker's counters from its last report
QUESTION = "What do you see?"


def single(
    url: str, num_requests: int, num_frames: int, side: int, repeats: int, seed: int
) -> Iterator[Record]:
    """Blocks. The cluster's processes must run on this machine."""
    prompts, server, doors = Prompts(seed), endpoint(url), processes_at(url).of("door")
    _warm_up(server, prompts)
    for repetition in range(repeats):
        clip = prompts.video(num_frames, side, 2, "single", repetition)
        requests = [request("video", NUM_TOKENS, clip, text_part(QUESTION))] * num_requests
        before, cpu_before_s = page(url), list(map(cpu_s, doors))
        outcome = _timed(server, requests)
        if held := wait_idle(url, IDLE_TIMEOUT_S):
            raise RuntimeError(f"the cluster still holds {held}")
        after, cpu_after_s = page(url), list(map(cpu_s, doors))
        yield {
            "type": "single",
            "model": server.model_id,
            "repetition": repetition,
            "door_cpu_s": [end - start for start, end in zip(cpu_before_s, cpu_after_s, strict=True)],
            "items_encoded": grown(before, after, ENCODER_ITEMS, result="encoded"),
            "items_cached": grown(before, after, ENCODER_ITEMS, result="cached"),
            **outcome,
        }


def flood(
    url: str, model: str, dtype: torch.dtype, num_requests: int, side: int, repeats: int, seed: int
) -> Iterator[Record]:
    """`model`, `dtype`: of the running cluster. Blocks. The cluster must run on this machine and have one
    encoder.
    """
    prompts, server = Prompts(seed), endpoint(url)
    encoder, *others = processes_at(url).of("encode")
    if others:
        raise RuntimeError("one encoder is measured; this cluster has several")
    _warm_up(server, prompts)
    for repetition in range(repeats):
        images = (prompts.image(side, "flood", repetition, idx) for idx in range(num_requests))
        requests = [request("image", NUM_TOKENS, image, text_part(QUESTION)) for image in images]
        resident_bytes = status_bytes(encoder, "VmRSS")
        forget_peak(encoder)
        outcome = _timed(server, requests)
        yield {
            "type": "flood",
            "model": server.model_id,
            "repetition": repetition,
            "resident_bytes": resident_bytes,
            "peak_bytes": status_bytes(encoder, "VmHWM"),
            "budget_bytes": step_budget(model, dtype),
            **outcome,
        }


def burst(
    urls: Sequence[str], num_images: int, num_texts: int, side: int, repeats: int, seed: int
) -> Iterator[Record]:
    """Each repetition sends new images and texts, to every cluster the same. Blocks."""
    prompts, servers = Prompts(seed), [endpoint(url) for url in urls]
    for server in servers:
        _warm_up(server, prompts)
    for repetition in range(repeats):
        images = (prompts.image(side, "burst", repetition, idx) for idx in range(num_images))
        requests = [request("image", 1, image, text_part(QUESTION)) for image in images]
        texts = (prompts.text(TEXT_WORDS, "burst", repetition, idx) for idx in range(num_texts))
        requests += [request("text", 1, text_part(text)) for text in texts]
        for place in range(len(servers))[:: -1 if repetition % 2 else 1]:
            records = required(at_once(servers[place], requests))
            by_kind = {
                kind: [record.ttft_s for record in records if record.kind == kind]
                for kind in ("image", "text")
            }
            yield {
                "type": "burst",
                "model": servers[place].model_id,
                "cluster": place,
                "repetition": repetition,
                "side": side,
                "images": num_images,
                "texts": num_texts,
                "images_per_s": num_images / max(by_kind["image"]),
                "image_mean_s": statistics.mean(by_kind["image"]),
                "image_p99_s": percentile(by_kind["image"], 0.99),
                "text_p50_s": percentile(by_kind["text"], 0.5),
                "text_p99_s": percentile(by_kind["text"], 0.99),
            }


def step_budget(model: str, dtype: torch.dtype) -> int:
    """Bytes that an encoder's memory plan allows for a step; weights and cache are allocated at its start."""
    from transformers import AutoConfig

    return encoder_step_bytes(MAX_BATCH_ROWS, AutoConfig.from_pretrained(model), dtype.itemsize)


def forget_peak(pid: int) -> None:
    """Resets the kernel's peak of resident memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _warm_up(server: Endpoint, prompts: Prompts) -> None:
    image = prompts.image(224, "warm-up")
    required(at_once(server, [request("warm-up", NUM_TOKENS, image, text_part(QUESTION))]))


def _timed(server: Endpoint, requests: Sequence[ChatRequest]) -> Record:
    started_at = time.perf_counter()
    records = at_once(server, requests)
    return {
        "requests": len(requests),
        "seconds": time.perf_counter() - started_at,
        **asdict(tally(records)),
    }
