"""What a run on one card should show, and whether it did. The figures are those of an H100 SXM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.gpu.encoders import CLIP, ONE, SIGLIP, SIXTEEN
from bench.gpu.formats import FP8, NIBBLES, PLAIN
from bench.gpu.offline import OFFLINE_RUN
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


def _step(what: str, field: str, limit: float) -> Goal:
    text = f"{what}, {'us' if field == 'us' else 'share of what bounds it'}"
    return Goal(text, of("steps", what, field), limit, is_most=field == "us")


def _start(topology: str, first_run_s: float) -> Goal:
    text, value = f"{topology}: seconds until ready", of(f"equal-{topology}", "ready", "s")
    return Goal(text, value, first_run_s + 5, is_most=True)


def _images(load: str, field: str, limit_ms: float) -> Goal:
    name = {"ttft_p50_ms": "TTFT p50", "encode_ms": "encode stage of an image"}[field]
    return Goal(f"E/P/D, {load}: {name}, ms", of("images-e-p-d", load, field), limit_ms, is_most=True)


def _step_ms(records: Records) -> float:
    return of("steps", "0.5b decode at 1, context 2048", "us")(records) / 1e3


def _throughput(load: str, above: str, below: str, limit: float) -> Goal:
    value = ratio(of(f"load-{above}", load, "tokens_per_s"), of(f"load-{below}", load, "tokens_per_s"))
    return Goal(f"tokens/s, {load}: {above} ÷ {below}", value, limit, is_most=False)


def _faster(what: str, name: str, limit: float) -> Goal:
    value = ratio(of("formats", f"{PLAIN}, {what}", "us"), of("formats", f"{name}, {what}", "us"))
    return Goal(f"7b {what}: bf16 ÷ {name}", value, limit, is_most=False)


_LINK = of("load-raw", "fastest measured link", "gb_per_s")
_TRANSFER = of("transfer", "NIXL between two processes", "gb_per_s")
_ITL_ALONE = of("load-whole", ALONE, "itl_p50_ms")
_ITL_P99, _ITL_P50 = (of("load-whole", SHORT, f"itl_{share}_ms") for share in ("p99", "p50"))
GOALS = (
    Goal("whole: answers equal generate", of("equal-whole", ALL_EQUAL, "ok"), 1, is_most=False),
    Goal("E/P/D: answers equal generate", of("equal-e-p-d", ALL_EQUAL, "ok"), 1, is_most=False),
    _step("7b decode at 1, context 2048", "of_bound", 0.80),
    _step("7b decode at 32, context 2048", "of_bound", 0.78),
    _step("7b decode at 64, context 2048", "of_bound", 0.78),
    _step("0.5b decode at 1, context 2048", "us", 1300),
    _step("0.5b decode at 32, context 2048", "us", 2300),
    _step("0.5b step of 512 prompt tokens", "us", 3500),
    _step("0.5b step of 512 prompt tokens, decode at 32, context 2048", "us", 3500),
    _step("7b step of 512 prompt tokens", "us", 13_000),
    _step("7b step of 512 prompt tokens, decode at 32, context 2048", "us", 13_000),
    _step("7b step of 2048 prompt tokens", "of_bound", 0.75),
    Goal(
        "7b attention, INT8 KV, 64 × 8,192, share of what bounds it",
        of("attention-int8", "7b attention, int8 KV, blocks of 16, 64 × 8192", "of_bound"), 0.7,
        is_most=False,
    ),
    *(Goal(f"7b, {name}: right", of("formats", f"{name}, right", "right"), 1, is_most=False)
      for name in (FP8, NIBBLES)),
    _faster("decode at 1", FP8, 1.5),
    _faster("decode at 1", NIBBLES, 2.0),
    _faster("prompt of 2048", FP8, 1.3),
    Goal("draw of 64 rows at T = 0.8, us", of("draws", "64 rows, T = 0.8", "device_us"), 60, is_most=True),
    Goal(
        "draw of 64 rows with top-k 20 and top-p 0.8, us",
        of("draws", "64 rows, T = 0.8, top-k 20, top-p 0.8", "device_us"), 150, is_most=True,
    ),
    Goal(
        "draw of 64 rows of all kinds, us",
        of("draws", "64 rows, all kinds by turns", "device_us"), 150, is_most=True,
    ),
    *(
        Goal(f"{what}, us", of("encoder", what, "us"), limit, is_most=True)
        for what, limit in ((ONE, 6_000), (SIXTEEN, 20_000), (CLIP, 50_000), (SIGLIP, 5_000))
    ),
    _images("image/32 at 1", "encode_ms", 6),
    _images("image/32 at 16", "encode_ms", 20),
    _images("image/32 at 16", "ttft_p50_ms", 60),
    Goal(f"whole, {SHORT}: ITL p99 ÷ p50", ratio(_ITL_P99, _ITL_P50), 1.5, is_most=True),
    Goal(f"whole, {ALONE}: ITL p50 ÷ the step alone", ratio(_ITL_ALONE, _step_ms), 1.1, is_most=True),
    *(
        Goal(f"{part}, {OFFLINE_RUN}: tokens/s", of(part, OFFLINE_RUN, "tokens_per_s"), 20_000, is_most=False)
        for part in ("throughput", "throughput-engine")
    ),
    _start("whole", 26.6),
    _start("e-p-d", 19.1),
    _handover("raw", SHORT, 20),
    _handover("int8", SHORT, 20),
    _handover("raw", ALONE, 8),
    _handover("int8", ALONE, 8),
    _throughput(SHORT, "raw", "whole", 0.9),
    _throughput(LONG, "int8", "raw", 0.95),
    Goal("links as workers measure them ÷ the transfer part", ratio(_LINK, _TRANSFER), 0.5, is_most=False),
    *(
        Goal(f"{codec} {what}, GB/s", of("wire", f"{codec} {what}", "gb_per_s"), 700, is_most=False)
        for codec in ("int8", "int4")
        for what in ("codes", "decodes")
    ),
    Goal("checksum, GB/s", of("wire", "checksum", "gb_per_s"), 1000, is_most=False),
)  # fmt: skip


def judged(records: Sequence[Mapping[str, Any]]) -> str:
    """A table: met, missed or not measured, next to each goal."""
    last = {(record["part"], record["what"]): record for record in records}
    return "\n".join(table(("goal", "measured", "wanted", ""), (goal.line(last) for goal in GOALS)))
