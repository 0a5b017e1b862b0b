"""A worker's threads that hang, fail or only take long, on a clock that a test sets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.errors import UnavailableError
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from cluster.pulse import FAILED_S, SILENT_S, Pulse, Watch
from cluster.rpc import connect
from cluster.types.messages import Cancel, Failed, Ping, Pong, Stalled
from cluster.worker.cpu_slots import CpuSlots
from cluster.worker.loop import StepLoop
from cluster.worker.outbox import Outbox
from cluster.worker.shell import WorkerShell
from kv_transfer.agents.agent import TransferError
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.fakes.clock import ManualClock
from tests.fakes.waiting import until

LIMIT_S = 60.0
LAYOUT = MemoryLayout((SegmentSpec(1, (4,), torch.float32),))


class Worker:
    """Two pulses under a watch that is looked through by hand."""

    def __init__(self, on_hung: Callable[[str, float], None] | None = None):
        self.clock = ManualClock()
        self.engine, self.transfer = Pulse(self.clock), Pulse(self.clock)
        self.told: list[tuple[str, ...]] = []
        self.hung: list[str] = []
        pulses = {"engine": self.engine, "transfer": self.transfer}
        on_hung = on_hung or (lambda name, _: self.hung.append(name))
        self.watch = Watch(self.clock, pulses, LIMIT_S, self.told.append, on_hung)

    def wait(self, seconds: float, beats: Pulse | None = None) -> None:
        """Looks four times a second; `beats` moves each time."""
        for _ in range(int(seconds * 4)):
            self.clock.at += 0.25
            if beats is not None:
                beats.beat()
            self.watch.look()


@pytest.mark.parametrize("name", ["engine", "transfer"])
def test_a_thread_that_hangs_is_reported_within_two_seconds_and_fails_at_the_limit(name):
    worker = Worker()
    getattr(worker, name).beat()
    worker.wait(SILENT_S)
    assert worker.told == []
    worker.wait(0.5)
    assert worker.told == [(name,)] and worker.hung == []
    worker.wait(LIMIT_S)
    assert worker.told == [(name,)] and worker.hung == [name]


def test_a_thread_that_moves_again_is_reported():
    worker = Worker()
    worker.engine.beat()
    worker.wait(10)
    worker.wait(1, beats=worker.engine)
    assert worker.told == [("engine",), ()] and worker.hung == []


def test_a_step_of_minutes_whose_layers_progress_is_never_silent():
    worker = Worker()
    worker.engine.beat()
    worker.wait(600, beats=worker.engine)
    assert worker.told == [] and worker.hung == []


def test_a_process_that_was_stopped_is_given_its_time_again():
    worker = Worker()
    worker.engine.beat()
    worker.wait(0.5)
    worker.clock.at += 3600.0
    worker.watch.look()
    worker.wait(SILENT_S)
    assert worker.told == [] and worker.hung == []
    worker.wait(LIMIT_S)
    assert worker.told == [("engine",)] and worker.hung == ["engine"]


def test_a_thread_without_work_is_never_silent():
    worker = Worker()
    worker.engine.beat()
    worker.engine.rest()
    worker.wait(3600)
    assert worker.told == [] and worker.hung == []


def test_a_transport_that_only_fails_ends_the_worker_sooner():
    worker = Worker()
    worker.transfer.begin()
    worker.transfer.is_failing = True
    worker.wait(FAILED_S)
    assert worker.told == [("transfer",)] and worker.hung == []
    worker.wait(0.5)
    assert worker.hung == ["transfer"]


def test_waiting_for_a_cpu_slot_and_yielding_one_count_as_progress(tmp_path):
    clock, moves = ManualClock(), []

    def pause(_: float) -> None:
        clock.at += 1.0

    first = CpuSlots(clock, tmp_path / "slots", 1, on_progress=lambda: moves.append("first"))
    second = CpuSlots(clock, tmp_path / "slots", 1, pause, lambda: moves.append("second"))
    with first.acquire():
        first.yield_between_layers()
        with second.acquire():
            pass
    assert moves[0] == "first" and moves.count("second") > 10


class Agent:
    """A transport that fails while it is told to."""

    def __init__(self, agent: Any):
        self._agent = agent
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def notifications(self) -> Any:
        if self.error is not None:
            raise self.error
        return self._agent.notifications()


@pytest.mark.parametrize("error", [TransferError("the transport is broken"), ValueError("a bug")])
def test_a_transport_that_fails_at_every_poll_is_no_progress(error):
    clock = ManualClock()
    agent = Agent(InProcessNetwork().agent("owner"))
    transfer_engine = TransferEngine(agent, clock, lambda event: None, incoming=BlockMemory(LAYOUT, 2))  # type: ignore[arg-type]
    transfer_engine.step()
    assert transfer_engine.pulse.is_resting
    transfer_engine.grant("lease", [0], [0], ttl_s=100.0)
    transfer_engine.step()
    agent.error = error
    for _ in range(8):
        clock.at += 1.0
        transfer_engine.step()
    assert transfer_engine.pulse.silent_s == 8.0 and transfer_engine.pulse.is_failing
    agent.error = None
    transfer_engine.step()
    assert transfer_engine.pulse.silent_s == 0.0 and not transfer_engine.pulse.is_failing
    transfer_engine.revoke("lease", "no writer")
    transfer_engine.step()
    assert transfer_engine.pulse.is_resting


async def test_the_watch_looks_only_while_there_is_work():
    worker = Worker()
    worker.watch.start()
    await asyncio.sleep(0.01)
    assert not worker.watch.is_looking
    worker.engine.beat()
    assert worker.watch.is_looking
    worker.engine.rest()
    await asyncio.sleep(0.01)
    assert not worker.watch.is_looking
    worker.watch.stop()


class Hanging:
    def __init__(self) -> None:
        self.is_in_step, self.may_go = threading.Event(), threading.Event()

    def step(self) -> float | None:
        self.is_in_step.set()
        self.may_go.wait(60)
        return None


def test_a_hanging_engine_has_work_and_does_not_move_and_an_idle_one_rests():
    clock, engine = ManualClock(), Hanging()
    pulse = Pulse(clock)
    loop = StepLoop("engine", engine, pulse)
    loop.start()
    loop.call(lambda: None)
    assert engine.is_in_step.wait(60)
    clock.at = 5.0
    assert pulse.silent_s == 5.0
    engine.may_go.set()
    loop.stop(60)
    assert pulse.is_resting


@pytest.fixture
async def shell(tmp_path):
    """A worker's sockets around an engine without requests."""
    tmp_path.chmod(0o700)
    setup = SimpleNamespace(address=f"unix:{tmp_path / 'w'}", replica_id="w", secret=None)

    def handle(door: int, message: Any) -> None:
        raise ValueError("a bug")

    loop = StepLoop("engine", Hanging())
    outbox, engine = Outbox(lambda batch: None), SimpleNamespace(drop_door=print)
    seat: Any = SimpleNamespace(loop=loop, outbox=outbox, engine=engine)
    shell: Any = WorkerShell(setup, [seat], handle)  # type: ignore[arg-type]
    shell.address = await shell.start()
    yield shell
    await shell.aclose()


