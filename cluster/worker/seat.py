"""What each engine of a worker process has for itself: its thread, with a heartbeat; its CPU slots; the
messages that it collects for the doors. A worker has one engine, or two if it encodes and computes prompts.

Order: made → the service builds its engine with `outbox` and `cpu_slots` → `attach` → `loop.start`.
"""

from __future__ import annotations

from typing import Any, Protocol

from cluster.clock import Clock
from cluster.pulse import Pulse
from cluster.worker.cpu_slots import no_cpu_slots, shared_cpu_slots
from cluster.worker.loop import StepLoop
from cluster.worker.outbox import Deliver, DoorId, Outbox
from cluster.worker.setup import WorkerSetup


class WorkerEngine(Protocol):
    """All methods are called on the engine's thread."""

    def step(self) -> float | None: ...

    def on_transfer(self, event: Any, at: float) -> None: ...

    def drop_door(self, door: DoorId) -> None:
        """Cancels everything that the door requested."""
        ...


class EngineSeat:
    """Engines of one host's cores take turns by their CPU slots, also those of one process."""

    def __init__(self, name: str, setup: WorkerSetup, clock: Clock, num_threads: int, deliver: Deliver):
        """`name`: of the thread. `num_threads`: that a step runs on."""
        self.name = name
        self.outbox = Outbox(deliver)
        self.pulse = Pulse(clock)
        folder, on_progress = setup.cpu_slots_folder, self.pulse.beat_on
        self.cpu_slots = (
            no_cpu_slots(clock, on_progress)
            if folder is None
            else shared_cpu_slots(clock, folder, num_threads, on_progress)
        )

    def attach(self, engine: WorkerEngine) -> None:
        """Called once."""
        self.engine = engine
        self.loop = StepLoop(self.name, engine, self.pulse)
