"""Computes, from the doors' totals, the number of workers that each phase needs.

    encode, prefill   work that arrives in a second (= workers that are always busy) / utilisation
                      + work that waits beyond a normal queue / the time in which it is to be done
    decode            the larger of
                      * workers' worth of answers that run now: KV blocks in use, or how near the steps are to
                        the time per token that is promised
                      * requests that arrive in a second · worker-seconds that a request has lately taken

All phases are computed from what arrives at the doors. A phase that is too slow therefore does not hide the
needs of the later phases, which it keeps from getting work.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from cluster.types.members import Phase
from router.scaling.snapshot import DoorReport

# Arrivals count over both windows. The short one sees a step within seconds; because the work of few requests
# varies, it counts by its confidence interval only.
SLOW_S, FAST_S = 20.0, 4.0
CONFIDENCE = 1.0  # standard deviations
MEMORY_S = 120.0  # time constant of what a request takes of decode workers
MIN_ANSWERED = 5.0  # requests, before that is known
TOTALS = (
    "num_requests", "encode_s", "prefill_s", "encode_s2", "prefill_s2",
    "num_answered", "num_in_time", "num_refused",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Need:
    """The need of one phase, in workers that are always busy. `backlog_s`: work that waits or is queued, in
    seconds."""

    arrivals: float
    backlog_s: float


class DemandMeter:
    """Totals of all doors over the last seconds. A door that appears counts from its first report on."""

    def __init__(self, target_tpot_s: float):
        self._target_tpot_s = target_tpot_s
        self._last: dict[str, DoorReport] = {}
        self._sums: dict[str, float] = dict.fromkeys(TOTALS, 0.0)
        self._history: deque[tuple[float, dict[str, float]]] = deque()
        self._decode_s = self._num_decoded = 0.0  # worker-seconds, and requests; both fade
        self._now = DoorReport()  # of all doors

    def observe(self, doors: Mapping[str, DoorReport], now: float) -> None:
        passed_s = now - self._history[-1][0] if self._history else 0.0
        for name, report in doors.items():
            last = self._last.get(name, report)
            for total in TOTALS:  # a door that has restarted begins at zero
                self._sums[total] += max(0.0, getattr(report, total) - getattr(last, total))
        answered = self._sums["num_answered"] - (self._history[-1][1]["num_answered"] if self._history else 0)
        kept = math.exp(-passed_s / MEMORY_S)
        self._now = _merged(doors.values())
        self._last = dict(doors)
        self._decode_s = kept * self._decode_s + self.decoding * passed_s
        self._num_decoded = kept * self._num_decoded + answered
        self._history.append((now, dict(self._sums)))
        while len(self._history) > 2 and self._history[1][0] <= now - SLOW_S:
            self._history.popleft()

    @property
    def decoding(self) -> float:
        """Workers' worth of answers that run now."""
        state = self._now
        room_s = max(0.1 * self._target_tpot_s, self._target_tpot_s - state.step_s)
        return max(state.used_blocks_ratio, state.answers_s / room_s)

    @property
    def good_ratio(self) -> float | None:
        """Requests that got their first token in time, of those that got it or were refused. None: too
        few."""
        num_answered, num_refused = self._gained("num_answered", SLOW_S), self._gained("num_refused", SLOW_S)
        if num_answered + num_refused < MIN_ANSWERED:
            return None
        return self._gained("num_in_time", SLOW_S) / (num_answered + num_refused)

    def needs(self) -> dict[Phase, Need]:
        state = self._now
        decoding = self.decoding
        if self._num_decoded >= MIN_ANSWERED:
            each_s = self._decode_s / self._num_decoded
            decoding = max(decoding, each_s * self._gained("num_requests", SLOW_S) / SLOW_S)
        return {
            Phase.ENCODE: Need(self._arriving("encode_s"), state.waiting_encode_s + state.queued_encode_s),
            Phase.PREFILL: Need(
                self._arriving("prefill_s"), state.waiting_prefill_s + state.queued_prefill_s
            ),
            Phase.DECODE: Need(decoding, 0.0),
        }

    def _arriving(self, work: str) -> float:
        """The slow window's, as far as the fast one does not contradict."""
        slow, fast_s = self._gained(work, SLOW_S) / SLOW_S, self._gained(work, FAST_S)
        error_s = CONFIDENCE * math.sqrt(self._gained(f"{work}2", FAST_S))  # of a compound Poisson process
        return max((fast_s - error_s) / FAST_S, min(slow, (fast_s + error_s) / FAST_S)) if fast_s else slow

    def _gained(self, total: str, window_s: float) -> float:
        """What a total has gained since the last observation that is at least so old."""
        now, sums = self._history[-1]
        before = next(
            (old for at, old in reversed(self._history) if at <= now - window_s), self._history[0][1]
        )
        return sums[total] - before[total]


def _merged(reports: Iterable[DoorReport]) -> DoorReport:
    """Waiting work is summed, the state of the cluster is the largest that a door sees."""
    reports, values = tuple(reports), {}
    for name in (field.name for field in fields(DoorReport)):
        of_doors = [getattr(report, name) for report in reports]
        values[name] = sum(of_doors) if name.startswith(("num_", "waiting_")) else max(of_doors, default=0.0)
    return DoorReport(**values)
