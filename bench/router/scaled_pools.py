"""Pools that grow and shrink while a simulation runs, by the decisions of the real `Scaler`.

Every period the doors report and the scaler decides, as under Ray Serve. A replica that is added is ready
`start_s` later; one that goes is the newest of its pool (those that still start go first), gets nothing new
and ends with its last request. What a pool costs is counted from the start of a replica until it is gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from cluster.types.members import Role
from cluster.types.messages import PhasesAssigned
from deploy.simulator.simulation import Simulation
from deploy.simulator.spec import WorkerSpec
from router.scaling import PoolState, Scaler, ScalingDecision, Snapshot
from router.scaling.scaler import Change


@dataclass(frozen=True)
class Bounds:
    min_replicas: int
    max_replicas: int


@dataclass
class _Pool:
    bounds: Bounds
    replicas: list[str] = field(default_factory=list)  # in order of their start


class ScaledPools:
    """`make_worker`: of a role, with a name that no other has had. Replicas that the simulation has already
    are the first ones of their pools. `scaler`: None for pools that stay as they are."""

    def __init__(
        self,
        simulation: Simulation,
        scaler: Scaler | None,
        bounds: Mapping[Role, Bounds],
        make_worker: Callable[[Role], WorkerSpec],
    ):
        self.changes: list[tuple[float, Change]] = []
        self.device_s = 0.0  # of replicas that are gone
        self._simulation, self._scaler, self._make_worker = simulation, scaler, make_worker
        self._pools = {role: _Pool(each) for role, each in bounds.items()}
        self._started_at: dict[str, float] = {}
        self._phases: dict[str, PhasesAssigned] = {}
        for name, worker in simulation.workers.items():
            self._pools[worker.spec.role].replicas.append(name)
            self._started_at[name] = 0.0
        if scaler is not None:
            for door in simulation.doors:
                door.target_ttft_s = scaler.settings.target_ttft_s
            simulation.loop.after(scaler.settings.period_s, self._tick, scaler)

    def device_seconds(self) -> float:
        """The device seconds of all replicas, until now."""
        now = self._simulation.loop.now
        return self.device_s + sum(now - at for at in self._started_at.values())

    def _tick(self, scaler: Scaler) -> None:
        loop, simulation = self._simulation.loop, self._simulation
        doors = {f"door {number}": door.report() for number, door in enumerate(simulation.doors)}
        decision = scaler.decide(Snapshot(tuple(map(self._state, self._pools)), doors), loop.now)
        if decision is not None:
            self._follow(decision)
        if simulation.has_arrivals:
            loop.after(scaler.settings.period_s, self._tick, scaler)

    def _state(self, role: Role) -> PoolState:
        pool, now = self._pools[role], self._simulation.loop.now
        ready = tuple(name for name in pool.replicas if self._simulation.workers[name].spec.ready_at <= now)
        bounds = pool.bounds
        return PoolState(role, len(pool.replicas), bounds.min_replicas, bounds.max_replicas, ready)

    def _follow(self, decision: ScalingDecision) -> None:
        now = self._simulation.loop.now
        self.changes += ((now, change) for change in decision.changes)
        for role, target in decision.targets.items():
            replicas = self._pools[role].replicas
            while len(replicas) < target:
                self._start(role)
            while len(replicas) > target:
                self._simulation.retire(replicas.pop(), self._gone)
        for replica_id, phases in decision.phases.items():
            last = self._phases.get(replica_id)
            assigned = PhasesAssigned(tuple(sorted(phases)), 1 if last is None else last.epoch + 1)
            if last is None or last.phases != assigned.phases:
                self._phases[replica_id] = assigned
                self._simulation.network.tell_doors(replica_id, assigned)

    def _start(self, role: Role) -> None:
        now = self._simulation.loop.now
        assert self._scaler is not None
        spec = replace(self._make_worker(role), ready_at=now + self._scaler.settings.start_s)
        self._pools[role].replicas.append(spec.replica_id)
        self._started_at[spec.replica_id] = now
        self._simulation.add(spec)

    def _gone(self, replica_id: str) -> None:
        self.device_s += self._simulation.loop.now - self._started_at.pop(replica_id)
