"""Both transports between simulated GPUs, over stand-ins that refuse what NIXL and NCCL refuse."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.clock import SystemClock
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from kv_transfer.agents import collective_group, collective_link, nixl_agent, transport_probe
from kv_transfer.agents.agent import Agent, TransferError, TransferState
from kv_transfer.agents.collective_agent import CollectiveAgent
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.agents.nixl_agent import NixlAgent, NixlMetadata
from kv_transfer.lease.events import Completed
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.fakes import strict_nccl, vram_nixl
from tests.fakes.cuda_device import SimulatedCuda

LAYOUT = MemoryLayout((SegmentSpec(16, (4, 8), torch.float32),) * 2)
NUM_BLOCKS, HANG_S = 8, 60.0


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    with SimulatedCuda(num_devices=2) as simulated:
        yield simulated


@pytest.fixture
def strict(device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "load_nixl", lambda: (vram_nixl.API, vram_nixl.BINDINGS))
    vram_nixl.AGENTS.clear()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", strict_nccl.StrictNccl, raising=False)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    strict_nccl.MADE.clear()

    class OnDevice(threading.Thread):
        def run(self) -> None:
            with device.on_thread():
                super().run()

    names = SimpleNamespace(**{**vars(threading), "Thread": OnDevice})
    monkeypatch.setattr(collective_link, "threading", names)


def memory(where: str, number: float) -> BlockMemory:
    made = BlockMemory(LAYOUT, NUM_BLOCKS, where)
    for segment in made.segments:
        segment.fill_(number)
    made.synchronize()
    return made


def write(writer: Agent, owner: Agent, source: BlockMemory, target: BlockMemory, blocks: list[int]) -> None:
    peer = writer.connect(owner.metadata())
    handle = writer.post(peer, source.descriptors(blocks), target.descriptors(blocks))
    deadline = time.monotonic() + HANG_S
    while (state := writer.poll(handle)) is TransferState.PENDING:
        owner.notifications()
        writer.notifications()
        assert time.monotonic() < deadline
    writer.release(handle)
    assert state is TransferState.DONE


def check_blocks(target: BlockMemory, written: list[int]) -> None:
    for segment in target.segments:
        sums = segment.flatten(1).sum(1).tolist()
        assert [block for block, total in enumerate(sums) if total] == written


def test_nixl_moves_blocks_between_two_gpus(strict: None) -> None:
    source, target = memory("cuda:0", 1.0), memory("cuda:1", 0.0)
    writer, owner = NixlAgent("writer"), NixlAgent("owner")
    writer.register(source)
    owner.register(target)
    write(writer, owner, source, target, [2, 5])
    check_blocks(target, [2, 5])
    owner.close()
    writer.close()


def test_the_checks_of_a_lease_do_not_wait_for_the_device(strict: None, device: SimulatedCuda) -> None:
    """Neither side's thread: the word and the lease's end come in the step after the device is done."""
    source, target, sent, received = memory("cuda:0", 1.0), memory("cuda:1", 0.0), [], []
    writer = TransferEngine(NixlAgent("writer"), SystemClock(), sent.append, outgoing=source)
    owner = TransferEngine(NixlAgent("owner"), SystemClock(), received.append, incoming=target)
    grants = [owner.grant(name, blocks, [0, 0], 60.0) for name, blocks in (("a", [1, 3]), ("b", [2, 6]))]
    for grant in grants:
        outgoing = writer.open(grant.received(time.monotonic()))
        outgoing.write([4, 5], [0, 1])
        outgoing.finish(b"payload")
    for engine, where, events in ((writer, "cuda:0", sent), (owner, "cuda:1", received)):
        torch.cuda.set_device(where)
        before = device.num_syncs
        for _ in range(10):
            engine.step()
        assert not events and device.num_syncs == before
        torch.cuda.current_stream().synchronize()
        engine.step()
        assert [event.lease_id for event in events] == ["a", "b"]
    assert received == [Completed("a", b"payload"), Completed("b", b"payload")]
    for engine in (writer, owner):
        engine.close()


def test_nixl_is_told_kind_and_device_of_every_memory(strict: None) -> None:
    agent = NixlAgent("mixed")
    for each in (memory("cpu", 0.0), memory("cuda:1", 0.0)):
        agent.register(each)
        agent.register(each)  # repeating it is harmless
    decoded = nixl_agent.msgspec.msgpack.decode(agent.metadata(), type=NixlMetadata)
    assert [(region.kind, region.device_id) for region in decoded.regions] == [("DRAM", 0), ("VRAM", 1)]
    agent.close()


def test_nothing_is_written_to_memory_that_nixl_does_not_know(strict: None) -> None:
    source, target, unknown = memory("cuda:0", 1.0), memory("cuda:0", 0.0), memory("cuda:0", 0.0)
    writer, owner = NixlAgent("writer"), NixlAgent("owner")
    writer.register(source)
    owner.register(target)
    with pytest.raises(TransferError, match="no registered memory"):
        write(writer, owner, source, unknown, [0])
    with pytest.raises(TransferError, match="no registered memory"):
        write(writer, owner, unknown, target, [0])
    owner.close()
    writer.close()


def test_a_writer_closes_while_its_write_is_under_way(strict: None) -> None:
    source, target = memory("cuda:0", 1.0), memory("cuda:1", 0.0)
    writer, owner = NixlAgent("writer"), NixlAgent("owner")
    writer.register(source)
    owner.register(target)
    peer = writer.connect(owner.metadata())
    writer.post(peer, source.descriptors([1]), target.descriptors([1]))
    writer.close()  # the stand-in would refuse to deregister memory that is still read
    owner.close()
    check_blocks(target, [])


def test_a_write_in_flight_is_not_released(strict: None) -> None:
    source, target = memory("cuda:0", 1.0), memory("cuda:1", 0.0)
    writer, owner = NixlAgent("writer"), NixlAgent("owner")
    writer.register(source)
    owner.register(target)
    peer = writer.connect(owner.metadata())
    handle = writer.post(peer, source.descriptors([1]), target.descriptors([1]))
    with pytest.raises(TransferError, match="cannot be cancelled"):
        writer.release(handle)
    check_blocks(target, [])
    while writer.poll(handle) is TransferState.PENDING:
        pass
    writer.release(handle)
    check_blocks(target, [1])
    close(writer, owner)


def test_writes_that_end_late_are_no_warning_between_gpus(strict: None, caplog) -> None:
    """Of CPU memory they would say that the copy between processes is not in use."""
    source, target = memory("cuda:0", 1.0), memory("cuda:1", 0.0)
    writer, owner = NixlAgent("writer"), NixlAgent("owner")
    writer.register(source)
    owner.register(target)
    with caplog.at_level(logging.INFO, nixl_agent.logger.name):
        for _ in range(nixl_agent.NUM_LATE_WRITES + 2):
            write(writer, owner, source, target, [2])
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "network or device transport" in record.getMessage()
    close(writer, owner)


@pytest.mark.parametrize(("answer", "error"), [(1, None), (0, ConfigError)])
def test_the_probe_at_start_moves_a_gpus_memory(strict: None, device, monkeypatch, answer, error) -> None:
    """Its other process is a thread here, and the driver says whether memory can be opened there."""

    class Driver:
        def __init__(self, name: str):
            assert name == "libcuda.so.1"

        def cuPointerGetAttribute(self, out, attribute: int, address: ctypes.c_uint64) -> int:
            out._obj.value = answer
            return 0

    monkeypatch.setattr(transport_probe.ctypes, "CDLL", Driver)
    ours, theirs = socket.socketpair()

    def other_process() -> None:
        with device.on_thread(), contextlib.suppress(EOFError, OSError):
            transport_probe.main(theirs.detach(), "cuda:0")

    thread = threading.Thread(target=other_process)
    thread.start()
    pipe = Connection(ours.detach())
    try:
        with pytest.raises(error) if error else contextlib.nullcontext():
            assert transport_probe.measure(torch.device("cuda"), pipe, time.monotonic() + HANG_S) > 0
    finally:
        pipe.close()
        thread.join(HANG_S)
    assert not thread.is_alive()


def test_the_agent_inside_one_process_refuses_a_gpus_memory(device: SimulatedCuda) -> None:
    with pytest.raises(ValueError, match="CPU memory only"):
        InProcessNetwork().agent("a").register(memory("cuda", 0.0))


def close(*agents: Agent) -> None:
    for agent in agents:
        agent.close()


def test_nccl_carries_blocks_between_two_gpus(strict: None) -> None:
    source, target = memory("cuda:0", 1.0), memory("cuda:1", 0.0)
    writer, owner = (
        CollectiveAgent(name, backends=frozenset({"gloo", "nccl"})) for name in ("writer", "owner")
    )
    writer.register(source)
    owner.register(target)
    try:
        write(writer, owner, source, target, [1, 2, 7])
        check_blocks(target, [1, 2, 7])
        assert len(strict_nccl.MADE) == 2 and not any(group.ends_process for group in strict_nccl.MADE)
    finally:
        close(writer, owner)
    assert all(group.is_aborted for group in strict_nccl.MADE)


@pytest.mark.parametrize("backends", [{"gloo", "nccl"}, {"gloo"}])
def test_the_threads_of_a_link_use_their_memorys_device_and_a_stream_of_their_own(
    strict: None, monkeypatch, backends
) -> None:
    """The default stream is the model's, and the process's first device may be another worker's."""
    seen: set[tuple[int, bool]] = set()
    for verb in ("send", "receive"):
        carry = getattr(collective_group.Channel, verb)

        def watched(self, runs, carry=carry):
            stream: Any = torch.cuda.current_stream()
            seen.add((torch.cuda.current_device(), stream.number > 0))
            carry(self, runs)

        monkeypatch.setattr(collective_group.Channel, verb, watched)
    source, target = memory("cuda:1", 1.0), memory("cuda:0", 0.0)
    writer, owner = (CollectiveAgent(name, backends=frozenset(backends)) for name in ("writer", "owner"))
    writer.register(source)
    owner.register(target)
    try:
        write(writer, owner, source, target, [1, 2, 7])
        check_blocks(target, [1, 2, 7])
    finally:
        close(writer, owner)
    assert seen == {(1, True), (0, True)}


