"""What admitted requests still hold, and whether another request fits beside them. Pure.

A request holds encoder work until its media is encoded, prefill work until its first token, and KV blocks
until it ends. Workers get as much work as keeps them busy: `max_outstanding_s` of predicted work each, or two
requests. This holds for encoders, for workers that prefill and, if some workers do both, for all of these
together. KV blocks are given as long as there are any.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cluster import overload
from router.admission.answers import Capacity, Reported
from router.admission.fair_queue import AdmissionTicket

REQUESTS_PER_WORKER = 2  # one in work and one ready behind it, whatever they cost


class _Load:
    """Requests that a pool has not finished."""

    __slots__ = ("num_requests", "work_s")

    def __init__(self) -> None:
        self.num_requests = 0
        self.work_s = 0.0

    def change(self, work_s: float, step: int) -> None:
        """A request more (`step` 1) or less (-1)."""
        self.num_requests += step
        self.work_s = self.work_s + step * work_s if self.num_requests else 0.0


@dataclass(slots=True)
class _Holding:
    """What one admitted request still holds, beside its blocks."""

    ticket: AdmissionTicket
    encodes: bool
    prefills: bool = True


class AdmittedWork:
    """`capacity` is the whole cluster's; each of `num_doors` doors uses an equal part of it."""

    def __init__(self, max_outstanding_s: float, num_doors: int, text_share: float, capacity: Capacity):
        self.capacity = capacity
        self._max_outstanding_s = max_outstanding_s
        self._num_doors = num_doors
        self._text_share = text_share
        self._reported = Reported()
        self._holdings: dict[str, _Holding] = {}
        self._encode, self._prefill, self._media_prefill = _Load(), _Load(), _Load()
        self._num_blocks = 0
        self._num_text_blocks = 0

    def __len__(self) -> int:
        return len(self._holdings)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._holdings

    @property
    def is_prefill_idle(self) -> bool:
        return self._prefill.num_requests == 0

    def report(self, reported: Reported) -> None:
        """Takes the larger of this door's part of the workers' reports and of what this door has sent."""
        doors = self._num_doors
        parts = (reported.encode_s / doors, reported.prefill_s / doors, ceil(reported.num_blocks / doors))
        self._reported = Reported(*parts)

    def fits(self, ticket: AdmissionTicket) -> bool:
        if not self.has_blocks(ticket):
            return False
        capacity, reported = self.capacity, self._reported
        encode, prefill, num_kept = self._encode, self._prefill, 0.0
        if not ticket.is_text:
            num_kept = self._text_share * capacity.num_prefills
            if ticket.encode_s and not self._has_time(capacity.num_encoders, reported.encode_s, encode):
                return False
            if not self._has_time(capacity.num_prefills - num_kept, 0.0, self._media_prefill):
                return False
        if not self._has_time(capacity.num_prefills, reported.prefill_s, prefill):
            return False
        if not capacity.num_both:
            return True
        if num_kept and not self._has_time(capacity.num_workers - num_kept, 0.0, self._media_prefill, encode):
            return False
        return self._has_time(capacity.num_workers, reported.encode_s + reported.prefill_s, prefill, encode)

    def _has_time(self, num_workers: float, reported_s: float, *loads: _Load) -> bool:
        """Whether so many workers of the cluster need more work than these loads to be busy. `reported_s`: by
        themselves."""
        num_workers /= self._num_doors
        if max(load.num_requests for load in loads) < max(1.0, REQUESTS_PER_WORKER * num_workers):
            return True
        work_s = sum(load.work_s for load in loads)
        return max(work_s, reported_s) < self._max_outstanding_s * num_workers

    def has_blocks(self, ticket: AdmissionTicket) -> bool:
        """A request that is larger than all memory is admitted alone; the cluster decides about it."""
        return self._num_blocks == 0 or ticket.num_blocks <= self._num_free_blocks

    def block_shortage(self, ticket: AdmissionTicket) -> str:
        """For the client: why the request waits for blocks; empty if it does not."""
        if self.has_blocks(ticket):
            return ""
        num_free, limit = max(0, int(self._num_free_blocks)), int(self._blocks_limit)
        return overload.lacks_blocks(ticket.num_blocks, num_free, limit)

    def may_pass(self, text: AdmissionTicket, media: AdmissionTicket) -> bool:
        """Whether text may take blocks while media waits for some. Text holds less than its share of them and
        leaves as many as the media needs, so that it gets them however much text comes."""
        num_text, limit = self._num_text_blocks, self._blocks_limit
        leaves_enough = num_text + text.num_blocks + media.num_blocks <= limit
        return num_text < self._text_share * limit and leaves_enough

    def add(self, ticket: AdmissionTicket) -> None:
        self._holdings[ticket.request_id] = _Holding(ticket, encodes=ticket.encode_s > 0)
        if ticket.encode_s > 0:
            self._encode.change(ticket.encode_s, 1)
        self._change_prefill(ticket, 1)
        self._change_blocks(ticket, 1)

    def encoded(self, request_id: str) -> None:
        """Unknown requests are ignored, here and below; calls may repeat."""
        holding = self._holdings.get(request_id)
        if holding is not None:
            self._free_encode(holding)

    def prefilled(self, request_id: str) -> None:
        holding = self._holdings.get(request_id)
        if holding is not None:
            self._free_encode(holding)
            self._free_prefill(holding)

    def remove(self, request_id: str) -> None:
        holding = self._holdings.pop(request_id, None)
        if holding is not None:
            self._free_encode(holding)
            self._free_prefill(holding)
            self._change_blocks(holding.ticket, -1)

    @property
    def _num_free_blocks(self) -> float:
        """Free blocks of this door's part."""
        return self._blocks_limit - max(self._num_blocks, self._reported.num_blocks)

    @property
    def _blocks_limit(self) -> float:
        return self.capacity.num_blocks / self._num_doors

    def _free_encode(self, holding: _Holding) -> None:
        if holding.encodes:
            holding.encodes = False
            self._encode.change(holding.ticket.encode_s, -1)

    def _free_prefill(self, holding: _Holding) -> None:
        if holding.prefills:
            holding.prefills = False
            self._change_prefill(holding.ticket, -1)

    def _change_prefill(self, ticket: AdmissionTicket, step: int) -> None:
        for load in (self._prefill,) if ticket.is_text else (self._prefill, self._media_prefill):
            load.change(ticket.work_s - ticket.encode_s, step)

    def _change_blocks(self, ticket: AdmissionTicket, step: int) -> None:
        self._num_blocks += step * ticket.num_blocks
        self._num_text_blocks += step * ticket.num_blocks * ticket.is_text
