"""What every worker process consists of, whatever its phases: transfer engines, sockets, and a seat for each
of its engines.

Order: made → the service builds its engines, which take their seats → `attach` → `start`, on the event loop →
`stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch

from cluster.clock import SystemClock
from cluster.errors import UnavailableError
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.lost_device import DeviceLostError
from cluster.pulse import Watch
from cluster.types.members import Member, ProcessId, Role
from cluster.types.messages import AnyMessage, LoadReport
from cluster.worker.outbox import DoorId
from cluster.worker.ranks import Ranks
from cluster.worker.seat import EngineSeat
from cluster.worker.setup import WorkerSetup
from cluster.worker.shell import WorkerShell
from kv_transfer.agents.factory import make_agent
from kv_transfer.codecs.wire_memory import Wire
from kv_transfer.lease.events import LateWrite, LeaseEvent, TransferEngineFailed, TransferEvent
from kv_transfer.lease.group import GroupTransferEngine
from kv_transfer.lease.processes import process_id
from kv_transfer.lease.transfer import BlockTransfer
from kv_transfer.lease.transfer_engine import TransferEngine

STOP_TIMEOUT_S = 5.0
# How much longer than the writer the owner of a lease waits for the writer's word
# (kv_transfer.lease.receiver). Serve kills a replica that does not answer three health checks of 5 s, each 5
# s after the last, and then the call to stop for 20 s.
LEASE_MARGIN_S = 120.0


class WorkerProcess:
    def __init__(
        self,
        setup: WorkerSetup,
        model: str,
        *,
        outgoing: BlockMemory | None = None,
        incoming: BlockMemory | None = None,
        outgoing_wire: Wire | None = None,
        incoming_wire: Wire | None = None,
        features: BlockMemory | None = None,
        embeddings: BlockMemory | None = None,
        lease_margin_s: float = LEASE_MARGIN_S,
        ranks: Ranks | None = None,
    ):
        """Opens the transfer agent and registers the memories. `model` and the rest: see `TransferEngine`.
        `features`: memory that encoders write into; its events go to the engine's `on_features`.
        `embeddings`: memory that an encoder sends from. `ranks`: the other processes that share the model;
        this object ends them when it stops."""
        self.clock = SystemClock()
        # A transfer engine sends from one memory and receives into one. KV goes before embeddings.
        has_two = features is not None and (incoming is not None or embeddings is not None)
        self.transfer_engine = TransferEngine(
            make_agent(setup.transport, setup.replica_id, setup.host, setup.net_devices),
            self.clock,
            self._on_own_transfer,
            outgoing=outgoing if has_two else outgoing or embeddings,
            incoming=incoming if has_two else incoming or features,
            margin_s=lease_margin_s,
            model=model,
            outgoing_wire=outgoing_wire,
            incoming_wire=incoming_wire,
        )
        self.feature_transfer_engine = self.transfer_engine
        self._shares_engine = not has_two and features is not None
        if has_two:
            self.feature_transfer_engine = TransferEngine(
                make_agent(setup.transport, f"{setup.replica_id}-features", setup.host, setup.net_devices),
                self.clock,
                self._on_features,
                outgoing=embeddings,
                incoming=features,
                margin_s=lease_margin_s,
                model=model,
            )
        self._memories = _distinct(outgoing, incoming, outgoing_wire, incoming_wire, features, embeddings)
        self._model = model
        self._setup = setup
        self._ranks = ranks
        self._group = None
        if ranks is not None:
            progress = ranks.progress
            self._group = GroupTransferEngine(
                self.transfer_engine, ranks.links, self._on_transfer, lambda: progress.now
            )
        num_threads = torch.get_num_threads() * (1 if ranks is None else ranks.size)
        self.seat = self.encoder_seat = EngineSeat("engine", setup, self.clock, num_threads, self._deliver)
        if has_two and embeddings is not None:
            self.encoder_seat = EngineSeat("encoder", setup, self.clock, num_threads, self._deliver)
        self.seats = list(dict.fromkeys([self.seat, self.encoder_seat]))

    def member(
        self,
        role: Role,
        layout: MemoryLayout,
        num_blocks: int,
        *,
        modalities: tuple[str, ...] = (),
        block_bytes: int = 0,
        state_blocks: int = 0,
        num_layers: int = 1,
        row_bytes: int = 0,
    ) -> Member:
        """How this worker is published, without its address, which is known after `start`. Call it after
        `attach`."""
        setup = self._setup
        return Member(
            replica_id=setup.replica_id,
            role=role,
            address="",
            model=self._model,
            layout=layout.fingerprint,
            num_blocks=num_blocks,
            modalities=modalities,
            hardware=hardware_of(setup.device, num_ranks=1 if self._ranks is None else self._ranks.size),
            block_bytes=block_bytes,
            state_blocks=state_blocks,
            num_layers=num_layers,
            processes=self.processes,
            row_bytes=row_bytes,
            device=self._device,
            process_name=self.shell.name,
        )

    @property
    def _device(self) -> str:
        """Which slot of which host the steps of this worker take turns in; empty if others run beside it."""
        slot = self.seat.cpu_slots.only_slot
        return f"{self.processes[0].boot_id} {slot}" if slot and self.processes else ""

    @property
    def processes(self) -> tuple[ProcessId, ...]:
        """All processes that write to other workers' memories for this worker. Empty if this system cannot
        identify processes."""
        pids = [os.getpid(), *(() if self._ranks is None else self._ranks.pids)]
        known = [process_id(pid) for pid in pids]
        return () if None in known else tuple(process for process in known if process is not None)

    @property
    def _transfer_engines(self) -> list[TransferEngine]:
        both = [self.transfer_engine, self.feature_transfer_engine]
        return both[:1] if both[0] is both[1] else both

    @property
    def kv_transfer_engine(self) -> BlockTransfer:
        """Transfers KV, of which all ranks hold a share."""
        return self._group or self.transfer_engine

    def attach(self, on_message: Callable[[DoorId, AnyMessage], None]) -> None:
        """Called once, when every engine has taken its seat. `on_message` runs on the event loop and must not
        block."""
        self.loop = self.seat.loop
        self.shell = WorkerShell(self._setup, self.seats, on_message)
        pulses = {seat.name: seat.pulse for seat in self.seats}
        pulses["transfer"] = self.transfer_engine.pulse
        if self.feature_transfer_engine is not self.transfer_engine:
            pulses["feature transfer"] = self.feature_transfer_engine.pulse
        self._watch = Watch(
            self.clock, pulses, self._setup.hang_timeout_s, self.shell.tell_stalled, self._on_hung
        )
        if self._ranks is not None and self._group is not None:
            self._ranks.attach(self._group.on_event, self._on_lost)

    async def start(self) -> str:
        """Listens and runs; the pages of its memories are allocated from now on. Returns the address to
        dial."""
        address = await self.shell.start()
        for transfer_engine in self._transfer_engines:
            transfer_engine.start()
        for seat in self.seats:
            seat.loop.start()
        self._watch.start()
        self._setup.late_memory.populate(self._memories)
        return address

    async def drain(self, timeout_s: float) -> None:
        """Goes on until no door has a request here, for at most this time. Serve does not list this worker
        any more."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.shell.wait_alone(), timeout_s)

    async def stop(self) -> None:
        self._watch.stop()
        await self.shell.aclose()
        for seat in self.seats:
            await asyncio.to_thread(seat.loop.stop, STOP_TIMEOUT_S)
        for transfer_engine in self._transfer_engines:
            await asyncio.to_thread(transfer_engine.close, STOP_TIMEOUT_S)
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.stop)

    def loads(self) -> list[LoadReport]:
        """The last report of each engine."""
        return [seat.outbox.load for seat in self.seats]

    def check_health(self) -> None:
        """Raises the error that ended an engine, if there is one, or UnavailableError if one of the threads
        hangs."""
        for seat in self.seats:
            seat.loop.check_health()

    def _on_own_transfer(self, event: TransferEvent) -> None:
        if self._shares_engine and isinstance(event, LeaseEvent | LateWrite):
            self._on_features(event)
        elif self._group is None:
            self._on_transfer(event)
        else:
            self._group.on_event(0, event)

    def _on_lost(self, rank: int) -> None:
        self.loop.fail(UnavailableError(f"rank {rank} of this worker has ended"))

    def _on_hung(self, thread: str, silent_s: float) -> None:
        self.loop.fail(UnavailableError(f"the {thread} thread has not moved for {silent_s:.0f} s"))

    def _on_transfer(self, event: TransferEvent) -> None:
        if isinstance(event, TransferEngineFailed):
            return self._on_failed(event)
        self.loop.call(self.seat.engine.on_transfer, event, self.clock.now())

    def _on_features(self, event: TransferEvent) -> None:
        if isinstance(event, LeaseEvent | LateWrite):
            engine: Any = self.seat.engine  # a language engine
            self.loop.call(engine.on_features, event, self.clock.now())
        elif isinstance(event, TransferEngineFailed):
            self._on_failed(event)
        else:  # embeddings that were sent
            self.encoder_seat.loop.call(self.encoder_seat.engine.on_transfer, event, self.clock.now())

    def _on_failed(self, event: TransferEngineFailed) -> None:
        """It is in the log. Leases end nevertheless, at the end of their time at the latest; but without its
        device no transfer ever succeeds, and a worker without steps would not find out."""
        if isinstance(event.error, DeviceLostError):
            self.loop.fail(event.error)

    def _deliver(self, batch: list[tuple[DoorId, Any]]) -> None:
        self.shell.deliver_from_thread(batch)


def _distinct(*memories: BlockMemory | Wire | None) -> list[BlockMemory]:
    blocks = (memory.memory if isinstance(memory, Wire) else memory for memory in memories)
    return [memory for memory in dict.fromkeys(blocks) if memory is not None]


def hardware_of(device: torch.device, num_ranks: int = 1) -> str:
    """Equal for devices that are equally fast: the model of a GPU, or the number of threads of a CPU."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"cpu, {torch.get_num_threads()} threads"
    return name if num_ranks == 1 else f"{num_ranks} x {name}"
