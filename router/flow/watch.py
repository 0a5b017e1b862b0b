"""Which workers make progress, as this door sees it, and which keep failing.

A worker is silent while it reports so of its own threads (`Stalled`), or while it does not answer: its event
loop is blocked, or its process is stopped. A worker is asked (`Ping`) only while this door has a request
there and has heard nothing for a while: an idle cluster exchanges nothing, and the token frames of a busy
worker are answer enough. So a worker that stops while it has no work is found with its first request.

    quiet for QUIET_S                 asked
    no answer for ANSWER_S            silent, and stopped: what it has goes to other workers at once
    its own report                    silent: placements avoid it while there is another
    silent for MOVE_S                 what it has goes to other workers
    a message from it                 not silent any more, unless it has reported so itself
    FAILURES attempts failed with it  avoided for a second, and after each further failure for twice as long,
                                      up to LONGEST_PAUSE_S; an attempt that succeeds ends this

From the stop of a worker to the move of its requests: QUIET_S + ANSWER_S and two looks, 1.75 s at most. What
no other worker can take stays: it goes on when the worker does, or when another one joins after the worker
has hung up or was replaced. Pure: `now` is passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from router.flow.state import WorkerState

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
QUIET_S = 0.5
ANSWER_S = 0.75
MOVE_S = 10.0
FAILURES = 3
FIRST_PAUSE_S, MAX_DOUBLINGS = 1.0, 6
LONGEST_PAUSE_S = FIRST_PAUSE_S * 2**MAX_DOUBLINGS
LATE_S = (
    0.5  # a look that is later than this found the door itself held up: it concludes nothing about workers
)


@dataclass(eq=False, slots=True)
class _Progress:
    """What is known of one worker's progress."""

    heard_at: float
    asked_at: float | None = None  # and not answered
    is_unanswered: bool = False
    is_stalled: bool = False
    silent_since: float = 0.0
    has_moved: bool = False
    num_failures: int = 0  # attempts that failed with it, since one succeeded
    paused_until: float = 0.0


class WorkerWatch:
    def __init__(
        self,
        ping: Callable[[WorkerState], None],
        on_changed: Callable[[WorkerState], None],
        on_long_silent: Callable[[WorkerState, float], None],
    ):
        """`on_changed`: `WorkerState.is_avoided` has changed. `on_long_silent`: once for each silence; with
        the time."""
        self._ping = ping
        self._on_changed = on_changed
        self._on_long_silent = on_long_silent
        self._workers: dict[WorkerState, _Progress] = {}
        self._looked_at = 0.0
        self.next_look_at: float | None = None  # None: this door has no request anywhere
        self.num_silences = 0  # since the start

    def add(self, worker: WorkerState, now: float) -> None:
        self._workers[worker] = _Progress(now)

    def remove(self, worker: WorkerState) -> None:
        self._workers.pop(worker, None)

    def heard(self, worker: WorkerState, now: float) -> None:
        """A message of any kind has come."""
        progress = self._workers.get(worker)
        if progress is None:
            return
        progress.heard_at = now
        if progress.asked_at is not None:
            progress.asked_at, progress.is_unanswered = None, False
            self._update(worker, progress, now)

    def told(self, worker: WorkerState, is_stalled: bool, now: float) -> None:
        """What the worker reports of its own threads."""
        progress = self._workers.get(worker)
        if progress is not None:
            progress.is_stalled = is_stalled
            self._update(worker, progress, now)

    def failed(self, worker: WorkerState, now: float) -> None:
        """An attempt has failed, and this worker is blamed for it."""
        progress = self._workers.get(worker)
        if progress is None:
            return
        progress.num_failures += 1
        if progress.num_failures >= FAILURES:
            num_doublings = min(progress.num_failures - FAILURES, MAX_DOUBLINGS)
            progress.paused_until = now + FIRST_PAUSE_S * 2**num_doublings
            self._update(worker, progress, now)

    def succeeded(self, worker: WorkerState, now: float) -> None:
        progress = self._workers.get(worker)
        if progress is not None and progress.num_failures:
            progress.num_failures, progress.paused_until = 0, 0.0
            self._update(worker, progress, now)

    def begin(self, now: float) -> None:
        """There is a request. Looks go on until there is none."""
        if self.next_look_at is None:
            self._looked_at = now
            self.next_look_at = now + LOOK_EVERY_S

    def look_if_due(self, now: float) -> None:
        if self.next_look_at is None or now < self.next_look_at:
            return
        self.next_look_at = now + LOOK_EVERY_S
        try:
            is_needed = self._look(now)
        except Exception:
            logger.exception("a look at the workers failed")
            return
        if not is_needed:
            self.next_look_at = None

    def _look(self, now: float) -> bool:
        """False: no worker has a request of this door."""
        was_late = now - self._looked_at > LOOK_EVERY_S + LATE_S
        self._looked_at = now
        is_needed = False
        for worker, progress in list(self._workers.items()):
            if progress.paused_until:
                is_needed |= now < progress.paused_until
                self._update(worker, progress, now)
            if worker.num_requests == 0:
                continue
            is_needed = True
            if progress.asked_at is None:
                if now - progress.heard_at >= QUIET_S:
                    progress.asked_at = now
                    self._ping(worker)
            elif was_late:  # the answer may have come and not been read
                progress.asked_at = now
            elif now - progress.asked_at >= ANSWER_S:
                progress.is_unanswered = True
                self._update(worker, progress, now)
        for worker, progress in list(self._workers.items()):  # what is moved goes to none that is silent now
            limit_s = 0.0 if progress.is_unanswered else MOVE_S
            is_long = worker.is_silent and now - progress.silent_since >= limit_s
            if is_long and worker.num_requests and not progress.has_moved:
                progress.has_moved = True
                logger.warning("%s worker %s makes no progress", worker.role, worker.replica_id)
                self._on_long_silent(worker, now)
        return is_needed

    def _update(self, worker: WorkerState, progress: _Progress, now: float) -> None:
        was_avoided = worker.is_avoided
        is_silent = progress.is_stalled or progress.is_unanswered
        worker.is_failing = now < progress.paused_until
        if not worker.is_failing:
            progress.paused_until = 0.0
        if is_silent != worker.is_silent:
            worker.is_silent = is_silent
            if is_silent:
                self.num_silences += 1
                progress.silent_since, progress.has_moved = now, False
            name = f"{worker.role} worker {worker.replica_id}"
            logger.info("%s %s", name, "makes no progress" if is_silent else "makes progress again")
        if worker.is_avoided != was_avoided:
            self._on_changed(worker)
