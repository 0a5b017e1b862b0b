"""Who is chosen, by every policy and by the joint one."""

from collections import Counter

import msgspec
import pytest

from cluster.errors import RequestError, UnavailableError
from cluster.types.curves import CodecSpeed, Curve, Link, ServiceCurves
from cluster.types.media import Modality
from cluster.types.members import Role
from router.policy import JointPolicy, Worker, make_policy
from tests.fakes import placement
from tests.fakes.placement import (
    DECODE,
    ENCODE,
    LINEAR,
    LINK,
    MAX_TOKENS,
    PER_STAGE,
    POLICIES,
    PREFILL,
    ROUND_ROBIN,
    add,
    cluster_of,
    curves_of,
    hashes,
    load,
    media,
    text,
)


def decide(request, cluster, policy="joint", now=0.0):
    return make_policy(policy).decide(request, cluster, now)


def busy(cluster, **units):
    for replica_id, num_units in units.items():
        cluster.reported(replica_id, load(num_units, num_requests=1), now=0.0)
    return cluster


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("empty", ["encode", "prefill", "decode"])
def test_an_empty_pool_is_named(policy, empty):
    cluster = cluster_of(*(0 if empty == pool else 2 for pool in ("encode", "prefill", "decode")))
    with pytest.raises(UnavailableError, match=f"no {empty} worker is ready"):
        decide(media(400), cluster, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_nobody_can_hold_is_refused_and_who_can_is_chosen(policy):
    cluster = cluster_of(1, 1, 1)
    request = text(160, num_prefill_blocks=20_000, num_decode_blocks=20_000)
    with pytest.raises(RequestError, match="a decode worker holds 160000"):
        decide(request, cluster, policy)
    add(cluster, "d-large", Role.DECODE, num_blocks=20_000)
    with pytest.raises(RequestError, match="a prefill worker holds 160000"):
        decide(request, cluster, policy)
    add(cluster, "p-large", Role.PREFILL, num_blocks=20_000)
    placement = decide(request, cluster, policy).placement
    assert (placement.prefill, placement.decode) == ("p-large", "d-large")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_goes_to_workers_that_hold_its_adapter(policy):
    cluster = busy(cluster_of(0, 3, 3), p1=50_000, d1=30)
    request = text(160, adapter="mine")
    with pytest.raises(UnavailableError, match="no decode worker holds this adapter"):
        decide(request, cluster, policy)
    cluster.adapters_changed("d1", ["other", "mine"])
    cluster.adapters_changed("p0", ["other"])
    with pytest.raises(UnavailableError, match="no prefill worker holds this adapter"):
        decide(request, cluster, policy)
    cluster.adapters_changed("p1", ["mine"])
    placement = decide(request, cluster, policy).placement
    assert (placement.prefill, placement.decode) == ("p1", "d1")
    cluster.adapters_changed("p1", [])
    cluster.adapters_changed("p2", ["mine"])
    assert decide(request, cluster, policy).placement.prefill == "p2"
    cluster.remove("p2")
    add(cluster, "p3", Role.PREFILL)  # in its place
    with pytest.raises(UnavailableError, match="holds this adapter"):
        decide(request, cluster, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_text_needs_no_encoder(policy):
    assert decide(text(), cluster_of(num_encoders=0), policy).placement.encoders == ()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_item_goes_to_an_encoder_that_takes_its_kind(policy):
    cluster = cluster_of(num_encoders=0)
    cluster.add(Worker("sound", Role.ENCODE, 10, modalities=("audio",)))
    with pytest.raises(UnavailableError, match="no encode worker"):
        decide(media(400), cluster, policy)
    cluster.add(Worker("sight", Role.ENCODE, 10, modalities=("image", "video")))
    assert decide(media(400, 400), cluster, policy).placement.encoders == ("sight", "sight")


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != ROUND_ROBIN])
def test_the_least_loaded_worker_of_each_pool_is_chosen_among_equals(policy):
    cluster = busy(cluster_of(), e0=1000, p0=5000, p1=10, d0=3, d1=4)
    placement = decide(media(400), cluster, policy).placement
    assert (placement.encoders, placement.prefill, placement.decode) == (("e1",), "p1", "d0")


