"""The next encoder call: which items, and how much of each, by the memory that is free and by the speed that
was measured. Used on the engine's thread only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cluster.clock import Clock
from cluster.scheduling.encoder_calls import rows_of_a_call
from cluster.scheduling.fit import StepFit
from cluster.scheduling.keys import SchedulingPolicy, order_key
from cluster.types.curves import Curve
from cluster.types.media import Modality
from cluster.types.media_phase import MediaPhase
from encoder_service.cache import EmbeddingCache
from encoder_service.runner import Piece, Prepared
from encoder_service.scheduler import CallLimits, Candidate, select_batch, units_per_call
from encoder_service.state import EncodeItem

PIECE_S = 0.05  # an image that arrives during a piece of a long video waits no longer on a fast device

RECOVERY_S = 60.0  # time in which another process, or a fragmented allocator, may return the memory


@dataclass(frozen=True)
class EncoderLimits:
    max_batch_items: int  # media items in one call
    max_batch_rows: int  # embedding rows in one call, before pooling
    # rows of a piece of a longer item, if its family allows that; more if the device computes them in PIECE_S
    max_piece_rows: int
    max_call_bytes: int  # estimated bytes of a call, at most
    row_bytes: int  # estimated bytes of a call for one row, besides its input
    max_prepared_bytes: int  # preprocessed media ahead of the device
    max_queued_rows: int  # not yet encoded; beyond that, new items are refused
    num_prepare_threads: int


@dataclass(frozen=True)
class CallPart:
    """The part of one item in an encoder call."""

    item: EncodeItem
    piece: Piece
    candidate: Candidate


class CallBudget:
    """How many bytes a call may be estimated to need: what was free at the start, until a call runs out of
    memory.

    The estimate of a call is `cluster.worker.memory_plan.encoder_step_bytes` and its input tensors. After a
    call that ran out of memory, the budget is half of that call's estimate. After every `RECOVERY_S` without
    another such call the budget doubles, up to its first value.
    """

    def __init__(self, ceiling_bytes: int, clock: Clock):
        self._ceiling_bytes = ceiling_bytes
        self._clock = clock
        self._max_bytes = ceiling_bytes
        self._changed_at = clock.now()

    @property
    def max_bytes(self) -> int:
        now = self._clock.now()
        while self._max_bytes < self._ceiling_bytes and now - self._changed_at >= RECOVERY_S:
            self._max_bytes = min(2 * self._max_bytes, self._ceiling_bytes)
            self._changed_at += RECOVERY_S
        return self._max_bytes

    def lower(self, tried_bytes: int) -> None:
        """A call of this estimate has run out of memory."""
        self._max_bytes = max(1, min(self.max_bytes, tried_bytes // 2))
        self._changed_at = self._clock.now()


class EncoderFits:
    """What an encoder worker learns of its own speed, by modality. Units are embedding rows before pooling.
    The context of a step is not used."""

    def __init__(self, large_rows: int):
        self.encode = {modality: StepFit(large_rows, 1) for modality in Modality}  # of a call
        # Of an item, on its thread.
        self.prepare = {modality: StepFit(large_rows, 1) for modality in Modality}

    def rows_of_a_batch(self, modality: Modality, num_ready: int) -> float:
        """Returns `rows_of_a_call` by this device's fit."""
        fixed_s, per_row_s = self._parts(modality)
        return float(rows_of_a_call(num_ready, fixed_s, per_row_s)) if per_row_s else math.inf

    def rows_within(self, modality: Modality, seconds: float) -> float:
        """Rows of a call that lasts no longer; 0 before the first observation."""
        fixed_s, per_row_s = self._parts(modality)
        return max(0.0, seconds - fixed_s) / per_row_s if per_row_s else 0.0

    def _parts(self, modality: Modality) -> tuple[float, float]:
        curve = self.encode[modality].curve() or Curve(0.0, 0.0)
        return curve.fixed_s, curve.per_unit_s


class CallPlanner:
    """Chooses the parts of each call. Changes nothing."""

    def __init__(
        self,
        limits: EncoderLimits,
        budget: CallBudget,
        policy: SchedulingPolicy,
        cache: EmbeddingCache,
        fits: EncoderFits,
    ):
        self._limits = limits
        self._fits = fits
        self._budget = budget
        self._policy = policy
        self._cache = cache

    def choose(self, calls: Iterable[CallPart]) -> Iterator[CallPart]:
        """The parts that make up the next call. The cache has room for their items."""
        by_hash = {call.item.media_hash: call for call in calls}
        limits = CallLimits(
            self._limits.max_batch_items,
            self._limits.max_batch_rows,
            self._budget.max_bytes,
            self._fits.rows_of_a_batch,
        )
        candidates = (call.candidate for call in by_hash.values())
        for candidate in select_batch(candidates, limits, self._cache.num_free_blocks):
            yield by_hash[candidate.media_hash]

    def part_of(self, item: EncodeItem, prepared: Prepared) -> CallPart:
        """The part of the item that one call may compute."""
        num_rows, num_units = item.num_call_rows, prepared.num_units
        num_bytes = num_rows * self._limits.row_bytes + prepared.num_bytes
        options, modality = item.item.options, item.item.modality
        units = units_per_call(
            num_units,
            num_rows,
            num_bytes,
            max(self._limits.max_piece_rows, self._fits.rows_within(modality, PIECE_S)),
            self._budget.max_bytes,
            options.temporal_pooling,
        )
        start, end = item.num_units_done, min(item.num_units_done + units, num_units)
        piece = Piece(prepared, options, start, end)
        share = (end - start) / num_units
        candidate = Candidate(
            item.media_hash,
            order_key(item.ticket, self._policy),
            modality,
            num_rows=int(num_rows * share),
            num_bytes=int(num_bytes * share),
            num_blocks=self._cache.num_blocks(item.num_rows) if item.phase is MediaPhase.READY else 0,
            runs_alone=item.is_suspect or not piece.is_whole,
        )
        return CallPart(item, piece, candidate)
