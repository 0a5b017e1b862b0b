"""Runs an engine on a thread of its own, so that a model step never blocks the event loop.

Loop: take all queued calls, run them, `engine.step()`, repeat. `step` returns how long the engine can wait:
* 0: it has more work now;
* seconds until its next deadline;
* None: only a new call can give it work.

An idle engine sleeps on a condition and costs nothing. Only this thread touches the engine and everything
that the engine owns. Other threads use `call`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from cluster.clock import SystemClock
from cluster.pulse import Pulse

logger = logging.getLogger(__name__)


class Engine(Protocol):
    def step(self) -> float | None:
        """Does one bounded piece of work. Returns seconds until the next step is wanted. None: after the next
        call."""
        ...


class StepLoop:
    def __init__(self, name: str, engine: Engine, pulse: Pulse | None = None):
        """`pulse`: the heartbeat of the thread. The engine adds beats of its own inside long steps."""
        self._engine = engine
        self._pulse = pulse or Pulse(SystemClock())
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._failure: BaseException | None = None
        self._on_failure: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def on_failure(self, function: Callable[[], None]) -> None:
        """`function` is called once, on the thread that finds that the engine has failed; at once, if it has
        failed already. Set it before `start`."""
        with self._wake:
            self._on_failure = function
            has_failed = self._failure is not None
        if has_failed:
            function()

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Runs `function(*args)` on the engine's thread before its next step. Never blocks. Any thread."""
        with self._wake:
            self._calls.append(lambda: function(*args))
            self._wake.notify()

    def fail(self, error: BaseException) -> None:
        """The engine has failed, whatever its thread is waiting for. Any thread. The first error counts."""
        with self._wake:
            if self._failure is not None:
                return
            self._failure = error
            self._stopping = True
            self._wake.notify()
            on_failure = self._on_failure
        if on_failure is not None:
            on_failure()

    def stop(self, timeout_s: float) -> None:
        """Finishes the current step and ends the thread. Blocks up to `timeout_s`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def check_health(self) -> None:
        """Raises the error that ended the thread, if there is one."""
        if self._failure is not None:
            raise RuntimeError("the engine stopped") from self._failure

    def _run(self) -> None:
        wait_s: float | None = None
        try:
            while self._take_calls(wait_s):
                self._pulse.beat()
                wait_s = self._engine.step()
        # Process edge: check_health reports the error, and Serve replaces the replica.
        except BaseException as error:
            logger.exception("engine stopped")
            self.fail(error)
        self._pulse.rest()

    def _take_calls(self, wait_s: float | None) -> bool:
        with self._wake:
            if not self._calls and not self._stopping and wait_s != 0:
                self._pulse.rest()
                self._wake.wait(wait_s)
            self._pulse.beat()
            calls = list(self._calls)
            self._calls.clear()
            stopping = self._stopping
        for run in calls:
            run()
            self._pulse.beat()
        return not stopping