def test_round_robin_takes_turns():
    policy, cluster = make_policy(ROUND_ROBIN), cluster_of(2, 3, 2)
    placements = [policy.decide(media(400, 400, 400, name=f"r{i}"), cluster, 0.0).placement for i in range(6)]
    assert Counter(p.prefill for p in placements) == dict.fromkeys(("p0", "p1", "p2"), 2)
    assert Counter(p.decode for p in placements) == dict.fromkeys(("d0", "d1"), 3)
    assert Counter(e for p in placements for e in p.encoders) == dict.fromkeys(("e0", "e1"), 9)


@pytest.mark.parametrize("policy", ["joint", PER_STAGE, LINEAR])
def test_a_cached_prefix_outweighs_a_shorter_queue(policy):
    cluster = cluster_of()
    cluster.blocks_changed("p1", hashes("text", 60), [])
    assert decide(text(960), cluster, policy).placement.prefill == "p1"
    cluster.reported("p1", load(200, 1), 0.0)
    assert decide(text(960), cluster, policy).placement.prefill == "p1"


def test_a_long_queue_outweighs_a_cached_prefix():
    cluster = busy(cluster_of(), p1=2000)
    cluster.blocks_changed("p1", hashes("text", 60), [])
    assert decide(text(960), cluster).placement.prefill == "p0"


def test_every_policy_predicts_alike():
    cluster = busy(cluster_of(1, 1, 1), e0=300, p0=500, d0=5)
    predictions = {decide(media(400, 4000), cluster, policy).prediction for policy in POLICIES}
    assert len(predictions) == 1


def test_items_of_one_request_are_spread_over_encoders():
    cluster = cluster_of()
    for num_items in (4, 8):
        encoders = decide(media(*[400] * num_items), cluster).placement.encoders
        assert encoders.count("e0") == encoders.count("e1") == num_items // 2


def test_items_of_one_request_on_one_encoder_follow_each_other():
    items = decide(media(400, 400), cluster_of(num_encoders=1)).prediction.items
    assert items[0].queue_s == pytest.approx(0.0)
    assert items[1].queue_s == pytest.approx(ENCODE.seconds(400))


def test_an_item_goes_where_it_is_encoded_whatever_the_queue_there():
    cluster = busy(cluster_of(), e0=0)
    cluster.media_changed("e0", ["media-0"], [])
    busy(cluster, e0=20_000)
    decision = decide(media(400), cluster)
    assert decision.placement.encoders == ("e0",)
    assert decision.prediction.items[0].encode_s == 0.0


def test_hashing_chooses_the_encoder_of_a_new_item_unless_another_is_clearly_sooner():
    preferred = decide(
        media(400), busy(cluster_of(num_encoders=3), e0=100, e1=100, e2=100)
    ).placement.encoders
    queues = {f"e{idx}": 100 for idx in range(3)} | dict.fromkeys(preferred, 120)
    assert decide(media(400), busy(cluster_of(num_encoders=3), **queues)).placement.encoders == preferred
    queues |= dict.fromkeys(preferred, 250)  # less than half of the item
    assert decide(media(400), busy(cluster_of(num_encoders=3), **queues)).placement.encoders != preferred


def test_an_item_that_waits_somewhere_is_encoded_anew_where_that_is_sooner():
    cluster = busy(cluster_of(), e0=20_000)
    cluster.media_changed("e0", ["media-0"], [])
    assert decide(media(400), cluster).placement.encoders == ("e1",)
    assert decide(media(400), cluster, now=10.0).placement.encoders == ("e0",), "by now it is there"


def test_another_request_joins_an_item_that_is_on_its_way():
    cluster = cluster_of(num_encoders=4)
    first = decide(media(4000), cluster)
    cluster.started(media(4000), first.placement, first.prediction, 0.0)
    second = decide(media(4000), cluster, now=0.2)
    assert second.placement.encoders == first.placement.encoders
    left_s = ENCODE.seconds(4000) - 0.2
    assert second.prediction.items[0].queue_s == pytest.approx(left_s)


