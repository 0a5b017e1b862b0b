"""Workers that compute prompts and decode: legal placements, one account of their load, and what they
cost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import UnavailableError
from cluster.types.curves import Link
from cluster.types.members import Phase, Role
from router.admission.queue import Capacity
from router.flow.placer import Placer
from router.policy import ClusterView, JointPolicy, Placement, RequestView, Worker, make_policy
from router.policy.estimate import Estimate
from tests.fakes.placement import (
    BLOCK,
    DECODE,
    ENCODE,
    KV_BYTES,
    LINK,
    MAX_TOKENS,
    POLICIES,
    PREFILL,
    SCHEDULING,
    add,
    cluster_of,
    cost_of,
    curves_of,
    hashes,
    is_expected,
    is_legal,
    is_plain,
    load,
    media,
    random_cluster,
    text,
)

REQUESTS = (
    text(160),
    text(160, num_negative_tokens=16),
    text(160, num_sequences=3),
    media(400),
    media(400, 4000, num_negative_tokens=16),
)
AT_L0 = Placement((), "l0", "l0")


def decide(request: RequestView, cluster: ClusterView, policy: str = "joint", now: float = 0.0):
    return make_policy(policy).decide(request, cluster, now)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_every_placement_is_legal_for_the_roles(policy, seed):
    rng = random.Random(seed)
    num_languages = rng.randrange(3)
    first = 0 if num_languages else 1
    cluster = random_cluster(rng, (2, rng.randrange(first, 3), rng.randrange(first, 3), num_languages))
    for request in REQUESTS:
        placement = decide(request, cluster, policy, 1.0).placement
        assert is_legal(placement, request, cluster) and len(placement.encoders) == len(request.media)
        assert cost_of(Estimate(request, cluster, 1.0), placement) < float("inf")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("request_", REQUESTS)
def test_language_workers_alone_serve_everything(policy, request_):
    placement = decide(request_, cluster_of(1, 0, 0, 3), policy).placement
    assert placement.prefill[0] == placement.decode[0] == "l"


@pytest.mark.parametrize("request_", REQUESTS)
def test_an_idle_language_worker_keeps_what_it_has_computed(request_):
    decision = decide(request_, cluster_of(1, 0, 0, 3))
    assert decision.placement.is_local and decision.prediction.transfer_s == 0
    assert decision.prediction.first_step_s == pytest.approx(DECODE.seconds(request_.num_sequences))


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_decode_worker_without_a_cache_computes_what_is_not_plain_text_if_no_other_worker_can(request_):
    cluster = cluster_of(1, 1, 2)
    cluster.measured("p0", curves_of(Role.PREFILL, link=Link(0.5, 1e9)))
    assert decide(request_, cluster).placement.prefill == "p0", "they have measured no prompts"
    for decode in ("d0", "d1"):
        cluster.measured(decode, curves_of(Role.DECODE, may_prefill=True))
    assert decide(request_, cluster).placement.is_local == is_plain(request_)
    estimate = Estimate(request_, cluster, 0.0)
    encoders = ("e0",) * len(request_.media)
    assert cost_of(estimate, Placement(encoders, "d0", "d1")) == float("inf")
    cluster.remove("p0")
    assert decide(request_, cluster).placement.is_local


@pytest.mark.parametrize(
    ("num_cached", "num_elsewhere", "is_able"),
    # in blocks of 16; the second image ends at token 140
    [(0, 0, False), (1, 0, True), (8, 7, True), (8, 8, False), (9, 9, True), (9, 11, True), (11, 0, True)],
)
def test_a_decode_worker_computes_text_behind_its_media_and_media_of_which_others_have_less(
    num_cached, num_elsewhere, is_able
):
    request = media(80, 160, num_before=40)
    cluster = cluster_of(1, 1, 2)
    assert request.media_end == 140 and request.num_prompt_tokens == 180
    for decode in ("d0", "d1"):
        cluster.measured(decode, curves_of(Role.DECODE, may_prefill=True))
    cluster.blocks_changed("d1", request.block_hashes[:num_cached], [])
    cluster.blocks_changed("p0", request.block_hashes[:num_elsewhere], [])
    decision = decide(request, cluster)
    assert is_legal(decision.placement, request, cluster)
    local = Placement(("e0", "e0"), "d1", "d1")
    assert (cost_of(Estimate(request, cluster, 0.0), local) < float("inf")) == is_able
    assert cost_of(Estimate(request, cluster, 0.0), Placement(("e0", "e0"), "d1", "d0")) == float("inf")
    if is_able and num_cached > num_elsewhere:
        assert decision.placement.prefill == "d1"
        assert (decision.prediction.media_s == 0) == (num_cached > 8)
    scored = replace(request, block_hashes=())
    assert not decide(scored, cluster).placement.is_local, "nothing cached is of use to it"


def test_a_local_prefill_keeps_away_from_running_answers():
    cluster = cluster_of(1, 1, 1)
    cluster.measured("p0", curves_of(Role.PREFILL, link=Link(0.5, 1e9)))
    cluster.measured("d0", curves_of(Role.DECODE, may_prefill=True))
    prediction = decide(text(160), cluster).prediction
    assert prediction.ttft_s == pytest.approx(PREFILL.seconds(160), rel=0.01)
    cluster.reported("d0", load(200, 200), 0.0)
    assert decide(text(160), cluster).placement.prefill == "p0"


@pytest.mark.parametrize("request_", [text(640), media(400)])
def test_running_answers_send_a_prompt_to_another_worker(request_):
    cluster = cluster_of(1, 0, 0, 2)
    cluster.reported("l0", load(8, 8), 0.0)
    assert decide(request_, cluster).placement.prefill == "l1"
    cluster.reported("l1", load(0, 1, num_prompt_tokens=9000, num_prompts=9), 0.0)
    assert decide(request_, cluster).placement.prefill == "l0"


def test_queued_prompts_send_an_answer_to_another_worker():
    cluster = cluster_of(0, 1, 0, 2)
    placement = Placement((), "p0", "l0")
    before_s = cost_of(Estimate(text(160), cluster, 0.0), placement)
    cluster.reported("l0", load(0, 1, num_prompt_tokens=900, num_prompts=1), 0.0)
    estimate = Estimate(text(160), cluster, 0.0)
    longer_s = 0.5 * DECODE.seconds(1) + 1.5 * 900 * PREFILL.per_unit_s
    assert cost_of(estimate, placement) - before_s == pytest.approx(longer_s, rel=0.02)
    assert cost_of(estimate, Placement((), "p0", "l1")) == pytest.approx(before_s, rel=0.02)


def test_answers_take_part_in_the_steps_of_a_prompt_and_limit_them():
    cluster = cluster_of(0, 0, 0, 1)
    cluster.reported("l0", load(100, 100), 0.0)
    answers_s = 100 * DECODE.per_unit_s
    max_tokens = round((SCHEDULING.prompt_pause_s + DECODE.fixed_s - PREFILL.fixed_s) / PREFILL.per_unit_s)
    assert 2 < 1500 / max_tokens < 3
    expected_s = 0.5 * DECODE.seconds(100) + PREFILL.seconds(1500) + 2 * PREFILL.fixed_s + 3 * answers_s
    assert Estimate(text(1500), cluster, 0.0).prediction(AT_L0).ttft_s == pytest.approx(expected_s)


def test_a_request_counts_in_both_phases_of_its_worker_until_each_is_done():
    cluster = cluster_of(1, 0, 0, 1)
    request = media(400, num_sequences=2, num_prefill_blocks=12, num_decode_blocks=20)
    decision = decide(request, cluster)
    cluster.started(request, decision.placement, decision.prediction, 0.0)
    assert (cluster.prefills.sent_units[0], cluster.decodes.sent_units[0]) == (180, 2)
    used = cluster.prefills.sent_blocks[0] + cluster.decodes.sent_blocks[0]
    assert used == -(-180 // request.block_size), "the prompt's blocks count once"
    cluster.reported("l0", load(2, 1, num_prompt_tokens=180, num_prompts=1), 1.0)
    assert cluster.prefills.reported_units[0] + cluster.prefills.sent_units[0] == 180
    cluster.prefilled("media")
    cluster.reported("l0", load(2, 1), 2.0)
    assert (len(cluster.pending), cluster.prefills.reported_units[0]) == (0, 0)
    assert cluster.decodes.reported_units[0] + cluster.decodes.sent_units[0] == 2
    cluster.ended("media")
    assert not cluster.decodes.sent_units.any() and not is_expected(cluster, request)


def test_a_prompt_whose_kv_leaves_takes_blocks_from_the_answers_of_its_worker():
    cluster = cluster_of(0, 0, 1, 1)
    request = text(1600, num_prefill_blocks=100, num_decode_blocks=100)
    cluster.reported("l0", load(1, 1, num_used_blocks=9_850), 0.0)
    before = Estimate(request, cluster, 0.0)
    cluster.started(request, Placement((), "l0", "d0"), before.prediction(Placement((), "l0", "d0")), 0.0)
    after = Estimate(request, cluster, 0.0)
    assert (before.decodes.blocks_s[1], after.decodes.blocks_s[1] > 0) == (0, True)


@pytest.mark.parametrize("role", [Role.DECODE, Role.LANGUAGE])
def test_a_prompt_goes_where_its_blocks_are_cached_whatever_the_role(role):
    cluster = cluster_of(0, 2, 0)
    for replica_id in ("x0", "x1", "x2"):
        add(cluster, replica_id, role)
        cluster.measured(replica_id, curves_of(role, may_prefill=True))
    cluster.blocks_changed("x1", hashes("text", 60), [])
    decision = decide(text(960), cluster)
    assert decision.placement == Placement((), "x1", "x1")
    assert decision.prediction.prefill_s == pytest.approx(PREFILL.seconds(16))
    cluster.blocks_changed("x1", [], hashes("text", 60))
    assert decide(text(960), cluster).prediction.prefill_s == pytest.approx(PREFILL.seconds(960))


@pytest.mark.parametrize("num_cached", [0, 20, 60])
def test_blocks_that_decode_has_do_not_travel(num_cached):
    """The prompt has a picture, so a prefill worker computes it; of equal decode workers the one with blocks
    is ready sooner, by the time that these would take on the link."""
    cluster = cluster_of(1, 1, 3)
    request = media(40, num_before=475)
    cluster.blocks_changed("p0", hashes("media", 60), [])
    cluster.blocks_changed("d1", hashes("media", num_cached), [])
    decision = decide(request, cluster)
    assert num_cached == 0 or decision.placement.decode == "d1"
    num_tokens = request.num_prompt_tokens - 16 * num_cached
    assert decision.prediction.transfer_s == pytest.approx(
        max(0.0, LINK.seconds(KV_BYTES * num_tokens) - decision.prediction.ttft_s), abs=2e-3
    )


def test_nothing_is_expected_in_the_cache_of_a_worker_that_has_none():
    cluster = cluster_of(0, 0, 1)
    cluster.measured("d0", curves_of(Role.DECODE, may_prefill=True))
    for name, expected in (("first", False), ("second", True)):
        request = text(160, name)
        decision = decide(request, cluster)
        cluster.started(request, decision.placement, decision.prediction, 0.0)
        assert is_expected(cluster, request) == expected
        cluster.ended(name)
        cluster.blocks_changed("d0", [], [])  # it greets with the content of a cache


def test_a_language_worker_that_leaves_is_forgotten_in_both_phases():
    cluster = cluster_of(0, 0, 0, 2)
    request = text(160)
    placement = decide(request, cluster).placement
    cluster.started(request, placement, decide(request, cluster).prediction, 0.0)
    cluster.remove(placement.decode)
    assert len(cluster.pending) == 0 and not cluster.decodes.sent_units.any()
    other = decide(request, cluster).placement
    assert other.is_local and other.decode != placement.decode
    cluster.ended(request.request_id)
    cluster.remove(other.decode)
    with pytest.raises(UnavailableError, match="no decode worker is ready"):
        decide(request, cluster)


def test_a_silent_language_worker_is_avoided_for_both_phases():
    cluster = cluster_of(1, 0, 0, 2)
    cluster.set_avoided("l0", True)
    for policy in POLICIES:
        placement = decide(media(400), cluster, policy).placement
        assert (placement.prefill, placement.decode) == ("l1", "l1")


@pytest.mark.parametrize("policy", POLICIES)
def test_where_the_only_worker_that_prefills_is_avoided_decode_computes_its_own_prompts(policy):
    """The policies that others use know no local prefill."""
    cluster = cluster_of(1, 1, 1, 0)
    cluster.measured("d0", curves_of(Role.LANGUAGE))
    for request in REQUESTS:
        avoiding = replace(request, avoided=frozenset({"p0"}))
        assert decide(avoiding, cluster, policy).placement.prefill == ("d0" if policy == "joint" else "p0")
    cluster.set_avoided("p0", True)
    for request in REQUESTS:
        assert decide(request, cluster, policy).placement.prefill == ("d0" if policy == "joint" else "p0")


def test_what_is_learnt_of_one_role_does_not_correct_another():
    cluster = cluster_of(0, 1, 0, 1)
    request = text(160)
    for idx in range(30):
        decision = JointPolicy().decide(request, cluster, float(idx))
        prediction = Estimate(request, cluster, float(idx)).prediction(AT_L0)
        cluster.started(request, AT_L0, prediction, float(idx))
        cluster.observed(request.request_id, 2 * prediction.ttft_s)
        cluster.ended(request.request_id)
    at_p0 = Placement((), "p0", "l0")
    estimate = Estimate(request, cluster, 100.0)
    assert decision.prediction.ttft_s > 0
    assert estimate.prediction(at_p0).ttft_s == pytest.approx(PREFILL.seconds(160))
    assert estimate.prediction(AT_L0).ttft_s > 1.5 * PREFILL.seconds(160)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_phase_goes_to_workers_that_it_is_assigned_to(policy):
    cluster = cluster_of(1, 0, 0, 2)
    cluster.assign("l0", [Phase.PREFILL])
    cluster.assign("l1", [Phase.DECODE])
    for request in REQUESTS:
        placement = decide(request, cluster, policy).placement
        assert (placement.prefill, placement.decode) == ("l0", "l1")


@pytest.mark.parametrize(
    ("num_blocks", "other", "stays"), [(5000, "l1", False), (5001, "l1", True), (5001, "d0", False)]
)
def test_a_prompt_of_more_than_half_of_a_workers_blocks_is_not_sent_to_one_that_sends_prompts(
    num_blocks, other, stays
):
    """Two such workers, each with a prompt of that size for the other one, would wait for each other."""
    cluster = cluster_of(0, 0, other == "d0", 1 + (other == "l1"))  # of 10,000 blocks each
    request = text(9600, num_prefill_blocks=num_blocks, num_decode_blocks=num_blocks + 10)
    cluster.blocks_changed("l0", hashes("text", 600), [])
    cluster.reported("l0", load(100, 100, num_used_blocks=9900, num_prompts=4, num_prompt_tokens=4000), 0.0)
    cluster.reported(other, load(10, 10), 0.0)
    assert decide(request, cluster).placement == Placement((), "l0", "l0" if stays else other)


def test_a_large_prompt_is_sent_from_a_worker_that_does_not_decode_now():
    cluster = cluster_of(0, 0, 0, 2)
    cluster.assign("l0", [Phase.PREFILL])
    cluster.assign("l1", [Phase.DECODE])
    request = text(9600, num_prefill_blocks=5001, num_decode_blocks=5011)
    assert decide(request, cluster).placement == Placement((), "l0", "l1")


def test_a_phase_that_no_worker_is_assigned_to_goes_to_any():
    cluster = cluster_of(1, 0, 1, 2)
    for replica_id in ("l0", "l1"):
        cluster.assign(replica_id, [Phase.DECODE])
    assert decide(media(400), cluster).placement.prefill in ("l0", "l1")
    assert decide(text(160), cluster).placement.is_local, "a decode worker computes texts of its own"
    cluster.set_avoided("d0", True)
    assert decide(media(400), cluster).placement.decode in ("l0", "l1")
    cluster.assign("l0", [Phase.PREFILL, Phase.DECODE])
    assert decide(media(400), cluster).placement.prefill == "l0"


def test_an_item_of_the_prompts_worker_does_not_travel_and_shares_its_device():
    cluster = cluster_of(0, 0, 0, 0)
    add_whole(cluster, "w0")

    def queues_s() -> tuple[float, float]:
        """Of an item, and of a prompt of text."""
        return decide(media(400), cluster).prediction.items[0].queue_s, decide(
            text(160), cluster
        ).prediction.queue_s

    (item,) = decide(media(400), cluster).prediction.items
    assert item.encode_s > 0 and item.transfer_s == 0
    idle = queues_s()
    cluster.reported("w0", load(4, 4, num_prompts=4, num_prompt_tokens=4000), 0.0)
    with_prompts = queues_s()
    cluster.reported("w0", load(), 0.0)
    cluster.reported("w0", load(4000, 4, is_of_encoder=True), 0.0)
    with_items = queues_s()
    assert with_prompts[0] > idle[0] and with_items[1] > idle[1]


def add_whole(cluster: ClusterView, replica_id: str, role: Role = Role.WHOLE) -> None:
    """A worker of a role that encodes and prefills."""
    cluster.add(Worker(replica_id, role, 10_000))
    cluster.measured(replica_id, curves_of(Role.LANGUAGE if role.decodes else Role.PREFILL))
    cluster.measured(replica_id, curves_of(Role.ENCODE), is_of_encoder=True)


def test_admission_counts_a_workers_time_once_and_without_what_its_answers_take():
    cluster = cluster_of(1, 1, 1, 1)
    placer = Placer(JointPolicy(), cluster, BLOCK)
    assert placer.capacity() == Capacity(1, 2, 20_000)
    add_whole(cluster, "w0")
    add_whole(cluster, "x0", Role.ENCODE_PREFILL)
    assert placer.capacity() == Capacity(3, 4, 30_000, num_both=2)
    cluster.reported("w0", load(100, 100), 0.0)
    answers_s = 100 * DECODE.per_unit_s
    share = SCHEDULING.prompt_pause_s / (SCHEDULING.prompt_pause_s + answers_s)
    found = placer.capacity()
    assert [found.num_encoders, found.num_prefills, found.num_both] == pytest.approx(
        [2 + share, 3 + share, 1 + share]
    )
    cluster.assign("w0", [Phase.PREFILL])
    assert (placer.capacity().num_encoders, placer.capacity().num_both) == (2, 1)
    request = text(160)
    assert decide(request, cluster).prediction.work_s == pytest.approx(
        160 * PREFILL.per_unit_s + 160 / MAX_TOKENS * PREFILL.fixed_s
    )
    (item,) = decide(media(400), cluster).prediction.items
    assert item.work_s == pytest.approx(ENCODE.seconds(400))
