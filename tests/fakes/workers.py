"""What a worker's process consists of beside its engine, for tests that move everything by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from cluster.engine.features import FeatureStore
from cluster.types.members import ProcessId
from cluster.types.messages import AnyMessage
from cluster.worker.outbox import Outbox
from kv_transfer.lease.transfer_engine import TransferEngine

DOOR = 1


class Inbox:
    """Stands for the engine's loop: calls wait until `run`."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()

    def call(self, function: Callable[..., None], *args: Any) -> None:
        self.calls.append(lambda: function(*args))

    def run(self) -> None:
        while self.calls:
            self.calls.popleft()()


class ManualExecutor(Executor):
    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def job() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self.jobs.append(job)
        return future

    def run_one(self) -> None:
        if self.jobs:
            self.jobs.popleft()()


@dataclass
class Worker:
    """An engine, its transfer engines, and what it has said to the door so far."""

    engine: Any
    transfer_engine: TransferEngine
    feature_transfer_engine: TransferEngine  # may be the same
    features: FeatureStore | None  # None: of an encoder
    inbox: Inbox
    outbox: Outbox
    process: ProcessId
    said: deque[AnyMessage] = field(default_factory=deque)
    door: int = DOOR  # its number for the door's connection
    listeners: list[Callable[[AnyMessage], None]] = field(default_factory=list)  # to what it says from now on

    @property
    def transfer_engines(self) -> list[TransferEngine]:
        return list({id(one): one for one in (self.transfer_engine, self.feature_transfer_engine)}.values())

    def attach(self, on_message: Callable[[int, AnyMessage], None]) -> None:
        self.on_message = on_message

    def send(self, door: int, message: AnyMessage) -> None:
        if door == self.door:
            self.say(message)

    def say(self, message: AnyMessage) -> None:
        self.said.append(message)
        for hear in self.listeners:
            hear(message)

    def call_from_thread(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)

    def step(self) -> None:
        self.inbox.run()
        self.engine.step()

    def tell(self, function: Callable[..., None], *args: Any) -> None:
        self.inbox.call(function, *args)
