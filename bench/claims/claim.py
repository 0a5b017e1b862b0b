"""What a claim is, and how claims are shown. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deploy.simulator.charts import BAR, WIDTH, bar, label, svg

LEFT, VALUES = 300, 130
SIMULATED, COUNTED = "simulated", "counted"


@dataclass(frozen=True)
class Found:
    """`ours`: in one line. `ratio`: of a claim that says how many times better something is."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    ours: str
    ratio: float | None = None


@dataclass(frozen=True)
class Claim:
    """`how`: SIMULATED in virtual time, with curves from data sheets, or COUNTED by the product's own
    components. `published_ratio`: what `Found.ratio` is compared with."""

    title: str
    published: str
    how: str
    measure: Callable[[], Found]
    published_ratio: float | None = None


def plot(claims: Mapping[str, Claim], found: Mapping[str, Found]) -> str:
    """Ours next to the published figure, of the claims that are ratios, each pair to its own scale."""
    y, body = 28.0, [label(8, 16, "times better: ours (blue), published (grey)")]
    for name, each in found.items():
        ours, published = each.ratio, claims[name].published_ratio
        if not ours or not published:
            continue
        body.append(label(8, y + BAR, claims[name].title))
        for value, colour in ((ours, "#2f6fb0"), (published, "#bbbbbb")):
            width = (WIDTH - LEFT - VALUES) * value / max(ours, published)
            body.append(bar(LEFT, y, width, colour, f"{value:.2f}"))
            y += BAR * (1.0 if colour == "#2f6fb0" else 1.5)
    return svg(y + 8, body)
