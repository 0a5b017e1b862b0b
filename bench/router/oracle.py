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
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from bench.router.one_device import unpredicted
from cluster.errors import UnavailableError
from cluster.scheduling.chunks import ChunkScheduler, usable_prefix
from cluster.scheduling.keys import OrderKey, Ticket, order_key
from cluster.types.members import Phase
from cluster.types.messages import StartEncode
from cluster.types.request import GenerateRequest
from deploy.simulator.encoder import SimEncoder
from deploy.simulator.language import SimLanguage
from deploy.simulator.worker import SimWorker
from router.policy import ClusterView, Decision, ItemView, Placement, RequestView

if TYPE_CHECKING:
    from deploy.simulator.simulation import Simulation


NEAR_S = 1e-3
ReadyAt = Callable[[str], float]  # of an item, by its hash


@dataclass(frozen=True, slots=True)
class _Coming:
    """An item that an encoder has still to compute."""

    media_hash: str
    num_rows: int
    order: OrderKey
    at: float  # when it is there to be prepared


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
        encoders, prefills, decodes = (list(self._simulation.alive(phase).values()) for phase in Phase)
        if not prefills or not decodes or (request.media and not encoders):
            raise UnavailableError("a pool is empty")
        coming: dict[str, list[_Coming]] = {encoder.replica_id: [] for encoder in encoders}
        chosen, arrivals = [], []
        for item in request.media:
            by_encoder = [self._item_ready_at(e, item, coming, request, now) for e in encoders]
            place = _nearly_least(by_encoder, [_encoder_of(encoder).num_queued_rows for encoder in encoders])
            encoder, ready_at = encoders[place], by_encoder[place]
            coming[encoder.replica_id].append(self._new(item, request, encoder, now))
            chosen.append(encoder.replica_id)
            arrivals.append(ready_at + encoder.spec.link("").seconds(item.num_bytes))
        ready = self._all_ready(encoders, coming, now)
        estimates = [self._estimate(p, request, arrivals, ready, now) for p in prefills]
        place = _nearly_least([cost for cost, _ in estimates], list(map(_num_queued_tokens, prefills)))
        prefill, ttft_s = prefills[place], estimates[place][1] - now + self._network_s
        num_tokens = request.num_prompt_tokens
        num_bytes = num_tokens * self._simulation.model.kv_bytes_per_token

        def second_token_s(decode: SimWorker) -> float:
            sent_s = 0.0 if decode is prefill else prefill.spec.link(decode.replica_id).seconds(num_bytes)
            language = _language_of(decode)
            num_answers, context = language.answers
            return sent_s + language.runner.step_s((), num_answers + 1, context + num_tokens)

        decode = min(decodes, key=lambda d: (second_token_s(d), _language_of(d).blocks.num_referenced))
        placement = Placement(tuple(chosen), prefill.replica_id, decode.replica_id)
        return Decision(placement, replace(unpredicted(len(request.media)), ttft_s=ttft_s))

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        encoders = self._simulation.alive(Phase.ENCODE)
        left = [name for name in encoders if name not in excluded]
        if not left:
            raise UnavailableError("no encoder is left")
        return min(left, key=lambda name: _encoder_of(encoders[name]).num_queued_rows)

    def _item_ready_at(
        self,
        worker: SimWorker,
        item: ItemView,
        coming: dict[str, list[_Coming]],
        request: RequestView,
        now: float,
    ) -> float:
        encoder = _encoder_of(worker)
        if item.media_hash in encoder.cache:
            return max(now, encoder.busy_until) + self._network_s
        extra = coming[worker.replica_id]
        if item.media_hash not in encoder.engine.items:
            extra = [*extra, self._new(item, request, worker, now)]
        return run_ahead(worker, extra, now)[item.media_hash]

    def _all_ready(self, encoders: list[SimWorker], coming: dict[str, list[_Coming]], now: float) -> ReadyAt:
        """When an item will be encoded that is in work anywhere, the new ones included. What the call that
        runs computes is in the encoder's cache already."""
        found: dict[str, float] = {}
        for encoder in encoders:
            found |= run_ahead(encoder, coming[encoder.replica_id], now)

        def ready_at(media_hash: str) -> float:
            if media_hash not in found:
                holders = [_encoder_of(each) for each in encoders if media_hash in _encoder_of(each).cache]
                found[media_hash] = max(now, min((each.busy_until for each in holders), default=now))
            return found[media_hash]

        return ready_at

    def _estimate(
        self,
        worker: SimWorker,
        request: RequestView,
        arrivals: list[float],
        ready: ReadyAt,
        now: float,
    ) -> tuple[float, float]:
        """The instant of the request's first token at this worker plus by how much the prompts that are there
        wait longer for theirs; and that instant."""
        prefill = _language_of(worker)
        without = self._plan(worker, ready, now)
        others = sum(_play(prefill, without).values())
        plan = self._plan(worker, ready, now)
        size = request.block_size
        blocks = prefill.blocks.num_known(request.block_hashes) * size
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

    def _plan(self, worker: SimWorker, ready: ReadyAt, now: float) -> _PrefillSchedule:
        """What is in work at a worker, from the end of its running step on, which its records contain."""
        chunks = ChunkScheduler(self._simulation.scheduling)
        plan = _PrefillSchedule(chunks, max(now, _language_of(worker).busy_until))
        for request in worker.requests.values():
            if request.num_missing_tokens == 0 or not request.sequences:
                continue
            main, num_items = request.main, len(request.main.prompt.media)
            here = main.items_ready | {
                i for i in range(num_items) if main.prompt.media[i].end <= main.num_computed_tokens
            }
            _add(plan, request.request, main.num_computed_tokens, here, ready, request.arrived_at)
        for asked in _language_of(worker).asked:
            _add(plan, asked, 0, set(), ready, now - asked.waited_s)
        return plan

    def _new(self, item: ItemView, request: RequestView, encoder: SimWorker, now: float) -> _Coming:
        num_rows = sum(each.num_rows for each in request.media if each.start <= item.start)
        ticket = Ticket(request.request_id, now - request.waited_s, num_rows, False, request.priority)
        order = order_key(ticket, encoder.policy)
        return _Coming(item.media_hash, item.num_rows, order, now + self._network_s)


