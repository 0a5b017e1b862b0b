"""All that one door, or the simulator, knows of the cluster: the workers, their load and speed, what they
hold, and what this door has sent them. All policies read this one object.

It is driven from outside and has no clock:

    add, remove, set_listed, set_avoided                       workers join, drain, hang and leave
    assign, measured, reported, media_changed, blocks_changed, adapters_changed    messages of workers
    started, item_moved, item_done, prefilled, ended          this door's own requests, in this order
    observed                                                  the actual durations; before `ended`

Messages about a worker or a request that is not there are ignored, because they may arrive after it has left.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from cluster.scheduling.keys import SchedulingPolicy, Ticket, virtual_deadline
from cluster.types.curves import Curve, ServiceCurves
from cluster.types.members import Phase, Role
from cluster.types.messages import LoadReport
from cluster.types.timings import EncodeTiming, PrefillTiming
from router.policy.calibration import Calibration, Kind
from router.policy.encoder_media import EncoderMedia
from router.policy.in_flight import InFlightRequest, learn, num_early_tokens
from router.policy.index import HolderIndex
from router.policy.links import Links
from router.policy.pending import PendingPrompts
from router.policy.pool import UNMEASURED_S, Floats, WorkerPool
from router.policy.shared import SharedWorkers
from router.policy.views import Placement, Prediction, RequestView, Worker

HOLDING_S = 10.0  # how long a request keeps its blocks in decode, before the first one has ended
CONTEXT_TOKENS = 0.0  # of earlier steps that a prompt token attends to, on average, before the first request
FORGETTING = 0.05  # weight of a new observation of either
ROUND_TRIP_SHARE = 0.9  # of the shortest round trip: a margin
_Tokens = TypeVar("_Tokens", float, Floats)


class ClusterView:
    def __init__(
        self,
        scheduling: SchedulingPolicy,
        kv_bytes_per_token: float,
        num_layers: int,
        codecs: Sequence[str] = ("raw",),
    ):
        """`codecs`: those that KV may travel in; among equal ones the first is chosen."""
        self.scheduling = scheduling
        self.kv_bytes_per_token = kv_bytes_per_token
        self.num_layers = num_layers
        self.state_bytes = 0.0  # of a hybrid model's state of a prompt, which travels with its KV
        self.codecs = dict.fromkeys(codecs, 1.0)  # codec → bytes that travel, as a ratio to raw KV
        self.encoders = WorkerPool(Phase.ENCODE)
        # Of prompts: all workers that can compute some. Those that decode can, so they are in both of these
        self.prefills = WorkerPool(Phase.PREFILL)
        self.decodes = WorkerPool(Phase.DECODE)
        self.shared = SharedWorkers(self.encoders, self.prefills, self.decodes)
        self.feature_links = Links(self.encoders, self.prefills, is_free_inside=True)
        self.kv_links = Links(self.prefills, self.decodes)
        self.encoder_media = EncoderMedia(self.encoders)
        self.media = self.encoder_media.index
        self.prefixes: HolderIndex[bytes] = HolderIndex()
        self.pending = PendingPrompts()
        self.holding_s = HOLDING_S
        self.context_tokens = CONTEXT_TOKENS
        self.usual_rows = math.nan  # of a media item, on average; NaN before the first one
        self.calibration = Calibration()
        self.in_flight: dict[str, InFlightRequest] = {}
        self._now = 0.0  # the latest instant of any call

    # --- members

    def add(self, worker: Worker) -> None:
        """The worker is listed, and idle until it reports."""
        role = worker.role
        for pool, has_part in (
            (self.encoders, role.encodes),
            (self.prefills, role.prefills or role.decodes),
            (self.decodes, role.decodes),
        ):
            if has_part:
                pool.add(worker)
        self._members_changed()

    def remove(self, replica_id: str) -> None:
        """The worker is gone, and its caches with it."""
        for pool in self._pools_of(replica_id):
            slot = pool.remove(replica_id)
            if pool is self.encoders:
                self.encoder_media.drop(slot)
            elif pool is self.prefills:
                self.prefixes.drop(slot)
                self.pending.drop_slot(slot)
        self._members_changed()

    def set_listed(self, replica_id: str, is_listed: bool) -> None:
        """A worker that is not listed drains: it gets no new work."""
        for pool in self._pools_of(replica_id):
            pool.is_listed[pool.slots[replica_id]] = is_listed

    def set_avoided(self, replica_id: str, is_avoided: bool) -> None:
        """A worker that makes no progress, or keeps failing, is chosen only if there is no other."""
        for pool in self._pools_of(replica_id):
            pool.is_avoided[pool.slots[replica_id]] = is_avoided

    # --- messages of workers

    def assign(self, replica_id: str, phases: Collection[Phase]) -> None:
        """The worker is chosen for other phases of its role only if no other worker is left for them."""
        for pool in self._pools_of(replica_id):
            role, _ = pool.hardware_of(replica_id)
            # A worker whose role is to decode stands among those that prefill for its own prompts of text
            is_assigned = pool.phase in phases or pool.phase not in role.phases
            pool.is_assigned[pool.slots[replica_id]] = is_assigned

    def adapters_changed(self, replica_id: str, held: Collection[str]) -> None:
        """The worker holds these LoRA adapters, by digest."""
        for pool in self._pools_of(replica_id):
            pool.set_adapters(replica_id, frozenset(held))

    def measured(self, replica_id: str, curves: ServiceCurves, *, is_of_encoder: bool = False) -> None:
        kinds: dict[str, Curve] = {f"encode {m}": curve for m, curve in curves.encode.items()}
        kinds |= {f"prepare {m}": curve for m, curve in curves.prepare.items()}
        kinds |= {"prefill": curves.prefill} if curves.prefill is not None else {}
        kinds |= {"decode": curves.decode} if curves.decode is not None else {}
        for name, speed in curves.codecs.items():
            kinds[f"codec {name}"] = Curve(0.0, speed.s_per_byte)
            if name in self.codecs:
                self.codecs[name] = speed.ratio
        for pool in self._reporting(replica_id, is_of_encoder):
            pool.measured(replica_id, kinds, curves.max_step_units)
            links = {self.encoders: self.feature_links, self.prefills: self.kv_links}.get(pool)
            if links is not None:
                links.measured(replica_id, curves.links)

    def reported(self, replica_id: str, load: LoadReport, now: float) -> None:
        self._now = max(self._now, now)
        round_trip_s = ROUND_TRIP_SHARE * self.calibration.round_trip_s
        for pool in self._reporting(replica_id, load.is_of_encoder):
            is_shared = pool is self.prefills and replica_id in self.decodes.slots
            pool.reported(replica_id, _of_prompts(load) if is_shared else load, now, round_trip_s)

    def media_changed(self, encoder: str, added: Sequence[str], evicted: Sequence[str]) -> None:
        """The encoder has taken on `added` items, for any door, and no longer has the `evicted` ones."""
        self.encoder_media.changed(encoder, added, evicted, self._now)

    def blocks_changed(self, replica_id: str, added: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        """The worker has a prefix cache."""
        slot = self.prefills.slots.get(replica_id)
        if slot is not None:
            self.prefills.keeps_blocks[slot] = True
            self.prefixes.discard(slot, evicted)
            self.prefixes.add(slot, added)

    # --- the door's own requests

    def started(self, request: RequestView, placement: Placement, prediction: Prediction, now: float) -> None:
        """The request's work counts as queued at once. Raises KeyError for a placement on workers that are
        not there; then nothing is counted."""
        self._check(placement)
        self._now = max(self._now, now)
        pool, slot = self.prefills, self.prefills.slots[placement.prefill]
        num_cached = self._num_cached_blocks(request, slot)
        num_tokens = request.num_prompt_tokens - num_cached * request.block_size + request.num_negative_tokens
        # Blocks of a local prefill are those of decode
        num_blocks = 0 if placement.is_local else request.num_prefill_blocks - num_cached
        kind = self.kind_of(request, placement, prediction.media_s)
        in_flight = InFlightRequest(
            request=request,
            placement=placement,
            prediction=prediction,
            started_at=now,
            residual=self.calibration.residual(kind),
            kind=kind,
            prefill_factor=self.factor(pool, placement.prefill),
            encode_factors=tuple(self.factor(self.encoders, encoder) for encoder in placement.encoders),
            work=pool.charge(placement.prefill, num_tokens, num_blocks),
            decode=self.decodes.charge(
                placement.decode, request.num_sequences, -(-request.num_prompt_tokens // request.block_size)
            ),
            items=[],
            expected=self._expected(request, slot, num_cached),
        )
        self.in_flight[request.request_id] = in_flight
        self._queue_prompt(in_flight, num_tokens, num_cached, now)
        for item, encoder, predicted in zip(request.media, placement.encoders, prediction.items, strict=True):
            encoded_s = predicted.queue_s + predicted.encode_s
            in_flight.items.append(self.encoder_media.assign(item, encoder, encoded_s, self._now))

    def _queue_prompt(
        self, in_flight: InFlightRequest, num_tokens: int, num_cached_blocks: int, now: float
    ) -> None:
        request, pool = in_flight.request, self.prefills
        slot, num_cached = in_flight.work.slot, num_cached_blocks * request.block_size
        num_early = num_early_tokens(request, in_flight.prediction, num_tokens, num_cached)
        begins = pool.told(in_flight.work, now, num_early)
        self.pending.add(
            request.request_id,
            slot,
            self.keys(request, now, float(num_tokens)),
            num_tokens,
            num_early,
            is_text=not request.media,
            told_at=np.nextafter(now, -np.inf) if begins else now,  # before the step that begins with it
            ready_at=now + max((item.arrival_s for item in in_flight.prediction.items), default=0.0),
            num_coming=sum(item.arrival_s > 0 for item in in_flight.prediction.items),
            first_block=in_flight.expected[0] if in_flight.expected else None,
        )
        self.prefixes.expect(slot, in_flight.expected)
        context = num_cached + max(0.0, num_tokens - pool.step_units[slot]) / 2
        self.context_tokens += FORGETTING * (context - self.context_tokens)
        for item in request.media:
            mean = item.num_rows if math.isnan(self.usual_rows) else self.usual_rows
            self.usual_rows = mean + FORGETTING * (item.num_rows - mean)

    def item_moved(self, request_id: str, item_idx: int, encoder: str) -> None:
        """Another encoder is asked for the item."""
        in_flight = self.in_flight.get(request_id)
        if in_flight is not None and encoder in self.encoders.slots:
            self.encoder_media.release(in_flight.items[item_idx])
            item, predicted = in_flight.request.media[item_idx], in_flight.prediction.items[item_idx]
            encoded_s = predicted.queue_s + predicted.encode_s or UNMEASURED_S * item.num_rows
            in_flight.items[item_idx] = self.encoder_media.assign(item, encoder, encoded_s, self._now)

    def item_done(self, request_id: str, item_idx: int, came_at: float | None = None) -> None:
        """The encoder is done with the item. `came_at`: arrival of its embeddings; None: others bring
        them."""
        in_flight = self.in_flight.get(request_id)
        if in_flight is None:
            return
        self.encoder_media.release(in_flight.items[item_idx])
        if in_flight.prediction.items[item_idx].arrival_s > 0:
            self.pending.item_done(request_id, came_at)

    def prefilled(self, request_id: str) -> None:
        """The request's first token has arrived."""
        in_flight = self.in_flight.get(request_id)
        if in_flight is not None:
            self._end_prefill(in_flight)
            self.decodes.told(in_flight.decode, self._now)

    def ended(self, request_id: str) -> None:
        """The request has ended, successfully or not, and no worker has work for it."""
        in_flight = self.in_flight.pop(request_id, None)
        if in_flight is None:
            return
        self._end_prefill(in_flight)
        for item in in_flight.items:
            self.encoder_media.release(item)
        self.decodes.discharge(in_flight.decode)
        if self.prefills.has(in_flight.work):
            self.prefixes.unexpect(in_flight.work.slot, in_flight.expected)
        self.holding_s += FORGETTING * (self._now - in_flight.started_at - self.holding_s)

    def observed(
        self,
        request_id: str,
        ttft_s: float,
        media: Sequence[EncodeTiming | None] | None = None,
        prefill: PrefillTiming | None = None,
    ) -> None:
        """The actual durations: from the decision to the first token, and of each item that was encoded."""
        in_flight = self.in_flight.get(request_id)
        if in_flight is not None:
            learn(self.calibration, in_flight, ttft_s, media or (), prefill, self._hardware_of)

    # --- what policies read

    @property
    def is_idle(self) -> bool:
        """No request of this door is in flight."""
        return not self.in_flight

    def has_media(self, media_hash: str) -> bool:
        """Whether some encoder has the item or has taken it on."""
        return self.media.holders(media_hash) != 0

    def num_cached_tokens(self, request: RequestView, replica_id: str) -> int:
        """Tokens of the prompt that a worker need not compute."""
        return self._num_cached_blocks(request, self.prefills.slots[replica_id]) * request.block_size

    def num_queued_rows(self) -> float:
        """Embedding rows queued at the least loaded encoder; zero if there is none."""
        pool, able = self.encoders, self.encoders.is_listed
        return float((pool.reported_units + pool.sent_units)[able].min(initial=np.inf)) if able.any() else 0.0

    def keys(self, request: RequestView, now: float, num_tokens: _Tokens) -> _Tokens:
        """The request's virtual deadline at prefill workers that lack so many of its tokens."""
        arrived_at = now - request.waited_s
        ticket = Ticket(request.request_id, arrived_at, 0, not request.media, request.priority)
        return virtual_deadline(ticket, self.scheduling) + num_tokens / self.scheduling.tokens_per_s

    def factors(self, pool: WorkerPool) -> Floats:
        """[slots]: learnt corrections of predicted durations."""
        factors = [self.calibration.factor(*hardware) for hardware in pool.hardware]
        return np.array(factors)[pool.classes]

    def factor(self, pool: WorkerPool, replica_id: str) -> float:
        return self.calibration.factor(*pool.hardware_of(replica_id))

    def kind_of(self, request: RequestView, placement: Placement, media_s: float) -> Kind:
        """The kind of a placement's prediction."""
        if media_s > 0:
            return Kind.AWAITED
        if placement.prefill in self.decodes.slots:
            return Kind.BESIDE_ANSWERS
        return Kind.COMPUTED if request.media else Kind.TEXT

    # --- internal

    def _pools_of(self, replica_id: str) -> list[WorkerPool]:
        return [pool for pool in (self.encoders, self.prefills, self.decodes) if replica_id in pool.slots]

    def _reporting(self, replica_id: str, is_of_encoder: bool) -> list[WorkerPool]:
        """Those that a report of the worker is about. If it encodes and does other phases, too, each of its
        two parts reports for itself."""
        pools = self._pools_of(replica_id)
        if len(pools) == 1:
            return pools
        return [pool for pool in pools if (pool is self.encoders) == is_of_encoder]

    def _hardware_of(self, phase: Phase, replica_id: str) -> tuple[Role, str] | None:
        pool = self.encoders if phase is Phase.ENCODE else self.prefills
        return pool.hardware_of(replica_id) if replica_id in pool.slots else None

    def _check(self, placement: Placement) -> None:
        """Raises KeyError for a worker that is not there."""
        for encoder in placement.encoders:
            _ = self.encoders.slots[encoder]
        _ = self.prefills.slots[placement.prefill]
        _ = self.decodes.slots[placement.decode]

    def _members_changed(self) -> None:
        self.shared.changed()
        self.feature_links.changed()
        self.kv_links.changed()

    def _num_cached_blocks(self, request: RequestView, slot: int) -> int:
        depth = self.prefixes.depth(request.block_hashes, slot, request.snapshots)
        return min(depth, _num_usable_blocks(request))

    def _expected(self, request: RequestView, slot: int, num_cached: int) -> Sequence[bytes]:
        """What the worker will have of the prompt that it lacks: blocks, and the snapshots that it takes
        (`cluster.engine.snapshots`)."""
        if not self.prefills.keeps_blocks[slot]:
            return ()
        expected = request.block_hashes[num_cached:]
        if not request.snapshots:
            return expected
        at = {_num_usable_blocks(request), self.prefixes.depth(request.block_hashes, slot)}
        return [*expected, *(request.snapshots[depth - 1] for depth in at if depth > num_cached)]

    def _end_prefill(self, in_flight: InFlightRequest) -> None:
        self.prefills.discharge(in_flight.work)
        self.pending.remove(in_flight.request.request_id)


def _num_usable_blocks(request: RequestView) -> int:
    """Counts the full blocks in front of the prompt's last token, which is computed anyway."""
    return (request.num_prompt_tokens - 1) // request.block_size


def _of_prompts(load: LoadReport) -> LoadReport:
    """What a worker that decodes reports of the prompts that it computes itself."""
    return msgspec.structs.replace(
        load, num_running=0, num_waiting=load.num_prompts, num_queued_units=load.num_prompt_tokens
    )
