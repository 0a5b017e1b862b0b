"""What a run on one card should show, and whether it did. The figures are those of an H100 SXM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.tables import table

Records = Mapping[tuple[str, str], Mapping[str, Any]]  # the last record of a part, by its `what`


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


ALONE, SHORT, LONG = "text-128/64 at 1", "text-128/64 at 16", "text-1024/32 at 16"
ALL_EQUAL = "all equal to generate"


def _handover(codec: str, load: str, limit_ms: float) -> Goal:
    text = f"E/P/D, {codec}, {load}: gap between chunks 1 and 2, p99, ms"
    return Goal(text, of(f"load-{codec}", load, "handover_p99_ms"), limit_ms, is_most=True)


def _decode(model: str, batch: int, field: str, limit: float) -> Goal:
    text = f"{model} decode, {batch} answers, {'us' if field == 'us' else 'share of the copy'}"
    value = of("steps", f"{model} decode, graphs, batch {batch}, context 2048", field)
    return Goal(text, value, limit, is_most=field == "us")


def _throughput(load: str, above: str, below: str, limit: float) -> Goal:
    value = ratio(of(f"load-{above}", load, "tokens_per_s"), of(f"load-{below}", load, "tokens_per_s"))
    return Goal(f"tokens/s, {load}: {above} ÷ {below}", value, limit, is_most=False)


_LINK = of("load-raw", "fastest measured link", "gb_per_s")
_TRANSFER = of("transfer", "NIXL between two processes", "gb_per_s")
_ITL_P99, _ITL_P50 = (of("load-whole", SHORT, f"itl_{share}_ms") for share in ("p99", "p50"))
GOALS = (
    Goal("whole: answers equal generate", of("equal-whole", ALL_EQUAL, "ok"), 1, is_most=False),
    Goal("E/P/D: answers equal generate", of("equal-e-p-d", ALL_EQUAL, "ok"), 1, is_most=False),
    _handover("raw", SHORT, 20),
    _handover("int8", SHORT, 20),
    _handover("raw", ALONE, 8),
    _handover("int8", ALONE, 8),
    _throughput(SHORT, "raw", "whole", 0.9),
    _throughput(LONG, "int8", "raw", 0.95),
    Goal(f"whole, {SHORT}: ITL p99 ÷ p50", ratio(_ITL_P99, _ITL_P50), 1.5, is_most=True),
    Goal("links as workers measure them ÷ the transfer part", ratio(_LINK, _TRANSFER), 0.5, is_most=False),
    *(
        Goal(f"{codec} {what}, GB/s", of("wire", f"{codec} {what}", "gb_per_s"), 700, is_most=False)
        for codec in ("int8", "int4")
        for what in ("codes", "decodes")
    ),
    Goal("checksum, GB/s", of("wire", "checksum", "gb_per_s"), 1000, is_most=False),
    _decode("7b", 1, "of_bound", 0.80),
    _decode("7b", 32, "of_bound", 0.78),
    _decode("0.5b", 1, "us", 1300),
    _decode("0.5b", 32, "us", 2300),
    Goal(
        "7b prompt of 2,048 tokens, share of the measured peak",
        of("steps", "7b prefill, 2048 tokens", "of_bound"), 0.75, is_most=False,
    ),
)  # fmt: skip


def judged(records: Sequence[Mapping[str, Any]]) -> str:
    """A table: met, missed or not measured beside each goal."""
    last = {(record["part"], record["what"]): record for record in records}
    return "\n".join(table(("goal", "measured", "wanted", ""), (goal.line(last) for goal in GOALS)))
