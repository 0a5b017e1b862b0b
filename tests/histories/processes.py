"""The process of a simulated worker: `WorkerProcess` without sockets, threads and the real clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cluster.kvcache.memory import BlockMemory
from cluster.pulse import Pulse
from cluster.worker.cpu_slots import no_cpu_slots
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.process import WorkerProcess
from cluster.worker.seat import EngineSeat
from cluster.worker.shell import WorkerShell
from kv_transfer.lease.events import Expired, LateWrite, LeaseEvent, TransferEngineFailed
from tests.histories.threads import SimulatedTransferEngine, TurnLoop

if TYPE_CHECKING:
    from tests.histories.workers import SimulatedWorker


@dataclass(frozen=True)
class Listener:
    """As `cluster.rpc.Server`: what it is to call, for the world's network."""

    on_connect: Callable[[Any], None]
    on_message: Callable[[Any, Any], None]
    on_close: Callable[[Any], None]
    last_read: Callable[[str], str | None]


class SimulatedShell(WorkerShell):
    soon: Callable[..., None]  # on the event loop

    def call_from_thread(self, function: Callable[..., None], *args: Any) -> None:
        self.soon(function, *args)


class SimulatedSeat(EngineSeat):
    def __init__(self, name: str, worker: SimulatedWorker, deliver: Callable[..., None]):
        self.name = name
        self.outbox = Outbox(self._send)
        self._deliver = deliver
        self.pulse = Pulse(worker.clock)
        self.cpu_slots = no_cpu_slots(worker.clock)
        self._worker = worker

    def attach(self, engine: Any) -> None:
        self.engine = engine
        self.loop: Any = TurnLoop(
            self._worker.host, self._worker.thread(self.name), self._worker.clock, engine
        )

    def flushed(self) -> list[tuple[DoorId, Any]]:
        """What the outbox has for the doors, which do not get it."""
        sent: list[tuple[DoorId, Any]] = []
        deliver, self._deliver = self._deliver, sent.extend
        self.outbox.flush()
        self._deliver = deliver
        return sent

    def _send(self, batch: list[tuple[DoorId, Any]]) -> None:
        self._deliver(batch)


class SimulatedParts(WorkerProcess):
    """`WorkerProcess` without sockets, threads and the real clock."""

    def __init__(self, worker: SimulatedWorker, **memories: BlockMemory | None):
        """`kv_out`, `kv_in`, `features`, `embeddings`."""
        self._worker, self.clock = worker, worker.clock
        kv_out, kv_in = memories.get("kv_out"), memories.get("kv_in")
        features, embeddings = memories.get("features"), memories.get("embeddings")
        has_two = features is not None and (kv_in is not None or embeddings is not None)
        self.transfer_engine: SimulatedTransferEngine = worker.transfer(
            "transfer",
            self._on_own_transfer,
            outgoing=kv_out if has_two else kv_out or embeddings,
            incoming=kv_in if has_two else kv_in or features,
        )
        self.feature_transfer_engine = self.transfer_engine
        self._shares_engine = not has_two and features is not None
        if has_two:
            self.feature_transfer_engine = worker.transfer(
                "features", self._on_features, outgoing=embeddings, incoming=features
            )
        self._group = self._ranks = None
        self.seat = self.encoder_seat = SimulatedSeat("engine", worker, self._deliver)
        if has_two and embeddings is not None:
            self.encoder_seat = SimulatedSeat("encoder", worker, self._deliver)
        self.seats = list(dict.fromkeys([self.seat, self.encoder_seat]))

    def attach(self, on_message: Callable[..., None]) -> None:
        worker = self._worker
        self.loop = self.seat.loop
        setup: Any = SimpleNamespace(address="unix:/nowhere", replica_id=worker.replica_id, secret=None)
        make_server: Any = worker.listen
        self.shell = SimulatedShell(setup, self.seats, on_message, make_server)
        self.shell.soon = worker.soon

    def _on_transfer(self, event: Any) -> None:
        self._check(event)
        self._worker.host.num_waited_for += isinstance(event, Expired)
        super()._on_transfer(event)
        if isinstance(event, LateWrite):
            self.loop.call(self._worker.told_late, self.transfer_engine, event.block_ids)

    def _on_features(self, event: Any) -> None:
        self._check(event)
        super()._on_features(event)
        if isinstance(event, LateWrite):
            self.loop.call(self._worker.told_late, self.feature_transfer_engine, event.block_ids)

    def _check(self, event: Any) -> None:
        if isinstance(event, TransferEngineFailed):
            raise AssertionError(f"a transfer step of {self._worker.name} raised") from event.error
        self._worker.host.num_expired += isinstance(event, Expired)
        if isinstance(event, LeaseEvent):
            self._worker.note(f"lease {event}")
