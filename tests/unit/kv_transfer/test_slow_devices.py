"""Leases whose bytes a device sums, codes and decodes over several polls: whatever happens meanwhile, no
block is given back before the device is done, and each lease has one end. How faults of the transport end
such leases: test_leases.py, test_wire.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cluster.lost_device import DeviceLostError
from cluster.types.members import ProcessId
from kv_transfer.agents.agent import PeerLostError
from kv_transfer.codecs.checksum import BlockSums
from kv_transfer.lease.events import (
    Aborted,
    Completed,
    Expired,
    Finished,
    LateWrite,
    SendAborted,
    SendFailed,
    TransferEngineFailed,
)
from tests.fakes.leases import MARGIN_S, TTL_S
from tests.fakes.slow_memory import SlowMemory
from tests.unit.kv_transfer import test_wire
from tests.unit.kv_transfer.test_leases import Pair, assert_arrived, send

NUM_LOOKS = 3


@pytest.fixture
def pair():
    pair = Pair(SlowMemory)
    yield pair
    end(pair)


@pytest.fixture
def coded():
    pair = test_wire.Pair(kind=SlowMemory)
    yield pair
    end(pair)


def end(pair):
    pair.let_everything_end()
    pair.audit()
    assert not pair.source.unfinished and not pair.target.unfinished


@pytest.mark.parametrize("loser", ["writer", "owner"])
def test_a_lost_device_is_told_and_costs_no_single_lease(loser):
    """Every later lease would fail, too: the worker must be replaced."""
    pair = Pair(SlowMemory)

    def lost():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    memory, events = (pair.source, pair.sent) if loser == "writer" else (pair.target, pair.received)
    memory.mark = lambda: lost
    outgoing = pair.open(pair.grant())
    outgoing.write([7, 6, 5, 4], [0, 1, 2, 3])
    outgoing.finish(b"payload")
    pair.step(20)
    (event,) = events
    assert isinstance(event, TransferEngineFailed) and isinstance(event.error, DeviceLostError)


def sum_at_the_writer(pair, name="lease"):
    """All is written, and the writer's device sums."""
    outgoing = send(pair, pair.grant(name))
    pair.writer.step()
    assert pair.source.unfinished and not pair.sent
    return outgoing


def settle_at_the_owner(pair, name="lease"):
    """The writer is done, and the owner's device sums."""
    outgoing = send(pair, pair.grant(name))
    while not pair.target.unfinished:
        pair.writer.step()
        pair.owner.step()
    assert not pair.received
    return outgoing


def step_until_the_device_is_done(memory, engine, events):
    num_events = len(events)
    for _ in range(NUM_LOOKS):
        assert memory.unfinished and len(events) == num_events
        engine.step()
    engine.step()
    assert not memory.unfinished and len(events) > num_events


def test_the_word_comes_when_the_bytes_are_summed_and_the_end_when_they_are_checked(pair):
    grant = pair.grant()
    send(pair, grant)
    pair.writer.step()
    assert pair.writer.pause_s() == 0.001
    step_until_the_device_is_done(pair.source, pair.writer, pair.sent)
    assert pair.sent == [Finished("lease")]
    pair.clock.at += 5.0
    pair.owner.step()
    assert pair.owner.pause_s() == 0.001
    step_until_the_device_is_done(pair.target, pair.owner, pair.received)
    assert pair.received == [Completed("lease", b"payload")]
    assert_arrived(pair, grant)


def test_the_sums_of_all_leases_of_a_poll_are_one_launch(pair, monkeypatch):
    launches = []
    mark = SlowMemory.mark
    monkeypatch.setattr(SlowMemory, "mark", lambda self: (launches.append(self), mark(self))[1])
    for name in ("a", "b", "c"):
        outgoing = pair.open(pair.grant(name, 2))
        outgoing.write([7, 6], [0, 1])
        outgoing.finish(b"")
    pair.writer.step()
    assert launches == [pair.source] and len(pair.source.unfinished) == 1
    while len(pair.sent) < 3:
        pair.writer.step()
    pair.owner.step()
    assert launches == [pair.source, pair.target]
    pair.step(5)
    assert [event.lease_id for event in pair.received] == ["a", "b", "c"]


