"""Leases whose writer or owner is lost: over the in-process agent, on a virtual clock."""

from __future__ import annotations

from cluster.kvcache.memory import BlockMemory
from cluster.types.members import ProcessId
from kv_transfer.agents.agent import LeaseExpiredError, PeerLostError
from kv_transfer.lease.events import Aborted, Completed, SendFailed
from kv_transfer.lease.receiver import IN_FLIGHT_S, LOOK_EVERY_S
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.fakes.leases import MARGIN_S, TTL_S
from tests.unit.kv_transfer.test_leases import LAYOUT, send

PROCESS = ProcessId("boot", 1, 7, 0)


def test_a_lease_whose_writers_have_all_ended_is_over_when_nothing_of_theirs_is_on_its_way(pair):
    first, second = (ProcessId("boot", 1, pid, 0) for pid in (7, 8))
    pair.grant()
    pair.owner.note_writer("lease", [first, second])
    pair.owner.note_writer("unknown", [first])
    pair.ended.add(first)
    pair.clock.at = 1.0
    pair.step()
    pair.clock.at = 1.0 + IN_FLIGHT_S + LOOK_EVERY_S
    pair.step()
    assert not pair.received, "one of them still writes"
    pair.ended.add(second)
    ended_at = pair.clock.at = 4.0
    pair.step()
    pair.clock.at = ended_at + IN_FLIGHT_S - 0.01
    pair.step()
    assert not pair.received
    pair.clock.at = ended_at + IN_FLIGHT_S
    pair.step()
    assert pair.received == [Aborted("lease", "the process that was to write has ended")]
    pair.clock.at = 2 * (TTL_S + MARGIN_S)
    pair.step()
    assert len(pair.received) == 1


def test_that_its_writer_has_ended_makes_no_lease_longer(pair):
    pair.grant()
    pair.owner.note_writer("lease", [PROCESS])
    pair.clock.at = TTL_S + MARGIN_S - 0.5
    pair.step()
    pair.ended.add(PROCESS)
    pair.clock.at += LOOK_EVERY_S
    pair.step()
    assert not pair.received
    pair.clock.at = TTL_S + MARGIN_S
    pair.step()
    assert len(pair.received) == 1


def test_a_writer_that_ended_behind_its_last_word_has_delivered(pair):
    grant = pair.grant()
    pair.owner.note_writer("lease", [PROCESS])
    send(pair, grant)
    pair.writer.step()
    pair.ended.add(PROCESS)
    pair.step(2)
    assert pair.received == [Completed("lease", b"payload")]


def test_a_lost_peer_is_forgotten_under_all_that_was_known_of_it(pair, monkeypatch):
    """A new agent of that name is another process: its speed says nothing about leases of the old one."""
    monkeypatch.setattr("kv_transfer.lease.link_meter.MIN_MEASURED_BYTES", 1)
    before = pair.open(pair.grant("before"))
    before.write([7], [0])
    pair.writer.step()
    pair.network.kill("owner")
    before.write([6], [1])
    pair.step(2)
    assert isinstance(pair.sent[0].error, PeerLostError)
    namesake = TransferEngine(
        pair.network.agent("owner"), pair.clock, [].append, incoming=BlockMemory(LAYOUT, 4)
    )
    pair.network.faults.post_polls = 2
    outgoing = pair.open(namesake.grant("next", [0], [0], TTL_S))
    outgoing.write([7], [0])
    outgoing.finish(b"")
    pair.writer.step()
    pair.clock.at += 0.002
    for _ in range(3):
        pair.writer.step()
        namesake.step()
    assert outgoing.block_s is not None and before.block_s is None
    namesake.close()
    pair.owner.close(0.0)


def test_a_right_that_is_never_used_ends_with_its_time_and_the_owner_hears_of_it(pair):
    pair.open(pair.grant())
    pair.clock.at = TTL_S - 0.1
    pair.step()
    assert not pair.sent
    pair.clock.at = TTL_S
    pair.step(2)
    (event,) = pair.sent
    assert isinstance(event, SendFailed) and isinstance(event.error, LeaseExpiredError)
    assert [type(event) for event in pair.received] == [Aborted]


def test_no_word_is_sent_of_a_lease_whose_writes_were_cut_off_with_their_connection(pair):
    """Not even over a new connection: they may still land."""
    pair.network.faults.post_polls = 9
    grants = [pair.grant(name, 1) for name in ("one", "new", "two")]
    one, new, two = (pair.open(grant) for grant in grants)
    one.write([7], [0])
    two.write([6], [0])
    pair.writer.step()
    new.write([5], [0])
    new.finish(b"")
    pair.network.faults.fail("poll", pair.network.faults.counts["poll"] + 1, PeerLostError("cut"))
    pair.network.faults.post_polls = 0
    pair.step(3)
    assert {event.lease_id for event in pair.sent} == {"one", "new", "two"}
    assert [type(event) for event in pair.received] == [Completed] and pair.received[0].lease_id == "new"
