"""Time to first token when one of 32 requests has a video: our cluster against a server that encodes before
it admits.

Per repetition there are four bursts, alternating between the systems: the text requests alone, and the text
requests with the video at a place that changes with the repetition. Both systems get the same bytes; no part
of a burst was sent before. All requests are sent at once, each for one token.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import REPOSITORY
from bench.client import ChatRequest, endpoint
from bench.encoder.clients import at_once, request, required, text_part
from bench.engine.prompts import Prompts
from bench.engine.servers import is_healthy
from bench.records import Record
from deploy.serving.ports import free_port

OURS, BASELINE = "cluster", "synchronous"
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class BurstLoad:
    num_text: int
    text_words: int  # of each text request
    num_frames: int
    side: int  # of a frame, pixels

    def __str__(self) -> str:
        return f"{self.num_text} texts of {self.text_words} words, {self.num_frames} frames of {self.side}²"

    def texts(self, prompts: Prompts, *key: object) -> list[ChatRequest]:
        return [
            request("text", 1, text_part(prompts.text(self.text_words, *key, idx)))
            for idx in range(self.num_text)
        ]

    def with_video(self, prompts: Prompts, place: int, *key: object) -> list[ChatRequest]:
        """The video request stands at `place` among the text requests; its message begins with a text of its
        own, so no prefix is cached.
        """
        texts = self.texts(prompts, *key)
        clip = prompts.video(self.num_frames, self.side, 2, *key)
        before, after = (text_part(prompts.text(16, *key, part)) for part in ("before", "after"))
        return [*texts[:place], request("video", 1, before, clip, after), *texts[place:]]


def place_of(repetition: int, repeats: int, num_text: int) -> int:
    """Spread evenly over the burst: at its beginning, middle and end."""
    return (2 * repetition + 1) * (num_text + 1) // (2 * repeats)


def order_of(repetition: int, bursts: list[str], systems: list[str]) -> list[tuple[str, str]]:
    """All pairs of burst and system. The first system changes with each repetition, the first burst with
    every second.
    """
    systems = systems if repetition % 2 == 0 else systems[::-1]
    bursts = bursts if repetition // 2 % 2 == 0 else bursts[::-1]
    return list(itertools.product(bursts, systems))


def measure(
    url: str, model: str, dtype: str, load: BurstLoad, repeats: int, seed: int, num_threads: int
) -> Iterator[Record]:
    """`url`: of a cluster that serves `model` in `dtype`. Raises RuntimeError if a request fails."""
    prompts = Prompts(seed)
    with baseline(model, dtype, num_threads) as baseline_url:
        systems = {OURS: endpoint(url), BASELINE: endpoint(baseline_url)}
        for name, each in systems.items():
            required(at_once(each, load.with_video(prompts, 0, "warm-up", name)))
        for repetition in range(repeats):
            place = place_of(repetition, repeats, load.num_text)
            bursts = {
                "text": load.texts(prompts, repetition, "alone"),
                "video": load.with_video(prompts, place, repetition),
            }
            for burst, name in order_of(repetition, list(bursts), list(systems)):
                records = required(at_once(systems[name], bursts[burst]))
                yield {
                    "type": "mixed",
                    "system": name,
                    "model": Path(model).name,
                    "dtype": dtype,
                    "load": str(load),
                    "burst": burst,
                    "repetition": repetition,
                    "place": place,
                    "prompt_tokens": [record.num_prompt_tokens for record in records],
                    "kinds": [record.kind for record in records],
                    "answers": [record.text for record in records],
                    "ttfts_s": [record.ttft_s for record in records],
                }


@contextmanager
def baseline(model: str, dtype: str, num_threads: int) -> Iterator[str]:
    """Runs the synchronous server in a process of its own until the block ends; yields its URL when it is
    ready.
    """
    port = free_port()
    command = [sys.executable, "-m", "bench.encoder", "synchronous", "--model", model, "--dtype", dtype]
    command += ["--port", str(port), "--threads", str(num_threads)]
    waits = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "20000", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **waits})
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the synchronous server did not start")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
