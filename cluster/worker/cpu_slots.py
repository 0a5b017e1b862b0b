"""CPU slots: workers that share a CPU compute one after the other, one model step at a time.

Two steps at once on the same cores take longer than one after the other: their threads preempt each other in
every parallel region, and both stream their weights through one cache. So a step holds a slot, and all its
threads run. A host has `cores // threads` slots: one, if each worker uses all cores. Workers that are bound
to other cores have slots of their own. Work on a GPU needs no slot.

    with cpu_slots.acquire(exclusive_s):      waits for a slot
        …  cpu_slots.yield_between_layers()   between layers: may yield the slot to a waiting worker

After `exclusive_s` of running, a step yields its slot between two layers if another worker waits. From then
on it yields again before it has run longer than `SHARE` of the time that the others ran meanwhile. So the
others are slowed down by no more than that, or by one layer, however long the step is.

A slot is an flock: the kernel frees it when its process ends. A worker that needs a slot first acquires the
lock `next` and keeps it until it has a slot. So the queue has one place, and the holder of a slot can see
that a worker waits. CPU slots affect speed only, never correctness: a worker that has waited for `TIMEOUT_S`
runs without slots from then on, and its log says so.

Used on the engine's thread. Waiting polls, because flock has no timeout.
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

# After its exclusive time a step runs for this part of the time that the others ran meanwhile, then yields.
SHARE = 0.3
TIMEOUT_S = 30.0  # a model step never lasts that long between two layers
POLL_S = 0.0005  # a poll takes 10 us of a core from another worker, and makes a parallel region wait
# A step does not poll for this part of its shortest pause so far, at most for MAX_QUIET_S.
QUIET_SHARE = 0.7
MAX_QUIET_S = 0.05


class FileLock:
    """Excludes every other object for the same path, in this process and in others."""

    def __init__(self, path: Path):
        # Closing the file frees the lock: with the object or with the process.
        self._file = open(path, "w")  # noqa: SIM115

    def try_acquire(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


class CpuSlots:
    def __init__(
        self,
        clock: Clock,
        folder: Path | None,
        num_slots: int,
        pause: Callable[[float], None] = time.sleep,
        on_progress: Callable[[], None] = lambda: None,
        open_lock: Callable[[Path], FileLock] = FileLock,
    ):
        """`folder` is common to the workers that share CPU slots. None: this worker has its device alone.
        `on_progress` is called between layers and while a slot is waited for: this thread is alive."""
        self._clock = clock
        self._pause = pause
        self._on_progress = on_progress
        self.only_slot = str(folder) if folder is not None and num_slots == 1 else ""  # empty: not just one
        self._queue_lock: FileLock | None = None
        self._slots: list[FileLock] = []
        if folder is not None:
            folder.mkdir(exist_ok=True)
            self._queue_lock = open_lock(folder / "next")
            # Last slot first: a worker with fewer threads has more slots, and leaves the first to the others.
            self._slots = [open_lock(folder / f"slot-{i}") for i in reversed(range(num_slots))]
        self._held: FileLock | None = None
        self._began_at = 0.0  # when the step got the slot that it holds
        self._layer_began_at = 0.0  # last call of `yield_between_layers`, or `_began_at`
        self._may_run_s = math.inf  # since `_began_at`
        self._ran_s = 0.0  # before `_began_at`, in this step
        self._pauses_s: list[float] = []  # the pauses of this step
        self.busy_s = 0.0  # of all steps that have ended, without their pauses

    @contextmanager
    def acquire(self, exclusive_s: float = math.inf) -> Iterator[None]:
        """Waits for a slot. Not while one is held. `exclusive_s`: how long the step runs before it may
        yield."""
        self._ran_s = 0.0
        self._pauses_s.clear()
        self._may_run_s = exclusive_s
        self._acquire()
        try:
            yield
        finally:
            self._release()
            self.busy_s += self._ran_s

    def yield_between_layers(self) -> None:
        """Inside `acquire`. May wait. Costs 2 us if no other worker waits."""
        self._on_progress()
        if self._held is None or self._queue_lock is None:
            return
        now = self._clock.now()
        layer_s, self._layer_began_at = now - self._layer_began_at, now
        if now + layer_s - self._began_at <= self._may_run_s:  # after one more layer like the last
            return
        if self._queue_lock.try_acquire():
            self._queue_lock.release()
            return
        self._release()
        yielded_at = self._clock.now()
        self._acquire(min(QUIET_SHARE * min(self._pauses_s, default=0.0), MAX_QUIET_S))
        self._pauses_s.append(self._began_at - yielded_at)
        self._may_run_s = SHARE * self._pauses_s[-1]

    @property
    def ran_s(self) -> float:
        """How long the last step (or the present one, so far) has run, without its pauses."""
        return self._ran_s + (self._clock.now() - self._began_at if self._held is not None else 0.0)

    @property
    def mean_slice_s(self) -> float:
        """How long the last step could run between two yields, on average. Infinite if it never yielded."""
        return SHARE * sum(self._pauses_s) / len(self._pauses_s) if self._pauses_s else math.inf

    def _acquire(self, quiet_s: float = 0.0) -> None:
        deadline = self._clock.now() + TIMEOUT_S
        if self._queue_lock is not None and self._wait_for([self._queue_lock], deadline) is not None:
            if quiet_s > 0:
                self._pause(quiet_s)
            self._held = self._wait_for(self._slots, deadline)
            self._queue_lock.release()
        if self._queue_lock is not None and self._held is None:
            logger.error(
                "no CPU slot was free for %.0f s: this worker runs without CPU slots from now on", TIMEOUT_S
            )
            self._queue_lock = None
        self._began_at = self._layer_began_at = self._clock.now()

    def _wait_for(self, locks: list[FileLock], deadline: float) -> FileLock | None:
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


def no_cpu_slots(clock: Clock, on_progress: Callable[[], None] = lambda: None) -> CpuSlots:
    return CpuSlots(clock, folder=None, num_slots=0, on_progress=on_progress)


def shared_cpu_slots(
    clock: Clock, folder: Path, num_threads: int, on_progress: Callable[[], None] = lambda: None
) -> CpuSlots:
    """Returns the slots of a worker whose steps run on `num_threads` of the cores that this process may use.
    `folder` must be private to the user; otherwise ConfigError."""
    make_private(folder)
    cores = os.sched_getaffinity(0)
    mask = sum(1 << core for core in cores)
    num_slots = max(1, len(cores) // num_threads)
    return CpuSlots(clock, folder / f"cpu-slots-{mask:x}", num_slots, on_progress=on_progress)
