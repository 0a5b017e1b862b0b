"""Decides how many replicas each pool should have. Pure; `now` is an argument.

Each time:

1. `DemandMeter` says how many workers each phase needs.
2. If too many requests got their first token late or were refused, the phase that is nearest to its limit
   gets more room: its workers are planned to be less busy, until the requests are in time again.
3. A pool of one phase gets what its phase needs, up to its bound. Pools of several phases get the rest of
   their phases; their workers are divided among these (`phases`), which costs nearly nothing, and replicas
   are added only if all of them together are too few.
4. A pool grows at once. It shrinks to the most that it has needed within `hold_s`, the time that starting and
   draining a replica takes: to start it again would cost as much as to keep it for so long (the
   rent-or-buy rule).
5. If all pools together would have more than `max_workers`, replicas that are only held go first, then those
   whose pool would be least short of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf

from cluster.types.members import Phase, Role
from router.scaling.demand import DemandMeter, Need
from router.scaling.phases import Phases, divide
from router.scaling.snapshot import PoolState, Snapshot

SLACK = 0.05  # of a worker, which is not worth another replica
BAND = 0.1  # a pool shrinks only as far as it would not grow again if it needed so much more
LEAST_ROOM, ROOM_STEP = 0.6, 0.03  # how far, and how fast in a second, missed targets lower the utilisation
RECOVERY = 0.003  # per second without missed targets


@dataclass(frozen=True)
class ScalingSettings:
    """Durations in seconds. `catch_up_s`: in which work that has piled up is to be done."""

    target_ttft_s: float = 2.0
    target_tpot_s: float = 0.1
    good_ratio: float = 0.95  # requests with their first token in time
    utilisation: float = 0.75  # part of their time that workers of a pool are planned to be busy
    start_s: float = 30.0  # that a replica takes to start
    drain_s: float = 15.0
    catch_up_s: float = 15.0
    period_s: float = 1.0  # between two decisions
    max_workers: int = 0  # of all pools together; 0: only the pools' own bounds

    @property
    def hold_s(self) -> float:
        return self.start_s + self.drain_s


@dataclass(frozen=True)
class Change:
    """Why a pool gets another number of replicas. `cause`: arrivals, backlog, late, idle or budget."""

    role: Role
    before: int
    after: int
    cause: str
    text: str


@dataclass(frozen=True)
class ScalingDecision:
    """`phases`: of the replicas of pools of several phases, by replica id. `needed`: workers, by pool."""

    targets: dict[Role, int] = field(default_factory=dict)
    phases: dict[str, Phases] = field(default_factory=dict)
    needed: dict[Role, float] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()


class Scaler:
    def __init__(self, settings: ScalingSettings):
        self.settings = settings
        self._meter = DemandMeter(settings.target_tpot_s)
        self._room = dict.fromkeys(Phase, 1.0)  # factor of the utilisation
        self._held: dict[Role, deque[tuple[float, int]]] = {}  # what was needed, and when
        self._phases: dict[str, Phases] = {}
        self._decided_at = -inf
        self._began_at: float | None = None

    def is_due(self, now: float) -> bool:
        return now - self._decided_at >= self.settings.period_s

    def decide(self, snapshot: Snapshot, now: float) -> ScalingDecision | None:
        """None: it is not time yet, or nothing is known."""
        if not snapshot.doors or not self.is_due(now):
            return None
        passed_s = min(now - self._decided_at, 2 * self.settings.period_s)
        self._decided_at = now
        self._meter.observe(snapshot.doors, now)
        needs = self._meter.needs()
        wants = {phase: self._want(phase, need) for phase, need in needs.items()}
        self._make_room(wants, snapshot.pools, passed_s)
        wants_of = _of_pools(wants, snapshot.pools)
        needed = {pool.role: sum(wants_of[pool.role].values()) for pool in snapshot.pools}
        targets = {pool.role: self._target(pool, needed[pool.role], now) for pool in snapshot.pools}
        cut = self._within_budget(targets, needed, snapshot.pools)
        self._divide(wants_of, snapshot.pools)
        changes = tuple(
            self._explain(pool, targets[pool.role], needed[pool.role], needs, pool.role in cut)
            for pool in snapshot.pools
            if targets[pool.role] != pool.target
        )
        return ScalingDecision(targets, dict(self._phases), needed, changes)

    def _want(self, phase: Phase, need: Need) -> float:
        """Workers. A queue that is done within half of the target is normal."""
        settings = self.settings
        arrivals = need.arrivals / (settings.utilisation * self._room[phase])
        normal_s = settings.target_ttft_s / 2 * max(1.0, need.arrivals)
        return arrivals + max(0.0, need.backlog_s - normal_s) / settings.catch_up_s

    def _make_room(self, wants: Mapping[Phase, float], pools: tuple[PoolState, ...], passed_s: float) -> None:
        """What replicas that still start will change is waited for."""
        good_ratio = self._meter.good_ratio
        if good_ratio is None or good_ratio >= self.settings.good_ratio:
            self._room = {phase: min(1.0, room + RECOVERY * passed_s) for phase, room in self._room.items()}
        elif all(len(pool.replica_ids) >= pool.target for pool in pools):
            able = {phase: sum(pool.target for pool in pools if phase in pool.role.phases) for phase in Phase}
            tightest = max(wants, key=lambda phase: wants[phase] / able[phase] if able[phase] else 0.0)
            self._room[tightest] = max(LEAST_ROOM, self._room[tightest] - ROOM_STEP * passed_s)

    def _target(self, pool: PoolState, needed: float, now: float) -> int:
        wanted, kept = (_within(pool, each) for each in (needed - SLACK, needed * (1.0 + BAND) - SLACK))
        held = self._held.setdefault(pool.role, deque())
        while held and held[-1][1] <= kept:
            held.pop()
        held.append((now, kept))
        while held[0][0] < now - self.settings.hold_s:
            held.popleft()
        # Just after its own start the scaler has not seen why the pool is as large as it is
        least = pool.target if self._is_new(now) else held[0][1]
        return max(wanted, min(_within(pool, pool.target), least))

    def _is_new(self, now: float) -> bool:
        self._began_at = now if self._began_at is None else self._began_at
        return now - self._began_at < self.settings.hold_s

    def _within_budget(
        self, targets: dict[Role, int], needed: Mapping[Role, float], pools: tuple[PoolState, ...]
    ) -> set[Role]:
        """Lowers targets until they fit; returns the pools that get less."""
        least, cut = {pool.role: pool.min_replicas for pool in pools}, set()
        while self.settings.max_workers and sum(targets.values()) > self.settings.max_workers:
            able = [role for role, target in targets.items() if target > least[role]]
            if not able:
                break
            role = min(
                able, key=lambda each: needed[each] / (targets[each] - 1) if targets[each] > 1 else inf
            )
            targets[role] -= 1
            cut.add(role)
        return cut

    def _divide(self, wants_of: Mapping[Role, Mapping[Phase, float]], pools: tuple[PoolState, ...]) -> None:
        phases: dict[str, Phases] = {}
        for pool in pools:
            if len(pool.role.phases) > 1:
                phases |= divide(wants_of[pool.role], sorted(pool.replica_ids), self._phases)
        self._phases = phases

    def _explain(
        self, pool: PoolState, target: int, needed: float, needs: Mapping[Phase, Need], is_cut: bool
    ) -> Change:
        phases = sorted(pool.role.phases & needs.keys())
        arrivals = sum(needs[phase].arrivals for phase in phases)
        backlog_s = sum(needs[phase].backlog_s for phase in phases)
        room = min(self._room[phase] for phase in phases)
        if target < pool.target:
            cause = "budget" if is_cut and needed > target else "idle"
        elif room < 1.0:
            cause = "late"
        else:
            cause = "arrivals" if arrivals / self.settings.utilisation > pool.target else "backlog"
        text = (
            f"{pool.role.deployment} {pool.target} -> {target} ({cause}): {needed:.2f} workers are needed, "
            f"{arrivals:.2f} for what arrives at utilisation {self.settings.utilisation * room:.2f}, "
            f"the rest for {backlog_s:.1f} s of work that waits"
        )
        return Change(pool.role, pool.target, target, cause, text)


def _within(pool: PoolState, wanted: float) -> int:
    return min(pool.max_replicas, max(pool.min_replicas, ceil(wanted)))


def _of_pools(wants: Mapping[Phase, float], pools: tuple[PoolState, ...]) -> dict[Role, dict[Phase, float]]:
    """Workers that each pool is to have for each of its phases. Pools of fewer phases come first."""
    left, found = dict(wants), {}
    ordered = sorted(pools, key=lambda pool: (len(pool.role.phases), pool.role))
    for place, pool in enumerate(ordered):
        later = {phase for other in ordered[place + 1 :] for phase in other.role.phases}
        room, found[pool.role] = float(pool.max_replicas), {}
        for phase in sorted(pool.role.phases & left.keys()):
            given = min(left[phase], room) if phase in later else left[phase]
            found[pool.role][phase] = given
            left[phase] -= given
            room = max(0.0, room - given)
    return found