def _nearly_least(costs: list[float], queued: list[int]) -> int:
    """The index of the least cost; of costs within a millisecond of it, that with the least queued."""
    enough = min(costs) + NEAR_S
    return min((queued[i], cost, i) for i, cost in enumerate(costs) if cost <= enough)[2]


def _language_of(worker: SimWorker) -> SimLanguage:
    assert worker.language is not None
    return worker.language


def _encoder_of(worker: SimWorker) -> SimEncoder:
    assert worker.encoder is not None
    return worker.encoder


def _num_queued_tokens(worker: SimWorker) -> int:
    """With the prompts that are on their way, as one each."""
    requests = worker.requests.values()
    return sum(request.num_missing_tokens for request in requests) + len(_language_of(worker).asked)


def _add(
    plan: _PrefillSchedule,
    request: GenerateRequest,
    num_computed: int,
    here: Collection[int],
    ready: ReadyAt,
    arrived_at: float,
) -> None:
    """`here`: the items whose embeddings are there, or not needed."""
    media, num_tokens = request.prompt.media, len(request.prompt.token_ids)
    at = [0.0 if i in here else ready(item.media_hash) for i, item in enumerate(media)]
    ticket = Ticket(request.request_id, arrived_at, num_tokens - num_computed, not media, request.priority)
    plan.add(ticket, num_tokens, num_computed, [item.ranges[0][0] for item in media], at)


