"""What every agent must do: each test runs over each agent, with both ends in this process."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from cluster.clock import SystemClock
from cluster.kvcache.memory import BlockMemory
from kv_transfer.agents import factory as agents_of_the_cluster
from kv_transfer.agents.agent import NotPostedError, PeerLostError, TransferError, TransferState
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.agents.regions import merged
from kv_transfer.lease.events import Completed, Finished
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.contract.agents import (
    ALL_KINDS,
    BIG_LAYOUT,
    LAYOUT,
    NUM_BIG_BLOCKS,
    NUM_BLOCKS,
    make_agent,
    unique_name,
)

DEADLINE_S = 60.0  # a guard only


def wait_for(condition, *agents):
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for agent in agents:
            agent.inbox.extend(agent.notifications())
        if condition():
            return
        time.sleep(0.0005)
    raise AssertionError("nothing happened before the deadline")


def furnished(agent: Any) -> Any:
    """With a memory that is registered, and a list for its notifications."""
    agent.memory, agent.inbox = BlockMemory(LAYOUT, NUM_BLOCKS), []
    agent.register(agent.memory)
    return agent


@pytest.fixture(params=ALL_KINDS)
def agents(request):
    network = InProcessNetwork()
    pair = []
    for stem in ("writer", "owner"):
        agent = furnished(make_agent(request.param, unique_name(stem), network))
        agent.register(agent.memory)
        pair.append(agent)
    pair[0].memory.buffer.copy_(torch.arange(pair[0].memory.buffer.numel()) % 251)
    yield pair
    for agent in pair:
        assert not getattr(agent, "_handles", None), "a transfer handle was not released"
        agent.close()


def run_write(writer, owner, local, remote, notification=b""):
    return run_rows(
        writer, owner, writer.memory.descriptors(local), owner.memory.descriptors(remote), notification
    )


def run_rows(writer, owner, local, remote, notification=b""):
    handle = writer.post(writer.connect(owner.metadata()), local, remote, notification)
    wait_for(lambda: writer.poll(handle) is not TransferState.PENDING, writer, owner)
    state = writer.poll(handle)
    writer.release(handle)
    return state


def test_a_write_moves_exactly_the_named_blocks(agents):
    writer, owner = agents
    assert run_write(writer, owner, [3, 9, 4], [8, 1, 2]) is TransferState.DONE
    for source, target in zip(writer.memory.segments, owner.memory.segments, strict=True):
        source, target = source.view(torch.uint8), target.view(torch.uint8)
        assert torch.equal(source[[3, 9, 4]], target[[8, 1, 2]])
        assert not target[[i for i in range(NUM_BLOCKS) if i not in (8, 1, 2)]].any()


def test_a_posts_notification_arrives_with_the_writers_name(agents):
    writer, owner = agents
    run_write(writer, owner, [0], [0], b"\x00done")
    wait_for(lambda: owner.inbox, writer, owner)
    assert owner.inbox == [(writer.name, b"\x00done")]


def test_notifications_arrive_once_and_in_order(agents):
    writer, owner = agents
    peer = writer.connect(owner.metadata())
    for i in range(20):
        writer.notify(peer, b"%d" % i)
    wait_for(lambda: len(owner.inbox) >= 20, writer, owner)
    assert owner.inbox == [(writer.name, b"%d" % i) for i in range(20)]


def test_connecting_again_is_harmless_and_disconnecting_can_be_undone(agents):
    writer, owner = agents
    assert writer.connect(owner.metadata()) == writer.connect(owner.metadata()) == owner.name
    writer.disconnect(owner.name)
    writer.disconnect(owner.name)
    writer.disconnect("never heard of")
    with pytest.raises(PeerLostError):
        writer.notify(owner.name, b"x")
    assert run_write(writer, owner, [1], [1]) is TransferState.DONE


def test_a_closed_agent_raises_nothing_but_the_errors_of_agents(agents):
    writer, owner = agents
    peer = writer.connect(owner.metadata())
    writer.close()
    rows, raised = writer.memory.descriptors([0]), []
    for verb, arguments in (
        (writer.register, (BlockMemory(LAYOUT, NUM_BLOCKS),)),
        (writer.connect, (owner.metadata(),)),
        (writer.post, (peer, rows, rows)),
        (writer.notify, (peer, b"x")),
        (writer.notifications, ()),
    ):
        try:
            verb(*arguments)
        except Exception as error:
            raised.append(error)
    assert all(isinstance(error, TransferError) for error in raised), raised


def test_memory_that_is_not_registered_is_refused(agents):
    writer, owner = agents
    peer = writer.connect(owner.metadata())
    outside = owner.memory.descriptors([0])
    outside[:, 0] += np.uint64(owner.memory.buffer.numel())
    with pytest.raises(NotPostedError):
        writer.post(peer, writer.memory.descriptors([0]), outside)
    with pytest.raises(NotPostedError):
        writer.post(peer, outside, owner.memory.descriptors([0]))


def test_bytes_that_are_no_metadata_are_refused(agents):
    with pytest.raises(TransferError):
        agents[0].connect(b"\xffnonsense")


def test_bytes_are_there_when_their_notification_is_however_many_writes_are_in_flight(agents):
    writer, owner = agents
    peer = writer.connect(owner.metadata())
    source, target = (agent.memory.segments[0].view(torch.uint8) for agent in agents)
    handles = []
    for block in range(NUM_BLOCKS):
        rows = writer.memory.descriptors([block]), owner.memory.descriptors([NUM_BLOCKS - 1 - block])
        handles.append(writer.post(peer, *rows, b"%d" % block))
    num_seen = 0

    def all_seen():
        nonlocal num_seen
        for _, payload in owner.inbox[num_seen:]:
            block = int(payload)
            assert torch.equal(source[block], target[NUM_BLOCKS - 1 - block])
        num_seen = len(owner.inbox)
        states = [writer.poll(handle) for handle in handles]
        return num_seen >= NUM_BLOCKS and set(states) == {TransferState.DONE}

    wait_for(all_seen, writer, owner)
    assert sorted(int(payload) for _, payload in owner.inbox) == list(range(NUM_BLOCKS))
    for handle in reversed(handles):
        writer.release(handle)


def test_a_notice_after_a_done_write_comes_after_that_writes_own(agents):
    writer, owner = agents
    for i in range(10):
        assert run_write(writer, owner, [i], [i], b"write %d" % i) is TransferState.DONE
        writer.notify(owner.name, b"notice %d" % i)
    wait_for(lambda: len(owner.inbox) >= 20, writer, owner)
    assert [data for _, data in owner.inbox] == [
        b"%s %d" % (w, i) for i in range(10) for w in (b"write", b"notice")
    ]


def test_a_second_release_does_not_disturb_later_writes(agents):
    writer, owner = agents
    peer = writer.connect(owner.metadata())
    handle = writer.post(peer, writer.memory.descriptors([0]), owner.memory.descriptors([0]))
    wait_for(lambda: writer.poll(handle) is TransferState.DONE, writer, owner)
    writer.release(handle)
    writer.release(handle)
    assert run_write(writer, owner, [5], [6]) is TransferState.DONE


def test_a_write_in_flight_is_not_forgotten_and_its_bytes_arrive(agents):
    """No transport can call a write off, so none may say that it did."""
    writer, owner = agents
    if (network := getattr(writer, "_network", None)) is not None:
        network.faults.is_parted = True
    peer, blocks = writer.connect(owner.metadata()), range(NUM_BLOCKS)
    handle = writer.post(peer, writer.memory.descriptors(blocks), owner.memory.descriptors(blocks), b"whole")
    try:
        writer.release(handle)
    except TransferError:
        if network is not None:
            network.faults.is_parted = False
        wait_for(lambda: writer.poll(handle) is not TransferState.PENDING, writer, owner)
        assert writer.poll(handle) is TransferState.DONE
        writer.release(handle)
    expected = writer.memory.buffer.clone()
    writer.memory.buffer.fill_(77)  # the source belongs to another lease now
    wait_for(lambda: owner.inbox, writer, owner)
    assert torch.equal(owner.memory.buffer, expected)


def test_a_disconnect_ends_what_is_in_flight_and_a_new_connection_works_each_time(agents):
    writer, owner = agents
    for i in range(4):
        peer = writer.connect(owner.metadata())
        handle = writer.post(peer, writer.memory.descriptors([i]), owner.memory.descriptors([i]))
        was_done = writer.poll(handle) is TransferState.DONE
        writer.disconnect(peer)
        state = state_after_disconnect(writer, handle)
        assert state is TransferState.DONE or not was_done
        if state is TransferState.DONE:  # the answer may come between the poll and the disconnect
            ours, theirs = (agent.memory.segments[0].view(torch.uint8)[i] for agent in agents)
            assert torch.equal(ours, theirs)
        try:
            writer.release(handle)
        except TransferError:
            assert state is not TransferState.DONE
        assert run_write(writer, owner, [i + 8], [i + 8], b"%d" % i) is TransferState.DONE
    wait_for(lambda: len(owner.inbox) >= 4, writer, owner)
    assert owner.inbox == [(writer.name, b"%d" % i) for i in range(4)]


def state_after_disconnect(agent, handle):
    """DONE or FAILED: a write must not stay pending when its peer was dropped."""
    try:
        state = agent.poll(handle)
    except TransferError:
        return TransferState.FAILED
    assert state is not TransferState.PENDING
    return state


def test_a_peer_of_the_same_name_and_other_metadata_replaces_the_old(agents, request):
    writer, owner = agents
    assert run_write(writer, owner, [1], [1], b"old") is TransferState.DONE
    wait_for(lambda: owner.inbox, writer, owner)
    kind = request.node.callspec.params["agents"]
    again = furnished(make_agent(kind, owner.name, getattr(writer, "_network", None)))
    assert again.metadata() != owner.metadata()
    assert run_write(writer, again, [4], [9], b"new") is TransferState.DONE
    wait_for(lambda: again.inbox, writer, again)
    assert torch.equal(writer.memory.segments[1][4], again.memory.segments[1][9])
    assert again.inbox == [(writer.name, b"new")] and not owner.memory.segments[1][9].any()
    again.close()


def test_one_row_outside_the_memory_spoils_the_write(agents):
    writer, owner = agents
    peer = writer.connect(owner.metadata())
    good = owner.memory.descriptors(range(4))
    for column, change in ((0, owner.memory.buffer.numel()), (1, owner.memory.buffer.numel())):
        local, remote = writer.memory.descriptors(range(4)), good.copy()
        remote[2, column] += np.uint64(change)
        if column == 1:
            local[2, 1] = remote[2, 1]
        with pytest.raises(NotPostedError):
            writer.post(peer, local, remote)
    assert not owner.memory.buffer.any()
    assert run_write(writer, owner, [0], [0]) is TransferState.DONE


@pytest.mark.parametrize(
    ("step", "merges"), [(1, False), (-1, False), (1, True)], ids=["one run", "many runs", "one descriptor"]
)
def test_32_mib_move_in_one_write(agents, step, merges):
    writer, owner = agents
    source, target = (BlockMemory(BIG_LAYOUT, NUM_BIG_BLOCKS) for _ in agents)
    writer.register(source)
    owner.register(target)
    source.buffer.view(torch.int64).copy_(torch.arange(source.buffer.numel() // 8))
    blocks = list(range(NUM_BIG_BLOCKS))
    local, remote = source.descriptors(blocks), target.descriptors(blocks[::step])
    if merges:
        local, remote = merged(local, remote)
        assert len(local) == 1
    assert run_rows(writer, owner, local, remote, b"big") is TransferState.DONE
    wait_for(lambda: owner.inbox, writer, owner)
    for ours, theirs in zip(source.segments, target.segments, strict=True):
        assert torch.equal(ours, theirs if step == 1 else theirs.flip(0))


def test_a_thousand_tiny_descriptors_move_in_one_write(agents):
    writer, owner = agents
    places = np.random.default_rng(0).permutation(owner.memory.buffer.numel() // 48)[:1000]
    local, remote = np.empty((1000, 2), dtype=np.uint64), np.empty((1000, 2), dtype=np.uint64)
    local[:, 0] = writer.memory.base_address + 48 * np.arange(1000)
    remote[:, 0] = owner.memory.base_address + 48 * places
    local[:, 1] = remote[:, 1] = 48
    assert run_rows(writer, owner, local, remote) is TransferState.DONE
    expected = torch.zeros_like(owner.memory.buffer)
    expected[: 48 * (len(expected) // 48)].view(-1, 48)[places] = writer.memory.buffer[:48000].view(-1, 48)
    assert torch.equal(owner.memory.buffer, expected)


def test_a_first_transfer_without_a_block_reaches_an_owner_that_answers_late(agents):
    """The writer has nothing open any more when the connection is made."""
    writer, owner = agents
    sent, received = [], []
    sending = TransferEngine(writer, SystemClock(), sent.append, outgoing=writer.memory)
    receiving = TransferEngine(owner, SystemClock(), received.append, incoming=owner.memory)
    grant = receiving.grant("nothing", [], [], 600.0, (), [2])  # the owner has both blocks of the prompt
    sending.open(grant.received(time.monotonic())).finish(b"first token")
    sending.start()
    deadline = time.monotonic() + DEADLINE_S
    while not sent and time.monotonic() < deadline:  # its end is told after it is over
        time.sleep(0.001)
    assert sent and not received
    receiving.start()
    while not received and time.monotonic() < deadline:
        time.sleep(0.001)
    assert received == [Completed("nothing", b"first token")]
    sending.close()
    receiving.close()


def test_two_transfer_engines_with_threads_serve_many_leases(agents):
    writer, owner = agents
    sent, received = [], []
    sending = TransferEngine(writer, SystemClock(), sent.append, outgoing=writer.memory, linger_s=0.1)
    receiving = TransferEngine(owner, SystemClock(), received.append, incoming=owner.memory, linger_s=0.1)
    sending.start()
    receiving.start()
    for i in range(30):
        grant = receiving.grant(f"lease-{i}", [i], [0], 600.0)
        outgoing = sending.open(grant.received(time.monotonic()))
        outgoing.write([i + 1], [0])
        outgoing.finish(b"%d" % i)
    nothing = receiving.grant("nothing", [], [], 600.0, (), [2])  # the owner has both blocks of the prompt
    sending.open(nothing.received(time.monotonic())).finish(b"first token")
    deadline = time.monotonic() + DEADLINE_S
    while (sending.num_open or receiving.num_open) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(sent) == len(received) == 31
    assert Completed("nothing", b"first token") in received
    assert all(isinstance(event, Finished) for event in sent)
    source, target = writer.memory.segments[0].view(torch.uint8), owner.memory.segments[0].view(torch.uint8)
    assert torch.equal(source[1:31], target[:30])
    time.sleep(0.2)  # past the linger: both threads sleep on their conditions
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
    sending.close()
    receiving.close()


def test_a_collective_agent_that_is_given_no_host_finds_one_where_peers_reach_it():
    writer, owner = (
        furnished(agents_of_the_cluster.make_agent("collective", unique_name(stem))) for stem in ("a", "b")
    )
    writer.memory.buffer.fill_(9)
    assert run_write(writer, owner, [1], [2]) is TransferState.DONE
    assert (owner.memory.segments[0].view(torch.uint8)[2] == 9).all()
    writer.close()
    owner.close()