def test_an_abort_waits_until_the_sources_are_read(pair):
    sum_at_the_writer(pair).abort("client gone")
    step_until_the_device_is_done(pair.source, pair.writer, pair.sent)
    assert pair.sent == [SendAborted("lease", "client gone")]
    pair.owner.step()
    assert pair.received == [Aborted("lease", "client gone")]


def test_a_peer_that_is_lost_meanwhile_fails_the_lease_when_they_are_read(pair):
    sum_at_the_writer(pair)
    pair.network.faults.fail("post", pair.network.faults.counts["post"] + 1, PeerLostError("gone"))
    pair.open(pair.grant("other")).write([3], [0])
    pair.writer.step()
    assert [(type(event), event.lease_id) for event in pair.sent] == [(SendFailed, "other")]
    while pair.source.unfinished:
        assert len(pair.sent) == 1
        pair.writer.step()
    assert [(type(event), event.lease_id) for event in pair.sent[1:]] == [(SendFailed, "lease")]


def test_what_has_arrived_in_time_is_told_after_it(pair):
    sum_at_the_writer(pair)
    pair.clock.at = TTL_S
    step_until_the_device_is_done(pair.source, pair.writer, pair.sent)
    pair.step(5)
    assert pair.received == [Completed("lease", b"payload")]


@pytest.mark.parametrize("happens", ["cancel", "revoke", "late write"])
def test_a_lease_that_is_discarded_while_it_settles_ends_when_it_has(pair, happens):
    if happens == "late write":
        others = pair.pool.allocate(4)  # so that the next lease gets the blocks of the last one
        late = pair.open(pair.grant("late"))
        late.expires_at = math.inf
        pair.clock.at += TTL_S + MARGIN_S
        pair.owner.step()
        assert pair.received == [Expired("late")]
        pair.received.clear()
        settle_at_the_owner(pair, "lease")
        late.write([0], [0])
        pair.writer.step()
        late.abort("stopped")
        pair.writer.step()
        pair.owner.step()
        (event,) = pair.received
        assert isinstance(event, LateWrite) and pair.held
        pair.received.clear()
        pair.pool.free(others)
    else:
        settle_at_the_owner(pair)
        if happens == "cancel":
            pair.owner.cancel("lease")
        else:
            pair.owner.revoke("lease", "its writer has ended")
    while pair.target.unfinished:
        assert not pair.received and pair.held
        pair.owner.step()
    (event,) = pair.received
    assert isinstance(event, Aborted) and event.lease_id == "lease"


@pytest.mark.parametrize("happens", ["its time is over", "its writer has ended"])
def test_a_lease_whose_writer_is_done_neither_expires_nor_is_orphaned(pair, happens):
    settle_at_the_owner(pair)
    writer = ProcessId("boot", 4026531836, 7, 1)
    pair.owner.note_writer("lease", [writer])
    pair.ended.add(writer)
    pair.clock.at += TTL_S + MARGIN_S if happens == "its time is over" else 1.0
    pair.owner.step()
    pair.clock.at += 3.0
    pair.step(5)
    assert pair.received == [Completed("lease", b"payload")]


@pytest.mark.parametrize("digest", ["the same", "another"])
def test_a_second_word_is_ignored_while_the_first_is_checked(pair, monkeypatch, digest):
    from kv_transfer.lease import lease_writer

    if digest == "the same":
        pair.network.faults.duplicate(1)
        settle_at_the_owner(pair)
    else:
        settle_at_the_owner(pair)
        envelope = lease_writer.Envelope("lease", b"other", lease_writer.NoticeKind.DONE, b"")
        pair.writer.agent.notify("owner", lease_writer.encode(envelope))
    pair.step(6)
    assert pair.received == [Completed("lease", b"payload")]
    assert pair.owner.received.num_ignored == 1 and pair.owner.received.num_mismatched == 0


