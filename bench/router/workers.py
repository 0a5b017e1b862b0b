"""A cluster on this machine without Ray: a process for each worker, and in this process several doors over
the same workers.

Order: `cluster` spawns the workers (each loads its half of the model, listens and sends its `Member` through
a pipe), builds the doors and puts HTTP before each → requests → the block ends: doors close, workers stop;
one whose pipe ends stops by itself.

Decode's Serve call is a message through the pipe and one back when the generation is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from bench.in_process import api
from cluster import rpc
from cluster.config.settings import ClusterArgs
from cluster.errors import UnavailableError
from cluster.types.curves import ServiceCurves
from cluster.types.members import Member, Role
from cluster.types.messages import AnyMessage, Measured
from deploy.services import SERVICES
from router.door import Door

if TYPE_CHECKING:
    from bench.router.devices import Device

START_TIMEOUT_S = 300.0  # several processes load torch and a model on a few cores
STOP_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 30.0
READY_TIMEOUT_S = 10.0


class Slowdown(msgspec.Struct, frozen=True):
    """A message to a worker: from now on every call takes so many times as long."""

    factor: float


class Run(msgspec.Struct, frozen=True):
    """A message to a decode worker: Serve's call."""

    request_id: str


class Ended(msgspec.Struct, frozen=True):
    """A message of a decode worker: its answer."""

    request_id: str
    error: str = ""


class Stop(msgspec.Struct, frozen=True):
    pass


class Stopped(msgspec.Struct, frozen=True):
    """The last message that a worker sends."""

    wanted_s: float  # of all emulated calls
    taken_s: float  # that they took


@dataclass(frozen=True)
class WorkerSpec:
    """`emulated`: how long its calls are to take; None: as long as they do."""

    role: Role
    replica_id: str
    emulated: ServiceCurves | None


class Worker:
    """One worker process, as this process sees it. Event loop only."""

    def __init__(self, spec: WorkerSpec, args: ClusterArgs, folder: str):
        context = multiprocessing.get_context("spawn")
        self.spec = spec
        self.report: Stopped | None = None
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(spec, args, folder, theirs), daemon=True)
        self._process.start()
        theirs.close()
        loop = asyncio.get_running_loop()
        self._member: asyncio.Future[Member] = loop.create_future()
        self._stopped: asyncio.Future[None] = loop.create_future()
        self._runs: dict[str, asyncio.Future[None]] = {}
        loop.add_reader(self._pipe.fileno(), self._read)

    async def start(self) -> Member:
        """Raises UnavailableError when the process ends instead, TimeoutError."""
        return await asyncio.wait_for(asyncio.shield(self._member), START_TIMEOUT_S)

    async def run(self, request_id: str) -> None:
        self._runs[request_id] = asyncio.get_running_loop().create_future()
        self._pipe.send(Run(request_id))
        await self._runs[request_id]

    def slow_down(self, factor: float) -> None:
        self._pipe.send(Slowdown(factor))

    async def stop(self) -> None:
        """Whatever state it is in."""
        with contextlib.suppress(OSError, TimeoutError):
            self._pipe.send(Stop())
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._stopped
        await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
        self._end("stopped")
        self._pipe.close()

    def _read(self) -> None:
        try:
            while self._pipe.poll():
                self._take(self._pipe.recv())
        except (EOFError, OSError):
            self._end("its process has ended")

    def _take(self, message: Any) -> None:
        match message:
            case Member():
                self._member.set_result(message)
            case Ended():
                run = self._runs.pop(message.request_id)
                if message.error and not run.done():
                    run.set_exception(UnavailableError(message.error))
                elif not run.done():
                    run.set_result(None)
            case Stopped():
                self.report = message

    def _end(self, why: str) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        error = UnavailableError(f"worker {self.spec.replica_id}: {why}")
        for waiting in (self._member, *self._runs.values()):
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # retrieved, also if no task awaits it
        self._runs.clear()
        if not self._stopped.done():
            self._stopped.set_result(None)


