"""The thread of an engine in virtual time: as `cluster.worker.loop.StepLoop`, it runs what was asked of it
between two steps, and steps as long as the engine has work.

Where answers alone are generated, one step is like the next until something comes or an answer ends. Such
steps are not events: the engine rests (`Rest`), and what it would have done meanwhile is done in one step,
as with drafts that are all right, when something comes, or at the end of the first answer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cluster.worker.loop import Engine
from deploy.simulator.events import EventLoop, VirtualClock

if TYPE_CHECKING:
    from deploy.simulator.language import SimLanguage

Call = tuple[Callable[..., None], tuple[Any, ...]]  # a function, and its arguments


@dataclass(frozen=True)
class Rest:
    """At most `num_steps` steps of the same answers. Step i, counted from 0, lasts first_s + i · more_s."""

    began_at: float
    num_steps: int
    first_s: float
    more_s: float

    def seconds(self, num_steps: int) -> float:
        return num_steps * (self.first_s + 0.5 * (num_steps - 1) * self.more_s)

    def ends_at(self, num_steps: int) -> float:
        return self.began_at + self.seconds(num_steps)

    def steps_at(self, instant: float) -> int:
        """How many steps have ended at the instant, or will have when the one that runs then has."""
        left_s, half = max(0.0, instant - self.began_at), 0.5 * self.more_s
        linear = self.first_s - half
        if half > 0:
            steps = (math.sqrt(linear * linear + 4 * half * left_s) - linear) / (2 * half)
        else:
            steps = left_s / self.first_s
        return max(1, min(self.num_steps, math.ceil(steps - 1e-9)))


class EngineLoop:
    def __init__(self, loop: EventLoop, clock: VirtualClock, engine: Engine, resting: SimLanguage | None):
        """`resting`: of an engine that may rest."""
        self._loop, self._clock, self._engine, self._resting = loop, clock, engine, resting
        self._calls: deque[Call] = deque()
        self._next_at = math.inf  # when it runs next
        self.busy_until = 0.0  # what it has done by then is done already in its records
        self._rest: Rest | None = None
        self.is_dead = False

    def asked(self, function: Callable[..., None]) -> list[tuple[Any, ...]]:
        """The arguments of the calls of `function` that wait."""
        return [args for each, args in self._calls if each == function]

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Runs `function(*args)` between two steps. Inside an event that spends time, at its end."""
        self._calls.append((function, args))
        self._run_soon()

    def end_rest(self) -> float:
        """What the engine would have gone on with takes another time from now on, or another engine wants its
        device. Returns when the step of a rest that runs now ends; without a rest, now."""
        if self._rest is None:
            return self._clock.now()
        self._calls.append((_nothing, ()))
        return self._run_soon()

    def kill(self) -> None:
        """The process ends now. What it has done before this instant counts."""
        if self._rest is not None and (num_steps := self._rest.steps_at(self._loop.now) - 1):
            self._make_up(self._rest, num_steps)
        self.is_dead = True

    def _run_soon(self) -> float:
        """The engine runs when the step is over that runs now: returns when."""
        at, rest = max(self._clock.now(), self.busy_until), self._rest
        if rest is not None and at <= rest.began_at:
            self._rest = None  # no step of it has begun
        elif rest is not None:
            at = rest.ends_at(rest.steps_at(at))
        self._run_at(at)
        return at

    def _run_at(self, at: float) -> None:
        if at < self._next_at:
            self._next_at = at
            self._loop.at(at, self._run, at)

    def _run(self, at: float) -> None:
        if at != self._next_at or self.is_dead:
            return  # it has run sooner
        self._next_at = math.inf
        resting, rest = self._resting, self._rest
        if resting is not None and rest is not None and self._goes_on(resting, rest, at):
            return
        if self._rest is not None:
            self._make_up(self._rest, self._rest.steps_at(at))
        with self._clock.at(at):
            self._take_calls()
            wait_s = self._engine.step()
            self.busy_until = self._clock.now()
        if wait_s == 0 and resting is not None and not self._calls:
            self._rest = resting.plan(self.busy_until)
        if self._rest is not None:
            self._run_at(self._rest.ends_at(self._rest.num_steps))
        elif wait_s is not None and wait_s != math.inf:
            self._run_at(self.busy_until + wait_s)

    def _goes_on(self, resting: SimLanguage, rest: Rest, at: float) -> bool:
        """Whether the engine rests on, or again, after it has taken in what has come."""
        num_steps = rest.steps_at(at)
        if not resting.may_take(self._calls, num_steps):
            return False
        if is_over := num_steps == rest.num_steps:
            self._make_up(rest, num_steps)
        self.busy_until = at
        with self._clock.at(at):
            self._take_calls()
            if not resting.admit():
                return False
        if is_over:
            self._rest = resting.plan(at)
        elif (most := min(rest.num_steps, resting.runner.max_steps())) > num_steps:
            self._rest = replace(rest, num_steps=most)
        else:
            return False
        if self._rest is None:
            return False
        self._run_at(self._rest.ends_at(self._rest.num_steps))
        return True

    def _take_calls(self) -> None:
        while self._calls:
            function, args = self._calls.popleft()
            function(*args)

    def _make_up(self, rest: Rest, num_steps: int) -> None:
        """The rest is over, after so many steps: they are the engine's next one."""
        self._rest = None
        if self._resting is not None:
            self._resting.runner.make_up(rest, num_steps)
        with self._clock.at(rest.began_at):
            self._engine.step()


def _nothing() -> None:
    """Ends a rest."""
