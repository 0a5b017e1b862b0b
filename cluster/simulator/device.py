"""One accelerator in virtual time, and the links of a writer."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from cluster.simulator.events import EventLoop
from cluster.types.curves import Link

if TYPE_CHECKING:
    from cluster.simulator.language import SimLanguage


class Stage(Protocol):
    """A worker that computes on a device, call by call."""

    is_waiting: bool

    def begin(self) -> float | None:
        """Start the next call and say how long it takes; None: there is nothing to compute."""
        ...

    def finish(self, took_s: float) -> None:
        """The call is over; ask for the next turn if there is more."""
        ...


class Device:
    """Runs one call at a time; stages take turns in the order in which they asked."""

    def __init__(self, loop: EventLoop):
        self._loop = loop
        self._waiting: deque[Stage] = deque()
        self._is_busy = False
        # its answers go on inside an encoder's calls, a step in each
        self.language: SimLanguage | None = None
        self.busy_s = 0.0
        self.running: Stage | None = None
        self.free_at = 0.0  # when the call that runs ends

    def wake(self, stage: Stage) -> None:
        """The stage may have something to compute. May repeat."""
        if stage.is_waiting:
            return
        stage.is_waiting = True
        self._waiting.append(stage)
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            stage = self._waiting.popleft()
            stage.is_waiting = False
            call_s = stage.begin()
            if call_s is None:
                continue
            if self.language is not None and stage is not self.language:
                call_s = self.language.ride(call_s)
            self._is_busy = True
            self.running = stage
            self.busy_s += call_s
            self.free_at = self._loop.now + call_s
            self._loop.at(self.free_at, self._end, stage, call_s)
            return

    def _end(self, stage: Stage, took_s: float) -> None:
        if self.language is not None and stage is not self.language:
            self.language.resume()
        self.running = None
        stage.finish(took_s)
        self._is_busy = False
        self._next()


class SimLink:
    """All that one worker writes to others goes through one link, in order."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def send(self, ready_at: float, num_bytes: float, link: Link, all_ready_at: float = 0.0) -> float:
        """The instant at which the bytes are there. They are ready from `ready_at` on; the last of them, a
        layer's, not before `all_ready_at`."""
        begins_at = max(self._free_at, ready_at)
        self._free_at = max(begins_at + num_bytes / link.bytes_per_s, all_ready_at)
        return self._free_at + link.latency_s