def test_a_fast_encoder_is_worth_a_queue():
    cluster = cluster_of(num_encoders=1)
    add(cluster, "fast", Role.ENCODE, speed=4.0)
    busy(cluster, fast=4000)
    assert decide(media(4000), cluster).placement.encoders == ("fast",)


def test_a_slow_link_is_avoided():
    cluster = cluster_of(1, 2, 2)
    cluster.measured(
        "e0", ServiceCurves(encode={Modality.IMAGE: ENCODE}, links={"": LINK, "p0": Link(1.0, 1e9)})
    )
    assert decide(media(400), cluster).placement.prefill == "p1"
    links = {"": LINK, "d1": Link(0.001, 1e7)}
    cluster.measured("p1", ServiceCurves(prefill=PREFILL, max_step_units=MAX_TOKENS, links=links))
    assert decide(media(400), cluster).placement.decode == "d0"


def test_kv_hides_behind_prefill_but_for_the_last_layer():
    cluster = cluster_of(1, 1, 1)
    prediction = decide(text(160), cluster).prediction
    new_bytes, own_s = 160 * cluster.kv_bytes_per_token, PREFILL.seconds(160)
    last_s = new_bytes / cluster.num_layers / LINK.bytes_per_s
    assert prediction.transfer_s == pytest.approx(
        LINK.latency_s + max(last_s, new_bytes / LINK.bytes_per_s - own_s), rel=0.1
    )
    assert prediction.first_step_s == pytest.approx(DECODE.seconds(1), rel=0.01)


def test_of_a_prompt_of_several_steps_only_the_last_ones_last_layer_is_not_hidden():
    cluster = cluster_of(1, 1, 1)
    last_bytes = MAX_TOKENS * cluster.kv_bytes_per_token / cluster.num_layers
    expected_s = LINK.seconds(last_bytes)
    assert decide(text(3000), cluster).prediction.transfer_s == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("bytes_per_s", "decode_byte_s", "codec"), [(1e7, 1e-9, "int8"), (1e7, 1e-7, "raw"), (1e10, 1e-9, "raw")]
)
def test_kv_is_coded_where_that_is_sooner(bytes_per_s, decode_byte_s, codec):
    """1/2 of 1/10^7 and the codec, against 1/10^7: seconds per byte."""
    cluster = cluster_of(1, 1, 1, codecs=("raw", "int8"))
    cluster.measured("p0", curves_of(Role.PREFILL, link=Link(0.001, bytes_per_s)))
    decoding = {"int8": CodecSpeed(0.52, decode_byte_s)}
    cluster.measured("d0", msgspec.structs.replace(curves_of(Role.DECODE), codecs=decoding))
    assert decide(text(960), cluster).placement.codec == codec


def test_coded_kv_is_decoded_when_all_of_it_is_there():
    cluster = cluster_of(1, 1, 1, codecs=("int8",))
    decoding = {"int8": CodecSpeed(0.52, 1e-8)}
    hidden = decide(text(960), cluster).prediction.transfer_s
    cluster.measured("d0", msgspec.structs.replace(curves_of(Role.DECODE), codecs=decoding))
    longer_s = decide(text(960), cluster).prediction.transfer_s - hidden
    assert longer_s == pytest.approx((1e-8 - 0.5e-9) * 960 * cluster.kv_bytes_per_token, rel=0.01)


def test_kv_goes_raw_where_nobody_has_measured_a_codec(monkeypatch):
    monkeypatch.setattr(placement, "CODECS", {})
    cluster = cluster_of(1, 1, 1, codecs=("raw", "int8"))
    cluster.measured("p0", curves_of(Role.PREFILL, link=Link(0.001, 1e7)))
    assert decide(text(960), cluster).placement.codec == "raw"


def test_a_decode_worker_without_blocks_is_avoided_and_waiting_for_blocks_is_predicted():
    cluster = cluster_of(1, 1, 2)
    cluster.reported("d0", load(1, 1, num_used_blocks=10_000), 0.0)
    cluster.reported("d1", load(3, 3, num_used_blocks=5_000), 0.0)
    assert decide(text(960), cluster).placement.decode == "d1"
    cluster.reported("d1", load(3, 3, num_used_blocks=10_000), 0.0)
    assert decide(text(960), cluster).prediction.first_step_s > 0.021


