"""Whether a worker's threads move, and who is told when they do not.

Each thread that has work stamps its progress: the engine at every call and step, between the layers of a step and while it waits for
its turn at the CPU; the mover at every round in which the transport did not fail. Such a thread is silent when its last stamp is old.

    silent for SILENT_S     every door is told, and avoids the worker while there is another; again when the thread moves
    silent for `limit_s`    the worker is of no use: it hangs up, its doors' requests end, `check_health` fails, Serve replaces it
    a transport that did nothing but fail for FAILED_S: the same

`limit_s` (setting `hang_timeout_s`) must be longer than anything a thread does between two stamps. The longest is one encoder block over a whole
batch, 16,384 rows that see each other: 1.4 TFLOP in Qwen2.5-VL's encoder, 27 s on a core of 50 GFLOP/s. A decode step has no stamps
within; it is far shorter.

A look that comes late found the whole process held up, stopped by a signal for example: silence counts from there.

The watch lives on the worker's event loop and looks only while a thread has work: an idle worker does nothing for it. That loop itself, and a
process that is stopped, are watched by the doors, which ask (`router.flow.watch`), and by Serve.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping

from cluster.clock import Clock

logger = logging.getLogger(__name__)

SILENT_S = 1.0  # a step of a second between two layers is slow enough to send what comes elsewhere
FAILED_S = 5.0
LOOK_EVERY_S = 0.25
LATE_S = 2.0


class Pulse:
    """One thread's stamps. Written by that thread, read by any."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._moved_at = math.inf  # it has nothing to do
        self.is_failing = False  # it goes round and round, and fails each time
        self.on_begin: Callable[[], None] = lambda: None  # called by the thread when it gets work

    def begin(self) -> None:
        """There is work. If there was before, this is no progress."""
        if self._moved_at == math.inf:
            self.beat()

    def beat(self) -> None:
        """It has work, and has moved."""
        was_resting = self._moved_at == math.inf
        self._moved_at = self._clock.now()
        if was_resting:
            self.on_begin()

    def beat_on(self) -> None:
        """It has moved, if it has work: a step before the first request belongs to no work."""
        if self._moved_at != math.inf:
            self._moved_at = self._clock.now()

    def rest(self) -> None:
        """It has nothing to do."""
        self._moved_at = math.inf

    @property
    def is_resting(self) -> bool:
        return self._moved_at == math.inf

    @property
    def silent_s(self) -> float:
        return max(0.0, self._clock.now() - self._moved_at)


class Watch:
    """Over the pulses of one worker. On its event loop, but for `wake`."""

    def __init__(
        self,
        clock: Clock,
        pulses: Mapping[str, Pulse],
        limit_s: float,
        on_silent: Callable[[tuple[str, ...]], None],
        on_hung: Callable[[str, float], None],
    ):
        """`on_silent(names)`: the threads that are silent from now on; none: all move. `on_hung(name, silent_s)`: at most once."""
        self._clock = clock
        self._looked_at = clock.now()
        self._since = -math.inf  # silence before does not count
        self._pulses = pulses
        self._limit_s = limit_s
        self._on_silent = on_silent
        self._on_hung = on_hung
        self._is_hung = False
        self._is_looking = False
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
        if loop is not None and not self._is_looking and not loop.is_closed():
            self._is_looking = True
            self._looked_at = self._clock.now()
            loop.call_soon_threadsafe(self._look_on)

    def look(self) -> None:
        """Once."""
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
            self._is_looking = False
            if not self._has_work():  # else it has got some just now, and has not woken this
                return
            self._is_looking = True
        self._loop.call_later(LOOK_EVERY_S, self._look_on)

    def _has_work(self) -> bool:
        return not all(pulse.is_resting for pulse in self._pulses.values())