@pytest.mark.parametrize("end", ["close", "deadline"])
def test_a_transfer_that_nccl_does_not_end_has_an_end(strict: None, monkeypatch, end: str) -> None:
    source, target = memory("cuda:0", 1.0), memory("cuda:1", 0.0)
    writer, owner = (
        CollectiveAgent(name, backends=frozenset({"gloo", "nccl"})) for name in ("writer", "owner")
    )
    writer.register(source)
    owner.register(target)
    write(writer, owner, source, target, [1])
    monkeypatch.setattr(strict_nccl.Work, "is_completed", lambda self: False)
    if end == "deadline":
        monkeypatch.setattr(collective_group, "PIECE_TIMEOUT_S", 0.05)
    handle = writer.post(writer.connect(owner.metadata()), source.descriptors([2]), target.descriptors([2]))
    started = time.monotonic()
    if end == "deadline":
        with pytest.raises(TransferError, match=r"did not answer in time|dropped the connection"):
            while writer.poll(handle) is TransferState.PENDING:
                owner.notifications()
                assert time.monotonic() - started < HANG_S
    close(writer, owner)
    assert time.monotonic() - started < HANG_S / 4
    assert all(group.is_aborted for group in strict_nccl.MADE)
    check_blocks(target, [1])


@pytest.mark.parametrize(("ours", "theirs"), [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:1")])
def test_gloo_carries_them_where_nccl_cannot(strict: None, ours: str, theirs: str) -> None:
    """NCCL refuses two ranks on one GPU."""
    source, target = memory(ours, 1.0), memory(theirs, 0.0)
    writer, owner = (
        CollectiveAgent(name, backends=frozenset({"gloo", "nccl"})) for name in ("writer", "owner")
    )
    writer.register(source)
    owner.register(target)
    try:
        write(writer, owner, source, target, [0, 3])
        check_blocks(target, [0, 3])
        assert not strict_nccl.MADE
    finally:
        close(writer, owner)
