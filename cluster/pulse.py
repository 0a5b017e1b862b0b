"""Heartbeats of a worker's threads, and what happens if they stop.

A thread that has work records a beat whenever it has moved:
* the engine at every call and step, between the layers of a step, and while it waits for a CPU slot;
* the transfer engine at every round in which the transport did not fail.

A thread that has work is silent if its last beat is old:

    silent for SILENT_S    every door is told, and avoids the worker while there is another one;
                           told again when the thread moves
    silent for `limit_s`   the worker closes its connections, so the requests of its doors end;
                           `check_health` fails, and Serve replaces the worker
    the transport has only failed for FAILED_S: the same

`limit_s` (setting `hang_timeout_s`) must be longer than anything that a thread does between two beats. The
longest is one encoder block over a whole batch, 16,384 rows that attend to each other: 1.4 TFLOP in
Qwen2.5-VL's encoder, 27 s on a core of 50 GFLOP/s. A decode step has no beats inside; it is far shorter.

If a check comes late, the whole process was stopped, by a signal for example. Silence counts from that check
on.

The watch runs on the worker's event loop and checks only while a thread has work: an idle worker does nothing
for it. The event loop itself, and a process that is stopped, are watched by the doors, which send pings
(`router.flow.watch`), and by Serve.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping

from cluster.clock import Clock

logger = logging.getLogger(__name__)

SILENT_S = 1.0  # a layer of a second is slow enough to send new requests elsewhere
FAILED_S = 5.0
LOOK_EVERY_S = 0.25
LATE_S = 2.0


class Pulse:
    """The heartbeat of one thread. Written by that thread, read by any thread."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._moved_at = math.inf  # inf: the thread has no work
        self.is_failing = False  # its rounds go on, and each of them fails
        self.on_begin: Callable[[], None] = lambda: None  # called by the thread when it gets work

    def begin(self) -> None:
        """The thread has work. If it had work before, this is no progress."""
        if self._moved_at == math.inf:
            self.beat()

    def beat(self) -> None:
        """The thread has work, and has moved."""
        was_resting = self._moved_at == math.inf
        self._moved_at = self._clock.now()
        if was_resting:
            self.on_begin()

    def beat_on(self) -> None:
        """The thread has moved. Ignored if it has no work: a step before the first request belongs to no
        work."""
        if self._moved_at != math.inf:
            self._moved_at = self._clock.now()

    def rest(self) -> None:
        """The thread has no work."""
        self._moved_at = math.inf

    @property
    def is_resting(self) -> bool:
        return self._moved_at == math.inf

    @property
    def silent_s(self) -> float:
        return max(0.0, self._clock.now() - self._moved_at)


class Watch:
    """Checks the pulses of one worker. On its event loop, except `wake`."""

    def __init__(
        self,
        clock: Clock,
        pulses: Mapping[str, Pulse],
        limit_s: float,
        on_silent: Callable[[tuple[str, ...]], None],
        on_hung: Callable[[str, float], None],
    ):
        """`on_silent(names)`: these threads are silent from now on; empty: all move. `on_hung(name,
        silent_s)`: called at most once."""
        self._clock = clock
        self._looked_at = clock.now()
        self._since = -math.inf  # silence before this instant does not count
        self._pulses = pulses
        self._limit_s = limit_s
        self._on_silent = on_silent
        self._on_hung = on_hung
        self._is_hung = False
        self.is_looking = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.silent: tuple[str, ...] = ()
        for pulse in pulses.values():
            pulse.on_begin = self.wake

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.wake()

    def stop(self) -> None:
        self._loop = None

    def wake(self) -> None:
        """A thread has got work. Any thread."""
        loop = self._loop
        if loop is not None and not self.is_looking and not loop.is_closed():
            self.is_looking = True
            self._looked_at = self._clock.now()
            loop.call_soon_threadsafe(self._look_on)

    def look(self) -> None:
        """One check."""
        now = self._clock.now()
        if now - self._looked_at > LOOK_EVERY_S + LATE_S:
            self._since = now
        self._looked_at = now
        seconds = {name: min(pulse.silent_s, now - self._since) for name, pulse in self._pulses.items()}
        silent = tuple(name for name, silent_s in seconds.items() if silent_s > SILENT_S)
        if silent != self.silent:
            self.silent = silent
            self._on_silent(silent)
        for name, pulse in self._pulses.items():
            silent_s = seconds[name]
            limit_s = min(self._limit_s, FAILED_S) if pulse.is_failing else self._limit_s
            if silent_s > limit_s and not self._is_hung:
                self._is_hung = True
                self._on_hung(name, silent_s)

    def _look_on(self) -> None:
        try:
            self.look()
        except Exception:
            logger.exception("a look at this worker's threads failed")
        if self._loop is None:
            return
        if not self._has_work() and not self.silent:
            self.is_looking = False
            if not self._has_work():  # otherwise a thread got work just now and did not wake this watch
                return
            self.is_looking = True
        self._loop.call_later(LOOK_EVERY_S, self._look_on)

    def _has_work(self) -> bool:
        return not all(pulse.is_resting for pulse in self._pulses.values())
