"""What a door knows of the cluster, and what its own requests add to that."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.types.members import Role
from router.policy import ClusterView, JointPolicy, RequestView, Worker, make_policy
from tests.fakes.placement import EPD, POLICIES, add, cluster_of, hashes, is_expected, load, media, text


def send(cluster: ClusterView, request: RequestView, now: float = 0.0):
    decision = JointPolicy().decide(request, cluster, now)
    cluster.started(request, decision.placement, decision.prediction, now)
    return decision.placement


def queued(pool) -> float:
    return float((pool.reported_units + pool.sent_units).sum())


def test_a_request_counts_from_the_moment_it_is_sent_until_each_stage_is_done():
    cluster = cluster_of()
    send(cluster, media(400, num_sequences=2))
    assert [queued(pool) for pool in (cluster.encoders, cluster.prefills, cluster.decodes)] == [400, 180, 2]
    cluster.item_done("media", 0)
    assert queued(cluster.encoders) == 0
    cluster.prefilled("media")
    assert (queued(cluster.prefills), queued(cluster.decodes), len(cluster.pending)) == (0, 2, 0)
    cluster.ended("media")
    assert queued(cluster.decodes) == 0


def test_of_a_prompt_that_is_cached_whole_the_last_block_is_computed_again():
    """Its last token must be computed for the first one of the answer."""
    cluster = cluster_of(1, 1, 1)
    cluster.blocks_changed("p0", hashes("text", 10), ())
    send(cluster, text(160))
    assert queued(cluster.prefills) == 16
    cluster.ended("text")
    send(cluster, text(161))
    assert queued(cluster.prefills) == 1


def test_the_smallest_queue_of_an_encoder_is_known():
    cluster = cluster_of()
    assert cluster.num_queued_rows() == 0
    send(cluster, media(400))
    assert cluster.num_queued_rows() == 0
    send(cluster, media(300, name="other"))
    assert cluster.num_queued_rows() == 300
    assert cluster_of(num_encoders=0).num_queued_rows() == 0


def test_an_item_that_moves_is_charged_to_the_next_encoder_and_expected_there():
    cluster = cluster_of()
    first = send(cluster, media(400)).encoders[0]
    other = {"e0": "e1", "e1": "e0"}[first]
    cluster.item_moved("media", 0, other)
    slots = cluster.encoders.slots
    assert cluster.encoders.sent_units[slots[first]] == 0
    assert cluster.encoders.sent_units[slots[other]] == 400
    assert cluster.media.holders("media-0") == 1 << slots[other]


def test_media_that_is_on_its_way_to_an_encoder_is_held_until_the_request_ends_without_it():
    cluster = cluster_of()
    send(cluster, media(400))
    assert cluster.has_media("media-0")
    cluster.ended("media")
    assert not cluster.has_media("media-0")


def test_what_encoders_say_of_their_caches_is_known_from_then_on():
    cluster = cluster_of()
    cluster.media_changed("e1", ["media-0"], [])
    assert cluster.has_media("media-0")
    assert JointPolicy().decide(media(4000), cluster, 0.0).placement.encoders == ("e1",)
    cluster.media_changed("e1", [], ["media-0"])
    assert not cluster.has_media("media-0")


def test_a_lost_worker_is_forgotten_with_its_caches_and_its_slot_serves_the_next():
    cluster = cluster_of()
    cluster.media_changed("e1", ["media-0"], [])
    cluster.blocks_changed("p1", hashes("text", 10), [])
    send(cluster, text(name="other"))
    for replica_id in ("e1", "p0", "p1", "d1"):
        cluster.remove(replica_id)
    assert not cluster.has_media("media-0")
    assert len(cluster.pending) == 0
    add(cluster, "new", Role.PREFILL)
    assert len(cluster.prefills) == 4, "of prefill and of decode"
    prediction = JointPolicy().decide(text(), cluster, 0.0).prediction
    assert (prediction.queue_s, prediction.prefill_s) == (0, pytest.approx(0.026)), (
        "no cache, no queue is left"
    )


@pytest.mark.parametrize("role", EPD)
def test_what_was_sent_to_a_worker_that_is_gone_is_not_taken_from_the_next_of_its_name(role):
    """A connection is lost and made again: the end of an old request frees nothing of what was sent since."""
    cluster = cluster_of(1, 1, 1)
    pool = {Role.ENCODE: cluster.encoders, Role.PREFILL: cluster.prefills, Role.DECODE: cluster.decodes}[role]
    send(cluster, media(400))
    cluster.remove(f"{role[0]}0")
    add(cluster, f"{role[0]}0", role)
    send(cluster, replace(media(400, name="again"), media=media(400).media), 1.0)
    own = float(pool.sent_units[0])
    cluster.ended("media")
    assert float(pool.sent_units[0]) == own > 0
    assert role is not Role.ENCODE or cluster.media.holders("media-0") == 1
    cluster.ended("again")
    assert not pool.sent_units.any() and not pool.sent_blocks.any() and not pool.sent_requests.any()


def test_a_silent_worker_is_avoided_while_there_is_another():
    for role in EPD:
        cluster = cluster_of()
        for silent in (f"{role[0]}0", f"{role[0]}1"):
            cluster.set_avoided(silent, True)
            for policy in map(make_policy, POLICIES):
                chosen = policy.decide(media(400), cluster, 0.0).placement
                of_role = {
                    Role.ENCODE: chosen.encoders[0],
                    Role.PREFILL: chosen.prefill,
                    Role.DECODE: chosen.decode,
                }
                if silent[1] == "0":
                    assert of_role[role] == f"{role[0]}1"
                else:  # both are
                    assert of_role[role] in (f"{role[0]}0", f"{role[0]}1")
        cluster.set_avoided(f"{role[0]}0", False)
        chosen = JointPolicy().decide(media(400), cluster, 0.0).placement
        assert f"{role[0]}0" in (*chosen.encoders, chosen.prefill, chosen.decode)


def test_a_silent_encoder_gets_an_item_that_no_other_may_have():
    cluster = cluster_of(num_encoders=2)
    cluster.set_avoided("e1", True)
    (item,) = media(400).media
    assert JointPolicy().place_item(item, cluster, 0.0, ("e0",)) == "e1"
    assert JointPolicy().place_item(item, cluster, 0.0, ()) == "e0"


def test_a_placement_on_a_worker_that_is_not_there_charges_nobody():
    cluster = cluster_of()
    decision = JointPolicy().decide(media(400), cluster, 0.0)
    cluster.remove(decision.placement.decode)
    with pytest.raises(KeyError):
        cluster.started(media(400), decision.placement, decision.prediction, 0.0)
    assert cluster.is_idle
    assert not any(pool.sent_units.any() for pool in (cluster.encoders, cluster.prefills, cluster.decodes))


def test_a_worker_that_is_not_listed_gets_nothing_new():
    cluster = cluster_of()
    for replica_id in ("e0", "p0", "d0"):
        cluster.set_listed(replica_id, False)
    for policy in map(make_policy, POLICIES):
        placement = policy.decide(media(400, 400), cluster, 0.0).placement
        assert (placement.encoders, placement.prefill, placement.decode) == (("e1", "e1"), "p1", "d1")
    cluster.set_listed("p0", True)
    cluster.set_listed("p1", False)
    assert JointPolicy().decide(text(), cluster, 0.0).placement.prefill == "p0"


def test_news_of_those_who_are_not_there_is_ignored():
    cluster = cluster_of()
    cluster.reported("x", load(5), 0.0)
    cluster.media_changed("x", ["a"], [])
    cluster.blocks_changed("x", [b"a"], [])
    cluster.set_listed("x", False)
    cluster.remove("x")
    for told in (cluster.prefilled, cluster.ended):
        told("nobody")
    cluster.item_done("nobody", 0)
    cluster.item_moved("nobody", 0, "e0")
    assert not cluster.has_media("a")


def test_a_worker_that_is_there_cannot_be_added_again():
    with pytest.raises(ValueError, match="there already"):
        cluster_of().add(Worker("p0", Role.PREFILL, 10))


class Requests(RuleBasedStateMachine):
    """Requests in every order of events, workers that report, leave and come."""

    def __init__(self):
        super().__init__()
        self.cluster = cluster_of(3, 2, 2, 2)
        self.alive: set[str] = set()
        self.sent: list[RequestView] = []
        self.replicas = {"e0": Role.ENCODE, "p1": Role.PREFILL, "d0": Role.DECODE, "l1": Role.LANGUAGE}
        self.now = 0.0

    @rule(num_items=st.integers(0, 3), name=st.sampled_from(["a", "b"]))
    def send(self, num_items, name):
        num_sent = len(self.sent) + 1
        request = media(*[400] * num_items, name=f"{name}{num_sent % 4}-{num_sent}")
        self.sent.append(request)
        send(self.cluster, request, self.now)
        self.alive.add(request.request_id)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), idx=st.integers(0, 2))
    def advance(self, data, idx):
        request_id = data.draw(st.sampled_from(sorted(self.alive)))
        if idx < len(self.cluster.in_flight[request_id].items):
            encoder = data.draw(st.sampled_from(sorted(self.cluster.encoders.slots)))
            self.cluster.item_moved(request_id, idx, encoder)
            self.cluster.item_done(request_id, idx)
        self.cluster.prefilled(request_id)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def end(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(request_id)
        self.cluster.ended(request_id)

    @rule(data=st.data(), passed=st.sampled_from([0.0, 0.001, 1.0]))
    def report(self, data, passed):
        self.now += passed
        self.cluster.reported(data.draw(st.sampled_from(sorted(self.replicas))), load(), self.now)

    @rule(data=st.data())
    def restart(self, data):
        lost = data.draw(st.sampled_from(sorted(self.replicas)))
        self.cluster.remove(lost)
        role = self.replicas.pop(lost)
        self.replicas[f"{lost}+"] = role
        add(self.cluster, f"{lost}+", role)

    @invariant()
    def nothing_is_negative(self):
        for pool in (self.cluster.encoders, self.cluster.prefills, self.cluster.decodes):
            for column in (pool.sent_units, pool.sent_requests, pool.sent_blocks):
                assert (column > -1e-9).all()

    @invariant()
    def nothing_is_left_when_all_have_ended(self):
        if not self.alive:
            for pool in (self.cluster.encoders, self.cluster.prefills, self.cluster.decodes):
                assert not np.any(np.abs(pool.sent_units) > 1e-9)
            assert len(self.cluster.pending) == 0
            assert not any(is_expected(self.cluster, request) for request in self.sent)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=25, stateful_step_count=25)
