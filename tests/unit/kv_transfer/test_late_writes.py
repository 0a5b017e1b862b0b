"""Writes that are in flight when their lease's time is over, their peer is lost, or one of them fails."""

from __future__ import annotations

import pytest
import torch

from kv_transfer.agents.agent import LeaseExpiredError
from kv_transfer.lease.events import Aborted, Expired, LateWrite, SendFailed
from tests.fakes.leases import MARGIN_S, TTL_S
from tests.unit.kv_transfer.test_leases import send


def begin_write_that_stands_still(pair):
    """At its deadline: one of its blocks is posted, the other one is queued."""
    pair.network.faults.is_parted = True
    grant = pair.grant()
    outgoing = pair.open(grant)
    outgoing.write([7], [0])
    outgoing.write([6], [1], ready=lambda: pair.clock.at >= TTL_S)
    outgoing.finish(b"")
    pair.step(3)
    pair.clock.at = TTL_S
    pair.step(3)
    return grant


def test_a_write_in_flight_at_the_deadline_keeps_the_lease_and_its_sources(pair):
    """The transport still reads them. Nothing more is posted."""
    grant = begin_write_that_stands_still(pair)
    assert not pair.sent and pair.writer.num_open == 1 and pair.writer.pause_s() < 0.01
    pair.network.faults.is_parted = False
    pair.step(2)
    (event,) = pair.sent
    assert isinstance(event, SendFailed) and isinstance(event.error, LeaseExpiredError)
    first, second = grant.block_ids[:2]
    assert torch.equal(pair.target.segments[0][first], pair.source.segments[0][7])
    assert not pair.target.segments[0][second].any()
    assert [type(event) for event in pair.received] == [Aborted]  # within the margin: not late


def test_the_owner_is_told_of_a_write_that_lands_in_blocks_which_others_hold_by_then(pair):
    grant = begin_write_that_stands_still(pair)
    others = pair.pool.allocate(4)
    pair.clock.at = TTL_S + MARGIN_S
    pair.step()
    pair.pool.free(others)
    assert pair.received == [Expired("lease")] and not pair.sent
    other = pair.grant("other")
    assert set(other.block_ids) == set(grant.block_ids)
    pair.network.faults.is_parted = False
    pair.step(3)
    assert [type(event) for event in pair.sent] == [SendFailed]
    assert pair.received[1:] == [LateWrite("lease", tuple(sorted(grant.block_ids)))]
    pair.clock.at += 1.0
    send(pair, other)
    pair.step(3)
    (event,) = pair.received[2:]
    assert isinstance(event, Aborted) and "wrote late" in event.reason


def test_a_write_to_a_peer_that_is_lost_ends_without_a_word(pair):
    begin_write_that_stands_still(pair)
    pair.network.kill("owner")
    pair.writer.step()
    pair.writer.step()
    (event,) = pair.sent
    assert isinstance(event, SendFailed) and pair.network.faults.num_notifications == 0


@pytest.mark.parametrize(("verb", "nth"), [("post", 2), ("poll", 1)])
def test_after_a_write_that_failed_half_way_only_time_ends_the_lease(pair, verb, nth):
    """What was posted may still land, so the writer may not say that it has stopped."""
    pair.network.faults.post_polls = 2
    pair.network.faults.fail(verb, nth)
    outgoing = pair.open(pair.grant())
    outgoing.write([7], [0])
    outgoing.write([6], [1])
    pair.step(5)
    assert [type(event) for event in pair.sent] == [SendFailed]
    pair.clock.at = TTL_S + MARGIN_S - 0.1
    pair.step(2)
    assert not pair.received
    pair.clock.at = TTL_S + MARGIN_S
    pair.step()
    assert pair.received == [Expired("lease")]


def test_a_bug_fails_the_lease_when_its_writes_are_over(pair):
    pair.network.faults.post_polls = 3

    def broken():
        raise RuntimeError("bug")

    outgoing = pair.open(pair.grant())
    outgoing.write([7], [0])
    outgoing.write([6], [1], ready=broken)
    pair.step()
    assert not pair.sent
    pair.step(3)
    assert isinstance(pair.sent[0], SendFailed) and "bug" in str(pair.sent[0].error)
    assert [type(event) for event in pair.received] == [Aborted]
