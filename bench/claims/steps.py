"""The time between the tokens of an answer: with a long prompt next to it, and with the KV of its own prompt
on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.claims.claim import SIMULATED, Claim, Found
from bench.claims.virtual import request, simulation
from cluster.engine.state import LanguageRequest, Work, WorkResult
from cluster.types.curves import Link
from cluster.types.members import Phase
from deploy.simulator.device import SimRunner
from deploy.simulator.hardware import VL_7B, Model, step_s
from deploy.simulator.layouts import Layout
from deploy.simulator.simulation import SCHEDULING

NUM_ANSWERS, LONG_TOKENS, COMES_AT = 16, 7744, 2.0
APART, TOGETHER = Layout(num_prefill=1, num_decode=1), Layout(num_language=1)
SYSTEMS = {
    "PD, steps as large as they may be": (TOGETHER, replace(SCHEDULING, prompt_pause_s=math.inf)),
    "PD, steps that answers can bear (default)": (TOGETHER, SCHEDULING),
    "P + D": (APART, SCHEDULING),
}
AFTER, NO_LINK = replace(VL_7B, num_layers=1), Link(0.0, 1e15)  # a single layer: sent when all is computed


def noted(runner: SimRunner, gaps: list[float]) -> None:
    """Every step with prompts that all answers wait for goes into `gaps`."""
    run, clock = runner.run, runner.device.clock

    def timed(works: Sequence[Work], *rest: Any) -> list[WorkResult]:
        began_at = clock.now()
        results = run(works, *rest)
        num_answers = sum(isinstance(work, LanguageRequest) for work in works)
        if num_answers == NUM_ANSWERS < len(works):
            gaps.append(clock.now() - began_at)
        return results

    runner.run = timed  # type: ignore[method-assign]


def chunked_prefill() -> Found:
    rows = []
    requests = [request(i, 1e-3 * i, 128, 400) for i in range(NUM_ANSWERS)]
    requests.append(request(NUM_ANSWERS, COMES_AT, LONG_TOKENS, 1))
    for name, (layout, scheduling) in SYSTEMS.items():
        run, gaps = simulation(layout, scheduling=scheduling), []
        (worker,) = run.alive(Phase.DECODE).values()
        assert worker.language is not None
        noted(worker.language.runner, gaps)
        (long,) = (each for each in run.run(requests) if each.request.num_prompt_tokens == LONG_TOKENS)
        usual_s = step_s(worker.spec.curves, (), NUM_ANSWERS, NUM_ANSWERS * 300)
        longest_s = max(gaps, default=usual_s)
        times = (f"{1e3 * each:.0f}" for each in (usual_s, longest_s, long.ttft_s))
        rows.append((name, *times, f"{longest_s / usual_s:.1f}"))
    columns = ("A100", "usual gap, ms", "longest gap", "TTFT of the long prompt", "longest ÷ usual")
    whole, bounded, apart = (row[-1] for row in rows)
    ours = f"longest gap {whole} (whole steps), {bounded} (bounded), {apart} (P + D) times the usual one"
    return Found(columns, rows, ours)


def second_s(num_tokens: int, link: Link, sent: Model = VL_7B) -> float:
    (outcome,) = simulation(APART, link=link, sent=sent).run([request(0, 0.0, num_tokens, 2)])
    return outcome.second_s


def layer_pipelining() -> Found:
    rows, hidden = [], []
    for num_tokens in (1024, 4096, 8192):
        without_s = second_s(num_tokens, NO_LINK)
        for speed in (1, 10, 50):
            link = Link(2e-4, speed * 1e9)
            late_s, ours_s = second_s(num_tokens, link, AFTER), second_s(num_tokens, link)
            hidden.append(1 - (ours_s - without_s) / (late_s - without_s))
            times = (f"{1e3 * each:.1f}" for each in (late_s - without_s, ours_s - without_s, late_s, ours_s))
            rows.append((f"{num_tokens:,}", str(speed), *times, f"{hidden[-1]:.0%}"))
    times = (
        "shows, all after prefill: ms",
        "layer by layer",
        "second token, all after prefill",
        "layer by layer",
    )
    ours = (
        f"{min(hidden):.0%} to {max(hidden):.0%} of the transfer hides; the first token waits for none of it"
    )
    return Found(("prompt", "link GB/s", *times, "hidden"), rows, ours)


CHUNKS = "chunks bound the stall, P/D removes it; vLLM: P50 ITL 275 ms, 32 with a cadence (vllm#44558)"
LAYERS = "TTFT −61, −68, −48 % at 1k, 4k, 8k tokens (sglang#23515)"
CLAIMS = {
    "chunked_prefill": Claim("Chunked prefill, time between tokens", CHUNKS, SIMULATED, chunked_prefill),
    "layer_pipelining": Claim("KV layer by layer", LAYERS, SIMULATED, layer_pipelining),
}
