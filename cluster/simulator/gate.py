"""The real admission queue in front of simulated doors: one for all of them, with the capacity of the whole cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config.settings import AdmissionArgs
from cluster.simulator.workload import SimRequest
from router.admission.fair_queue import AdmissionTicket
from router.admission.queue import AdmissionQueue, AdmissionRefusal, Admitted, Capacity
from router.policy import Decision

if TYPE_CHECKING:
    from cluster.simulator.door import SimDoor
    from cluster.simulator.simulation import Simulation


class Gate:
    def __init__(self, simulation: Simulation, args: AdmissionArgs, text_share: float):
        self._loop, self._block_size = simulation.loop, simulation.model.block_size
        num_blocks = sum(decode.spec.num_blocks for decode in simulation.decodes.values())
        capacity = Capacity(len(simulation.encoders), len(simulation.prefills), num_blocks)
        self._queue = AdmissionQueue(args, text_share, capacity)
        self._waiting: dict[str, tuple[SimDoor, SimRequest]] = {}
        self._woken_at = float("inf")

    @property
    def is_idle(self) -> bool:
        return self._queue.is_idle and not self._waiting

    def offer(self, door: SimDoor, request: SimRequest) -> None:
        decision = door.predicted(request)
        if decision is None:
            return door.refuse(request, "failed")
        prediction = decision.prediction
        encode_s = sum(item.encode_s for item in prediction.items)
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        ticket = AdmissionTicket(
            request_id=request.request_id,
            tenant=request.tenant,
            class_name=self._queue.class_name(request.priority),
            is_text=not request.media,
            work_s=encode_s + prediction.prefill_s,
            encode_s=encode_s,
            num_blocks=-(-num_tokens // self._block_size),
            ttft_s=prediction.ttft_s,
            arrived_at=request.arrived_at,
        )
        self._waiting[request.request_id] = door, request
        answer = self._queue.offer(ticket, self._loop.now)
        if isinstance(answer, Admitted):
            self._admit(request.request_id, decision)
        elif isinstance(answer, AdmissionRefusal):
            self._refuse(request.request_id)
        self._watch()

    def encoded(self, request: SimRequest) -> None:
        self._queue.encoded(request.request_id)
        self._go()

    def first_token(self, request: SimRequest) -> None:
        self._queue.done(request.request_id)
        self._go()

    def ended(self, request: SimRequest) -> None:
        self._queue.leave(request.request_id)
        self._go()

    def _go(self) -> None:
        for ticket in self._queue.freed(self._loop.now):
            self._admit(ticket.request_id)
        self._watch()

    def _watch(self) -> None:
        """Tell those whose time is over, now and when the next one's is."""
        for ticket, _ in self._queue.expired(self._loop.now):
            self._refuse(ticket.request_id)
        deadline = self._queue.next_deadline()
        if deadline is not None and not self._loop.now < self._woken_at <= deadline:
            self._woken_at = max(deadline, self._loop.now)
            self._loop.at(self._woken_at, self._wake)

    def _wake(self) -> None:
        self._woken_at = float("inf")
        self._go()

    def _admit(self, request_id: str, decision: Decision | None = None) -> None:
        """`decision`: the one that it was offered with; None: the cluster is another one by now."""
        door, request = self._waiting.pop(request_id)
        door.admitted(request, decision)

    def _refuse(self, request_id: str) -> None:
        door, request = self._waiting.pop(request_id)
        door.refuse(request, "refused")
