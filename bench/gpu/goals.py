"""What a run on one card should show, and whether it did. The figures are those of an H100 SXM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.tables import table

Records = Mapping[tuple[str, str], Mapping[str, Any]]  # the last record of a part, by its `what`
LEAST_EQUAL_BANDWIDTH = 0.5  # of the transfer part, at a busy cluster's links


@dataclass(frozen=True)
class Goal:
    """`value`: of the records, or a KeyError where they are missing. At most, or at least, `limit`."""

    text: str
    value: Callable[[Records], float]
    limit: float
    is_most: bool

    def line(self, records: Records) -> tuple[str, str, str, str]:
        sign = "≤" if self.is_most else "≥"
        try:
            value = self.value(records)
        except KeyError:
            return self.text, "–", f"{sign} {self.limit:g}", "not measured"
        is_met = value <= self.limit if self.is_most else value >= self.limit
        return self.text, f"{value:.3g}", f"{sign} {self.limit:g}", "met" if is_met else "**missed**"


def of(part: str, what: str, field: str) -> Callable[[Records], float]:
    def value(records: Records) -> float:
        record = records[part, what]
        if record.get("num_failed"):  # times of those that did not fail say nothing
            raise KeyError(f"{record['num_failed']} requests of {part}, {what} failed")
        return float(record[field])

    return value


def ratio(above: Callable[[Records], float], below: Callable[[Records], float]) -> Callable[[Records], float]:
    return lambda records: above(records) / below(records)


SHORT, LONG = "text-128/64 at 16", "text-1024/32 at 16"
ALL_EQUAL = "all equal to generate"
GOALS = (
    Goal("whole: answers equal generate", of("equal-whole", ALL_EQUAL, "ok"), 1, False),
    Goal("E/P/D: answers equal generate", of("equal-e-p-d", ALL_EQUAL, "ok"), 1, False),
    *(
        Goal(f"E/P/D, {codec}: chunk 1 to chunk 2 {place}, p99, ms", of(f"load-{codec}", what, "handover_p99_ms"), limit, True)
        for codec in ("raw", "int8")
        for place, what, limit in (("at 16 at once", SHORT, 20), ("alone", "text-128/64 at 1", 8))
    ),
    Goal(
        "E/P/D ÷ whole, tokens/s, text-128/64 at 16",
        ratio(of("load-raw", SHORT, "tokens_per_s"), of("load-whole", SHORT, "tokens_per_s")), 0.9, False,
    ),
    Goal(
        "int8 ÷ raw, tokens/s, text-1024/32 at 16",
        ratio(of("load-int8", LONG, "tokens_per_s"), of("load-raw", LONG, "tokens_per_s")), 0.95, False,
    ),
    Goal(
        "whole: ITL p99 ÷ p50, text-128/64 at 16",
        ratio(of("load-whole", SHORT, "itl_p99_ms"), of("load-whole", SHORT, "itl_p50_ms")), 1.5, True,
    ),
    Goal(
        "measured links ÷ the transfer part",
        ratio(of("load-raw", "fastest measured link", "gb_per_s"), of("transfer", "NIXL between two processes", "gb_per_s")),
        LEAST_EQUAL_BANDWIDTH, False,
    ),
    *(
        Goal(f"{codec} {what}, GB/s", of("wire", f"{codec} {what}", "gb_per_s"), 700, False)
        for codec in ("int8", "int4")
        for what in ("codes", "decodes")
    ),
    Goal("checksum, GB/s", of("wire", "checksum", "gb_per_s"), 1000, False),
    Goal("7B, 1 answer, share of the copy", of("steps", "7b decode, graphs, batch 1, context 2048", "of_bound"), 0.80, False),
    Goal("7B, 32 answers, share of the copy", of("steps", "7b decode, graphs, batch 32, context 2048", "of_bound"), 0.78, False),
    Goal("0.5B, 1 answer, us", of("steps", "0.5b decode, graphs, batch 1, context 2048", "us"), 1300, True),
    Goal("0.5B, 32 answers, us", of("steps", "0.5b decode, graphs, batch 32, context 2048", "us"), 2300, True),
    Goal("7B, prompt of 2,048, share of peak", of("steps", "7b prefill, 2048 tokens", "of_bound"), 0.75, False),
)  # fmt: skip


def judged(records: Sequence[Mapping[str, Any]]) -> str:
    """A table: met, missed or not measured beside each goal."""
    last = {(record["part"], record["what"]): record for record in records}
    return "\n".join(table(("goal", "measured", "wanted", ""), (goal.line(last) for goal in GOALS)))
