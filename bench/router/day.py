"""A day's traffic that swings between text and video, for the simulator. Deterministic by seed.

Text has its peak at noon, video in the evening; at night there is little of both. Each kind's rate follows a
raised cosine around its hour, and arrivals are Poisson's at that rate. An hour of the day lasts `hour_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from random import Random

from cluster.types.media import Modality
from deploy.simulator.workload import (
    TAIL_TOKENS,
    Draft,
    Item,
    SimRequest,
    block_keys,
    heavy_tailed,
)

VIDEO_ROWS = 7680


@dataclass(frozen=True)
class Swing:
    """Requests a second: `low` at night, `high` at the hour of the peak; `width_h` hours from half to
    half."""

    low: float
    high: float
    peak_h: float
    width_h: float

    def rate(self, hour: float) -> float:
        distance = abs((hour - self.peak_h + 12.0) % 24.0 - 12.0)
        return self.low + (self.high - self.low) * 0.5 * (
            1 + math.cos(math.pi * min(1.0, distance / self.width_h))
        )


TEXT = Swing(low=0.5, high=8.0, peak_h=12.0, width_h=6.0)
VIDEO = Swing(low=0.05, high=3.0, peak_h=20.0, width_h=4.0)
HOUR_S = 60.0  # of a simulated day: 24 hours in 24 minutes


def day(seed: int, hour_s: float = HOUR_S, text: Swing = TEXT, video: Swing = VIDEO) -> Iterator[SimRequest]:
    """The requests of a day in order of arrival."""
    arrivals = merge(
        _instants(Random(f"text {seed}"), text, hour_s, "text"),
        _instants(Random(f"video {seed}"), video, hour_s, "video"),
    )
    rng = Random(f"content {seed}")
    for number, (at, kind) in enumerate(arrivals):
        draft = video_draft(number) if kind == "video" else text_draft(rng)
        yield SimRequest(
            f"r{number}",
            at,
            draft.num_prompt_tokens,
            draft.num_output_tokens,
            block_keys(draft, number),
            draft.media,
            kind=kind,
        )


def _instants(rng: Random, swing: Swing, hour_s: float, kind: str) -> Iterator[tuple[float, str]]:
    """Draws the instants of arrival by thinning."""
    now = 0.0
    while True:
        now += rng.expovariate(swing.high)
        if now >= 24 * hour_s:
            return
        if rng.random() * swing.high < swing.rate(now / hour_s):
            yield now, kind


def text_draft(rng: Random) -> Draft:
    return Draft(heavy_tailed(rng, 3000, 0.5, 64, 16_000), heavy_tailed(rng, 500, 0.5, 16, 2000), 0)


def video_draft(number: int) -> Draft:
    media = (Item(f"video-{number}", Modality.VIDEO, VIDEO_ROWS, 32),)
    return Draft(32 + VIDEO_ROWS + TAIL_TOKENS, 150, 0, media=media, kind="video")
