"""Loads of two kinds: text with images at an equal rate, and long prompts before long answers."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from bench.claims.claim import SIMULATED, Claim, Found
from bench.claims.virtual import request, serve
from bench.router.policies import WHOLE
from deploy.simulator.demand import capacity, demand
from deploy.simulator.hardware import A100, VL_7B
from deploy.simulator.layouts import Layout, workers
from deploy.simulator.results import Slo, summarise
from deploy.simulator.workload import Draft, SimRequest, Workload, heavy_tailed, images

SYSTEMS = {
    "4 EPD, each request on one": (Layout(num_whole=4), WHOLE),
    "1 E + 3 PD": (Layout(num_encode=1, num_language=3), "joint"),
    "4 EPD, any phase anywhere": (Layout(num_whole=4), "joint"),
}
NUM_REQUESTS, LOAD = 400, 0.7  # of what arithmetic allows
DIVISIONS = {f"{p} P + {4 - p} D": Layout(num_prefill=p, num_decode=4 - p) for p in (3, 2, 1)}
HALVES = {"long prompts": (5.5, 3000, 30), "long answers": (15.0, 200, 600)}  # a second; median tokens
HALF_S, TTFT_S, TPOT_S = 30.0, 1.0, 0.03


def mix(share: float) -> Workload:
    """A mix in which so many requests show four images of 640 × 640."""

    def drafts(rng: Random) -> Iterator[Draft]:
        for number in range(0, 1 << 20, 4):
            tokens = heavy_tailed(rng, 500, 0.6, 16, 8000)
            media = images(number, 4, 400, tokens) if rng.random() < share else ()
            yield Draft(tokens + (1616 if media else 0), 150, 0, media=media)

    return Workload("mix", drafts)


def mixes() -> Found:
    rows, tpots = [], {}
    for share in (0.0, 0.1, 0.5):
        workload = mix(share)
        rate = LOAD * capacity(workers(Layout(num_whole=4), VL_7B, A100), demand(workload))
        for name, (layout, policy) in SYSTEMS.items():
            outcomes = serve(layout, workload.requests(rate, NUM_REQUESTS, 0), policy)
            text = summarise([each for each in outcomes if not each.request.media], Slo(float("inf")))
            tpots[share, name] = text.tpot_mean_s
            times = (text.ttft_p50_s, text.ttft_p99_s, text.tpot_mean_s, text.tpot_p99_s)
            rows.append((f"{share:.0%}", f"{rate:.1f}", name, *(f"{1e3 * each:.0f}" for each in times)))
    columns = ("media", "requests/s", "four A100", "text: TTFT p50, ms", "p99", "TPOT mean", "p99")
    parallel, split, anywhere = (1e3 * tpots[0.1, name] for name in SYSTEMS)
    ours = f"texts at 90/10: {parallel:.1f} → {split:.1f} ms a token, any phase anywhere {anywhere:.1f}"
    return Found(columns, rows, ours, parallel / min(split, anywhere))


def changing() -> Iterator[SimRequest]:
    rng, at, number = Random(0), 0.0, 0
    for idx, (half, (rate, prompt, answer)) in enumerate(HALVES.items()):
        while (at := at + rng.expovariate(rate)) < (idx + 1) * HALF_S:
            tokens, output = (heavy_tailed(rng, median, 0.4, 16, 16_000) for median in (prompt, answer))
            yield request(number, at, tokens, output, kind=half)
            number += 1


def rebalance() -> Found:
    rows, worse = [], []
    for name, layout in {**DIVISIONS, "4 PD": Layout(num_language=4)}.items():
        good = {half: [] for half in HALVES}
        for each in serve(layout, changing()):
            good[each.request.kind].append(each.ttft_s <= TTFT_S and each.tpot_s <= TPOT_S)
        shares = [sum(found) / len(found) for found in good.values()]
        worse.append(min(shares))
        rows.append((name, *(f"{share:.0%}" for share in shares)))
    ours = f"{worse[-1]:.0%} within limits in the worse half; fixed pools {max(worse[:-1]):.0%} at best"
    return Found(("four A100", *(f"{half}: within limits" for half in HALVES)), rows, ours)


ENCODER = "mean ITL 142 → 105 ms with an encoder apart (vllm#21740)"
SWITCH = "roles fixed at start, or flipped when idle (vllm#56133, sglang#28403)"
CLAIMS = {
    "mixes": Claim("Time a token of texts, 90/10", ENCODER, SIMULATED, mixes, 142.42 / 104.96),
    "rebalance": Claim("P:D rebalancing under load", SWITCH, SIMULATED, rebalance),
}
