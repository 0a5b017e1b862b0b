"""A simulated door: drives the router's own request flow (`router.flow.request_flow`) in virtual time.

    submit                 a request of the workload enters the flow
    receive, join, lose    messages of workers, their starts and losses enter it as at a real door
    Send                   the message is at its worker after the network's delay
    Deliver                an answer's events; the last one, or an error, makes the request's outcome
    Drained                a worker that retires has no request of this door any more
    CallDecode, Placed     nothing: there is no Serve and no clock

The only timer is admission's. The flow also looks for silent workers every 0.25 s; simulated workers are
never silent, so no look is planned, and a ping is answered at once, without an event. There are no time
limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from cluster.config.settings import AdmissionArgs
from cluster.errors import InternalError, OverloadedError
from cluster.types.messages import AnyMessage, Ping, Pong
from deploy.simulator.client import SimClient, make_client, name_of
from deploy.simulator.spec import WorkerSpec, member
from deploy.simulator.workload import SimRequest
from router.admission.controller import AdmissionController
from router.admission.queue import AdmissionQueue, Capacity, Reported
from router.flow.outputs import Deliver, Drained, Output, Send
from router.flow.placer import Placer
from router.flow.request_flow import RequestFlow, Timeouts
from router.policy import ClusterView, Policy
from router.scaling import DoorReport
from router.scaling.report import door_report

if TYPE_CHECKING:
    from deploy.simulator.simulation import Simulation

UNLIMITED, NO_LOAD = Capacity(1e9, 1e9, 1 << 60), Reported()  # every request is admitted at once


class SimPlacer(Placer):
    """It admits every request at once where there is no admission (`has_admission`)."""

    def __init__(self, policy: Policy, cluster: ClusterView, block_size: int, has_admission: bool):
        super().__init__(policy, cluster, block_size)
        self._has_admission = has_admission

    def capacity(self) -> Capacity:
        return super().capacity() if self._has_admission else UNLIMITED

    def reported(self) -> Reported:
        return super().reported() if self._has_admission else NO_LOAD


class SimDoor:
    def __init__(
        self,
        number: int,
        simulation: Simulation,
        policy: Policy,
        cluster: ClusterView,
        admission: AdmissionArgs | None,
    ):
        """`number`: by which workers know the door."""
        self.number, self.cluster = number, cluster
        queue = AdmissionQueue(admission or AdmissionArgs(), cluster.scheduling.text_share, UNLIMITED)
        self._simulation, self._admission = simulation, AdmissionController(queue)
        self._loop, self._network = simulation.loop, simulation.network
        self._clients: dict[str, SimClient] = {}
        self._num_submitted = 0
        self._timer_at = inf
        self.num_answered = self.num_in_time = 0  # within `target_ttft_s`
        self.target_ttft_s = inf
        block_size = simulation.model.block_size
        self._placer = SimPlacer(policy, cluster, block_size, admission is not None)
        self.flow = RequestFlow(self._placer, self._admission, Timeouts(inf, inf))

    @property
    def is_idle(self) -> bool:
        return self.flow.is_idle and not self._clients

    def submit(self, request: SimRequest) -> None:
        self._num_submitted += 1
        block_size = self._simulation.model.block_size
        client = make_client(request, self.number, self._num_submitted, block_size)
        self._clients[request.request_id] = client
        self._run(self.flow.submit, client.asked)

    def receive(self, replica_id: str, *messages: AnyMessage) -> None:
        """Messages of one worker, in order. Those of a worker that has not joined, or is lost, are
        ignored."""
        for message in messages:
            self._run(self.flow.on_message, replica_id, message)

    def join(self, spec: WorkerSpec) -> None:
        """A worker has started."""
        self._run(self.flow.on_joined, member(spec, self._simulation.model))

    def lose(self, replica_id: str) -> None:
        """The connection to the worker has ended."""
        self._run(self.flow.on_lost, replica_id)

    def unlist(self, replica_id: str) -> None:
        """The worker gets nothing new."""
        self._run(self.flow.on_listed, replica_id, False)

    def report(self) -> DoorReport:
        """The door's report for the scaling policy."""
        return door_report(self._admission, self._placer, self.num_answered, self.num_in_time)

    def client_of(self, request_id: str) -> SimClient:
        """`request_id`: of any attempt."""
        return self._clients[name_of(request_id)]

    # Outputs

    def _run(self, call: Callable[..., None], *args: Any) -> None:
        call(*args, self._loop.now)
        while outputs := self.flow.take_outputs():
            self._carry_out(outputs)
        if self._admission.deadline is not None:
            self._set_timer(self._admission.deadline)

    def _carry_out(self, outputs: Sequence[Output]) -> None:
        ended = []
        for output in outputs:
            if isinstance(output, Send):
                self._send(output.replica_id, output.message)
            elif isinstance(output, Deliver) and self._deliver(output):
                ended.append(output.request_id)
            elif isinstance(output, Drained):
                self._simulation.drained(self, output.replica_id)
        for request_id in ended:  # after its last messages
            self._forget(request_id)

    def _send(self, replica_id: str, message: AnyMessage) -> None:
        if isinstance(message, Ping):
            return self.flow.on_message(replica_id, Pong(), self._loop.now)
        worker = self._simulation.workers.get(replica_id)
        if worker is not None:  # else it has gone
            worker.expect(message)
            self._network.tell(worker.receive, self.number, message)

    def _deliver(self, output: Deliver) -> bool:
        """Whether this was the last event of the request."""
        client, event, now = self.client_of(output.request_id), output.event, self._loop.now
        if isinstance(event, InternalError):
            raise event  # an error of the router or the simulator itself
        if isinstance(event, Exception):
            status = "refused" if isinstance(event, OverloadedError) else "failed"
        else:
            if client.ttft_s is None:
                self.num_answered += 1
                ttft_s = now - client.request.arrived_at
                self.num_in_time += ttft_s <= self.target_ttft_s
                if self._simulation.on_first is not None:
                    self._simulation.on_first(client.request, ttft_s)
            client.on_tokens(event, now)
            status = "finished"
            if event.finish_reason is None:
                return False
        self._simulation.on_outcome(client.outcome(status, now))
        return True

    def _forget(self, request_id: str) -> None:
        del self._clients[name_of(request_id)]

    def _set_timer(self, deadline: float) -> None:
        if deadline < self._timer_at:
            self._timer_at = max(deadline, self._loop.now)
            self._loop.at(self._timer_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at = inf
        self._run(self.flow.on_timer)
