"""Tables from the records of `bench.router.live`. Pure; the resampling is seeded."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence

from bench.records import Record
from bench.tables import head, row
from deploy.simulator.results import percentile

NUM_RESAMPLES = 300
BASELINE = "least_loaded"
BY_KIND = ("grouped", "skewed")  # phases
Interval = tuple[float, float]


def bootstrap(
    samples: Sequence[Sequence[float]], figure: Callable[..., float], seed: int = 0, share: float = 0.95
) -> Interval:
    """The percentile interval of `figure(*samples)` when each sample is resampled from itself (Efron
    1979)."""
    rng = random.Random(seed)
    figures = [
        figure(*(rng.choices(sample, k=len(sample)) for sample in samples)) for _ in range(NUM_RESAMPLES)
    ]
    return percentile(figures, (1 - share) / 2), percentile(figures, (1 + share) / 2)


def p50(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def p99(values: Sequence[float]) -> float:
    return percentile(values, 0.99)


def p99_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    return p99(values) / p99(others)


def error_ratio(predicted: Iterable[float], actual: Iterable[float]) -> float:
    """Mean absolute percentage error, as a ratio."""
    return statistics.fmean(abs(p - a) / a for p, a in zip(predicted, actual, strict=True))


def coverage(low: Iterable[float], actual: Iterable[float], high: Iterable[float]) -> float:
    """The part that lies in its interval."""
    return statistics.fmean(
        least <= value <= most for least, value, most in zip(low, actual, high, strict=True)
    )


def tables(records: Sequence[Record]) -> list[str]:
    """Lines of Markdown, by kind of device: times to first token, then how good the predictions were."""
    live = [record for record in records if record["type"] == "live"]
    lines = []
    for devices in dict.fromkeys(record["devices"] for record in live):
        found = [record for record in live if record["devices"] == devices]
        lines += [f"**{devices} devices**", "", *ttft_table(found), "", *prediction_table(found), ""]
    return lines


def ttft_table(records: Sequence[Record]) -> list[str]:
    """Ratios to BASELINE in the same phase, and over all of them, with their 95 % bootstrap interval."""
    lines = head(
        "phase",
        "policy",
        "requests",
        "TTFT p50, ms",
        "TTFT p99, ms",
        f"p50 ÷ {BASELINE}",
        f"p99 ÷ {BASELINE}",
    )
    found = _ttfts(records)
    for (phase, policy), ttfts in found.items():
        others = found.get((phase, BASELINE))
        low, high = bootstrap([ttfts], p99)
        cells = [phase, policy, str(len(ttfts)), f"{1e3 * p50(ttfts):.0f}"]
        cells.append(f"{1e3 * p99(ttfts):.0f} ({1e3 * low:.0f} to {1e3 * high:.0f})")
        if others is None or policy == BASELINE:
            cells += ["", ""]
        else:
            low, high = bootstrap([ttfts, others], p99_ratio)
            cells += [
                f"{p50(ttfts) / p50(others):.2f}",
                f"{p99_ratio(ttfts, others):.2f} ({low:.2f} to {high:.2f})",
            ]
        lines.append(row(cells))
    return lines


def prediction_table(records: Sequence[Record]) -> list[str]:
    lines = head("phase", "policy", "requests", "MAPE", "median error", "in the 90 % interval")
    told = [record for record in records if "predicted_s" in record]
    for policy in dict.fromkeys(record["policy"] for record in told):
        own = [record for record in told if record["policy"] == policy]
        phases = list(dict.fromkeys(record["phase"] for record in own))
        for name, cell in [*((p, [r for r in own if r["phase"] == p]) for p in phases), ("all", own)]:
            actual, predicted = _joined(cell, "placed_s"), _joined(cell, "predicted_s")
            errors = [p / a - 1 for p, a in zip(predicted, actual, strict=True)]
            share = coverage(_joined(cell, "low_s"), actual, _joined(cell, "high_s"))
            lines.append(
                f"| {name} | {policy} | {len(actual)} | {error_ratio(predicted, actual):.1%} | "
                f"{statistics.median(errors):+.1%} | {share:.1%} |"
            )
    return lines


def _ttfts(records: Iterable[Record]) -> dict[tuple[str, str], list[float]]:
    """Times to first token by (phase, policy), of phases in BY_KIND by kind of request, too; then of all
    phases."""
    cells: dict[tuple[str, str], list[float]] = {}
    for record in records:
        phase, policy = record["phase"], record["policy"]
        for name in (phase, "all"):
            cells.setdefault((name, policy), []).extend(record["ttfts_s"])
        if phase in BY_KIND:
            for kind, ttft_s in zip(record["kinds"], record["ttfts_s"], strict=True):
                cells.setdefault((f"{phase}, {kind}", policy), []).append(ttft_s)
    return dict(sorted(cells.items(), key=lambda cell: (cell[0][0] == "all", cell[0][0])))


def _joined(records: Iterable[Record], name: str) -> list[float]:
    return [value for record in records for value in record[name]]
