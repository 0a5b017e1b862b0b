"""The measured links of a transfer engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from cluster.types.curves import Link
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.lease.events import Finished, SendFailed
from kv_transfer.lease.group import GroupTransferEngine
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.fakes.clock import ManualClock

LAYOUT = MemoryLayout((SegmentSpec(1, (1 << 17,), torch.int64),))  # a mebibyte a block


def test_a_link_is_known_by_the_owners_name_once_something_was_sent():
    clock, network = ManualClock(), InProcessNetwork()
    network.faults.post_polls = 2
    writer = TransferEngine(network.agent("p0"), clock, lambda event: None, outgoing=BlockMemory(LAYOUT, 1))
    owner = TransferEngine(network.agent("d0"), clock, lambda event: None, incoming=BlockMemory(LAYOUT, 1))
    assert writer.links == owner.links == {}
    outgoing = writer.open(owner.grant("lease", [0], [0], 10.0).received(clock.at))
    outgoing.write([0], [0])
    outgoing.finish(b"")
    for _ in range(4):
        writer.step()
        owner.step()
        clock.at += 0.001
    (link,) = writer.links.values()
    assert set(writer.links) == {"d0"}
    assert link.bytes_per_s == pytest.approx((1 << 20) / 0.001)
    assert owner.links == {}, "it writes to no peer"


def test_the_link_to_a_peer_that_is_lost_is_forgotten():
    clock, network, sent = ManualClock(), InProcessNetwork(), []
    network.faults.post_polls = 2
    writer = TransferEngine(network.agent("p0"), clock, sent.append, outgoing=BlockMemory(LAYOUT, 1))
    owner = TransferEngine(network.agent("d0"), clock, lambda event: None, incoming=BlockMemory(LAYOUT, 1))
    grants = [owner.grant(name, [0], [0], 10.0) for name in ("first", "second")]
    for number, grant in enumerate(grants):
        if number == 1:
            assert set(writer.links) == {"d0"}
            network.kill("d0")
        outgoing = writer.open(grant.received(clock.at))
        outgoing.write([0], [0])
        outgoing.finish(b"")
        for _ in range(4):
            writer.step()
            clock.at += 0.001
    assert isinstance(sent[0], Finished) and isinstance(sent[1], SendFailed)
    assert writer.links == {}


@pytest.mark.parametrize("num_polls", [0, 1, 2])
def test_a_thread_that_comes_back_late_does_not_slow_the_link(num_polls: int) -> None:
    clock, network = ManualClock(), InProcessNetwork()
    writer = TransferEngine(network.agent("p0"), clock, lambda event: None, outgoing=BlockMemory(LAYOUT, 8))
    owner = TransferEngine(network.agent("d0"), clock, lambda event: None, incoming=BlockMemory(LAYOUT, 8))

    def write(lease: str, polls: int, late_s: float) -> None:
        network.faults.post_polls = polls
        outgoing = writer.open(owner.grant(lease, range(8), [0] * 8, 10.0).received(clock.at))
        outgoing.write(range(8), range(8))
        outgoing.finish(b"")
        writer.step()
        clock.at += late_s
        for _ in range(polls + 2):
            writer.step()
            owner.step()
            clock.at += (8 << 20) / 134e9

    write("first", 2, (8 << 20) / 134e9)
    (link,) = writer.links.values()
    assert link.bytes_per_s == pytest.approx(134e9)
    for nth in range(10):
        write(f"late {nth}", num_polls, 0.45)
    assert writer.links["d0"].bytes_per_s >= 40e9


@pytest.mark.parametrize("num_others", [1, 3])
def test_ranks_that_write_side_by_side_are_as_many_times_faster(num_others: int):
    own: Any = SimpleNamespace(links={"d0": Link(0.001, 2e9)})
    group = GroupTransferEngine(own, [SimpleNamespace()] * num_others, lambda event: None, lambda: None)  # type: ignore[list-item, arg-type, return-value]
    assert group.links == {"d0": Link(0.001, (1 + num_others) * 2e9)}
