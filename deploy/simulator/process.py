"""The process of a simulated worker: its threads, sockets, device and links, all in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.messages import AnyMessage, ChannelMessage, GrantPassed, Measured
from cluster.worker.outbox import DoorId, Outbox
from deploy.simulator.device import Device, DeviceSlots, Noise
from deploy.simulator.engine_loop import EngineLoop
from deploy.simulator.events import EventLoop, VirtualClock
from deploy.simulator.hardware import Model
from deploy.simulator.network import Network
from deploy.simulator.spec import WorkerSpec
from deploy.simulator.transfer import SimTransfer
from kv_transfer.lease.events import LeaseEvent

if TYPE_CHECKING:
    from deploy.simulator.language import SimLanguage


class World:
    """What the workers of one simulation share."""

    def __init__(self, network: Network, loop: EventLoop, clock: VirtualClock, model: Model):
        self.network, self.loop, self.clock, self.model = network, loop, clock, model
        self.peers: dict[str, SimTransfer] = {}


class Seat:
    """It is to an engine what `EngineSeat` is."""

    def __init__(self, process: SimProcess):
        self._process = process
        self.outbox = Outbox(process.deliver)
        self.cpu_slots = DeviceSlots(process.clock)
        self.resting: SimLanguage | None = None  # of an engine that may rest

    def attach(self, engine: Any) -> None:
        self.engine = engine
        self.loop = EngineLoop(self._process.world.loop, self._process.clock, engine, self.resting)


class SimProcess:
    """It is to the engines what `WorkerProcess` and `WorkerShell` are."""

    def __init__(self, spec: WorkerSpec, world: World, policy: SchedulingPolicy, noise: Noise):
        self.world, self.policy, self.clock = world, policy, world.clock
        self.device = Device(spec, world.clock, noise)
        self.is_dead = False
        self.seat = self.encoder_seat = Seat(self)
        if spec.role.encodes and len(spec.role.phases) > 1:
            self.encoder_seat = Seat(self)
        self.step_began_at: Callable[[], float] = world.clock.now  # the last one with prompts
        model, self.shell = world.model, self
        self.kv_transfer_engine = self._transfer("kv", model.kv_bytes_per_token, self._on_kv)
        self.feature_transfer_engine = self._transfer("rows", spec.bytes_per_row, self._on_rows)
        self._on_message: Callable[[DoorId, AnyMessage], None] = lambda door, message: None

    @property
    def spec(self) -> WorkerSpec:
        return self.device.spec

    @property
    def loop(self) -> EngineLoop:
        return self.seat.loop

    @property
    def seats(self) -> list[Seat]:
        return list(dict.fromkeys([self.seat, self.encoder_seat]))

    def attach(self, on_message: Callable[[DoorId, AnyMessage], None]) -> None:
        self._on_message = on_message

    def receive(self, door: DoorId, message: AnyMessage) -> None:
        """A message of a door has arrived. The writers of leases are known without `GrantPassed`."""
        if not self.is_dead and not isinstance(message, GrantPassed):
            self._on_message(door, message)

    def send(self, door: DoorId, message: ChannelMessage) -> None:
        reported = self.spec.reported
        if isinstance(message, Measured) and reported is not None:
            message = Measured(reported, message.is_of_encoder)
        self.world.network.tell_door(door, self.spec.replica_id, message)

    def deliver(self, batch: Sequence[tuple[DoorId, ChannelMessage]]) -> None:
        for door, message in batch:
            self.send(door, message)

    def call_from_thread(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)

    def kill(self) -> None:
        """The process ends now. What its steps have done before counts."""
        for seat in self.seats:
            seat.loop.kill()
        self.is_dead = True
        self.kv_transfer_engine.lose()
        self.feature_transfer_engine.lose()

    def _transfer(self, name: str, unit_bytes: int, on_event: Callable[[Any], None]) -> SimTransfer:
        world = self.world
        return SimTransfer(
            f"{self.spec.replica_id}/{name}",
            world.peers,
            world.loop,
            world.clock,
            block_bytes=unit_bytes * world.model.block_size,
            num_layers=world.model.num_layers,
            link_to=lambda peer: self.spec.link(peer.rpartition("/")[0]),
            began_at=lambda: self.step_began_at(),
            on_event=on_event,
        )

    def _on_kv(self, event: Any) -> None:
        self.loop.call(self.seat.engine.on_transfer, event, self.clock.now())

    def _on_rows(self, event: Any) -> None:
        if isinstance(event, LeaseEvent):
            self.loop.call(self.seat.engine.on_features, event, self.clock.now())
        else:  # embeddings that were sent
            self.encoder_seat.loop.call(self.encoder_seat.engine.on_transfer, event, self.clock.now())
