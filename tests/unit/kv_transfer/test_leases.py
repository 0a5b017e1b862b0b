"""Sender and receiver over the in-process agent, on a virtual clock: every order of events, every fault."""

from __future__ import annotations

import msgspec
import pytest
import torch

from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from kv_transfer.agents.agent import (
    LayoutMismatchError,
    LeaseExpiredError,
    NotPostedError,
    PeerLostError,
    TransferError,
)
from kv_transfer.lease import lease_writer
from kv_transfer.lease.events import Aborted, Completed, Expired, Finished, LateWrite, SendAborted, SendFailed
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.fakes.leases import MARGIN_S, TTL_S, LeasePair
from tests.fakes.slow_memory import SlowMemory

LAYOUT = MemoryLayout((SegmentSpec(4, (2,), torch.float32), SegmentSpec(4, (3,), torch.float32)))


class Pair(LeasePair):
    """Eight blocks on either side; the writer's are full of numbers."""

    def __init__(self, kind=BlockMemory):
        super().__init__(kind(LAYOUT, 8), kind(LAYOUT, 8))
        for segment in self.source.segments:
            segment.copy_(torch.arange(1, segment.numel() + 1).view_as(segment))

    def grant(self, lease_id="lease", num_blocks=4):
        return self.owner.grant(lease_id, *self.take(lease_id, num_blocks), TTL_S)


def send(pair, grant):
    outgoing = pair.open(grant)
    outgoing.write([7, 6], [0, 1])
    pair.step()
    outgoing.write([5, 4], [2, 3])
    outgoing.finish(b"payload")
    return outgoing


def assert_arrived(pair, grant):
    for source, target in zip(pair.source.segments, pair.target.segments, strict=True):
        assert torch.equal(target[list(grant.block_ids)], source[[7, 6, 5, 4]])


def test_bytes_and_payload_arrive(pair):
    grant = pair.grant()
    send(pair, grant)
    pair.step(2)
    assert pair.sent == [Finished("lease")]
    assert pair.received == [Completed("lease", b"payload")]
    assert_arrived(pair, grant)


def test_a_write_of_many_descriptors_is_posted_in_parts(pair, monkeypatch):
    """Four blocks of two segments each."""
    monkeypatch.setattr(lease_writer, "MAX_DESCRIPTORS", 3)
    grant = pair.grant()
    outgoing = pair.open(grant)
    outgoing.write([7, 6, 5, 4], [0, 1, 2, 3])
    outgoing.finish(b"payload")
    pair.step(2)
    assert pair.network.faults.counts["post"] == 3
    assert pair.received == [Completed("lease", b"payload")]
    assert_arrived(pair, grant)


def test_one_segment_can_be_written_at_a_time(pair):
    outgoing = pair.open(pair.grant())
    outgoing.write([7], [0], segment_ids=[1])
    pair.step()
    assert not pair.target.segments[0].any()
    assert torch.equal(pair.target.segments[1][0], pair.source.segments[1][7])
    outgoing.abort("enough")


def test_nothing_is_announced_before_the_last_write_is_done(pair):
    pair.network.faults.post_polls = 5
    send(pair, pair.grant())
    pair.step(3)
    assert not pair.sent and not pair.received
    pair.step(6)
    assert pair.received == [Completed("lease", b"payload")]


def test_an_abort_waits_for_the_write_in_flight(pair):
    pair.network.faults.post_polls = 4
    outgoing = pair.open(pair.grant())
    outgoing.write([7], [0])
    pair.step()
    outgoing.abort("client gone")
    pair.step()
    assert not pair.sent
    pair.step(5)
    assert pair.sent == [SendAborted("lease", "client gone")]
    assert pair.received == [Aborted("lease", "client gone")]


def test_an_unused_right_can_be_given_back(pair):
    pair.open(pair.grant()).abort("not needed")
    pair.step(2)
    assert pair.received == [Aborted("lease", "not needed")]


@pytest.mark.parametrize("num_posted", [0, 1])
def test_a_write_that_was_refused_before_a_part_was_posted_ends_the_lease(pair, num_posted):
    """The writer says that it has stopped, behind what it had posted before, and the owner need not wait for
    the time."""
    pair.network.faults.post_polls = 3
    outgoing = pair.open(pair.grant())
    if num_posted:
        outgoing.write([7], [0])
        pair.step()
    pair.network.faults.fail("post", num_posted + 1, NotPostedError("no registered memory"))
    outgoing.write([6], [1])
    pair.step()
    assert bool(pair.sent) == (not num_posted), "a write is in flight"
    pair.step(4)
    assert [type(event) for event in pair.sent] == [SendFailed]
    assert pair.received == [Aborted("lease", "no registered memory")]


