"""The cluster in virtual time: it repeats itself, loses nothing, agrees with queueing theory, and survives
deaths and late starts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from random import Random

import pytest

from bench.router.one_device import OneDevice, OneDeviceRoundRobin, unpredicted
from bench.router.oracle import Oracle
from bench.router.policies import maker
from cluster.types.curves import Curve, ServiceCurves
from cluster.types.members import Role
from deploy.simulator.hardware import H200, NETWORK, VL_7B, encode_curve
from deploy.simulator.layouts import Layout, throttled, workers
from deploy.simulator.network import NETWORK_S
from deploy.simulator.results import Outcome, Slo, summarise
from deploy.simulator.simulation import MakePolicy, Simulation
from deploy.simulator.spec import WorkerSpec
from deploy.simulator.workload import (
    WORKLOADS,
    SimRequest,
    Workload,
    fixed_text,
    image_prompts,
    images,
)
from router.policy import ClusterView, Decision, ItemView, Placement, RequestView
from tests.fakes.slow_params import often

SLO = Slo(2.0, 0.05)
NO_TIME = Curve(1e-9, 0.0)


JOINT = maker("joint")


def simulate(
    specs: list[WorkerSpec],
    workload: Workload,
    rate: float,
    num_requests: int,
    policy: MakePolicy = JOINT,
    seed: int = 0,
    num_doors: int = 1,
    noise: float = 0.03,
) -> tuple[Simulation, list[Outcome]]:
    simulation = Simulation(specs, [policy] * num_doors, VL_7B, seed, noise)
    outcomes = list(simulation.run(workload.requests(rate, num_requests, seed)))
    return simulation, outcomes


def assert_nothing_is_left(simulation: Simulation) -> None:
    for worker in simulation.workers.values():
        if worker.is_dead:
            continue
        if worker.encoder is not None:
            load = worker.encoder.engine.load()
            assert not worker.encoder.engine.items
            assert (load.num_queued_units, load.num_used_blocks, load.num_open_leases) == (0, 0, 0)
        if worker.language is not None:
            load, blocks = worker.language.engine.load(), worker.language.blocks
            assert not worker.requests and blocks.num_referenced == 0
            assert (load.num_queued_units, load.num_used_blocks, load.num_open_leases) == (0, 0, 0)
            blocks.check_integrity()
    for door in simulation.doors:
        assert door.is_idle


def assert_each_ends_once(outcomes: list[Outcome], num_requests: int) -> None:
    assert sorted(int(o.request.request_id[1:]) for o in outcomes) == list(range(num_requests))


def without_prediction(outcomes: list[Outcome]) -> list[tuple[str, str, float, float, float]]:
    return [(o.request.request_id, o.status, o.ttft_s, o.second_s, o.finished_at) for o in outcomes]


def single(prefill: Curve, decode: Curve = NO_TIME, step_tokens: int = 64) -> list[WorkerSpec]:
    """One prefill worker that computes one prompt a step, and a decode worker that takes no time."""
    links = {"": NETWORK}
    return [
        WorkerSpec(
            "p",
            Role.PREFILL,
            ServiceCurves(prefill=prefill, max_step_units=step_tokens, links=links),
            1 << 20,
        ),
        WorkerSpec("d", Role.DECODE, ServiceCurves(decode=decode, links=links), 1 << 20),
    ]


class OnlyOne:
    """Places every request on the same two workers."""

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        return Decision(Placement((), "p", "d"), unpredicted(0))

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        raise AssertionError("there are no items")


# --- a run


@pytest.mark.parametrize("workload", often(["4-image", "video-mix", "multi-turn"], ["video-mix"]))
def test_a_run_follows_from_its_seed(workload: str) -> None:
    specs = workers(Layout(1, 2, 2), VL_7B, H200)
    first, again, other = (
        without_prediction(simulate(specs, WORKLOADS[workload], 15, 60, seed=seed)[1]) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "policy", often(["joint", "round_robin", "least_loaded", "linear", "per_stage"], ["joint", "per_stage"])
)
def test_every_request_ends_once_and_all_memory_comes_back(policy: str) -> None:
    simulation, outcomes = simulate(
        workers(Layout(1, 1, 1, 1, 1, may_prefill_locally=True), VL_7B, H200),
        WORKLOADS["multi-turn"],
        40,
        150,
        maker(policy),
    )
    assert_each_ends_once(outcomes, 150)
    assert {outcome.status for outcome in outcomes} == {"finished"}
    assert_nothing_is_left(simulation)


def test_doors_that_share_no_state_serve_together() -> None:
    simulation, outcomes = simulate(
        workers(Layout(2, 2, 2), VL_7B, H200), WORKLOADS["4-image"], 20, 100, num_doors=3
    )
    assert_each_ends_once(outcomes, 100)
    assert_nothing_is_left(simulation)


def test_no_time_is_shorter_than_the_work_in_it() -> None:
    workload = Workload("images", image_prompts(1, 400))
    _, outcomes = simulate(workers(Layout(2, 3, 1), VL_7B, H200), workload, 30, 100, noise=0.0)
    encode_s = encode_curve(VL_7B, H200).seconds(400)
    for outcome in outcomes:
        assert outcome.ttft_s >= 2 * NETWORK_S + encode_s
        assert outcome.second_s > outcome.ttft_s
        assert outcome.finished_at >= outcome.request.arrived_at + outcome.second_s - 1e-9


def test_nothing_happens_between_the_steps_of_an_answer() -> None:
    """Neither a decode step nor the door's look for silent workers is an event."""
    workload = Workload("one", fixed_text(256, 400))
    simulation, (outcome,) = simulate(workers(Layout(0, 1, 1), VL_7B, H200), workload, 1, 1)
    assert outcome.finished_at - outcome.request.arrived_at > 2.0
    assert simulation.loop.num_run < 40


