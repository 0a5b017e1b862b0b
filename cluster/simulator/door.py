"""A simulated door: the policy, what it knows of the cluster, and the life of each request. It learns of workers by frames alone,
which are late, as the real one does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.errors import ClusterError
from cluster.simulator.flight import Flight, Outcome
from cluster.simulator.worker import WorkerSpec
from cluster.simulator.workload import SimRequest
from cluster.types.curves import ServiceCurves
from cluster.types.messages import LoadReport, PrefillTiming
from router.policy import ClusterView, Decision, ItemView, Placement, Policy, RequestView, Worker

if TYPE_CHECKING:
    from cluster.simulator.gate import Gate
    from cluster.simulator.simulation import Simulation


class SimDoor:
    def __init__(self, simulation: Simulation, policy: Policy, cluster: ClusterView, gate: Gate | None):
        self._simulation, self._policy, self.cluster, self._gate = simulation, policy, cluster, gate
        self._loop, self._network = simulation.loop, simulation.network
        self.flights: dict[str, Flight] = {}
        self._second_at: dict[str, float] = {}
        self._first: dict[str, Outcome] = {}
        self._waited_s: dict[str, float] = {}
        self._num_flights: dict[str, int] = {}
        self._members: set[str] = set()

    def add(self, spec: WorkerSpec) -> None:
        modalities = tuple(spec.curves.encode)
        self._members.add(spec.replica_id)
        self.cluster.add(Worker(spec.replica_id, spec.role, spec.num_blocks, spec.hardware, modalities))
        self.cluster.measured(spec.replica_id, spec.told or spec.curves)

    def measured(self, replica_id: str, curves: ServiceCurves) -> None:
        if replica_id in self._members:
            self.cluster.measured(replica_id, curves)

    def reported(
        self,
        replica_id: str,
        load: LoadReport,
        media: tuple[Sequence[str], Sequence[str]],
        blocks: tuple[Sequence[bytes], Sequence[bytes]],
    ) -> None:
        if replica_id not in self._members:
            return
        self.cluster.reported(replica_id, load, self._loop.now)
        if media[0] or media[1]:
            self.cluster.media_changed(replica_id, *media)
        if blocks[0] or blocks[1]:
            self.cluster.blocks_changed(replica_id, *blocks)

    def arrive(self, request: SimRequest) -> None:
        if self._gate is None:
            return self.fly(request)
        self._gate.offer(self, request)

    def admitted(self, request: SimRequest, decision: Decision | None = None) -> None:
        self._waited_s[request.request_id] = self._loop.now - request.arrived_at
        self.fly(request, decision=decision)

    def refuse(self, request: SimRequest, status: str) -> None:
        self._land(request, status)

    def predicted(self, request: SimRequest) -> Decision | None:
        """What would become of it now; None: nobody can serve it."""
        try:
            return self._policy.decide(self._view(request, 0), self.cluster, self._loop.now)
        except ClusterError:
            return None

    def fly(self, request: SimRequest, num_generated: int = 0, decision: Decision | None = None) -> None:
        """Place it, unless that is decided, and send it off; also what is left of it when it has lost its worker."""
        number = self._num_flights.get(request.request_id, 0) + 1
        self._num_flights[request.request_id] = number
        view, now = self._view(request, num_generated), self._loop.now
        try:
            decision = decision or self._policy.decide(view, self.cluster, now)
        except ClusterError:
            return self._land(request, "failed")
        flight = self._make_flight(request, view, decision, num_generated)
        self.flights[view.request_id] = flight
        self.cluster.started(view, decision.placement, decision.prediction, now)
        if decision.placement.prefill is None:
            self._network.tell(flight.decode.reserve, flight)
        else:
            flight.prefill.coming[flight.request_id] = flight
            self._network.tell(flight.prefill.start, flight)
        for i, replica_id in enumerate(flight.encoders):
            self._network.tell(self._simulation.encoders[replica_id].start, flight, i)

    def item_done(self, flight: Flight, item_idx: int) -> None:
        if not flight.is_over:
            came_at = None if flight.is_missing[item_idx] else self._loop.now  # None: another brings it
            self.cluster.item_done(flight.request_id, item_idx, came_at)
            if self._gate is not None and not any(flight.is_missing):
                self._gate.encoded(flight.request)

    def first_token(self, flight: Flight, timing: PrefillTiming) -> None:
        if flight.is_over:
            return
        request, now = flight.request, self._loop.now
        self.cluster.prefilled(flight.request_id)
        decided_ttft_s = now - flight.decided_at
        media = list(flight.timings)
        self.cluster.observed(flight.request_id, decided_ttft_s, media, timing)
        if request.request_id not in self._first:
            self._first[request.request_id] = Outcome(
                request,
                "finished",
                ttft_s=now - request.arrived_at,
                num_cached=flight.num_cached,
                decided_ttft_s=decided_ttft_s,
                prediction=flight.prediction,
            )
        if self._gate is not None:
            self._gate.first_token(request)
        if flight.num_output_tokens <= 1:
            self.finished(flight)

    def bring(self, flight: Flight, item_idx: int) -> None:
        """Nobody else does any more."""
        if not flight.is_over:
            encoder = self._simulation.encoders[flight.encoders[item_idx]]
            self._network.tell(encoder.start, flight, item_idx)

    def second_token(self, flight: Flight, expected_at: float) -> None:
        """Told by decode when it takes a request on; not a frame."""
        self._second_at.setdefault(flight.request.request_id, expected_at)

    def finished(self, flight: Flight) -> None:
        if not flight.is_over:
            self._close(flight)
            self._land(flight.request, "finished")

    def lost(self, flight: Flight, num_generated: int) -> None:
        """Its worker is gone, or gave it up: what is left of it flies again."""
        if flight.is_over:
            return
        self._close(flight)
        self.fly(flight.request, flight.request.num_output_tokens - flight.num_output_tokens + num_generated)

    def worker_lost(self, spec: WorkerSpec) -> None:
        """End-of-file on its connection."""
        if spec.replica_id not in self._members:
            return
        self._members.discard(spec.replica_id)
        self.cluster.remove(spec.replica_id)
        for flight in list(self.flights.values()):
            for i, replica_id in enumerate(flight.encoders):
                has_come = flight.timings[i] is not None or flight.is_complete
                if replica_id == spec.replica_id and not has_come:
                    self._move_item(flight, i)
            is_decode = spec.replica_id == flight.decode.spec.replica_id
            if is_decode or (spec.replica_id == flight.prefill.spec.replica_id and not flight.is_at_decode):
                has_token = flight.request.request_id in self._first
                num_generated = flight.decode.num_generated(flight) if is_decode and has_token else 0
                self.lost(flight, num_generated)

    def _move_item(self, flight: Flight, item_idx: int) -> None:
        item = flight.view.media[item_idx]
        try:
            encoder = self._policy.place_item(item, self.cluster, self._loop.now, {flight.encoders[item_idx]})
        except ClusterError:
            self._close(flight)
            return self._land(flight.request, "failed")
        flight.encoders[item_idx] = encoder
        self.cluster.item_moved(flight.request_id, item_idx, encoder)
        self._network.tell(self._simulation.encoders[encoder].start, flight, item_idx)

    def _close(self, flight: Flight) -> None:
        flight.is_over = True
        del self.flights[flight.request_id]
        self.cluster.ended(flight.request_id)
        flight.prefill.cancel(flight)
        flight.decode.cancel(flight)

    def _land(self, request: SimRequest, status: str) -> None:
        """The one end of every request at this door."""
        first = self._first.pop(request.request_id, None)
        second_at = self._second_at.pop(request.request_id, 0.0)
        num_flights = self._num_flights.pop(request.request_id, 0)
        waited_s, now = self._waited_s.pop(request.request_id, 0.0), self._loop.now
        if first is None:
            outcome = Outcome(request, status, waited_s, finished_at=now, num_flights=num_flights)
            return self._ended(request, outcome)
        num_gaps = max(1, request.num_output_tokens - 1)
        outcome = replace(
            first,
            status=status,
            waited_s=waited_s,
            second_s=max(0.0, second_at - request.arrived_at),
            finished_at=now,
            tpot_s=(now - request.arrived_at - first.ttft_s) / num_gaps,
            num_flights=num_flights,
        )
        self._ended(request, outcome)

    def _ended(self, request: SimRequest, outcome: Outcome) -> None:
        self._simulation.landed(outcome)
        if self._gate is not None:
            self._gate.ended(request)

    def _view(self, request: SimRequest, num_generated: int) -> RequestView:
        num_tokens = request.num_prompt_tokens + num_generated
        num_flights = self._num_flights.get(request.request_id, 0)
        model = self._simulation.model
        block_size = model.block_size
        media = tuple(
            ItemView(i.media_hash, i.modality, i.num_rows, i.num_tokens * model.bytes_per_row, i.start, i.end)
            for i in request.media
        )
        num_blocks = -(-num_tokens // block_size)
        num_left = request.num_output_tokens - num_generated
        return RequestView(
            request_id=f"{request.request_id}/{num_flights}",
            num_prompt_tokens=num_tokens,
            block_size=block_size,
            block_hashes=request.block_hashes,
            media=media,
            num_prefill_blocks=num_blocks,
            num_decode_blocks=-(-(num_tokens + num_left) // block_size),
            priority=request.priority,
            waited_s=self._loop.now - request.arrived_at,
            may_prefill_locally=not request.media and self._simulation.may_prefill_locally,
        )

    def _make_flight(
        self, request: SimRequest, view: RequestView, decision: Decision, num_generated: int
    ) -> Flight:
        placement: Placement = decision.placement
        decode = self._simulation.decodes[placement.decode]
        prefill = decode.local if placement.prefill is None else self._simulation.prefills[placement.prefill]
        assert prefill is not None, f"{placement.decode} computes no prompts"
        return Flight(
            request,
            view,
            self,
            placement,
            decision.prediction,
            self._loop.now,
            prefill,
            decode,
            view.num_prompt_tokens,
            request.num_output_tokens - num_generated,
            list(placement.encoders),
            [True] * len(request.media),
            [None] * len(request.media),
            [False] * len(request.media),
            frozenset(item.media_hash for item in request.media if self.cluster.has_media(item.media_hash)),
        )
