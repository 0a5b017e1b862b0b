"""A simulated encoder: items are prepared on CPU threads, then computed in calls by the rules of the real
one, kept by their hash within a budget of bytes, and sent. As in the real one, what happens during a call
waits for the end of the call: new requests, also for items in the cache, and items that have been
prepared."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from cluster.scheduling.keys import OrderKey, SchedulingPolicy, Ticket, order_key
from cluster.simulator.attempt import SimAttempt
from cluster.simulator.caches import Changes, MediaCache
from cluster.simulator.device import Device, SimLink
from cluster.simulator.events import EventLoop
from cluster.simulator.worker import Network, WorkerSpec
from cluster.simulator.workload import Item
from cluster.types.members import Role
from cluster.types.messages import (
    AnyMessage,
    CacheChanged,
    Cancel,
    Encoded,
    EncodeTiming,
    LoadReport,
    StartEncode,
    Tokens,
)
from encoder_service.scheduler import CallLimits, Candidate, select_batch

CALLS_AHEAD = 4  # so many calls' worth of ready items is all that choosing one looks at


@dataclass(eq=False, slots=True)
class Ask:
    """A `StartEncode`: one item of one attempt."""

    attempt: SimAttempt
    item_idx: int
    item: Item
    order: OrderKey
    keep: bool  # another use of the item is expected
    asked_at: float
    is_wanted: bool = True  # it has not been cancelled


@dataclass(eq=False, slots=True)
class Job:
    """One item in work, for all that asked for it."""

    item: Item
    num_bytes: int
    order: OrderKey
    num_rows_left: int
    asks: list[Ask]
    asked_at: float
    prepared_at: float = 0.0
    begun_at: float = 0.0


class SimEncoder:
    def __init__(
        self,
        spec: WorkerSpec,
        loop: EventLoop,
        device: Device,
        network: Network,
        policy: SchedulingPolicy,
        noise: Callable[[], float],
    ):
        self.spec, self.is_waiting, self.is_dead = spec, False, False
        self._loop, self.device, self._network = loop, device, network
        self.policy, self._noise = policy, noise
        self._cache, self.changes = MediaCache(spec.cache_bytes), Changes()
        self.jobs: dict[str, Job] = {}
        self._unprepared: list[tuple[OrderKey, int, Job]] = []
        self._num_threads_busy = 0
        self.ready: list[tuple[OrderKey, int, Job]] = []
        self.batch: list[tuple[Job, int]] = []
        self.asked: list[Ask] = []  # during the call
        self._asks: dict[tuple[str, int], Ask] = {}  # that are not answered, by attempt and item
        self._prepared_during_call: list[Job] = []
        self._num_asked = 0
        self.num_queued_rows = 0
        self._sender = SimLink()
        self.slowdown = 1.0

    def receive(self, attempt: SimAttempt, message: AnyMessage) -> None:
        """Handles a message of the attempt's door."""
        if isinstance(message, StartEncode):
            self._ask(attempt, message)
        elif isinstance(message, Cancel):
            self._cancel(attempt, message.item_idx)

    def _ask(self, attempt: SimAttempt, start: StartEncode) -> None:
        now, item_idx = self._loop.now, start.item_idx
        num_rows = start.num_rows_before + start.item.num_call_rows
        arrived_at = now - start.waited_s
        ticket = Ticket(attempt.request_id, arrived_at, num_rows, is_text=False, priority=start.priority)
        order = order_key(ticket, self.policy)
        ask = Ask(attempt, item_idx, attempt.request.media[item_idx], order, start.keep, now)
        self._asks[attempt.request_id, item_idx] = ask
        if self.batch:
            self.asked.append(ask)
        else:
            self._start(ask)

    def _cancel(self, attempt: SimAttempt, item_idx: int | None) -> None:
        """`item_idx`: None for all items. What is not here is ignored."""
        items = range(len(attempt.request.media)) if item_idx is None else (item_idx,)
        for idx in items:
            ask = self._asks.pop((attempt.request_id, idx), None)
            if ask is not None:
                ask.is_wanted = False

    def _start(self, ask: Ask) -> None:
        if self.is_dead or not ask.is_wanted:
            return
        item = ask.item
        if self._cache.use(item.media_hash, ask.keep):
            timing = EncodeTiming(queued_s=self._loop.now - ask.asked_at)
            return self._send(ask, timing, is_cached=True)
        job = self.jobs.get(item.media_hash)
        if job is not None:
            job.asks.append(ask)
            return
        num_bytes = item.num_tokens * self.spec.bytes_per_row
        job = Job(item, num_bytes, ask.order, item.num_rows, [ask], ask.asked_at)
        self.jobs[item.media_hash] = job
        self.changes.add(item.media_hash)
        self.num_queued_rows += item.num_rows
        self._num_asked += 1
        heappush(self._unprepared, (job.order, self._num_asked, job))
        self._prepare()
        self.report()

    def report(self) -> None:
        """Sends a report to all doors."""
        added, evicted = self.changes.take()
        load = LoadReport(
            num_running=len(self.batch),
            num_waiting=len(self.jobs) - len(self.batch),
            num_queued_units=self.num_queued_rows,
            is_of_encoder=self.spec.role is not Role.ENCODE,
        )
        messages: list[AnyMessage] = [Tokens((), load)]
        if added or evicted:
            messages.append(CacheChanged(added, evicted))
        self._network.tell_doors(self.spec.replica_id, *messages)

    def begin(self) -> float | None:
        if self.is_dead:
            return None
        max_rows = self.spec.curves.max_step_units
        candidates, by_hash = [], {}
        self._drop_unwanted()
        for order, _, job in self.ready[: CALLS_AHEAD * self.spec.max_items]:
            num_rows = min(job.num_rows_left, max_rows)
            in_pieces = job.item.num_rows > max_rows
            candidates.append(
                Candidate(job.item.media_hash, order, job.item.modality, num_rows, 0, 0, in_pieces)
            )
            by_hash[job.item.media_hash] = job
        chosen = select_batch(candidates, CallLimits(self.spec.max_items, max_rows, 1 << 62), 1 << 62)
        if not chosen:
            return None
        now = self._loop.now
        self.batch = [(by_hash[each.media_hash], each.num_rows) for each in chosen]
        picked = {id(job) for job, _ in self.batch}
        self.ready = [entry for entry in self.ready if id(entry[2]) not in picked]
        for job, _ in self.batch:
            job.begun_at = job.begun_at or now
        for gone in self._cache.make_room(sum(job.num_bytes for job, _ in self.batch)):
            self.changes.evict(gone)
        num_rows = sum(rows for _, rows in self.batch)
        return self.true_call_s(self.batch[0][0].item, num_rows) * self._noise()

    def true_call_s(self, item: Item, num_rows: int) -> float:
        """How long a call with so many rows of the item's modality lasts, without noise."""
        return self.slowdown * self.spec.curves.encode[item.modality].seconds(num_rows)

    def true_prepare_s(self, item: Item) -> float:
        return self.slowdown * self.spec.curves.prepare[item.modality].seconds(item.num_rows)

    def finish(self, took_s: float) -> None:
        if self.is_dead:
            return
        batch, self.batch = self.batch, []
        for job, num_rows in batch:
            job.num_rows_left -= num_rows
            self.num_queued_rows -= num_rows
            if job.num_rows_left:
                self._num_asked += 1
                insort(self.ready, (job.order, self._num_asked, job))
            else:
                self._complete(job)
        prepared, self._prepared_during_call = self._prepared_during_call, []
        for job in prepared:
            self._ready(job)
        asked, self.asked = self.asked, []
        for ask in asked:
            self._start(ask)
        self.report()
        self.device.wake(self)

    def unprepared(self) -> list[Job]:
        """The items whose preparation has not begun, in order."""
        return [job for _, _, job in sorted(self._unprepared, key=lambda entry: entry[:2])]

    def has(self, media_hash: str) -> bool:
        return media_hash in self._cache

    def preparing_until(self) -> list[float]:
        """When the threads that are busy will be free."""
        return [job.prepared_at for job in self.jobs.values() if job.prepared_at > self._loop.now]

    def is_in_call(self, job: Job) -> bool:
        return any(each is job for each, _ in self.batch)

    def _prepare(self) -> None:
        while self._unprepared and self._num_threads_busy < self.spec.num_prepare_threads:
            _, _, job = heappop(self._unprepared)
            self._num_threads_busy += 1
            job.prepared_at = self._loop.now + self.true_prepare_s(job.item)
            self._loop.at(job.prepared_at, self._prepared, job)

    def _prepared(self, job: Job) -> None:
        if self.is_dead:
            return
        self._num_threads_busy -= 1
        self._prepare()
        if self.batch:
            self._prepared_during_call.append(job)
        else:
            self._ready(job)

    def _ready(self, job: Job) -> None:
        self._num_asked += 1
        insort(self.ready, (job.order, self._num_asked, job))
        self.device.wake(self)

    def _drop_unwanted(self) -> None:
        """Drops, of the items that could run next, those that no attempt waits for any more. As in the real
        one, items that prefill has found in its prefix cache are encoded all the same."""
        for entry in self.ready[: CALLS_AHEAD * self.spec.max_items]:
            job = entry[2]
            if not any(ask.is_wanted for ask in job.asks):
                self.ready.remove(entry)
                del self.jobs[job.item.media_hash]
                self.num_queued_rows -= job.num_rows_left
                self.changes.evict(job.item.media_hash)

    def _complete(self, job: Job) -> None:
        now = self._loop.now
        del self.jobs[job.item.media_hash]
        keep = any(ask.keep for ask in job.asks)
        for gone in self._cache.add(job.item.media_hash, job.num_bytes, keep):
            self.changes.evict(gone)
        for ask in job.asks:
            timing = EncodeTiming(
                preparing_s=max(0.0, job.prepared_at - ask.asked_at),
                queued_s=max(0.0, job.begun_at - max(job.prepared_at, ask.asked_at)),
                encoding_s=now - max(job.begun_at, ask.asked_at),
            )
            self._send(ask, timing, is_cached=False)

    def _send(self, ask: Ask, timing: EncodeTiming, is_cached: bool) -> None:
        if not ask.is_wanted:
            return
        attempt = ask.attempt
        del self._asks[attempt.request_id, ask.item_idx]
        num_bytes = ask.item.num_tokens * self.spec.bytes_per_row
        link = self.spec.link(attempt.prefill.spec.replica_id)
        there_at = self._sender.send(self._loop.now, num_bytes, link)
        timing = EncodeTiming(
            timing.preparing_s, timing.queued_s, timing.encoding_s, 0.0, there_at - self._loop.now
        )
        encoded = Encoded(attempt.request_id, ask.item_idx, is_cached, timing)
        self._loop.at(there_at, self._arrived, attempt, encoded)

    def _arrived(self, attempt: SimAttempt, encoded: Encoded) -> None:
        if self.is_dead or attempt.is_cancelled:
            return
        attempt.prefill.item_ready(attempt.request.media[encoded.item_idx].media_hash)
        self._network.tell(attempt.door.receive, self.spec.replica_id, encoded)
