"""Workers that share a CPU take turns at it, one model step at a time.

Two steps at once on the same cores take longer than one after the other: their threads preempt each other inside every
parallel region, and both stream their weights through one cache. So a step holds a slot, and all its threads run. A host has
`cores // threads` slots: one if each worker uses all cores. Workers bound to other cores have slots of their own. Work on
a GPU takes no turns.

    with cpu_slots.acquire(exclusive_s):     waits for a slot
        …  cpu_slots.yield_between_layers()             between layers: whoever waits goes first, if this step has had its share

After `exclusive_s` of running, a step gives way at its next offer, and then again before it has run for more than `SHARE` of
what the others have had meanwhile: so they are slowed down by no more than that, or a layer, however long the step is.

A slot is an flock, given back by the kernel when its holder dies. Whoever wants one first takes the lock `next` and keeps it
until he has a slot; that makes a queue of one, and tells a holder that somebody waits. CpuSlots are a matter of speed, never of
correctness: who has waited `TIMEOUT_S` goes on without them for good, and says so in the log.

Belongs to the engine's thread; waiting polls, because flock knows no deadline.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.clock import Clock
from cluster.rpc.address import make_private

logger = logging.getLogger(__name__)

# What a step may run between two yields, as a part of the time that the others ran meanwhile; after its exclusive time.
SHARE = 0.3
TIMEOUT_S = 30.0  # a model step never lasts that long between two layers
POLL_S = (
    0.0005  # a poll costs 10 us of a core that another worker could use, and makes a parallel region wait
)
# A step does not poll for this part of its shortest pause so far, at most for MAX_QUIET_S.
QUIET_SHARE = 0.7
MAX_QUIET_S = 0.05


class CpuSlots:
    def __init__(
        self,
        clock: Clock,
        folder: Path | None,
        num_slots: int,
        pause: Callable[[float], None] = time.sleep,
        on_progress: Callable[[], None] = lambda: None,
    ):
        """`folder` is common to the workers that take turns; None: this worker has its device alone. `on_progress` is called at every
        offer, and while a turn is waited for: this thread moves."""
        self._clock = clock
        self._pause = pause
        self._on_progress = on_progress
        self._queue_lock: _FileLock | None = None
        self._slots: list[_FileLock] = []
        if folder is not None:
            folder.mkdir(exist_ok=True)
            self._queue_lock = _FileLock(folder / "next")
            # Last first: a worker with fewer threads than the others leaves them the slots that they can have.
            self._slots = [_FileLock(folder / f"slot-{i}") for i in reversed(range(num_slots))]
        self._held: _FileLock | None = None
        self._began_at = 0.0  # when this stretch of running began
        self._layer_began_at = 0.0  # last, in this stretch
        self._may_run_s = math.inf  # in this stretch
        self._ran_s = 0.0  # in the stretches before, of this step
        self._yielded_s: list[float] = []  # the pauses of this step

    @contextmanager
    def acquire(self, exclusive_s: float = math.inf) -> Iterator[None]:
        """Not while it is held."""
        self._ran_s = 0.0
        self._yielded_s.clear()
        self._may_run_s = exclusive_s
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def yield_between_layers(self) -> None:
        """Inside `acquire`. May wait; costs 2 us when nobody else does."""
        self._on_progress()
        if self._held is None or self._queue_lock is None:
            return
        now = self._clock.now()
        layer_s, self._layer_began_at = now - self._layer_began_at, now
        if now + layer_s - self._began_at <= self._may_run_s:  # after one more like the last
            return
        if self._queue_lock.try_acquire():
            self._queue_lock.release()
            return
        self._release()
        yielded_at = self._clock.now()
        self._acquire(min(QUIET_SHARE * min(self._yielded_s, default=0.0), MAX_QUIET_S))
        self._yielded_s.append(self._began_at - yielded_at)
        self._may_run_s = SHARE * self._yielded_s[-1]

    @property
    def ran_s(self) -> float:
        """How long the last step, or the one so far, has run, without what it waited."""
        return self._ran_s + (self._clock.now() - self._began_at if self._held is not None else 0.0)

    @property
    def mean_slice_s(self) -> float:
        """What the last step's share of its pauses was, on average: infinite if nobody made use of its offers."""
        return SHARE * sum(self._yielded_s) / len(self._yielded_s) if self._yielded_s else math.inf

    def _acquire(self, quiet_s: float = 0.0) -> None:
        deadline = self._clock.now() + TIMEOUT_S
        if self._queue_lock is not None and self._wait_for([self._queue_lock], deadline) is not None:
            if quiet_s > 0:
                self._pause(quiet_s)
            self._held = self._wait_for(self._slots, deadline)
            self._queue_lock.release()
        if self._queue_lock is not None and self._held is None:
            logger.error("no turn at the CPU came in %.0f s: this worker takes none any more", TIMEOUT_S)
            self._queue_lock = None
        self._began_at = self._layer_began_at = self._clock.now()

    def _wait_for(self, locks: list[_FileLock], deadline: float) -> _FileLock | None:
        while True:
            for lock in locks:
                if lock.try_acquire():
                    return lock
            if self._clock.now() >= deadline:
                return None
            self._on_progress()
            self._pause(POLL_S)

    def _release(self) -> None:
        self._ran_s += self._clock.now() - self._began_at
        if self._held is not None:
            self._held.release()
        self._held = None


class _FileLock:
    """Excludes every other object for the same path, in this process and in others."""

    def __init__(self, path: Path):
        self._file = open(path, "w")  # noqa: SIM115 (closing it gives the lock back: with the object or the process)

    def try_acquire(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def no_cpu_slots(clock: Clock, on_progress: Callable[[], None] = lambda: None) -> CpuSlots:
    return CpuSlots(clock, folder=None, num_slots=0, on_progress=on_progress)


def shared_cpu_slots(
    clock: Clock, folder: Path, num_threads: int, on_progress: Callable[[], None] = lambda: None
) -> CpuSlots:
    """For a worker whose steps run on `num_threads` of the cores that this process may use. `folder` is private to the user; one
    that is not is a ConfigError."""
    make_private(folder)
    cores = os.sched_getaffinity(0)
    mask = sum(1 << core for core in cores)
    num_slots = max(1, len(cores) // num_threads)
    return CpuSlots(clock, folder / f"cpu-slots-{mask:x}", num_slots, on_progress=on_progress)