async def dial(shell: Any, name: str = "door") -> tuple[Any, list[Any]]:
    """A door, and what it hears."""
    heard: list[Any] = []
    connection = await connect(shell.address, name, lambda _, message: heard.append(message))
    return connection, heard


async def test_a_door_that_asks_is_answered_whatever_the_engine_does(shell):
    connection, heard = await dial(shell)
    connection.send(Ping())
    await until(lambda: heard)
    assert heard == [Pong()]
    await connection.aclose()


async def test_every_door_is_told_what_does_not_move_and_one_that_comes_later_too(shell):
    connection, heard = await dial(shell)
    connection.send(Ping())
    await until(lambda: heard)
    shell.tell_stalled(("engine",))
    later, heard_later = await dial(shell, "another door")
    shell.tell_stalled(())
    await until(lambda: len(heard) == 3 and len(heard_later) == 2)
    assert heard[1:] == heard_later == [Stalled(("engine",)), Stalled(())]
    await connection.aclose()
    await later.aclose()


async def test_a_message_that_a_worker_stumbles_over_ends_its_request_and_no_connection(shell):
    connection, heard = await dial(shell)
    connection.send(Cancel("r"))
    connection.send(Ping())
    await until(lambda: len(heard) == 2)
    failed, answer = heard
    assert isinstance(failed, Failed) and failed.request_id == "r" and failed.error.kind == "InternalError"
    assert answer == Pong() and connection.is_open
    await connection.aclose()


def test_a_thread_that_hangs_makes_the_worker_unhealthy():
    worker = Worker(lambda name, _: loop.fail(UnavailableError(name)))
    loop = StepLoop("engine", Hanging(), worker.engine)
    hung_up: list[bool] = []
    loop.on_failure(lambda: hung_up.append(True))
    worker.engine.beat()
    worker.wait(LIMIT_S)
    loop.check_health()
    worker.wait(1)
    with pytest.raises(RuntimeError):
        loop.check_health()
    assert hung_up == [True]
