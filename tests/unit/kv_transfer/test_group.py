"""Leases of workers of two ranks each: over the in-process agent and pipes that deliver at once, on a virtual
clock."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from kv_transfer.agents.agent import LayoutMismatchError, TransferError
from kv_transfer.agents.in_process import FaultScript, InProcessNetwork
from kv_transfer.lease.events import Aborted, Completed, Finished, SendAborted, SendFailed
from kv_transfer.lease.group import GroupTransferEngine, RankLink
from kv_transfer.lease.outgoing import Outgoing
from kv_transfer.lease.rank_follower import EngineOrder, RankFollower, RankReady
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.fakes.clock import ManualClock
from tests.fakes.leases import MARGIN_S, TTL_S, SteppedPair

LAYOUT = MemoryLayout((SegmentSpec(4, (2,), torch.float32), SegmentSpec(4, (3,), torch.float32)))
NUM_RANKS = 2


class Instant:
    """One end of a pipe whose other end acts at once."""

    def __init__(self, act):
        self.act = act

    def send(self, message):
        self.act(message)


class WatchedEngine(TransferEngine):
    """Knows which of the leases that it has opened are still held."""

    def __init__(self, *args: Any, **sides: Any):
        super().__init__(*args, **sides)
        self._opened: list[weakref.ref[Outgoing]] = []

    def open(self, received):
        outgoing = super().open(received)
        self._opened.append(weakref.ref(outgoing))
        return outgoing

    @property
    def num_held(self) -> int:
        return sum(outgoing() is not None for outgoing in self._opened)


class Worker:
    """Writer or owner: a transfer engine per rank, the group's over them."""

    def __init__(self, network, clock, name, is_writer):
        self.memories = [BlockMemory(LAYOUT, 8) for _ in range(NUM_RANKS)]
        self.events = []
        self.reached = True  # whether rank 1's forwards have come as far as rank 0's
        sides: list[dict[str, Any]] = [
            {"outgoing" if is_writer else "incoming": memory} for memory in self.memories
        ]
        self.pipe: Any = Instant(lambda order: self.rank_follower.follow(order))
        self.link = RankLink(self.pipe)
        self.rank_follower = RankFollower(
            Instant(
                lambda message: self.link.on_report(message, lambda event: self.group.on_event(1, event))
            ),  # type: ignore[arg-type]
            lambda mark: self.reached,
        )
        own = WatchedEngine(
            network.agent(f"{name}-0"),
            clock,
            lambda event: self.group.on_event(0, event),
            margin_s=MARGIN_S,
            **sides[0],
        )
        other = WatchedEngine(
            network.agent(f"{name}-1"), clock, self.rank_follower.on_event, margin_s=MARGIN_S, **sides[1]
        )
        self.rank_follower.attach(other)
        self.engines = [own, other]
        self.group = GroupTransferEngine(own, [self.link], self.events.append, lambda: (1, 1))

    def step(self):
        for engine in self.engines:
            engine.step()

    def audit(self):
        """Nothing of a lease is left."""
        assert [engine.num_open for engine in self.engines] == [0, 0]
        self.events.clear()
        if any(engine.num_held for engine in self.engines):
            gc.collect()
        assert [engine.num_held for engine in self.engines] == [0, 0]


class Pair(SteppedPair):
    def __init__(self):
        self.clock, self.network = ManualClock(), InProcessNetwork()
        self.writer = Worker(self.network, self.clock, "writer", True)
        self.owner = Worker(self.network, self.clock, "owner", False)
        self.pool = BlockPool(8, 4)
        self.blocks = self.pool.allocate(2)
        for rank, memory in enumerate(self.writer.memories):
            for segment in memory.segments:
                segment.copy_(torch.arange(1, segment.numel() + 1).view_as(segment) + 1000 * rank)

    def grant(self):
        return self.owner.group.grant("lease", self.blocks, self.pool.generations(self.blocks), TTL_S)

    def send(self):
        outgoing = self.writer.group.open(self.grant().received(self.clock.at))
        outgoing.write([7], [0])
        outgoing.write([6], [1])
        outgoing.finish(b"payload")
        return outgoing

    def check_bytes(self):
        for source, target in zip(self.writer.memories, self.owner.memories, strict=True):
            for ours, theirs in zip(source.segments, target.segments, strict=True):
                assert torch.equal(theirs[self.blocks], ours[[7, 6]])


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.let_everything_end()
    for worker in (pair.writer, pair.owner):
        assert len(worker.events) <= 1
        worker.audit()


def test_every_rank_writes_its_share_and_the_lease_ends_once(pair):
    pair.send()
    pair.step(3)
    assert pair.writer.events == [Finished("lease")]
    assert pair.owner.events == [Completed("lease", b"payload")]
    pair.check_bytes()
    total = sum(LAYOUT.block_bytes * 2 for _ in range(NUM_RANKS))
    assert pair.writer.group.sent.raw_bytes == total


def test_a_rank_writes_only_when_its_forward_has_come_so_far(pair):
    pair.writer.reached = False
    pair.send()
    pair.step(5)
    assert not pair.owner.events and not pair.owner.memories[1].buffer.any()
    pair.writer.reached = True
    pair.step(3)
    assert pair.owner.events == [Completed("lease", b"payload")]
    pair.check_bytes()


def test_an_abort_reaches_all_ranks(pair):
    pair.writer.reached = False
    outgoing = pair.send()
    outgoing.abort("not wanted")
    pair.step(3)
    assert pair.writer.events == [SendAborted("lease", "not wanted")]
    assert isinstance(pair.owner.events[0], Aborted)


