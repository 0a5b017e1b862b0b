"""Pools that are scaled while requests run, in virtual time: the real scaler, flow, admission and
placement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from bench.router.scaled_pools import Bounds, ScaledPools
from cluster.config.settings import AdmissionArgs
from cluster.types.members import Phase, Role
from deploy.simulator.hardware import A100, VL_7B
from deploy.simulator.layouts import ROLES, Layout, worker, workers
from deploy.simulator.simulation import Simulation
from deploy.simulator.workload import Draft, SimRequest, block_keys
from router.policy import ClusterView, Decision, JointPolicy, Policy, RequestView, make_policy
from router.scaling import Scaler, ScalingSettings

LETTERS = {role: letters for letters, role in ROLES.items()}
SETTINGS = ScalingSettings(target_ttft_s=2.0, start_s=2.0, drain_s=2.0)


def requests(*parts: tuple[float, float, float]) -> Iterator[SimRequest]:
    """Of 8,000 tokens, which take a worker 0.8 s; each part: (from, until, requests a second)."""
    numbers = count()
    for since, until, rate in parts:
        for turn in range(int((until - since) * rate)):
            number = next(numbers)
            draft = Draft(8000, 20, 0)
            yield SimRequest(
                f"r{number}", since + turn / rate, 8000, 20, block_keys(draft, number), kind="text"
            )


def scaled(
    layout: Layout, *parts: tuple[float, float, float], policy: Policy | None = None
) -> tuple[Simulation, ScaledPools]:
    specs = workers(layout, VL_7B, A100)
    policies = [lambda _: policy or make_policy("joint")] * 2
    simulation = Simulation(specs, policies, VL_7B, admission=AdmissionArgs())
    numbers = count(len(specs))
    pools = ScaledPools(
        simulation,
        Scaler(SETTINGS),
        {spec.role: Bounds(1, 4) for spec in specs},
        lambda role: worker(LETTERS[role], f"a100-{next(numbers)}", layout, VL_7B, A100),
    )
    simulation.run(requests(*parts))
    return simulation, pools


def test_a_load_step_up_and_down_loses_no_request():
    simulation, pools = scaled(Layout(0, 1, 1), (0, 10, 0.2), (10, 40, 2.0), (40, 70, 0.2))
    assert {outcome.status for outcome in simulation.outcomes} == {"finished"}
    assert all(door.is_idle for door in simulation.doors)
    sizes = [(at, change.after) for at, change in pools.changes if change.role is Role.PREFILL]
    assert next(at for at, size in sizes if size >= 2) <= 15.0
    assert max(size for _, size in sizes) >= 3  # 1.6 workers would be busy all the time
    assert sizes[-1][1] == 1
    (left,) = simulation.alive(Phase.PREFILL)
    assert len(simulation.workers) == 2 and left in simulation.workers
    most = 1 + max(size for _, size in sizes)
    assert pools.device_seconds() < 0.75 * most * simulation.loop.now


def test_a_replica_that_is_not_wanted_any_more_before_it_is_ready_never_joins():
    simulation, _ = scaled(Layout(0, 1, 1), (0, 1, 0.1))
    gone: list[str] = []
    late = worker("p", "late", Layout(0, 1, 1), VL_7B, A100)
    simulation.add(replace(late, ready_at=simulation.loop.now + 5))
    simulation.retire("p:late", gone.append)
    simulation.loop.run()
    assert gone == ["p:late"]
    assert all(state.replica_id != "p:late" for door in simulation.doors for state in door.flow.workers)


def test_language_workers_are_divided_among_their_phases():
    phases: dict[str, int] = {}  # of each worker, as the door sees them at the last placement

    class Watching(JointPolicy):
        def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
            for name in cluster.prefills.slots:
                pools = (cluster.prefills, cluster.decodes)
                phases[name] = sum(int(pool.is_assigned[pool.slots[name]]) for pool in pools)
            return super().decide(request, cluster, now)

    simulation, _ = scaled(Layout(num_language=3), (0, 30, 1.5), policy=Watching())
    assert {outcome.status for outcome in simulation.outcomes} == {"finished"}
    assert len(phases) >= 3 and {*phases.values()} == {1}
