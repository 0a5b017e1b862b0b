"""Prompts about the same images: each goes where their KV is, against workers that take them in order."""

from __future__ import annotations

from bench.claims.claim import SIMULATED, Claim, Found
from bench.router.cases import GroupCase
from bench.router.run import record

SPLITS, RATE = ("8 EPD, in turn", "8 EPD, joint"), 40.0
FIELDS = {"output_tokens_per_s": 1, "ttft_p50_s": 1e3, "ttft_p99_s": 1e3, "cached_share": 100}


def measure() -> Found:
    found = {split: record(GroupCase("", split, RATE, seed=0)) for split in SPLITS}
    rows = [
        (split, *(f"{n * each[name]:,.0f}" for name, n in FIELDS.items())) for split, each in found.items()
    ]
    turns, joint = (each["output_tokens_per_s"] for each in found.values())
    ours = f"{100 * joint / turns - 100:+.0f} % output tokens/s, TTFT p50 {rows[0][2]} → {rows[1][2]} ms"
    columns = ("eight pairs of H200", "output tokens/s", "TTFT p50, ms", "p99", "% of prompts reused")
    return Found(columns, rows, ours, joint / turns)


PUBLISHED = "+44 % output tokens/s, TTFT p50 19.2 → 0.16 s (llm-d, 2026-08-31)"
CLAIMS = {"media_prefix": Claim("Prefix caching of media", PUBLISHED, SIMULATED, measure, 1.44)}
