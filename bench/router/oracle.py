"""A policy that cannot be built: it sees the workers themselves, now, and plays out what a choice would lead
to.

For each item it takes the encoder at which the item would be ready first: the encoder's threads, its queue
and its calls are run ahead with the true durations. Then it runs every prefill worker ahead, step by step
with the real chunk scheduler and the true instants at which the embeddings of all prompts will come, until
all first tokens are out, with the request and without it, and takes the worker where the sum of all times to
first token grows least. Workers may have several phases: the answer is generated where the KV's way, which is
none to the prompt's own worker, and the next step, with the request in it, are shortest.

It is greedy: it knows neither what will arrive nor how much a single step will vary, and its encoders are
chosen before its prefill worker, for the request alone. So it is no lower bound: a policy can be better by
chance. Where a worker encodes and computes prompts, it does not see that the two take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from bench.router.one_device import unpredicted
from cluster.errors import UnavailableError
from cluster.scheduling.chunks import ChunkScheduler, usable_prefix
from cluster.scheduling.keys import OrderKey, Ticket, order_key
from cluster.simulator.attempt import hold
from cluster.simulator.encoder import SimEncoder
from cluster.simulator.language import SimLanguage
from router.policy import ClusterView, Decision, ItemView, Placement, RequestView

if TYPE_CHECKING:
    from cluster.simulator.simulation import Simulation


NEAR_S = 1e-3


@dataclass(frozen=True, slots=True)
class _Coming:
    """An item that an encoder has still to compute."""

    media_hash: str
    num_rows: int
    order: OrderKey
    at: float  # when it is there to be prepared, or is prepared


@dataclass(slots=True)
class _PrefillSchedule:
    """What one prefill worker has before it. `events`: (instant, prompt, tokens that are ready from then
    on)."""

    chunks: ChunkScheduler
    clock: float
    computed: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    events: list[tuple[float, str, int]] = field(default_factory=list)

    def add(
        self, ticket: Ticket, num_tokens: int, num_computed: int, starts: list[int], at: list[float]
    ) -> None:
        """A prompt whose items begin at `starts` and are there `at`: it is ready up to the first one that is
        not."""
        name, latest = ticket.request_id, 0.0
        self.chunks.add(ticket, num_tokens)
        self.chunks.set_computed(name, num_computed)
        self.computed[name], self.totals[name] = num_computed, num_tokens
        ends = [*starts, num_tokens]
        self.events.append((0.0, name, ends[0]))
        for i, when in enumerate(at):
            latest = max(latest, when)
            self.events.append((latest, name, ends[i + 1]))


class Oracle:
    def __init__(self, simulation: Simulation):
        self._simulation = simulation
        self._network_s = simulation.network.delay_s

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        encoders = [e for e in self._simulation.encoders.values() if not e.is_dead]
        prefills = [p for p in self._simulation.prefills.values() if not p.is_dead]
        decodes = [d for d in self._simulation.decodes.values() if not d.is_dead]
        if not prefills or not decodes or (request.media and not encoders):
            raise UnavailableError("a pool is empty")
        coming: dict[str, list[_Coming]] = {encoder.spec.replica_id: [] for encoder in encoders}
        chosen, arrivals = [], []
        for item in request.media:
            by_encoder = [self._item_ready_at(e, item, coming, request, now) for e in encoders]
            place = _nearly_least(by_encoder, [encoder.num_queued_rows for encoder in encoders])
            encoder, ready_at = encoders[place], by_encoder[place]
            coming[encoder.spec.replica_id].append(self._new(item, request, encoder, now))
            chosen.append(encoder.spec.replica_id)
            link = encoder.spec.link("")
            arrivals.append(ready_at + link.seconds(item.num_bytes))
        ready = self._all_ready(encoders, coming, now)
        estimates = [self._estimate(p, request, arrivals, ready, now) for p in prefills]
        place = _nearly_least(
            [cost for cost, _ in estimates], [p.num_queued_tokens + len(p.coming) for p in prefills]
        )
        prefill, ttft_s = prefills[place], estimates[place][1] - now + self._network_s
        num_tokens = request.num_prompt_tokens
        num_bytes = num_tokens * self._simulation.model.kv_bytes_per_token

        def second_token_s(decode: SimLanguage) -> float:
            sent_s = (
                0.0 if decode is prefill else prefill.spec.link(decode.spec.replica_id).seconds(num_bytes)
            )
            return sent_s + decode.true_step_s((), 1, num_tokens)

        decode = min(decodes, key=lambda d: (second_token_s(d), d.blocks.num_used))
        placement = Placement(tuple(chosen), prefill.spec.replica_id, decode.spec.replica_id)
        return Decision(placement, replace(unpredicted(len(request.media)), ttft_s=ttft_s))

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        encoders = [
            e
            for e in self._simulation.encoders.values()
            if not e.is_dead and e.spec.replica_id not in excluded
        ]
        if not encoders:
            raise UnavailableError("no encoder is left")
        return min(encoders, key=lambda e: e.num_queued_rows).spec.replica_id

    def _item_ready_at(
        self,
        encoder: SimEncoder,
        item: ItemView,
        coming: dict[str, list[_Coming]],
        request: RequestView,
        now: float,
    ) -> float:
        if encoder.has(item.media_hash):
            return now + self._network_s
        extra = coming[encoder.spec.replica_id]
        if item.media_hash not in encoder.jobs:
            extra = [*extra, self._new(item, request, encoder, now)]
        return run_ahead(encoder, extra, now)[item.media_hash]

    def _all_ready(
        self, encoders: list[SimEncoder], coming: dict[str, list[_Coming]], now: float
    ) -> dict[str, float]:
        """When each item in work anywhere will be encoded, the new ones included."""
        found: dict[str, float] = {}
        for encoder in encoders:
            found |= run_ahead(encoder, coming[encoder.spec.replica_id], now)
        return found

    def _estimate(
        self,
        prefill: SimLanguage,
        request: RequestView,
        arrivals: list[float],
        ready: dict[str, float],
        now: float,
    ) -> tuple[float, float]:
        """The instant of the request's first token at this worker plus by how much the prompts that are there
        wait longer for theirs; and that instant."""
        without = self._plan(prefill, ready, now)
        others = sum(_play(prefill, without).values())
        plan = self._plan(prefill, ready, now)
        size = request.block_size
        blocks = prefill.blocks.match(request.block_hashes) * size
        num_cached = usable_prefix(blocks, request.num_prompt_tokens, size, ())
        num_tokens, name = request.num_prompt_tokens, request.request_id
        arrived_at = now - request.waited_s
        ticket = Ticket(name, arrived_at, num_tokens - num_cached, not request.media, request.priority)
        pairs = zip(request.media, arrivals, strict=True)
        at = [0.0 if item.end <= num_cached else when for item, when in pairs]
        plan.add(ticket, num_tokens, num_cached, [item.start for item in request.media], at)
        plan.clock = max(plan.clock, now + self._network_s) if len(plan.computed) == 1 else plan.clock
        done_at = _play(prefill, plan)
        return sum(done_at.values()) - others, done_at[name]

    def _plan(self, prefill: SimLanguage, ready: dict[str, float], now: float) -> _PrefillSchedule:
        """What is in work at a worker, from the end of its running step on."""
        plan = _PrefillSchedule(ChunkScheduler(self._simulation.scheduling), max(now, prefill.device.free_at))
        running = {work.request.request_id: work.num_tokens for work in prefill.batch}
        coming = (hold(attempt, prefill, now) for attempt in prefill.coming.values())
        for held in (*prefill.held.values(), *coming):
            sequence, media = held.sequence, held.attempt.request.media
            num_computed = sequence.num_computed_tokens + running.get(held.attempt.request_id, 0)
            if not held.request.computes or num_computed >= held.attempt.num_tokens:
                continue
            at = [
                0.0
                if item.end <= num_computed or i in sequence.items_ready
                else ready.get(item.media_hash, now)
                for i, item in enumerate(media)
            ]
            ticket = held.ticket(held.attempt.num_tokens - sequence.num_cached_tokens)
            plan.add(ticket, held.attempt.num_tokens, num_computed, [item.start for item in media], at)
        return plan

    def _new(self, item: ItemView, request: RequestView, encoder: SimEncoder, now: float) -> _Coming:
        num_rows = sum(each.num_rows for each in request.media if each.start <= item.start)
        ticket = Ticket(request.request_id, now - request.waited_s, num_rows, False, request.priority)
        order = order_key(ticket, encoder.policy)
        return _Coming(item.media_hash, item.num_rows, order, now + self._network_s)


def _nearly_least(costs: list[float], queued: list[int]) -> int:
    """The index of the least cost; of costs within a millisecond of it, that with the least queued."""
    enough = min(costs) + NEAR_S
    return min((queued[i], cost, i) for i, cost in enumerate(costs) if cost <= enough)[2]


def run_ahead(encoder: SimEncoder, extra: list[_Coming], now: float) -> dict[str, float]:
    """When each item in work at an encoder, and each of the extra ones, will be encoded, if nothing else
    comes."""
    done_at: dict[str, float] = {}
    clock = max(now, encoder.device.free_at)
    waiting: list[tuple[float, OrderKey, str, int]] = []  # (prepared at, order, hash, rows)
    for job, num_rows in encoder.batch:
        left = job.num_rows_left - num_rows
        if left:
            waiting.append((clock, job.order, job.item.media_hash, left))
        else:
            done_at[job.item.media_hash] = clock
    threads = [at for at in encoder.preparing_until() if at > now]
    for job in encoder.jobs.values():
        if job.prepared_at and job.item.media_hash not in done_at and not encoder.is_in_call(job):
            waiting.append((job.prepared_at, job.order, job.item.media_hash, job.num_rows_left))
    threads += [now] * (encoder.spec.num_prepare_threads - len(threads))
    heapify(threads)
    unprepared = [_Coming(j.item.media_hash, j.num_rows_left, j.order, now) for j in encoder.unprepared()]
    for ask in encoder.asked:
        item = ask.item
        if not encoder.has(item.media_hash) and item.media_hash not in encoder.jobs:
            unprepared.append(_Coming(item.media_hash, item.num_rows, ask.order, clock))
    curves = encoder.spec.curves
    image = next(iter(curves.prepare))
    for each in sorted([*unprepared, *extra], key=lambda c: (c.at, c.order)):
        begins_at = max(heappop(threads), each.at)
        prepared_at = begins_at + encoder.slowdown * curves.prepare[image].seconds(each.num_rows)
        heappush(threads, prepared_at)
        waiting.append((prepared_at, each.order, each.media_hash, each.num_rows))
    return done_at | _calls(encoder, waiting, clock)


def _calls(
    encoder: SimEncoder, waiting: list[tuple[float, OrderKey, str, int]], clock: float
) -> dict[str, float]:
    """One after the other, by the rules of the encoder; items of several calls count as one long call."""
    curve = next(iter(encoder.spec.curves.encode.values()))
    max_rows = encoder.spec.curves.max_step_units
    waiting.sort()
    ready: list[tuple[OrderKey, str, int]] = []
    done_at: dict[str, float] = {}
    next_idx = 0
    while ready or next_idx < len(waiting):
        if not ready:
            clock = max(clock, waiting[next_idx][0])
        while next_idx < len(waiting) and waiting[next_idx][0] <= clock:
            _, order, media_hash, num_rows = waiting[next_idx]
            heappush(ready, (order, media_hash, num_rows))
            next_idx += 1
        batch, num_rows = [], 0
        while (
            ready
            and len(batch) < encoder.spec.max_items
            and (not batch or num_rows + ready[0][2] <= max_rows)
        ):
            _, media_hash, rows = heappop(ready)
            batch.append(media_hash)
            num_rows += rows
        num_calls = -(-num_rows // max_rows)
        clock += encoder.slowdown * (num_calls * curve.fixed_s + curve.per_unit_s * num_rows)
        for media_hash in batch:
            done_at[media_hash] = clock
    return done_at


def _play(prefill: SimLanguage, plan: _PrefillSchedule) -> dict[str, float]:
    """The instants at which each prompt's last step ends; a prompt that is never ready is left out."""
    done_at: dict[str, float] = {}
    events = deque(sorted(plan.events))
    chunks, computed = plan.chunks, plan.computed
    while len(done_at) < len(computed):
        while events and events[0][0] <= plan.clock:
            _, name, num_ready = events.popleft()
            if name in chunks:
                chunks.set_ready(name, num_ready)
        step = chunks.schedule(prefill.max_step_tokens)
        if not step and not events:
            break
        if not step:
            plan.clock = events[0][0]
            continue
        plan.clock += prefill.true_step_s([(computed[c.request_id], c.num_scheduled_tokens) for c in step])
        for chunk in step:
            name = chunk.request_id
            computed[name] += chunk.num_scheduled_tokens
            if computed[name] < plan.totals[name]:
                chunks.set_computed(name, computed[name])
            else:
                done_at[name] = plan.clock
                chunks.remove(name)
    return done_at