def run_ahead(worker: SimWorker, extra: list[_Coming], now: float) -> dict[str, float]:
    """When each item in work at an encoder, and each of the extra ones, will be encoded, if nothing else
    comes."""
    encoder, policy = _encoder_of(worker), worker.policy
    clock = max(now, encoder.busy_until)
    waiting: list[tuple[float, OrderKey, str, int]] = []  # (prepared at, order, hash, rows)
    unprepared, preparing = [], encoder.threads.ends_at
    for name, item in encoder.engine.items.items():
        order = order_key(item.ticket, policy)
        if item.prepared is not None:
            left = item.num_call_rows * (1 - item.num_units_done / item.prepared.num_units)
            waiting.append((clock if item.num_units_done else now, order, name, int(left)))
        elif name in preparing:
            waiting.append((preparing[name], order, name, item.num_call_rows))
        else:
            unprepared.append(_Coming(name, item.num_call_rows, order, now))
    known = {name for _, _, name, _ in waiting} | {each.media_hash for each in unprepared}
    for message in encoder.asked:
        name = message.item.media_hash
        if name not in encoder.cache and name not in known:
            unprepared.append(_Coming(name, message.item.num_call_rows, _order(message, worker, now), clock))
    threads = [at for at in preparing.values() if at > now]
    threads += [now] * (worker.spec.num_prepare_threads - len(threads))
    heapify(threads)
    curves = worker.spec.encoder_curves
    image = next(iter(curves.prepare))
    for each in sorted([*unprepared, *extra], key=lambda c: (c.at, c.order)):
        begins_at = max(heappop(threads), each.at)
        prepared_at = begins_at + worker.device.slowdown * curves.prepare[image].seconds(each.num_rows)
        heappush(threads, prepared_at)
        waiting.append((prepared_at, each.order, each.media_hash, each.num_rows))
    return _calls(worker, waiting, clock)


def _order(message: StartEncode, worker: SimWorker, now: float) -> OrderKey:
    num_rows = message.num_rows_before + message.item.num_call_rows
    ticket = Ticket(message.request_id, now - message.waited_s, num_rows, False, message.priority)
    return order_key(ticket, worker.policy)


def _calls(
    worker: SimWorker, waiting: list[tuple[float, OrderKey, str, int]], clock: float
) -> dict[str, float]:
    """One after the other, by the rules of the encoder; items of several calls count as one long call."""
    curves = worker.spec.encoder_curves
    curve, max_rows = next(iter(curves.encode.values())), curves.max_step_units
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
            ready and len(batch) < worker.spec.max_items and (not batch or num_rows + ready[0][2] <= max_rows)
        ):
            _, media_hash, rows = heappop(ready)
            batch.append(media_hash)
            num_rows += rows
        num_calls = -(-num_rows // max_rows)
        clock += worker.device.slowdown * (num_calls * curve.fixed_s + curve.per_unit_s * num_rows)
        for media_hash in batch:
            done_at[media_hash] = clock
    return done_at


def _play(prefill: SimLanguage, plan: _PrefillSchedule) -> dict[str, float]:
    """The instants at which each prompt's last step ends; a prompt that is never ready is left out."""
    done_at: dict[str, float] = {}
    events = deque(sorted(plan.events))
    chunks, computed = plan.chunks, plan.computed
    max_tokens, answers = prefill.max_step_tokens, prefill.answers
    while len(done_at) < len(computed):
        while events and events[0][0] <= plan.clock:
            _, name, num_ready = events.popleft()
            if name in chunks:
                chunks.set_ready(name, num_ready)
        step = chunks.schedule(max_tokens)
        if not step and not events:
            break
        if not step:
            plan.clock = events[0][0]
            continue
        parts = [(computed[name], num_tokens) for name, num_tokens in step.items()]
        plan.clock += prefill.runner.step_s(parts, *answers)
        for name, num_tokens in step.items():
            computed[name] += num_tokens
            if computed[name] < plan.totals[name]:
                chunks.set_computed(name, computed[name])
            else:
                done_at[name] = plan.clock
                chunks.remove(name)
    return done_at
