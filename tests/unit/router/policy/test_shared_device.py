"""Workers that take turns on one device: p0 and d0 on the same cores, unless a test says otherwise."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from cluster.types.curves import Curve
from cluster.types.members import Role
from router.policy import ClusterView, Placement, make_policy
from router.policy.estimate import Estimate
from tests.fakes.placement import (
    DECODE,
    KV_BYTES,
    MAX_TOKENS,
    NUM_LAYERS,
    PREFILL,
    SCHEDULING,
    add,
    cluster_of,
    curves_of,
    load,
    text,
)

AT_P0, AT_D0 = Placement((), "p0", "d0"), Placement((), "d0", "d0")


def cluster_on(*devices: str) -> ClusterView:
    """p0 and d0, which may compute its own prompts, on these devices."""
    cluster = ClusterView(SCHEDULING, KV_BYTES, NUM_LAYERS)
    for replica_id, role, device in zip(("p0", "d0"), (Role.PREFILL, Role.DECODE), devices, strict=True):
        add(cluster, replica_id, role, device=device)
    cluster.measured("d0", curves_of(Role.DECODE, may_prefill=True))
    return cluster


def ttft_s(cluster: ClusterView, placement: Placement, num_tokens: int = 160) -> float:
    return Estimate(text(num_tokens), cluster, 0.0).prediction(placement).ttft_s


def placed(cluster: ClusterView, num_tokens: int) -> str:
    return make_policy("joint").decide(text(num_tokens), cluster, 0.0).placement.prefill


@pytest.mark.parametrize(("devices", "prefill"), [(("a", "a"), "p0"), (("a", "b"), "d0"), (("", ""), "d0")])
def test_a_prompt_leaves_a_queue_only_for_another_device(devices, prefill):
    cluster = cluster_on(*devices)
    cluster.reported("p0", load(3000, 3), 0.0)
    cluster.reported("d0", load(1, 1), 0.0)
    assert placed(cluster, 5000) == prefill


def test_a_short_prompt_waits_for_a_step_of_the_others_not_for_their_queue():
    cluster = cluster_on("a", "a")
    alone_s = ttft_s(cluster, AT_D0)
    cluster.reported("p0", load(40 * MAX_TOKENS, 40), 0.0)
    assert ttft_s(cluster, AT_D0) - alone_s == pytest.approx(PREFILL.seconds(MAX_TOKENS), rel=0.02)
    assert placed(cluster, 160) == "d0"


def test_a_prompt_delays_those_that_wait_at_the_other_workers_of_its_device():
    costs_s = []
    for devices in (("a", "a"), ("a", "b")):
        cluster = cluster_on(*devices)
        cluster.reported("p0", load(3000, 3), 0.0)
        prefills = Estimate(text(160), cluster, 0.0).prefills
        costs_s.append(float(prefills.cost_s[1] / prefills.work_s[1]))
    assert costs_s[0] - costs_s[1] == pytest.approx(3, rel=0.05)


def test_what_one_worker_has_measured_of_prompts_holds_for_the_others_of_its_device():
    cluster = cluster_on("a", "a")
    before_s = ttft_s(cluster, AT_P0)
    curve = Curve(PREFILL.fixed_s, 2 * PREFILL.per_unit_s)
    slow = msgspec.structs.replace(curves_of(Role.PREFILL), prefill=curve)
    cluster.measured("p0", slow)
    assert ttft_s(cluster, AT_P0) == pytest.approx(before_s)
    alone = cluster_on("a", "b")
    alone.measured("p0", slow)
    assert ttft_s(alone, AT_P0) > 1.5 * before_s


def test_prompts_that_come_before_at_a_decode_worker_are_answers_by_the_next_ones_turn():
    cluster = cluster_on("", "")
    alone = Estimate(text(900), cluster, 0.0).prefills
    cluster.reported("d0", load(1, 1, num_prompt_tokens=160, num_prompts=1), 0.0)
    behind = Estimate(text(900), cluster, 0.0).prefills
    assert alone.max_tokens[1] > 900
    assert (
        behind.max_tokens[1]
        == (SCHEDULING.prompt_pause_s + DECODE.fixed_s - PREFILL.fixed_s) / PREFILL.per_unit_s
    )


def test_devices_of_many_workers_and_of_none():
    cluster = cluster_of(1, 4, 0)
    assert not cluster.shared.has_mates
    for replica_id in ("x0", "x1", "x2"):
        add(cluster, replica_id, Role.LANGUAGE, device="x")
    values = np.arange(1.0, 8.0)
    assert cluster.shared.has_mates
    assert cluster.shared.of_mates(values).tolist() == [0, 0, 0, 0, 13, 12, 11]
    assert cluster.shared.least_mates(values).tolist() == [0, 1, 2, 3, 4, 4, 4]
    for gone, rest in pairwise(("x0", "x1", "x2")):
        cluster.remove(gone)
        assert cluster.shared.has_mates == (rest != "x2")