# --- queueing theory


@pytest.mark.slow
def test_a_queue_with_constant_service_waits_as_theory_says() -> None:
    """M/D/1 (Pollaczek and Khinchine): mean wait = ρ · s / (2 (1 − ρ))."""
    service_s, load = 0.1, 0.6
    workload = Workload("constant", fixed_text(64, 1))
    _, outcomes = simulate(
        single(Curve(service_s, 0.0)), workload, load / service_s, 3_000, lambda _: OnlyOne(), noise=0.0
    )
    waits = [outcome.ttft_s - service_s - 2 * NETWORK_S for outcome in outcomes]
    expected_s = load * service_s / (2 * (1 - load))
    assert sum(waits) / len(waits) == pytest.approx(expected_s, rel=0.06)


def test_an_answer_takes_a_step_for_each_token_when_it_is_alone() -> None:
    workload = Workload("one", fixed_text(64, 101))
    _, (outcome,) = simulate(
        single(Curve(0.01, 0.0), Curve(0.02, 0.0)), workload, 1, 1, maker("round_robin"), noise=0.0
    )
    assert outcome.tpot_s == pytest.approx(0.02, rel=0.01)
    assert outcome.second_s - outcome.ttft_s == pytest.approx(0.02, abs=3e-3)


def test_answers_that_run_together_slow_each_other_down_by_their_own_cost() -> None:
    """Ten answers that come at once run in steps of ten: processor sharing without an event for a step."""
    requests = [SimRequest(f"r{i}", 0.0, 64, 101, [bytes([i])]) for i in range(10)]
    specs = single(Curve(1e-6, 0.0), Curve(0.01, 0.002), step_tokens=640)
    simulation = Simulation(specs, [maker("round_robin")], VL_7B, noise=0.0)
    outcomes = simulation.run(requests)
    for outcome in outcomes:
        assert outcome.tpot_s == pytest.approx(0.01 + 10 * 0.002, rel=0.02)


# --- deaths and late starts