def test_a_cancelled_lease_keeps_its_blocks_until_the_writer_is_done(pair):
    grant = pair.grant()
    pair.owner.cancel("lease")
    pair.step(3)
    assert not pair.received and pair.pool.num_free == 4
    send(pair, grant)
    pair.step(3)
    assert [type(event) for event in pair.received] == [Aborted]
    pair.owner.cancel("lease")  # ended leases are ignored


def test_a_silent_writer_loses_its_lease_after_the_margin(pair):
    pair.grant()
    pair.clock.at = TTL_S + MARGIN_S - 0.01
    pair.step()
    assert not pair.received
    pair.clock.at = TTL_S + MARGIN_S
    pair.step()
    assert pair.received == [Expired("lease")]


def test_a_grants_time_is_counted_from_its_receipt(pair):
    """Not from when the writer has something to send."""
    received = pair.grant().received(pair.clock.at)
    pair.clock.at = TTL_S - 1
    outgoing = pair.writer.open(received)
    outgoing.write([7], [0])
    pair.clock.at = TTL_S
    pair.step(2)
    assert not pair.target.buffer.any()
    assert isinstance(pair.sent[0].error, LeaseExpiredError)


@pytest.mark.parametrize("late_s", [0.0, MARGIN_S - 0.1])
def test_a_right_whose_time_is_over_can_still_be_given_back(pair, late_s):
    received = pair.grant().received(pair.clock.at)
    pair.clock.at = TTL_S + late_s
    pair.writer.open(received).abort("too late")
    pair.step(2)
    assert pair.received == [Aborted("lease", "too late")]


def test_the_clock_is_looked_at_before_each_post(pair):
    """The first of two writes takes until the time is over."""
    outgoing = pair.open(pair.grant())
    outgoing.write([7], [0])
    outgoing.write([6], [1])
    post = pair.writer.agent.post

    def slow(*args):
        pair.clock.at = TTL_S
        return post(*args)

    pair.writer.agent.post = slow
    pair.step(2)
    assert pair.target.segments[0][0].any() and not pair.target.segments[0][1].any()
    assert pair.received[0].lease_id == "lease" and isinstance(pair.received[0], Aborted)


def test_nothing_is_posted_after_the_grants_time(pair):
    outgoing = pair.open(pair.grant())
    outgoing.write([7], [0])  # queued in time, but the thread comes too late
    pair.clock.at = TTL_S
    with pytest.raises(LeaseExpiredError):
        outgoing.write([6], [1])
    with pytest.raises(LeaseExpiredError):
        outgoing.finish(b"")
    pair.step()
    assert not pair.target.buffer.any()
    assert isinstance(pair.sent[0].error, LeaseExpiredError)


def test_a_grant_is_written_once(pair):
    grant = pair.grant()
    send(pair, grant)
    pair.step(2)
    with pytest.raises(TransferError, match="opened before"):
        pair.open(grant)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol", 1),
        ("model", "another"),
        ("block_size", 8),
        ("dtypes", ("bfloat16",)),
        ("layout", "feedbeef"),
    ],
)
def test_peers_that_differ_are_refused_and_the_difference_is_named(pair, field, value):
    grant = pair.grant()
    other = msgspec.structs.replace(grant.contract, **{field: value})
    assert getattr(grant.contract, field) != value
    with pytest.raises(LayoutMismatchError, match=f"{field} is .* here and .* there"):
        pair.open(msgspec.structs.replace(grant, contract=other))


@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("block", range(4))
def test_a_flipped_bit_is_an_error_and_never_an_answer(pair, segment, block):
    grant = pair.grant()
    outgoing = pair.open(grant)
    outgoing.write([7, 6, 5, 4], [0, 1, 2, 3])
    pair.step()
    pair.target.segments[segment].view(torch.uint8)[grant.block_ids[block], 3, -1] ^= 16
    outgoing.finish(b"payload")
    pair.step(2)
    (event,) = pair.received
    assert isinstance(event, Aborted) and "not those that writer writer sent" in event.reason
    assert pair.owner.received.num_corrupt == 1


def test_a_block_that_lacks_a_segment_is_an_error(pair):
    """The writer forgot a layer."""
    outgoing = pair.open(pair.grant())
    outgoing.write([7, 6, 5, 4], [0, 1, 2, 3], segment_ids=[0])
    outgoing.write([7, 6, 5], [0, 1, 2], segment_ids=[1])
    outgoing.finish(b"payload")
    pair.step(3)
    (event,) = pair.received
    assert isinstance(event, Aborted)


def test_a_write_waits_until_its_bytes_are_there_and_keeps_later_ones_behind_it(pair):
    grant = pair.grant()
    outgoing = pair.open(grant)
    answers = [True, False, False]
    outgoing.write([7], [0], ready=answers.pop)
    outgoing.write([6, 5, 4], [1, 2, 3])
    outgoing.finish(b"payload")
    pair.step(2)
    assert not any(segment.any() for segment in pair.target.segments)
    pair.step(2)
    assert_arrived(pair, grant)
    assert pair.received == [Completed("lease", b"payload")]


