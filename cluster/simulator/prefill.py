"""A simulated prefill worker: memory, order and steps by the objects that the real one uses; durations by its curve. As in the real
one, who asks during a step is looked at when it is over: then what the step has computed can be reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from cluster.scheduling.admission import PromptAdmission
from cluster.scheduling.chunks import ChunkScheduler, usable_prefix
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from cluster.simulator.caches import BlockCache
from cluster.simulator.device import Device, Sender
from cluster.simulator.events import EventLoop
from cluster.simulator.features import Features
from cluster.simulator.flight import Flight
from cluster.simulator.hardware import Model
from cluster.simulator.worker import Network, WorkerSpec
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
        model: Model,
        is_local: bool = False,
    ):
        self.spec, self.is_waiting, self.is_dead = spec, False, False
        self._loop, self.device, self._network = loop, device, network
        self._policy, self._noise, self._is_local = policy, noise, is_local
        self._kv_bytes, self._num_layers = model.kv_bytes_per_token, model.num_layers
        self._block_size = model.block_size
        self._context = 0.0  # computed tokens that a token of the last step saw, on average
        self.blocks = BlockCache(1 << 40 if is_local else spec.num_blocks)
        self._admission = PromptAdmission(policy, self.blocks.num_blocks)
        self.chunks = ChunkScheduler(policy)
        self.flights: OrderedDict[str, Flight] = OrderedDict()
        self.coming: dict[str, Flight] = {}  # sent here, and not yet looked at; for those who know everything
        self._asked: list[Flight] = []  # during the step
        self._features = Features()
        self.batch: list[tuple[Flight, int]] = []
        self.num_queued_tokens = 0
        self._sender = Sender()
        self.slowdown = 1.0

    @property
    def max_step_tokens(self) -> int:
        """Of the next step, if its tokens see as much context as the last one's."""
        curves, target_s = self.spec.curves, self.spec.step_target_s / self.slowdown
        assert curves.prefill is not None
        token_s = curves.prefill.per_unit_s + curves.prefill.per_pair_s * self._context
        room_s = target_s - curves.prefill.fixed_s
        if token_s * curves.max_step_units <= room_s:
            return curves.max_step_units
        return self._block_size if room_s <= 0 else max(self._block_size, int(room_s / token_s))

    def start(self, flight: Flight) -> None:
        """Room for its embeddings is asked for at once."""
        flight.asked_at = self._loop.now
        if not self.is_dead and not flight.is_over:
            self._reserve_features(flight)
        if self.batch:
            self._asked.append(flight)
            return
        self._start(flight)
        self._admit()
        self.report()

    def _reserve_features(self, flight: Flight) -> None:
        for i, item in enumerate(flight.request.media):
            flight.is_shared[i] = self._features.reserve(flight, i)
            if flight.is_shared[i]:
                flight.is_missing[i] = not self._features.is_here(item.media_hash)
                self._network.tell(flight.door.item_done, flight, i)

    def _release_features(self, flight: Flight, num_tokens: int) -> None:
        """Of the items before so many tokens."""
        for i, item in enumerate(flight.request.media):
            heir = self._features.release(flight, i) if item.end <= num_tokens else None
            if heir is not None:
                other, item_idx = heir
                other.is_shared[item_idx] = False
                self._network.tell(other.door.bring, other, item_idx)

    def _start(self, flight: Flight) -> None:
        self.coming.pop(flight.request_id, None)
        if self.is_dead or flight.is_over:
            return
        flight.started_at = self._loop.now
        self.flights[flight.request_id] = flight
        self.num_queued_tokens += flight.num_tokens
        self._admission.push(self.ticket(flight, flight.num_tokens))

    def ticket(self, flight: Flight, num_tokens: int) -> Ticket:
        """Its arrival, as the real one counts it: what it had waited when it was placed, before it was here."""
        request = flight.request
        arrived_at = request.arrived_at + (flight.asked_at or self._loop.now) - flight.decided_at
        return Ticket(flight.request_id, arrived_at, num_tokens, not request.media, request.priority)

    def item_ready(self, flight: Flight, item_idx: int) -> None:
        """Its encoder has brought it, for all who share it."""
        if self.is_dead:
            return
        for consumer in self._features.arrived(flight.request.media[item_idx].media_hash):
            self._item_ready(*consumer)

    def _item_ready(self, flight: Flight, item_idx: int) -> None:
        if flight.is_over or not flight.is_missing[item_idx]:
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
        self._release_features(flight, flight.num_tokens)
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
        step = [(flight.num_computed, count) for flight, count in self.batch]
        self._context = mean_context(step)
        return self.true_step_s(step) * self._noise()

    def true_step_s(self, batch: list[tuple[int, int]]) -> float:
        """Of a step with so many (computed tokens, tokens to compute) of each prompt, without noise."""
        num_tokens = sum(count for _, count in batch)
        assert self.spec.curves.prefill is not None
        return self.slowdown * self.spec.curves.prefill.seconds(num_tokens, mean_context(batch))

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
            self._release_features(flight, flight.num_computed)
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
        asked, self._asked = self._asked, []
        for flight in asked:
            self._start(flight)
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
        num_blocks = -(-flight.num_tokens // self._block_size)
        if not self._admission.has_share(ticket, num_blocks):
            return False
        hashes = flight.view.block_hashes
        num_found = 0 if self._is_local else self.blocks.match(hashes)
        num_cached = usable_prefix(num_found * self._block_size, flight.num_tokens, self._block_size, ())
        shared = list(hashes[: num_cached // self._block_size])
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
        self._release_features(flight, num_cached)
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
        num_full = min(flight.num_computed // self._block_size, len(hashes))
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
        blocks_s = flight.admitted_at - flight.started_at
        timing = PrefillTiming(
            blocks_s=blocks_s,
            media_s=flight.media_s,
            queued_s=max(
                0.0, self._loop.now - flight.asked_at - blocks_s - flight.media_s - flight.computing_s
            ),
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


def mean_context(batch: list[tuple[int, int]]) -> float:
    """Earlier tokens that a token of a step sees: of (computed tokens, tokens to compute) of each prompt."""
    return sum(computed * count for computed, count in batch) / sum(count for _, count in batch)
