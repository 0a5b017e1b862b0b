"""A simulated worker: the engines of a real one and their inbox, over a device that computes nothing
(`device`), links (`transfer`) and threads in virtual time (`engine_loop`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.engine.state import LanguageRequest
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.members import Role
from cluster.types.messages import AnyMessage, DecodeTarget, StartDecode, StartPrefill
from cluster.worker.outbox import DoorId
from deploy.simulator.device import Noise
from deploy.simulator.encoder import SimEncoder
from deploy.simulator.language import SimLanguage
from deploy.simulator.process import SimProcess, World
from deploy.simulator.spec import WorkerSpec

NUM_REPEATS = 32  # steps of each size, after which a fit has forgotten what was before (`StepFit`)


class SimWorker:
    """One incarnation of a replica."""

    def __init__(self, spec: WorkerSpec, world: World, policy: SchedulingPolicy, noise: Noise):
        self.process = process = SimProcess(spec, world, policy, noise)
        self.device, self.policy = process.device, policy
        self.encoder = SimEncoder(process) if spec.role.encodes else None
        self.language = None if spec.role is Role.ENCODE else SimLanguage(process, self.encoder)
        if self.encoder is not None and self.language is None:
            self.encoder.attach(process)
            process.attach(self.encoder.on_message)

    @property
    def spec(self) -> WorkerSpec:
        return self.device.spec

    @property
    def replica_id(self) -> str:
        return self.device.spec.replica_id

    @property
    def is_dead(self) -> bool:
        return self.process.is_dead

    @property
    def requests(self) -> Mapping[str, LanguageRequest]:
        """The requests of its language engine. Raises AssertionError for a worker that only encodes."""
        assert self.language is not None
        return self.language.engine.requests

    def expect(self, message: AnyMessage) -> None:
        """A door has sent this message."""
        if self.language is None:
            return
        if isinstance(message, StartPrefill) or (isinstance(message, StartDecode) and message.prefills):
            self.language.coming[message.request.request_id] = message.request

    def receive(self, door: DoorId, message: AnyMessage) -> None:
        """A message of a door has arrived."""
        if self.language is not None and isinstance(message, StartPrefill | StartDecode):
            self.language.coming.pop(message.request.request_id, None)
        if isinstance(message, DecodeTarget):
            self.process.kv_transfer_engine.expect(message.grant)
        self.process.receive(door, message)

    def connect(self, door: DoorId) -> None:
        """A door has come: each engine greets it."""
        for seat in self.process.seats:
            seat.loop.call(seat.outbox.add_door, door)

    def measure(self, spec: WorkerSpec) -> None:
        """The worker is as this says from now on, and has measured how fast it is, until it has forgotten how
        fast it was."""
        self.device.become(spec, self.device.slowdown)
        parts: list[Any] = [part for part in (self.encoder, self.language) if part is not None]
        for part in parts * NUM_REPEATS:
            part.warm_up()

    def kill(self) -> None:
        """The process ends now."""
        self.process.kill()