def test_other_generations_are_never_accepted(pair):
    grant = pair.grant()
    wrong = msgspec.structs.replace(grant, generations=tuple(g + 1 for g in grant.generations))
    send(pair, wrong)
    pair.step(3)
    assert not pair.received
    pair.clock.at = TTL_S + MARGIN_S
    pair.step()
    assert pair.received == [Expired("lease")]
    assert pair.owner.received.num_mismatched == 1


@pytest.mark.parametrize("trouble", ["duplicate", "drop", "delay"])
def test_trouble_with_the_notification_gives_one_end(pair, trouble):
    faults = pair.network.faults
    {"duplicate": faults.duplicate, "drop": faults.drop, "delay": lambda n: faults.delay(n, 50)}[trouble](1)
    send(pair, pair.grant())
    pair.step(5)
    pair.clock.at = TTL_S + MARGIN_S
    pair.step(60)
    ends = {"duplicate": [Completed], "drop": [Expired], "delay": [Expired, LateWrite]}
    assert [type(event) for event in pair.received] == ends[trouble]
    assert pair.owner.received.num_ignored == (trouble == "duplicate")


def test_a_killed_owner_fails_all_leases_to_it(pair):
    pair.network.faults.post_polls = 5
    send(pair, pair.grant("one"))
    send(pair, pair.grant("two"))
    pair.network.kill("owner")
    pair.writer.step()
    pair.writer.step()
    assert {e.lease_id for e in pair.sent} == {"one", "two"}
    assert all(isinstance(e.error, PeerLostError) for e in pair.sent)


def test_a_dead_writers_lease_can_be_revoked(pair):
    pair.grant()
    pair.owner.revoke("lease", "writer died")
    pair.step()
    assert pair.received == [Aborted("lease", "writer died")]


def test_unreadable_notifications_are_counted(pair):
    pair.writer.agent.connect(pair.grant().agent_metadata)
    pair.writer.agent.notify("owner", b"\xff nonsense")
    pair.step()
    assert pair.owner.received.num_ignored == 1


def run_scenario(pair):
    grant = pair.grant("one")
    pair.network.faults.post_polls = 2
    send(pair, grant)
    try:
        pair.open(pair.grant("two", 2)).abort("no")
    finally:
        pair.let_everything_end()
    return grant


def count_operations(kind):
    pair = Pair(kind)
    run_scenario(pair)
    assert Completed("one", b"payload") in pair.received
    return pair.network.faults.num_operations


@pytest.mark.parametrize("kind", [BlockMemory, SlowMemory])
@pytest.mark.parametrize(
    "error", [TransferError("scripted"), PeerLostError("scripted")], ids=["fails", "lost"]
)
def test_whatever_operation_fails_every_lease_ends_once_and_no_wrong_byte_is_accepted(error, kind):
    num_operations = count_operations(kind)
    assert num_operations > 20
    for n in range(1, num_operations + 1):
        pair = Pair(kind)
        pair.network.faults.fail_at(n, error)
        grant = run_scenario(pair)
        pair.audit()
        assert {event.lease_id for event in pair.sent} == {"one", "two"}, n
        assert {event.lease_id for event in pair.received} == {"one", "two"}, n
        if any(isinstance(event, Completed) for event in pair.received):
            assert Finished("one") in pair.sent, n
            assert_arrived(pair, grant)


def test_a_step_that_raises_is_reported_once_and_leases_still_end():
    pair = Pair()
    pair.grant()

    def broken():
        raise RuntimeError("bug")

    events = []
    transfer_engine = TransferEngine(
        pair.network.agent("third"), pair.clock, events.append, outgoing=pair.source
    )
    transfer_engine.agent.notifications = broken
    transfer_engine.step()
    transfer_engine.step()
    assert [type(e).__name__ for e in events] == ["TransferEngineFailed"]
    pair.let_everything_end()
    pair.audit()


def test_how_long_a_block_takes_to_a_peer_is_measured_and_forgotten_with_it(pair, monkeypatch):
    monkeypatch.setattr("kv_transfer.lease.link_meter.MIN_MEASURED_BYTES", 1)
    pair.network.faults.post_polls = 2
    grant = pair.grant()
    outgoing = pair.open(grant)
    assert outgoing.block_s is None
    outgoing.write([7, 6, 5, 4], [0, 1, 2, 3])
    outgoing.finish(b"")
    pair.writer.step()
    pair.clock.at += 0.002
    pair.step(3)
    assert outgoing.block_s == pytest.approx(0.0005)
    later = pair.open(pair.grant("later", 1))
    assert later.block_s == pytest.approx(0.0005)  # before anything of this lease was posted
    pair.network.kill("owner")
    later.write([1], [0])
    later.finish(b"")
    pair.writer.step()
    assert later.block_s is None