@dataclass(frozen=True)
class Cluster:
    workers: Mapping[str, Worker]  # by replica id
    doors: Mapping[str, Door]
    urls: Mapping[str, str]  # of the doors

    def held(self) -> list[str]:
        """What is not as it is in an idle cluster."""
        running = [
            f"{name}: {door.num_running} requests" for name, door in self.doors.items() if door.num_running
        ]
        peers = [(name, peer) for name, door in self.doors.items() for peer in door.peers]
        return running + [
            f"{name}: {peer.member.replica_id} {peer.loads}" for name, peer in peers if not peer.is_idle
        ]

    async def wait_idle(self) -> list[str]:
        """What is still held after IDLE_TIMEOUT_S; normally nothing, and soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                while self.held():
                    await asyncio.sleep(0.01)
        return self.held()

    async def measured(self) -> dict[str, ServiceCurves]:
        """What each worker reports to a door that connects about its speed, by replica id. Raises
        ClusterError, TimeoutError."""
        peers = next(iter(self.doors.values())).peers
        return {peer.member.replica_id: await _curves_of(peer.member.address) for peer in peers}

    def slow_down(self, factors: Mapping[str, float]) -> None:
        """Slows workers down by replica id; a worker that is not named is as fast as it was made."""
        for replica_id, worker in self.workers.items():
            worker.slow_down(factors.get(replica_id, 1.0))


def specs(counts: Mapping[Role, int], emulated: Mapping[Role, ServiceCurves] | None) -> list[WorkerSpec]:
    return [
        WorkerSpec(role, f"{role}-{idx}", emulated[role] if emulated else None)
        for role, count in counts.items()
        for idx in range(count)
    ]


@asynccontextmanager
async def cluster(doors: Mapping[str, ClusterArgs], workers: list[WorkerSpec]) -> AsyncIterator[Cluster]:
    """Ready to be asked. `doors`: the settings of each by its name; what concerns workers is the first one's.
    Raises ClusterError, TimeoutError."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="epdg-", ignore_cleanup_errors=True))
        args = next(iter(doors.values()))
        running = {spec.replica_id: Worker(spec, args, f"{folder}/{idx}") for idx, spec in enumerate(workers)}
        stack.push_async_callback(_stop_all, list(running.values()))
        members = [await worker.start() for worker in running.values()]

        async def call_decode(replica_id: str, request_id: str) -> None:
            await running[replica_id].run(request_id)

        opened = {name: await _open(stack, each, call_decode, members) for name, each in doors.items()}
        urls = {name: await stack.enter_async_context(api(door)) for name, door in opened.items()}
        yield Cluster(running, opened, urls)


async def _open(
    stack: contextlib.AsyncExitStack,
    args: ClusterArgs,
    call_decode: Callable[[str, str], Awaitable[None]],
    members: list[Member],
) -> Door:
    door = Door(args, call_decode)
    stack.push_async_callback(door.aclose)
    for role in Role:
        door.update_members(role, [member for member in members if member.role is role])
    async with asyncio.timeout(READY_TIMEOUT_S):
        while len(door.peers) < len(members):
            await asyncio.sleep(0.005)
    return door


async def _curves_of(address: str) -> ServiceCurves:
    told: asyncio.Future[ServiceCurves] = asyncio.get_running_loop().create_future()

    def on_message(_: rpc.Connection, message: AnyMessage) -> None:
        if isinstance(message, Measured) and not told.done():
            told.set_result(message.curves)

    connection = await rpc.connect(
        address, "measurement", on_message, lambda _: None, timeout_s=READY_TIMEOUT_S, secret=None
    )
    try:
        return await asyncio.wait_for(told, READY_TIMEOUT_S)
    finally:
        await connection.aclose()


async def _stop_all(workers: list[Worker]) -> None:
    await asyncio.gather(*(worker.stop() for worker in workers))


def _work(spec: WorkerSpec, args: ClusterArgs, folder: str, pipe: Connection) -> None:
    """The worker's process. A folder of its own: its steps take no turns with the others'."""
    # the terminal sends it to all; the end of the pipe ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["EPDG_SOCKET_DIR"] = folder
    from bench.router.devices import Device, run_on

    device = Device(spec.emulated)
    run_on(device)
    asyncio.run(_serve(spec, args, device, pipe))


async def _serve(spec: WorkerSpec, args: ClusterArgs, device: Device, pipe: Connection) -> None:
    import importlib

    from cluster.worker.setup import set_up

    module, _, name = SERVICES[spec.role].partition(":")
    service: Any = getattr(importlib.import_module(module), name)(args, set_up(args, spec.replica_id))
    member = await service.start()
    if spec.emulated is not None:  # a device of its own, whatever it is made of
        member = msgspec.structs.replace(member, hardware="emulated")
    pipe.send(member)
    runs: set[asyncio.Task[None]] = set()
    is_over = asyncio.Event()

    async def run(request_id: str) -> None:
        error = ""
        try:
            await service.run(request_id)
        except UnavailableError as failure:
            error = str(failure)
        pipe.send(Ended(request_id, error))

    def read() -> None:
        try:
            while pipe.poll():
                match pipe.recv():
                    case Slowdown(factor=factor):
                        device.slowdown = factor
                    case Run(request_id=request_id):
                        task = asyncio.ensure_future(run(request_id))
                        runs.add(task)
                        task.add_done_callback(runs.discard)
                    case Stop():
                        is_over.set()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            is_over.set()

    asyncio.get_running_loop().add_reader(pipe.fileno(), read)
    await is_over.wait()
    await service.stop()
    with contextlib.suppress(OSError):
        pipe.send(Stopped(device.wanted_s, device.taken_s))