def test_two_doors_come_to_the_same_choice():
    for idx in range(20):
        request = media(400, 400, name=f"r{idx}")
        first, second = (decide(request, cluster_of(4, 4, 4)).placement for _ in range(2))
        assert first == second


def test_equals_are_chosen_by_content_and_all_of_them():
    cluster = cluster_of(4, 4, 4)
    placements = [decide(media(400, name=f"r{idx}"), cluster).placement for idx in range(80)]
    for chosen in (
        {p.prefill for p in placements},
        {p.decode for p in placements},
        {p.encoders[0] for p in placements},
    ):
        assert len(chosen) == 4


def test_most_contents_stay_where_they_were_when_a_worker_comes():
    cluster, requests = cluster_of(0, 4, 1), [text(160, f"r{idx}") for idx in range(60)]
    before = [decide(request, cluster).placement.prefill for request in requests]
    add(cluster, "new", Role.PREFILL)
    after = [decide(request, cluster).placement.prefill for request in requests]
    assert all(now in (then, "new") for then, now in zip(before, after, strict=True))
    assert 0 < after.count("new") < 30


def test_the_next_best_are_told_with_what_they_would_take():
    decision = decide(media(400), busy(cluster_of(2, 4, 2), p0=900, p1=500, p2=300))
    assert decision.placement.prefill == "p3"
    assert [placement.prefill for placement, _ in decision.alternatives] == ["p2", "p1"]
    times = [decision.prediction.ttft_s, *(ttft_s for _, ttft_s in decision.alternatives)]
    assert times == sorted(times)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_items_next_encoder_is_another_one_with_the_shortest_queue(policy):
    cluster, item = busy(cluster_of(num_encoders=3), e0=0, e1=4000, e2=100), media(400).media[0]
    assert make_policy(policy).place_item(item, cluster, 0.0, {"e0"}) == "e2"
    with pytest.raises(UnavailableError, match="no encode worker"):
        make_policy(policy).place_item(item, cluster, 0.0, {"e0", "e1", "e2", "gone"})


def test_a_slow_worker_takes_less_of_the_load_than_a_fast_one():
    cluster = cluster_of(1, 1, 1)
    cluster.add(Worker("slow", Role.PREFILL, 10_000))
    cluster.measured("slow", ServiceCurves(prefill=Curve(0.04, 4e-4), max_step_units=MAX_TOKENS))
    policy, chosen = JointPolicy(), Counter()
    for idx in range(40):
        request = text(960, f"r{idx}")
        decision = policy.decide(request, cluster, 0.0)
        cluster.started(request, decision.placement, decision.prediction, 0.0)
        chosen[decision.placement.prefill] += 1
    assert 2 < chosen["slow"] < chosen["p0"] / 2


def test_a_request_keeps_away_from_where_it_would_delay_many():
    cluster = cluster_of(1, 2, 1)
    for replica_id, num_requests in (("p0", 30), ("p1", 1)):
        cluster.reported(replica_id, load(3000, num_requests), now=0.0)
    for idx in range(8):
        assert decide(text(160, f"r{idx}"), cluster).placement.prefill == "p1"


def test_near_equals_go_where_the_beginning_is_on_its_way():
    cluster, placements = cluster_of(1, 4, 1), set()
    for idx in range(8):
        request = text(16_000, f"r{idx}")
        first = decide(request, cluster)
        cluster.started(request, first.placement, first.prediction, 0.0)
        cluster.prefilled(request.request_id)
        placements.add((first.placement.prefill, decide(request, cluster, now=100.0).placement.prefill))
    assert all(first == second for first, second in placements)


def test_an_item_that_nobody_waits_for_keeps_away_from_where_others_wait():
    cluster = cluster_of(2, 1, 1)
    cluster.reported("e0", load(5000, 10), now=0.0)
    for idx in range(8):
        decision = decide(media(400, name=f"r{idx}", num_before=9000), cluster)
        assert (decision.placement.encoders, decision.prediction.media_s) == (("e1",), 0.0)
