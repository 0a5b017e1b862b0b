"""Door processes: the product's dispatcher, member table, request flow, admission and policy, on a simulated
event loop. Replaced are asyncio's timers and futures, and the dialling of sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.config.settings import AdmissionArgs
from cluster.errors import ClusterError, UnavailableError
from cluster.types.members import Member
from router.admission.controller import AdmissionController
from router.admission.queue import AdmissionQueue, Capacity
from router.dispatcher import Dispatcher
from router.flow.outputs import CallDecode, Deliver, Output
from router.flow.placer import Placer
from router.flow.request_flow import RequestFlow, Timeouts
from router.members import MemberTable
from router.policy import ClusterView, Policy
from tests.histories.model import BLOCK_SIZE
from tests.histories.network import End
from tests.histories.scheduler import Scheduler, SimulatedProcess, SimulatedThread, SkewedClock
from tests.histories.workers import POLICY

FIRST_TOKEN_S, REQUEST_S = 10.0, 30.0
DIAL_AGAIN_S = 0.2

Dial = Callable[[SimulatedThread, str, str | None, str], End]  # raises UnavailableError


class FailedCall:
    """The future of a call whose replica has ended."""

    def cancelled(self) -> bool:
        return False

    def exception(self) -> Exception:
        return UnavailableError("the replica has ended")


class SimulatedMembers(MemberTable):
    def __init__(self, door: SimulatedDoor, listener: SimulatedDispatcher):
        super().__init__(door.name, listener, None, door.dial)
        self._door = door

    def _close_later(self, connection: Any) -> None:
        run(connection.aclose())

    def _start_dialling(self, member: Member) -> None:
        if member.replica_id not in self._peers and member.replica_id not in self._dialling:
            done: Any = None
            self._dialling[member.replica_id] = done
            self._door.later(0.0, self._try, member)

    def _try(self, member: Member) -> None:
        listed = self._listed[member.role].get(member.replica_id)
        if listed is None:
            del self._dialling[member.replica_id]
            return
        try:
            run(self._connect(listed))
        except ClusterError:
            self._door.later(DIAL_AGAIN_S, self._try, member)
        else:
            del self._dialling[member.replica_id]


class SimulatedDispatcher(Dispatcher):
    def __init__(self, door: SimulatedDoor, flow: RequestFlow):
        self._door = door
        super().__init__(flow, call_decode=self._no_call, secret=None, clock=door.clock)
        self.members = SimulatedMembers(door, self)
        self._timer_set_at: float | None = None

    async def _no_call(self, replica_id: str, request_id: str) -> None:
        raise AssertionError("calls are simulated")

    def _carry_out(self, output: Output) -> None:
        super()._carry_out(output)
        if isinstance(output, Deliver):
            self._door.on_deliver(output)

    def _call(self, output: CallDecode) -> None:
        """The call of Ray Serve, which ends with an error if the replica does."""
        if output.request_id in self.flow.attempts:
            self._door.serve_calls[output.request_id] = output.replica_id

    def fail_call(self, request_id: str) -> None:
        if self._door.serve_calls.pop(request_id, None) is not None:
            call: Any = FailedCall()
            self._on_call_done(request_id, call)

    def _set_timer(self) -> None:
        at = self.flow.next_timer()
        if at is None:
            return
        at = self._door.clock.virtual(at)
        now = self._door.scheduler.now
        if self._timer_set_at is None or self._timer_set_at <= now or at < self._timer_set_at:
            self._timer_set_at = max(at, now) + 0.0005
            self._door.scheduler.at(
                self._timer_set_at, self._door.event_loop, "", self._on_time, self._timer_set_at
            )

    def _on_time(self, at: float) -> None:
        if self._timer_set_at == at:
            self._timer_set_at = None
            self._on_timer()


class SimulatedDoor:
    """One incarnation of a door."""

    def __init__(
        self,
        scheduler: Scheduler,
        name: str,
        clock: SkewedClock,
        policy: Policy,
        admission: AdmissionArgs,
        dial: Dial,
        on_deliver: Callable[[SimulatedDoor, Deliver], None],
    ):
        self.scheduler, self.name, self.clock = scheduler, name, clock
        self.process = SimulatedProcess(name)
        self.event_loop = SimulatedThread(self.process, "loop")
        self.serve_calls: dict[str, str] = {}  # attempt → the replica that was called
        self._dial, self._on_deliver = dial, on_deliver
        self.admission = AdmissionQueue(admission, POLICY.text_share, Capacity(0, 0, 0))
        self.cluster = ClusterView(POLICY, kv_bytes_per_token=0.0, num_layers=1, codecs=("raw",))
        self.flow = RequestFlow(
            Placer(policy, self.cluster, BLOCK_SIZE),
            AdmissionController(self.admission),
            Timeouts(FIRST_TOKEN_S, REQUEST_S),
        )
        self.dispatcher = SimulatedDispatcher(self, self.flow)

    @property
    def members(self) -> MemberTable:
        return self.dispatcher.members

    def later(self, delay_s: float, function: Callable[..., None], *args: Any) -> None:
        self.scheduler.after(delay_s, self.event_loop, "", function, *args)

    async def dial(
        self,
        address: str,
        name: str,
        on_message: Any,
        on_close: Any,
        *,
        last_read: str | None,
        wanted: str,
        **_: Any,
    ) -> Any:
        """`cluster.rpc.connect` over the simulated network."""
        end = self._dial(self.event_loop, address, last_read, wanted)
        end.on_message, end.on_close = on_message, on_close
        return end

    def on_deliver(self, output: Deliver) -> None:
        self._on_deliver(self, output)


def run(coroutine: Any) -> Any:
    """To its end: it waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a simulated coroutine waits")
