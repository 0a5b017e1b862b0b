"""A simulated prefill worker: memory, order and steps by the objects that the real one uses; durations by its curve."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from bench.simulate.caches import BlockCache
from bench.simulate.device import Device, Sender
from bench.simulate.events import EventLoop
from bench.simulate.flight import Flight
from bench.simulate.hardware import BLOCK_SIZE
from bench.simulate.worker import Network, WorkerSpec
from cluster.scheduling.admission import PromptAdmission
from cluster.scheduling.chunks import ChunkScheduler, usable_prefix
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.types.messages import LoadReport, PrefillTiming


class SimPrefill:
    """`is_local`: part of a decode worker, which computes the prompts of its own requests: it keeps nothing and reports nothing."""

    def __init__(
        self,
        spec: WorkerSpec,
        loop: EventLoop,
        device: Device,
        network: Network,
        policy: SchedulingPolicy,
        noise: Callable[[], float],
        kv_bytes_per_token: float,
        num_layers: int,
        is_local: bool = False,
    ):
        self.spec, self.is_waiting, self.is_dead = spec, False, False
        self._loop, self.device, self._network, self._policy, self._noise = (
            loop,
            device,
            network,
            policy,
            noise,
        )
        self._kv_bytes, self._num_layers, self._is_local = kv_bytes_per_token, num_layers, is_local
        self.blocks = BlockCache(1 << 40 if is_local else spec.num_blocks)
        self._admission = PromptAdmission(policy, self.blocks.num_blocks)
        self.chunks = ChunkScheduler(policy)
        self.flights: OrderedDict[str, Flight] = OrderedDict()
        self.coming: dict[str, Flight] = {}  # sent here, and not yet arrived; for those who know everything
        self.batch: list[tuple[Flight, int]] = []
        self.num_queued_tokens = 0
        self._sender = Sender()
        self.slowdown = 1.0

    @property
    def max_step_tokens(self) -> int:
        return self.spec.curves.max_step_units

    def start(self, flight: Flight) -> None:
        self.coming.pop(flight.request_id, None)
        if self.is_dead or flight.is_over:
            return
        flight.asked_at = self._loop.now
        self.flights[flight.request_id] = flight
        self.num_queued_tokens += flight.num_tokens
        self._admission.push(self.ticket(flight, flight.num_tokens))
        self._admit()
        self.report()

    def ticket(self, flight: Flight, num_tokens: int) -> Ticket:
        request = flight.request
        return Ticket(flight.request_id, request.arrived_at, num_tokens, not request.media, request.priority)

    def item_ready(self, flight: Flight, item_idx: int) -> None:
        if self.is_dead or flight.is_over or not flight.is_missing[item_idx]:
            return
        flight.is_missing[item_idx] = False
        if flight.request_id not in self.chunks:
            return
        self.chunks.set_ready(flight.request_id, flight.num_ready)
        if flight.blocked_at is not None and flight.num_ready > flight.num_computed:
            flight.media_s += self._loop.now - flight.blocked_at
            flight.blocked_at = None
        self.device.wake(self)

    def granted(self, flight: Flight) -> None:
        """Decode has room: what is computed travels, and from now on each step's part while it is computed."""
        if self.is_dead or flight.is_over:
            return
        flight.granted_at = self._loop.now
        if flight.num_computed > flight.num_sent:
            self._push(flight, self._loop.now, 0.0)

    def cancel(self, flight: Flight) -> None:
        """Frees what it holds. Repeats and unknown ones are ignored."""
        if self.flights.pop(flight.request_id, None) is None:
            return
        self.num_queued_tokens -= flight.num_tokens - flight.num_computed
        self._admission.remove(flight.request_id)
        self.chunks.remove(flight.request_id)
        self._release(flight)
        self._admit()

    def begin(self) -> float | None:
        if self.is_dead:
            return None
        chunks = self.chunks.schedule(self.max_step_tokens)
        if not chunks:
            return None
        self.batch = [(self.flights[chunk.request_id], chunk.num_scheduled_tokens) for chunk in chunks]
        return self.true_step_s([(f.num_computed, count) for f, count in self.batch]) * self._noise()

    def true_step_s(self, batch: list[tuple[int, int]]) -> float:
        """Of a step with so many (computed tokens, tokens to compute) of each prompt, without noise."""
        num_tokens = sum(count for _, count in batch)
        context = sum(computed * count for computed, count in batch) / num_tokens
        assert self.spec.curves.prefill is not None
        return self.slowdown * self.spec.curves.prefill.seconds(num_tokens, context)

    def finish(self, took_s: float) -> None:
        if self.is_dead:
            return
        batch, self.batch = self.batch, []
        begun_at = self._loop.now - took_s
        for flight, count in batch:
            if flight.is_over:
                continue
            flight.num_computed += count
            flight.computing_s += took_s
            self.num_queued_tokens -= count
            self._name_blocks(flight)
            flight.is_complete = flight.num_computed == flight.num_tokens
            if flight.is_complete:
                self.chunks.remove(flight.request_id)
            else:
                self.chunks.set_computed(flight.request_id, flight.num_computed)
                if flight.num_ready <= flight.num_computed:
                    flight.blocked_at = self._loop.now
            if flight.granted_at is not None:
                self._push(flight, begun_at + took_s / self._num_layers, self._loop.now)
            if flight.is_complete:
                self._first_token(flight)
        self._admit()
        self.report()
        self.device.wake(self)

    def report(self) -> None:
        """To all doors."""
        if self._is_local:
            return
        load = LoadReport(
            num_running=len(self.chunks),
            num_waiting=len(self.flights) - len(self.chunks),
            num_queued_units=self.num_queued_tokens,
            num_used_blocks=self.blocks.num_used,
            num_cached_blocks=self.blocks.num_cached,
        )
        self._network.tell_doors(self.spec.replica_id, load, blocks=self.blocks.changes.take())

    def _admit(self) -> None:
        while any(self._try_admit(ticket) for ticket in self._admission.heads()):
            pass

    def _try_admit(self, ticket: Ticket) -> bool:
        flight = self.flights[ticket.request_id]
        num_blocks = -(-flight.num_tokens // BLOCK_SIZE)
        if not self._admission.has_share(ticket, num_blocks):
            return False
        hashes = flight.view.block_hashes
        num_found = 0 if self._is_local else self.blocks.match(hashes)
        num_cached = usable_prefix(num_found * BLOCK_SIZE, flight.num_tokens, BLOCK_SIZE, ())
        shared = list(hashes[: num_cached // BLOCK_SIZE])
        if not self.blocks.try_take(shared, num_blocks - len(shared)):
            return False
        self._admission.admit(ticket, num_blocks)
        flight.shared, flight.num_anonymous, flight.num_named = shared, num_blocks - len(shared), len(shared)
        flight.num_cached = flight.num_computed = num_cached
        flight.admitted_at = self._loop.now
        self.num_queued_tokens -= num_cached
        for i, item in enumerate(flight.request.media):
            if item.end <= num_cached:
                flight.is_missing[i] = False
        self.chunks.add(self.ticket(flight, flight.num_tokens - num_cached), flight.num_tokens)
        self.chunks.set_computed(flight.request_id, num_cached)
        self.chunks.set_ready(flight.request_id, flight.num_ready)
        if flight.num_ready <= flight.num_computed:
            flight.blocked_at = self._loop.now
        if not self._is_local:
            self._network.tell(self._network.tell, flight.decode.reserve, flight)  # by way of the door
        self.device.wake(self)
        return True

    def _name_blocks(self, flight: Flight) -> None:
        """Full blocks that are computed can be reused. One whose content is here already stays without a name."""
        if self._is_local:
            return
        hashes = flight.view.block_hashes
        num_full = min(flight.num_computed // BLOCK_SIZE, len(hashes))
        for i in range(flight.num_named, num_full):
            if self.blocks.name(hashes[i]):
                flight.shared.append(hashes[i])
                flight.num_anonymous -= 1
        flight.num_named = max(flight.num_named, num_full)

    def _push(self, flight: Flight, ready_at: float, all_ready_at: float) -> None:
        """Computed and not sent: the first layer's share is ready at one instant, the last layer's at another."""
        num_bytes = (flight.num_computed - flight.num_sent) * self._kv_bytes
        flight.num_sent = flight.num_computed
        link = self.spec.link(flight.decode.spec.replica_id)
        last_layer_s = num_bytes / self._num_layers / link.bytes_per_s
        there_at = self._sender.send(ready_at, num_bytes, link, all_ready_at + last_layer_s)
        if flight.is_complete:
            self._loop.at(max(there_at, self._loop.now), self._sent, flight)

    def _sent(self, flight: Flight) -> None:
        if self.is_dead or flight.is_over or flight.request_id not in self.flights:
            return
        self._end(flight)
        flight.decode.join(flight)

    def _first_token(self, flight: Flight) -> None:
        timing = PrefillTiming(
            blocks_s=flight.admitted_at - flight.asked_at,
            media_s=flight.media_s,
            queued_s=max(0.0, self._loop.now - flight.admitted_at - flight.media_s - flight.computing_s),
            computing_s=flight.computing_s,
        )
        self._network.tell(flight.door.first_token, flight, timing)
        if flight.num_output_tokens <= 1:
            self._end(flight)
            flight.decode.cancel(flight)
        elif self._is_local:
            self._end(flight)
            flight.decode.join(flight)

    def _end(self, flight: Flight) -> None:
        """It is done here; cached blocks stay."""
        del self.flights[flight.request_id]
        self._admission.remove(flight.request_id)
        self._release(flight)
        self._admit()

    def _release(self, flight: Flight) -> None:
        if self.is_dead:
            return
        self.blocks.free(flight.shared, flight.num_anonymous)
        flight.shared, flight.num_anonymous = [], 0