def test_a_lease_that_the_owner_cancels_is_over_when_all_writers_are(pair):
    pair.writer.reached = False
    pair.send()
    pair.owner.group.cancel("lease")
    pair.step(3)
    assert not pair.owner.events  # rank 1's writer has not stopped: its bytes may still land
    pair.writer.reached = True
    pair.step(3)
    assert pair.owner.events == [Aborted("lease", "cancelled by the owner")]


def test_a_revoked_lease_ends_on_all_ranks_at_once(pair):
    pair.grant()
    pair.owner.group.revoke("lease", "no writer")
    pair.step()
    assert pair.owner.events == [Aborted("lease", "no writer")]


def test_wherever_an_operation_fails_both_sides_hear_once_and_no_wrong_bytes_count():
    outcomes = set()
    for nth in range(1, 60):
        pair = Pair()
        pair.network.faults.fail_at(nth)
        pair.send()
        pair.let_everything_end()
        (sent,), (received,) = pair.writer.events, pair.owner.events
        if isinstance(received, Completed):
            pair.check_bytes()
        outcomes.add((type(sent).__name__, type(received).__name__))
        del sent, received  # an error holds its frames; the scripted one, too
        pair.network.faults = FaultScript()
        for worker in (pair.writer, pair.owner):
            worker.audit()
    assert outcomes == {("Finished", "Completed"), ("SendFailed", "Aborted"), ("SendFailed", "Expired")}


def test_a_worker_with_another_number_of_ranks_is_refused(pair):
    grant = pair.owner.engines[0].grant("alone", [5], [0], TTL_S)
    with pytest.raises(LayoutMismatchError, match="tensor_parallel_size is 2 here and 1 there"):
        pair.writer.group.open(grant.received(pair.clock.at))
    pair.owner.engines[0].revoke("alone", "test")
    pair.owner.engines[0].step()
    pair.owner.events.clear()


def test_a_rank_that_answers_too_late_shifts_no_later_grant(pair):
    """Its answer is of a lease that has been given up; the next lease needs its own."""
    owner, orders = pair.owner, []
    follow, wait_granted = owner.rank_follower.follow, owner.link.wait_granted
    owner.pipe.act = orders.append
    owner.link.wait_granted = lambda lease_id: wait_granted(lease_id, 0.0)
    with pytest.raises(TransferError, match="in time"):
        owner.group.grant("first", pair.blocks, pair.pool.generations(pair.blocks), TTL_S)
    owner.step()
    (revoked,) = owner.events
    assert isinstance(revoked, Aborted) and revoked.lease_id == "first", "the end of rank 0 alone"
    owner.events.clear()
    for order in orders:
        follow(order)
    owner.pipe.act = follow
    pair.send()
    pair.step(3)
    assert owner.events == [Completed("lease", b"payload")]
    pair.check_bytes()


def test_a_rank_that_cannot_open_its_part_fails_the_lease(pair):
    grant = pair.grant()
    pair.writer.engines[1].open(grant.shards[0].received(pair.clock.at)).abort("taken by a test")
    with pytest.raises(TransferError):
        pair.writer.engines[1].open(grant.shards[0].received(pair.clock.at))
    outgoing = pair.writer.group.open(grant.received(pair.clock.at))
    outgoing.write([7], [0])
    pair.let_everything_end()
    assert isinstance(pair.writer.events[0], SendFailed)
    assert isinstance(pair.owner.events[0], Aborted)


def test_a_rank_that_ends_is_known_at_once():
    ours, theirs = Pipe()
    link = RankLink(ours)
    listening = threading.Thread(target=link.listen, args=(print,))
    listening.start()
    theirs.send(RankReady(1))
    link.wait_ready(60)
    theirs.close()
    with pytest.raises(TransferError, match="has ended"):
        link.wait_granted("lease", 60)
    listening.join(60)
    assert not listening.is_alive()
    link.order(EngineOrder("cancel", ("lease",)))  # not an error


def test_a_link_whose_listener_fails_is_given_up_by_name():
    ours, theirs = Pipe()
    link, transfer_engine = RankLink(ours), RankFollower(theirs, lambda mark: True)
    transfer_engine.attach(SimpleNamespace(sent=None, received=None))  # type: ignore[arg-type]
    transfer_engine.on_event(SendFailed("lease", TransferError("because")))

    def broken(event):
        raise OSError("the owner's, not the pipe's")

    with pytest.raises(OSError, match="the owner's"):
        link.listen(broken)
    with pytest.raises(TransferError, match="has ended"):
        link.wait_granted("lease", 60)


def test_orders_and_events_survive_a_real_pipe():
    ours, theirs = Pipe()
    memory, events = BlockMemory(LAYOUT, 4), queue.SimpleQueue()
    link, rank_follower = RankLink(ours), RankFollower(theirs, lambda mark: True)
    transfer_engine = TransferEngine(
        InProcessNetwork().agent("rank"), ManualClock(), rank_follower.on_event, incoming=memory
    )
    rank_follower.attach(transfer_engine)
    for run, *arguments in ((rank_follower.run,), (link.listen, events.put)):
        threading.Thread(target=run, args=arguments, daemon=True).start()
    link.order(EngineOrder("grant", ("lease", (1, 2), (7, 8), 5.0, (), (4, 0))))
    grant = link.wait_granted("lease", 60)
    assert (grant.block_ids, grant.generations, grant.first_blocks) == ((1, 2), (7, 8), (4, 0))
    link.order(EngineOrder("revoke", ("lease", "why not")))
    link.order(EngineOrder("grant", ("next", (3,), (9,), 5.0, (), ())))
    link.wait_granted("next", 5)  # orders keep their order: the lease is revoked
    transfer_engine.step()
    assert events.get(timeout=60) == Aborted("lease", "why not")
    rank_follower.on_event(SendFailed("lease", TransferError("because")))
    assert str(events.get(timeout=60).error) == "because"
