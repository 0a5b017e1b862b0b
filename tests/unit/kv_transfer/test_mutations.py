"""One rule of the protocol is broken on purpose at a time: another rule notices, and no wrong bytes become an
answer."""

from __future__ import annotations

import math

import pytest

from kv_transfer.lease.events import Aborted, Completed, Expired, LateWrite
from kv_transfer.lease.receiver import TAKEN_BACK_S
from tests.fakes.leases import MARGIN_S, TTL_S
from tests.unit.kv_transfer.test_leases import Pair, assert_arrived, send


@pytest.fixture
def pair():
    pair = Pair()
    others = pair.pool.allocate(4)  # so that the next lease gets the blocks of the last one
    yield pair
    pair.let_everything_end()
    pair.pool.free(others)
    pair.audit()


def expire(pair):
    pair.clock.at += TTL_S + MARGIN_S
    pair.owner.step()


def test_a_writer_that_ignores_its_time_is_found_out_by_the_next_owner_of_the_blocks(pair):
    late = pair.open(pair.grant("late"))
    late.expires_at = math.inf  # the mutation
    expire(pair)
    grant = pair.grant("next")
    following = pair.open(grant)
    following.write([7, 6, 5, 4], [0, 1, 2, 3])
    pair.step()
    late.write([0], [0])
    pair.step()
    following.finish(b"payload")
    pair.step(2)
    late.abort("enough")
    assert [type(event) for event in pair.received] == [Expired, Aborted]


@pytest.mark.parametrize("ends_with", ["finish", "abort"])
@pytest.mark.parametrize("is_next_complete", [False, True])
def test_a_write_that_lands_behind_the_margin_ends_what_holds_the_blocks_now(
    pair, ends_with, is_next_complete
):
    """The writer was stopped between the check of the clock and the write."""
    late = pair.open(pair.grant("late"))
    late.expires_at = math.inf  # the mutation
    expire(pair)
    grant = pair.grant("next")
    following = pair.open(grant)
    following.write([7, 6, 5, 4], [0, 1, 2, 3])
    if is_next_complete:
        following.finish(b"payload")
    pair.step(2)
    late.write([0], [0])
    pair.writer.step()
    late.finish(b"") if ends_with == "finish" else late.abort("stopped")
    pair.step(2)
    if not is_next_complete:
        following.finish(b"payload")
        pair.step(2)
    late_write = LateWrite("late", tuple(sorted(grant.block_ids)))
    if is_next_complete:
        assert pair.received == [Expired("late"), Completed("next", b"payload"), late_write]
    else:
        assert pair.received[:2] == [Expired("late"), late_write]
        assert isinstance(pair.received[2], Aborted) and "wrote late" in pair.received[2].reason
    assert pair.owner.received.num_late == 1


def test_the_last_word_of_a_writer_that_wrote_nothing_harms_nothing(pair):
    late = pair.open(pair.grant("late"))
    late.expires_at = math.inf
    expire(pair)
    send(pair, pair.grant("next"))
    late.abort("stopped")
    pair.step(3)
    assert pair.received == [Expired("late"), Completed("next", b"payload")]
    assert pair.owner.received.num_late == 0 and pair.owner.received.num_ignored == 1


def test_how_long_and_how_many_leases_without_a_last_word_are_remembered(pair, monkeypatch):
    monkeypatch.setattr("kv_transfer.lease.receiver.MAX_TAKEN_BACK", 2)
    late = [pair.open(pair.grant(name, 1)) for name in ("a", "b", "c")]
    assert pair.owner.idle_s is None
    expire(pair)
    assert pair.owner.idle_s is not None, "their words are waited for"
    for outgoing in late:
        outgoing.expires_at = math.inf
        outgoing.write([0], [0])
    pair.writer.step()
    for outgoing in late:
        outgoing.abort("stopped")
    pair.step(3)
    assert [event.lease_id for event in pair.received if isinstance(event, LateWrite)] == ["b", "c"]
    assert pair.owner.received.num_ignored == 1 and pair.owner.idle_s is None
    pair.grant("d", 1)
    expire(pair)
    assert pair.owner.idle_s is not None
    pair.clock.at += TAKEN_BACK_S
    pair.owner.step()
    assert pair.owner.idle_s is None


def test_an_old_notification_completes_nothing_although_the_blocks_kept_their_generations(pair, monkeypatch):
    monkeypatch.setattr(pair.pool, "generations", lambda block_ids: [0] * len(block_ids))  # the mutation
    pair.network.faults.delay(1, polls=4)
    first = pair.grant("first")
    send(pair, first)
    pair.step()
    expire(pair)
    second = pair.grant("second")
    assert second.generations == first.generations and set(second.block_ids) == set(first.block_ids)
    pair.step(6)
    assert [type(event) for event in pair.received] == [Expired, LateWrite]
    send(pair, second)
    pair.step(2)
    (event,) = pair.received[2:]
    assert isinstance(event, Aborted) and "wrote late" in event.reason
    third = pair.grant("third")
    send(pair, third)
    pair.step(2)
    assert pair.received[3:] == [Completed("third", b"payload")]
    assert_arrived(pair, third)


def test_a_dropped_notification_ends_with_the_lease(pair):
    pair.network.faults.drop(1)
    send(pair, pair.grant())
    pair.step(5)
    assert not pair.received
    expire(pair)
    assert pair.received == [Expired("lease")]


def test_a_dropped_write_is_an_error(pair, monkeypatch):
    """The transport says DONE and has moved nothing."""
    grant = pair.grant()
    outgoing = pair.open(grant)
    outgoing.write([7, 6], [0, 1])
    pair.step()
    post = pair.writer.agent.post

    def lose(peer, local, remote, notification=b""):
        return post(peer, local[:1], remote[:1], notification)

    monkeypatch.setattr(pair.writer.agent, "post", lose)  # the mutation
    outgoing.write([5, 4], [2, 3])
    outgoing.finish(b"payload")
    pair.step(3)
    (event,) = pair.received
    assert isinstance(event, Aborted) and "not those" in event.reason