@pytest.mark.parametrize("dead", ["e:h200-0", "p:h200-2", "d:h200-5"])
def test_what_a_dead_worker_had_goes_on_at_others(dead: str) -> None:
    specs = workers(Layout(2, 3, 2), VL_7B, H200)
    specs = [replace(s, dies_at=1.0) if s.replica_id == dead else s for s in specs]
    simulation, outcomes = simulate(specs, WORKLOADS["4-image"], 40, 60)
    assert_each_ends_once(outcomes, 60)
    assert {outcome.status for outcome in outcomes} == {"finished"}
    assert (max(outcome.num_attempts for outcome in outcomes) > 1) is not dead.startswith("e")
    assert_nothing_is_left(simulation)


def test_answers_go_on_when_the_worker_that_computed_their_prompts_dies() -> None:
    """Their KV is at decode, which has told the door some of their tokens."""
    specs = workers(Layout(0, 1, 1), VL_7B, H200)
    specs = [replace(s, dies_at=1.0) if s.role is Role.PREFILL else s for s in specs]
    simulation, outcomes = simulate(specs, Workload("long answers", fixed_text(256, 400)), 5, 5)
    early = [outcome for outcome in outcomes if outcome.request.arrived_at < 0.9]
    assert {outcome.status for outcome in early} == {"finished"}
    assert max(outcome.finished_at for outcome in early) > 1.1
    assert_nothing_is_left(simulation)


def test_without_any_prefill_worker_requests_wait_for_the_next_one() -> None:
    encode, first, second, decode = workers(Layout(1, 2, 1), VL_7B, H200)
    specs = [encode, replace(first, dies_at=0.5), replace(second, ready_at=3.0), decode]
    simulation, outcomes = simulate(specs, WORKLOADS["1-image"], 20, 40)
    assert_each_ends_once(outcomes, 40)
    assert {outcome.status for outcome in outcomes} == {"finished"}
    assert any(outcome.ttft_s > 1.0 for outcome in outcomes)
    assert_nothing_is_left(simulation)


def test_a_replica_gets_work_from_when_it_has_started() -> None:
    early, late = workers(Layout(0, 2, 1), VL_7B, H200)[:2]
    decode = workers(Layout(0, 2, 1), VL_7B, H200)[2]
    specs = [early, replace(late, ready_at=2.0), decode]
    simulation = Simulation(specs, [maker("round_robin")], VL_7B)
    started: list[float] = []
    late_prefill = simulation.workers[late.replica_id]
    original = late_prefill.receive
    late_prefill.receive = lambda *told: (started.append(simulation.loop.now), original(*told))[1]  # type: ignore[method-assign]
    simulation.run(WORKLOADS["text"].requests(20, 100, 0))
    assert started and min(started) >= 2.0


def test_memory_that_runs_out_sends_the_newest_back_and_all_finish() -> None:
    specs = workers(Layout(0, 1, 1), VL_7B, H200)
    specs = [replace(s, num_blocks=40) if s.role is Role.DECODE else s for s in specs]
    workload = Workload("long answers", fixed_text(256, 400))
    simulation, outcomes = simulate(specs, workload, 50, 20)
    decode = simulation.workers[specs[1].replica_id].language
    assert decode is not None and decode.engine.load().totals.num_preempted > 0
    assert max(outcome.num_attempts for outcome in outcomes) > 1
    assert {outcome.status for outcome in outcomes} == {"finished"}
    assert_nothing_is_left(simulation)


def test_random_traffic_leaves_nothing_behind() -> None:
    rng = Random(5)
    for seed in range(2):
        counts = [rng.randint(1, 2) for _ in range(5)]
        specs = workers(Layout(*counts, may_prefill_locally=bool(seed % 2)), VL_7B, H200)
        victim = rng.choice([s for s in specs if sum(o.role is s.role for o in specs) > 1] or specs)
        specs = [replace(s, dies_at=0.7) if s is victim else s for s in specs]
        simulation, outcomes = simulate(specs, WORKLOADS["grouped"], 15, 60, seed=seed)
        assert_each_ends_once(outcomes, 60)
        assert_nothing_is_left(simulation)


# --- policies


