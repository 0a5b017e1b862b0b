"""What every agent must do, over every agent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch

from cluster.clock import SystemClock
from cluster.kvcache.memory import BlockMemory
from kv_transfer.agent import PeerLostError, TransferError, TransferState
from kv_transfer.in_process import InProcessNetwork
from kv_transfer.mover import Mover
from kv_transfer.nixl_agent import NixlAgent
from kv_transfer.sender import Finished, SendFailed
from tests.contract.agents import LAYOUT, NUM_BLOCKS, nixl_missing, serve_owner, unique_name

MISSING = nixl_missing()
needs_nixl = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
DEADLINE_S = 5.0


def wait_for(condition, *agents):
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for agent in agents:
            agent.inbox.extend(agent.notifications())
        if condition():
            return
        time.sleep(0.0005)
    raise AssertionError("nothing happened before the deadline")


@pytest.fixture(params=["in_process", pytest.param("nixl", marks=needs_nixl)])
def agents(request):
    network = InProcessNetwork()
    make = network.agent if request.param == "in_process" else NixlAgent
    pair = []
    for stem in ("writer", "owner"):
        agent = make(unique_name(stem))
        agent.memory, agent.inbox = BlockMemory(LAYOUT, NUM_BLOCKS), []
        agent.register(agent.memory)
        agent.register(agent.memory)
        pair.append(agent)
    pair[0].memory.buffer.copy_(torch.arange(pair[0].memory.buffer.numel()) % 251)
    yield pair
    for agent in pair:
        assert not getattr(agent, "_handles", None), "a transfer handle was not released"
        agent.close()


def run_write(writer, owner, local, remote, notification=b""):
    peer = writer.connect(owner.metadata())
    handle = writer.post(
        peer, writer.memory.descriptors(local), owner.memory.descriptors(remote), notification
    )
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


def test_memory_that_is_not_registered_is_refused(agents):
    writer, owner = agents
    peer = writer.connect(owner.metadata())
    outside = owner.memory.descriptors([0])
    outside[:, 0] += np.uint64(owner.memory.buffer.numel())
    with pytest.raises(TransferError):
        writer.post(peer, writer.memory.descriptors([0]), outside)
    with pytest.raises(TransferError):
        writer.post(peer, outside, owner.memory.descriptors([0]))


def test_bytes_that_are_no_metadata_are_refused(agents):
    with pytest.raises(TransferError):
        agents[0].connect(b"\xffnonsense")


def test_two_movers_with_threads_serve_many_leases(agents):
    writer, owner = agents
    sent, received = [], []
    sending = Mover(writer, SystemClock(), sent.append, outgoing=writer.memory)
    receiving = Mover(owner, SystemClock(), received.append, incoming=owner.memory)
    sending.start()
    receiving.start()
    for i in range(30):
        outgoing = sending.open(receiving.grant(f"lease-{i}", [i], [0], 10.0))
        outgoing.write([i + 1], [0])
        outgoing.finish(b"%d" % i)
    deadline = time.monotonic() + DEADLINE_S
    while (sending.num_open or receiving.num_open) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(sent) == len(received) == 30
    assert all(isinstance(event, Finished) for event in sent)
    source, target = writer.memory.segments[0].view(torch.uint8), owner.memory.segments[0].view(torch.uint8)
    assert torch.equal(source[1:31], target[:30])
    time.sleep(0.2)  # past the linger: both threads sleep on their conditions
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
    sending.close()
    receiving.close()


@pytest.fixture
def owner_process():
    """(pipe, process) of an owner in a process of its own."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve_owner, args=(theirs, unique_name("child")), daemon=True)
    process.start()
    theirs.close()
    assert pipe.poll(30) and pipe.recv() == "ready"
    yield pipe, process
    if process.is_alive():
        pipe.send(None)
    process.join(10)
    assert process.exitcode is not None


@pytest.fixture
def sending():
    events, memory = [], BlockMemory(LAYOUT, NUM_BLOCKS)
    for segment in memory.segments:
        segment.normal_()
    mover = Mover(NixlAgent(unique_name("sender")), SystemClock(), events.append, outgoing=memory)
    mover.start()
    yield mover, memory, events
    mover.close(2.0)
    assert mover.num_open == 0


def await_event(events):
    deadline = time.monotonic() + DEADLINE_S
    while not events and time.monotonic() < deadline:
        time.sleep(0.001)
    assert events, "no event before the deadline"
    return events.pop(0)


@needs_nixl
def test_a_lease_works_across_processes_and_a_killed_owner_is_an_error_in_time(owner_process, sending):
    pipe, process = owner_process
    mover, memory, events = sending
    for lease_id in ("one", "two"):
        pipe.send((lease_id, [4, 2]))
        outgoing = mover.open(pipe.recv())
        outgoing.write([6, 7], [0, 1])
        outgoing.finish(b"payload")
        assert await_event(events) == Finished(lease_id)
        name, payload, blocks = pipe.recv()
        assert (name, payload) == ("Completed", b"payload")
        assert all(torch.equal(a[[6, 7]], b) for a, b in zip(memory.segments, blocks, strict=True))
    pipe.send(("three", [4, 2]))
    outgoing = mover.open(pipe.recv())
    outgoing.write([6], [0])
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.join(5)
    outgoing.write([7], [1])
    outgoing.finish(b"payload")
    event = await_event(events)
    assert isinstance(event, SendFailed) and isinstance(event.error, TransferError)