@pytest.mark.parametrize("side", ["writer", "owner"])
def test_closing_meanwhile_gives_every_lease_one_end(side):
    pair: Any = Pair(SlowMemory)
    pair.source.num_looks = pair.target.num_looks = lambda: 10**9  # a device that hangs
    sum_at_the_writer(pair) if side == "writer" else None
    if side == "owner":
        pair.source.num_looks = lambda: 0
        settle_at_the_owner(pair)
    engine, events = (pair.writer, pair.sent) if side == "writer" else (pair.owner, pair.received)
    engine.close(0.0)
    assert [type(event) for event in events] == [SendFailed if side == "writer" else Aborted]


def test_a_launch_that_raises_ends_its_leases_alone(pair, monkeypatch):
    grant = pair.grant("first", 2)
    outgoing = pair.open(grant)
    outgoing.write([7, 6], [0, 1])
    outgoing.finish(b"")

    def fail() -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(pair.source, "mark", fail)
        pair.writer.step()
    pair.step(3)
    assert isinstance(pair.sent[0], SendFailed) and "broken" in str(pair.sent[0].error)
    assert isinstance(pair.received[0], Aborted)
    following = pair.grant("next")
    send(pair, following)
    pair.step(12)
    assert pair.received[1:] == [Completed("next", b"payload")]


def test_coded_groups_leave_when_they_are_coded_and_count_when_they_are_decoded(coded):
    grant = coded.grant()
    test_wire.send(coded, grant)
    while not coded.received:
        coded.step()
        if coded.writer_wire.memory.unfinished:
            assert coded.writer_wire.num_used and not coded.sent
        if coded.target.unfinished or coded.owner_wire.memory.unfinished:
            assert coded.owner_wire.num_used and not coded.received
    assert coded.received == [Completed("lease", b"payload")]
    test_wire.assert_arrived(coded, grant, 8)
    assert coded.sent_numbers() == (2, 0) and coded.writer.sent.key_error > 0


def test_an_abort_waits_until_groups_are_coded_and_posts_none_of_them(coded):
    outgoing = coded.open(coded.grant())
    outgoing.write(test_wire.source_blocks(outgoing.grant)[:4], range(4))
    coded.writer.step()
    assert coded.writer_wire.num_used == 1
    outgoing.abort("client gone")
    step_until_the_device_is_done(coded.source, coded.writer, coded.sent)
    assert coded.sent == [SendAborted("lease", "client gone")] and coded.writer_wire.num_used == 0
    assert coded.writer.sent.coded_bytes == 0


def test_coded_groups_are_not_posted_after_the_grants_time(coded):
    outgoing = coded.open(coded.grant())
    outgoing.write(test_wire.source_blocks(outgoing.grant)[:4], range(4))
    coded.writer.step()
    coded.clock.at = TTL_S
    step_until_the_device_is_done(coded.source, coded.writer, coded.sent)
    assert isinstance(coded.sent[0], SendFailed) and not coded.target.buffer.any()


def test_each_end_is_told_before_the_next_lease_is_looked_at(monkeypatch):
    """On the CPU, where a look takes as long as reading the bytes."""
    happened = []

    class Told(Pair):
        def on_sent(self, event):
            happened.append(event.lease_id)
            super().on_sent(event)

        def on_received(self, event):
            happened.append(event.lease_id)
            super().on_received(event)

    pair = Told()
    of, match, notifications = BlockSums.of, BlockSums.match, pair.writer.agent.notifications
    pair.writer.agent.notifications = lambda: (happened.append("drive"), notifications())[1]
    for name in ("a", "b"):
        outgoing = pair.open(pair.grant(name, 2))
        outgoing.write([7, 6], [0, 1])
        outgoing.finish(b"")
    with monkeypatch.context() as patch:
        patch.setattr(BlockSums, "of", lambda sums, ids: (happened.append("sum"), of(sums, ids))[1])
        pair.writer.step()
    assert happened == ["drive", "sum", "drive", "a", "sum", "drive", "b"]
    happened.clear()
    monkeypatch.setattr(
        BlockSums, "match", lambda sums, *asked: (happened.append("check"), match(sums, *asked))[1]
    )
    pair.owner.step()
    assert happened == ["check", "a", "check", "b"]