@pytest.mark.parametrize("layout", often([Layout(num_whole=4), Layout(3, 5, 2)], [Layout(3, 5, 2)]))
def test_doors_that_are_asked_for_the_same_new_images_at_once_have_each_encoded_about_once(
    layout: Layout,
) -> None:
    """Four doors, and four prompts about each image within 20 ms."""
    rng, num_images, requests = Random(1), 100, []
    for idx in range(num_images):
        media = images(idx, 1, 400, 400)
        for copy in range(4):
            request = SimRequest(f"r{idx}-{copy}", 0.05 * idx + 0.02 * rng.random(), 816, 20, [], media)
            requests.append(request)
    requests.sort(key=lambda request: request.arrived_at)
    simulation = Simulation(workers(layout, VL_7B, H200), [JOINT] * 4, VL_7B)
    assert len(simulation.run(requests)) == len(requests)
    hashes = {request.media[0].media_hash for request in requests}
    caches = [worker.encoder.cache for worker in simulation.workers.values() if worker.encoder is not None]
    num_encoded = sum(each in cache for cache in caches for each in hashes)
    assert num_images <= num_encoded <= 1.05 * num_images


@pytest.mark.slow
def test_the_joint_policy_is_no_worse_than_least_loaded_where_one_worker_is_slow() -> None:
    specs = throttled(workers(Layout(0, 3, 2), VL_7B, H200), "p:h200-0", since=0.0, factor=3.0)
    mean = {
        name: summarise(simulate(specs, WORKLOADS["text"], 35, 300, maker(name))[1], SLO).ttft_mean_s
        for name in ("joint", "least_loaded")
    }
    assert mean["joint"] <= 1.02 * mean["least_loaded"]


@pytest.mark.slow
def test_the_oracle_is_no_worse_than_taking_turns() -> None:
    specs = workers(Layout(0, 3, 2), VL_7B, H200)
    oracle, turns = (
        summarise(simulate(specs, WORKLOADS["text"], 50, 250, policy)[1], SLO)
        for policy in (Oracle, maker("round_robin"))
    )
    assert oracle.ttft_mean_s < turns.ttft_mean_s
    assert oracle.mape < 0.1


def test_the_oracle_places_requests_on_workers_of_any_role() -> None:
    """An answer stays where its prompt was computed, unless another worker is free."""
    specs = workers(Layout(num_language=1, num_whole=2), VL_7B, H200)
    oracle, turns = (
        summarise(simulate(specs, WORKLOADS["1-image"], 40, 80, policy)[1], SLO)
        for policy in (Oracle, maker("round_robin"))
    )
    assert oracle.ttft_mean_s < turns.ttft_mean_s and oracle.second_mean_s < turns.second_mean_s


@pytest.mark.parametrize("policy", [OneDevice, OneDeviceRoundRobin])
def test_data_parallelism_keeps_a_request_on_one_device(policy: MakePolicy) -> None:
    simulation = Simulation(workers(Layout(num_whole=3), VL_7B, H200), [policy], VL_7B)
    placements = []
    started = simulation.doors[0].cluster.started
    simulation.doors[0].cluster.started = lambda view, placement, *rest: (  # type: ignore[method-assign]
        placements.append(placement),
        started(view, placement, *rest),
    )[1]
    simulation.run(WORKLOADS["4-image"].requests(10, 30, 0))
    used = [{each.partition(":")[2] for each in (*p.encoders, p.prefill, p.decode)} for p in placements]
    assert all(len(devices) == 1 for devices in used)
    assert len(set.union(*used)) == 3
    assert_nothing_is_left(simulation)


def test_stages_on_one_device_take_its_time_from_each_other() -> None:
    apart, together = (
        summarise(simulate(specs, WORKLOADS["4-image"], 8, 150)[1], SLO)
        for specs in (workers(Layout(1, 1, 1), VL_7B, H200), workers(Layout(num_whole=1), VL_7B, H200))
    )
    assert together.ttft_mean_s > 1.1 * apart.ttft_mean_s
    assert together.tpot_p99_s > 1.2 * apart.tpot_p99_s
