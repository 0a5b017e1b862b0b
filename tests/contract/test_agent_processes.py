"""What every agent must do if its peer is another process that works, dies, comes back, or cannot share
memory."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
import torch

from cluster.clock import SystemClock
from cluster.kvcache.memory import BlockMemory
from kv_transfer.agents.agent import LeaseExpiredError, PeerLostError, TransferError, TransferState
from kv_transfer.lease.events import Expired, Finished, LateWrite, SendFailed
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.contract.agents import (
    BETWEEN_PROCESSES,
    BIG_LAYOUT,
    HANG_S,
    NUM_BIG_BLOCKS,
    make_agent,
    needs_nixl,
    serve_leases,
    unique_name,
    write_late_without_cma,
    write_without_cma,
)
from tests.fakes.processes import call_with, fork_server


@contextlib.contextmanager
def process_of(target, *arguments, environment=None):
    """(pipe, process) of a child; killed at the end if it has not gone by itself."""
    context = fork_server()
    pipe, theirs = context.Pipe()
    called = (environment or {}, target.__module__, target.__name__, theirs, *arguments)
    process = context.Process(target=call_with, args=called, daemon=True)
    process.start()
    theirs.close()
    try:
        yield pipe, process
        process.join(HANG_S)
        assert process.exitcode in (0, -signal.SIGKILL)
    finally:
        process.kill()


def receive(pipe):
    assert pipe.poll(HANG_S), "the child says nothing"
    return pipe.recv()


def await_event(events):
    deadline = time.monotonic() + HANG_S
    while not events and time.monotonic() < deadline:
        time.sleep(0.001)
    assert events, "no event before the deadline"
    return events.pop(0)


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_a_killed_owner_fails_what_is_in_flight_and_its_namesake_takes_over(kind):
    """The end of the connection fails it, long before the lease would expire."""
    events, memory = [], BlockMemory(BIG_LAYOUT, NUM_BIG_BLOCKS)
    for segment in memory.segments:
        segment.normal_()
    transfer_engine = TransferEngine(
        make_agent(kind, unique_name("sender")), SystemClock(), events.append, outgoing=memory
    )
    transfer_engine.start()

    def check_lease(pipe, lease_id):
        pipe.send((lease_id, [4, 2]))
        outgoing = transfer_engine.open(receive(pipe).received(time.monotonic()))
        outgoing.write([6, 7], [0, 1])
        outgoing.finish(b"payload")
        assert await_event(events) == Finished(lease_id)
        name, payload, blocks = receive(pipe)
        assert (name, payload) == ("Completed", b"payload")
        assert all(torch.equal(a[[6, 7]], b) for a, b in zip(memory.segments, blocks, strict=True))

    name, every_other = unique_name("owner"), list(range(0, NUM_BIG_BLOCKS, 2))
    with (
        process_of(serve_leases, kind, name) as (pipe, process),
        process_of(serve_leases, kind, name) as (next_pipe, _),
    ):
        assert receive(pipe) == receive(next_pipe) == "ready"
        check_lease(pipe, "one")
        check_lease(pipe, "two")
        pipe.send(("three", every_other))
        outgoing = transfer_engine.open(receive(pipe).received(time.monotonic()))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        outgoing.write(every_other, range(len(every_other)))
        time.sleep(0.1)
        assert not events
        os.kill(process.pid, signal.SIGKILL)
        with contextlib.suppress(TransferError):  # the copy between processes does not need the peer to run
            outgoing.write([1], [0])
        event = await_event(events)
        assert isinstance(event, SendFailed) and isinstance(event.error, PeerLostError)
        check_lease(next_pipe, "four")
        next_pipe.send(None)
    transfer_engine.close(2.0)
    assert transfer_engine.num_open == 0


@needs_nixl
def test_a_host_that_forbids_cma_is_slower_says_so_and_works():
    with process_of(write_without_cma) as (pipe, _):
        states, are_bytes_there, warnings = receive(pipe)
    assert set(states) == {TransferState.DONE} and are_bytes_there
    assert len(warnings) == 1 and "CMA" in warnings[0]


@needs_nixl
def test_a_write_that_stands_still_until_its_blocks_are_others_is_told_to_the_owner():
    """UCX cannot cancel it: the writer holds its sources and says when the bytes have landed."""
    with process_of(write_late_without_cma) as (pipe, _):
        refusal, num_sent, sent, received, bytes_there = receive(pipe)
    assert "cannot be cancelled" in refusal and num_sent == 1
    (failed,) = sent
    assert isinstance(failed, SendFailed) and isinstance(failed.error, LeaseExpiredError)
    expired, late = received
    assert expired == Expired("late") and isinstance(late, LateWrite) and len(late.block_ids) == 512
    assert bytes_there == {5, 7}, "the new holder's, and what the lease was to send; nothing that came after"
