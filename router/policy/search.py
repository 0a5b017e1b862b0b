"""The search for the placement of least cost. `joint` explains why it finds the optimum."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field

import numpy as np

from router.policy.at_decodes import KvTransferEstimate
from router.policy.estimate import Estimate
from router.policy.pool import Floats

MAX_EXACT_ITEMS = 4
# Limits of one decision; then the best placement found is chosen. `bench.router decide` measures the loss.
MAX_PREFILLS = 4
MAX_STEPS = 50  # assignments of an item to an encoder


@dataclass(frozen=True, slots=True)
class Found:
    """A placement in slots, and its cost in seconds."""

    cost_s: float
    encoders: tuple[int, ...]
    prefill: int
    decode: int
    codec: str


class Search:
    """The search for one request. `least_s`: [prefills], lower bound of the cost of any placement there;
    infinite if there is none."""

    def __init__(self, estimate: Estimate, max_prefills: int = MAX_PREFILLS, max_steps: int = MAX_STEPS):
        self._estimate = estimate
        self._max_prefills, self._max_steps = max_prefills, max_steps
        self.num_visited = 0
        self.num_steps = 0
        encoders, prefills, decodes = estimate.encoders, estimate.prefills, estimate.decodes
        costs = np.where(encoders.is_able, encoders.cost_s, np.inf)
        self._least_costs = costs.min(1, initial=np.inf)
        self._least_waits_s = _least_waits(costs, encoders.encode_s)
        ttft_s = prefills.least_ttft_s(estimate.earliest_s)
        least_s = decodes.least_cost_s(ttft_s, prefills) + prefills.cost_s
        if len(self._least_costs):
            least_s = least_s + (prefills.is_needed * self._least_costs[:, None]).sum(0)
            least_s = least_s + prefills.is_needed.all(0) * self._least_waits_s
        self.least_s = np.where(prefills.is_able, least_s, np.inf)

    def best(self) -> Found:
        best: Found | None = None
        bounds_s = self.least_s.copy()
        while True:
            prefill = int(bounds_s.argmin())
            if best is not None and (
                bounds_s[prefill] >= best.cost_s - self._estimate.tie_s
                or self.num_visited >= self._max_prefills
            ):
                return best
            there = _AtPrefill(
                self._estimate,
                prefill,
                self._least_costs,
                self._least_waits_s,
                self._max_steps - self.num_steps,
            )
            found = there.best()
            self.num_visited += 1
            self.num_steps += there.num_steps
            bounds_s[prefill] = np.inf
            if best is None or found.cost_s < best.cost_s:
                best = found


def _least_waits(costs: Floats, encode_s: Floats) -> float:
    """Lower bound of what all items together cost above each one's least cost, as those at one encoder wait
    for one another. `costs`, `encode_s`: [items, encoders]. Of the items with one cheapest encoder some stay,
    and the k-th of them waits for k others; the rest pay the difference to another encoder."""
    if len(costs) < 2 or costs.shape[1] < 2:
        return 0.0
    cheapest = costs.argmin(1)
    first, second = np.partition(costs, 1, axis=1)[:, :2].T
    least_s = 0.0
    for encoder in set(cheapest.tolist()):
        items = cheapest == encoder
        others_s = np.concatenate(([0.0], np.sort(second[items] - first[items]).cumsum()))
        num_staying = np.arange(len(others_s))[::-1]
        waits_s = encode_s[items, encoder].min() * num_staying * (num_staying - 1) / 2
        least_s += float((others_s + waits_s).min())
    return least_s


@dataclass
class _Assignment:
    """Encoders for the first few items, in the order in which prefill needs the items."""

    ttft_s: float
    cost_s: float = 0.0
    used_s: dict[int, float] = field(default_factory=dict)  # encoder → its device time
    encoders: tuple[int, ...] = ()


class _AtPrefill:
    """The search at one worker that computes prompts. `_rows`: [items, encoders], time to first token if only
    it waits."""

    def __init__(
        self, estimate: Estimate, prefill: int, least_costs: Floats, least_waits_s: float, max_steps: int
    ):
        self.num_steps = 0
        self._max_steps = max_steps
        self._estimate = estimate
        self._prefill = prefill
        self._delay_s = estimate.decodes.cost_s
        self._needed = [int(idx) for idx in np.flatnonzero(estimate.prefills.is_needed[:, prefill])]
        self._least_costs = least_costs
        self._least_waits_s = least_waits_s * (len(self._needed) == len(least_costs))
        self._text_s = float(estimate.prefills.text_s[prefill])
        self._kv_transfers: list[KvTransferEstimate] = estimate.decodes.kv_transfers(
            prefill, estimate.prefills
        )
        if self._needed:
            encoders, prefills = estimate.encoders, estimate.prefills
            self._transfers = encoders.transfers(prefill)
            arrivals = encoders.finish_s + self._transfers
            self._rows = prefills.awaiting_s(arrivals, prefills.tail_s[:, prefill, None], prefill)
            self._costs = encoders.cost_s

    def best(self) -> Found:
        nearest = self._nearest()
        best = self._found(nearest)
        least_ttft_s = max([self._text_s, *(float(self._rows[idx].min()) for idx in self._needed)])
        least_cost_s = self._least_waits_s + sum(float(self._least_costs[idx]) for idx in self._needed)
        is_least = nearest.ttft_s <= least_ttft_s and nearest.cost_s <= least_cost_s
        if is_least or not 1 <= len(self._needed) <= MAX_EXACT_ITEMS:
            return best
        self._floor_s = self._best_decode(least_ttft_s)[0]
        own_s = float(self._estimate.prefills.cost_s[self._prefill])
        self._slope_s = own_s + min(
            float((f.after_s + f.first_s + self._delay_s).min()) for f in self._kv_transfers
        )
        candidates = [self._candidates(idx, least_ttft_s, least_cost_s, best.cost_s) for idx in self._needed]
        return self._search(_Assignment(self._text_s), candidates, least_ttft_s, best)

    def _nearest(self) -> _Assignment:
        """Each item, in order of need, at the encoder where it adds least."""
        assignment = _Assignment(self._text_s)
        for idx in self._needed:
            added_s = np.maximum(assignment.ttft_s, self._rows[idx]) + self._costs[idx]
            for encoder, device_s in assignment.used_s.items():
                row_s = max(assignment.ttft_s, self._row(idx, encoder, device_s))
                added_s[encoder] = row_s + self._estimate.encoders.cost_after(idx, encoder, device_s)
            assignment = self._assign(assignment, idx, int(added_s.argmin()))
        return assignment

    def _candidates(self, idx: int, least_ttft_s: float, least_cost_s: float, max_s: float) -> list[int]:
        """The encoders of an item that may lead to a cost below `max_s`, those that fewer than n others
        beat."""
        row, cost = self._rows[idx], self._costs[idx]
        others_s = least_cost_s - float(self._least_costs[idx])
        least_end_s = np.maximum(self._floor_s, np.maximum(least_ttft_s, row) + self._slope_s)
        bound_s = least_end_s + cost + others_s
        left = np.flatnonzero(bound_s < max_s)
        order = left[np.lexsort((cost[left], row[left]))]
        kept: list[int] = []
        costs_of_kept: list[float] = []  # ascending
        for encoder, cost_s in zip(order.tolist(), cost[order].tolist(), strict=True):
            if bisect_right(costs_of_kept, cost_s) < len(self._needed):
                kept.append(encoder)
                insort(costs_of_kept, cost_s)
        return kept

    def _search(
        self, assignment: _Assignment, candidates: list[list[int]], least_ttft_s: float, best: Found
    ) -> Found:
        """Depth first; the item that is needed first is at the top."""
        depth = len(assignment.encoders)
        if depth == len(self._needed):
            found = self._found(assignment)
            return found if found.cost_s < best.cost_s else best
        rest_s = sum(float(self._least_costs[idx]) for idx in self._needed[depth + 1 :])
        for encoder in candidates[depth]:
            if self.num_steps >= self._max_steps:
                return best
            self.num_steps += 1
            longer = self._assign(assignment, self._needed[depth], encoder)
            ttft_s = max(longer.ttft_s, least_ttft_s)
            least_s = max(self._floor_s, ttft_s + self._slope_s)
            if least_s + longer.cost_s + rest_s < best.cost_s:
                best = self._search(longer, candidates, least_ttft_s, best)
        return best

    def _assign(self, assignment: _Assignment, idx: int, encoder: int) -> _Assignment:
        before_s = assignment.used_s.get(encoder, 0.0)
        used_s = {
            **assignment.used_s,
            encoder: before_s + float(self._estimate.encoders.encode_s[idx, encoder]),
        }
        return _Assignment(
            max(assignment.ttft_s, self._row(idx, encoder, before_s)),
            assignment.cost_s + self._estimate.encoders.cost_after(idx, encoder, before_s),
            used_s,
            (*assignment.encoders, encoder),
        )

    def _row(self, idx: int, encoder: int, device_s: float) -> float:
        """`_rows` of one encoder whose device first computes other items of the request for `device_s`."""
        if device_s <= 0:
            return float(self._rows[idx, encoder])
        prefills = self._estimate.prefills
        arrival_s = (
            self._estimate.encoders.finish_after(idx, encoder, device_s) + self._transfers[idx, encoder]
        )
        return float(prefills.awaiting_s(arrival_s, prefills.tail_s[idx, self._prefill], self._prefill))

    def _found(self, assignment: _Assignment) -> Found:
        estimate = self._estimate
        ttft_s = assignment.ttft_s
        cost_s, decode, codec = self._best_decode(ttft_s)
        encoders = estimate.encoders.default()
        for idx, encoder in zip(self._needed, assignment.encoders, strict=True):
            encoders[idx] = encoder
        cost_s += assignment.cost_s
        return Found(cost_s, tuple(encoders), self._prefill, decode, codec)

    def _best_decode(self, ttft_s: float) -> tuple[float, int, str]:
        """(cost without encoders, decode worker, codec)."""
        ends_s = [kv_transfer.end_s(ttft_s) + self._delay_s for kv_transfer in self._kv_transfers]
        decodes = [int(end_s.argmin()) for end_s in ends_s]
        costs_s = [float(end_s[decode]) for end_s, decode in zip(ends_s, decodes, strict=True)]
        least = costs_s.index(min(costs_s))
        cost_s = costs_s[least] + float(self._estimate.prefills.cost_s[self._prefill])
        return cost_s, decodes[least], self._kv_transfers[least].codec
