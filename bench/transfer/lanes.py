"""How fast blocks get from one process to another: per agent, codec and number of blocks, next to a memcpy
through shared memory and a plain TCP socket. A lane is one of these ways.

Every lane has an owner, a process of its own, and blocks scattered over memories larger than the last cache.
A shipment is timed from the writer's first call to the owner's event: connection known, checksum compared,
coded blocks decoded. `nixl-write` is only the agent's write, until it is done. The lanes alternate, so that
their times for one size and repetition are milliseconds apart. perf_counter is the host's, so readings of two
processes are comparable.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Protocol

import numpy as np
import torch

from cluster.clock import SystemClock
from cluster.kvcache.memory import BlockMemory, MemoryLayout, block_descriptors
from cluster.model.kv_format import kv_segments
from kv_transfer.agents.agent import TransferState
from kv_transfer.agents.factory import Transport, make_agent
from kv_transfer.codecs.quantisation import CodecName
from kv_transfer.codecs.wire_memory import Wire
from kv_transfer.lease.transfer_engine import TransferEngine

BLOCK_SIZE, HEADS, WIDTH = 16, 4, 128  # bfloat16: 16 KiB a block and segment
LAYOUT = MemoryLayout(kv_segments([(HEADS, WIDTH)] * 2, BLOCK_SIZE, torch.bfloat16))
NUM_BLOCKS = 4096  # 128 MiB
TIMEOUT_S = 120.0
MAX_VECTORS = 512  # of one sendmsg


@dataclass(frozen=True)
class Shipment:
    """Blocks to copy, and as many blocks to copy them to."""

    local_ids: Sequence[int]
    remote_ids: Sequence[int]

    @property
    def raw_bytes(self) -> int:
        return len(self.local_ids) * LAYOUT.block_bytes


class Lane(Protocol):
    name: str
    codec: str

    def ship(self, shipment: Shipment) -> tuple[float, int]:
        """Seconds until all blocks have arrived, and transferred bytes."""
        ...


# Our agents


class TransferEngineLane:
    def __init__(self, transport: Transport, codec: str, stack: ExitStack):
        self.name, self.codec = transport, codec
        self._pipe, child = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_own_blocks, args=(child, transport, codec), daemon=True
        )
        process.start()
        stack.callback(process.join, 10.0)
        stack.callback(self._pipe.send, None)
        memory = _filled_memory()
        self._transfer_engine = TransferEngine(
            make_agent(transport, f"writer-{codec}-{time.time_ns()}", "127.0.0.1"),
            SystemClock(),
            lambda event: None,
            outgoing=memory,
            outgoing_wire=_wire(memory, codec),
        )
        self._transfer_engine.start()
        stack.callback(self._transfer_engine.close, 1.0)
        self._received(self._pipe)

    def ship(self, shipment: Shipment) -> tuple[float, int]:
        self._pipe.send(list(shipment.remote_ids))
        grant = self._received(self._pipe)
        before = self._transfer_engine.sent
        start = time.perf_counter()
        outgoing = self._transfer_engine.open(grant.received(SystemClock().now()))
        outgoing.write(shipment.local_ids, range(len(shipment.local_ids)))
        outgoing.finish(b"")
        event, arrived_at = self._received(self._pipe)
        if event != "Completed":
            raise RuntimeError(f"{self.name} {self.codec}: a lease ended as {event}")
        sent = self._transfer_engine.sent
        num_bytes = sent.raw_bytes + sent.coded_bytes - before.raw_bytes - before.coded_bytes
        return arrived_at - start, num_bytes

    @staticmethod
    def _received(pipe: Connection):
        if not pipe.poll(TIMEOUT_S):
            raise TimeoutError("the owner says nothing")
        return pipe.recv()


def _own_blocks(pipe: Connection, transport: Transport, codec: str) -> None:
    torch.set_num_threads(1)
    arrived = threading.Event()
    ends: list[tuple[str, float]] = []

    def on_event(event: object) -> None:
        ends.append((type(event).__name__, time.perf_counter()))
        arrived.set()

    memory = BlockMemory(LAYOUT, NUM_BLOCKS)
    transfer_engine = TransferEngine(
        make_agent(transport, f"owner-{codec}-{time.time_ns()}", "127.0.0.1"),
        SystemClock(),
        on_event,
        incoming=memory,
        incoming_wire=_wire(memory, codec),
    )
    transfer_engine.start()
    pipe.send("ready")
    for block_ids in iter(pipe.recv, None):
        arrived.clear()
        ends.clear()
        lease_id = f"lease-{time.time_ns()}"
        run = [len(block_ids) * BLOCK_SIZE]
        pipe.send(transfer_engine.grant(lease_id, block_ids, [0] * len(block_ids), TIMEOUT_S, run))
        arrived.wait(TIMEOUT_S)
        pipe.send(ends[0] if ends else ("nothing", time.perf_counter()))
    transfer_engine.close(1.0)


def _filled_memory() -> BlockMemory:
    memory = BlockMemory(LAYOUT, NUM_BLOCKS)
    for segment in memory.segments:
        segment.normal_()
    return memory


def _wire(memory: BlockMemory, codec: str) -> Wire | None:
    names: dict[str, CodecName] = {"int8": "int8", "int4": "int4"}
    return Wire(memory, names[codec], NUM_BLOCKS * BLOCK_SIZE) if codec in names else None


class WriteLane:
    """The agent's write alone: no lease, no checksum, no notification, no other thread."""

    def __init__(self, transport: Transport, stack: ExitStack):
        self.name, self.codec = f"{transport}-write", "raw"
        self._pipe, child = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_own_memory, args=(child, transport), daemon=True
        )
        process.start()
        stack.callback(process.join, 10.0)
        stack.callback(self._pipe.send, None)
        self._memory = _filled_memory()
        self._agent = make_agent(transport, f"write-{time.time_ns()}", "127.0.0.1")
        stack.callback(self._agent.close)
        self._agent.register(self._memory)
        metadata, self._base = TransferEngineLane._received(self._pipe)
        self._peer = self._agent.connect(metadata)

    def ship(self, shipment: Shipment) -> tuple[float, int]:
        local = self._memory.descriptors(shipment.local_ids)
        remote = block_descriptors(LAYOUT, self._base, NUM_BLOCKS, shipment.remote_ids)
        start = time.perf_counter()
        handle = self._agent.post(self._peer, local, remote)
        while (state := self._agent.poll(handle)) is TransferState.PENDING:
            if time.perf_counter() - start > TIMEOUT_S:
                raise TimeoutError("a write does not end")
        took_s = time.perf_counter() - start
        self._agent.release(handle)
        if state is not TransferState.DONE:
            raise RuntimeError(f"{self.name}: a write ended as {state}")
        return took_s, shipment.raw_bytes


def _own_memory(pipe: Connection, transport: Transport) -> None:
    memory = BlockMemory(LAYOUT, NUM_BLOCKS)
    agent = make_agent(transport, f"target-{time.time_ns()}", "127.0.0.1")
    agent.register(memory)
    pipe.send((agent.metadata(), memory.base_address))
    while not pipe.poll(0.001):
        agent.notifications()  # lets the transport make progress
    agent.close()


# Yardsticks


class MemcpyLane:
    """Block by block into memory that another process has mapped as well; without a notification."""

    name, codec = "memcpy", "raw"

    def __init__(self, stack: ExitStack):
        self._source = _filled_memory()
        self._shared = SharedMemory(create=True, size=NUM_BLOCKS * LAYOUT.block_bytes)
        stack.callback(self._shared.unlink)
        stack.callback(self._close)
        assert self._shared.buf is not None
        self._target = np.frombuffer(self._shared.buf, dtype=np.uint8)
        self._target[:] = 0  # so that its pages exist
        self._base = self._target.ctypes.data

    def ship(self, shipment: Shipment) -> tuple[float, int]:
        local = self._source.descriptors(shipment.local_ids)
        offsets = _target_offsets(shipment.remote_ids)
        start = time.perf_counter()
        for (address, size), offset in zip(local.tolist(), offsets, strict=True):
            ctypes.memmove(self._base + offset, address, size)
        return time.perf_counter() - start, shipment.raw_bytes

    def _close(self) -> None:
        del self._target
        self._shared.close()


class SocketLane:
    """One TCP connection over loopback: gathered from the blocks, received into one buffer, acknowledged."""

    name, codec = "socket", "raw"

    def __init__(self, stack: ExitStack):
        self._source = _filled_memory()
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        process = multiprocessing.get_context("spawn").Process(
            target=_swallow, args=(listener.getsockname()[1],), daemon=True
        )
        process.start()
        listener.settimeout(TIMEOUT_S)
        self._socket, _ = listener.accept()
        self._socket.settimeout(TIMEOUT_S)
        stack.callback(process.join, 10.0)
        stack.callback(self._socket.close)

    def ship(self, shipment: Shipment) -> tuple[float, int]:
        views = [
            memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
            for address, size in self._source.descriptors(shipment.local_ids).tolist()
        ]
        start = time.perf_counter()
        self._socket.sendall(shipment.raw_bytes.to_bytes(8, "little"))
        for first in range(0, len(views), MAX_VECTORS):
            _send_all(self._socket, views[first : first + MAX_VECTORS])
        if self._socket.recv(1) != b"k":
            raise RuntimeError("the receiver has gone")
        return time.perf_counter() - start, shipment.raw_bytes


def _send_all(to: socket.socket, views: list[memoryview]) -> None:
    while views:
        sent = to.sendmsg(views)
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if views and sent:
            views[0] = views[0][sent:]


def _swallow(port: int) -> None:
    connection = socket.create_connection(("127.0.0.1", port))
    buffer = memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes))
    while True:
        head = connection.recv(8, socket.MSG_WAITALL)
        if len(head) < 8:
            return
        size, received = int.from_bytes(head, "little"), 0
        while received < size:
            received += connection.recv_into(buffer[received:size])
        connection.sendall(b"k")


def _target_offsets(block_ids: Sequence[int]) -> list[int]:
    """Where the blocks' segments begin in a buffer laid out like a block memory."""
    sizes = [segment.block_bytes for segment in LAYOUT.segments]
    starts = [NUM_BLOCKS * sum(sizes[:i]) for i in range(len(sizes))]
    return [
        start + block_id * size for start, size in zip(starts, sizes, strict=True) for block_id in block_ids
    ]


# Measuring


@contextmanager
def lanes(transports: Sequence[Transport], codecs: Sequence[str]) -> Iterator[list[Lane]]:
    with ExitStack() as stack:
        yield [
            MemcpyLane(stack),
            SocketLane(stack),
            *([WriteLane("nixl", stack)] if "nixl" in transports else []),
            *(TransferEngineLane(transport, codec, stack) for transport in transports for codec in codecs),
        ]


def measure(every: Sequence[Lane], block_counts: Sequence[int], repeats: int) -> Iterator[dict[str, object]]:
    """A record for each lane, size and repetition. `num_blocks` counts pieces of 16 KiB; the first round is
    not recorded.
    """
    draw = random.Random(0)
    for count in block_counts:
        for repetition in range(-1, repeats):
            shipment = Shipment(
                *(draw.sample(range(NUM_BLOCKS), count // len(LAYOUT.segments)) for _ in range(2))
            )
            for lane in every:
                seconds, num_bytes = lane.ship(shipment)
                if repetition >= 0:
                    yield {
                        "type": "lane", "agent": lane.name, "codec": lane.codec, "num_blocks": count,
                        "repetition": repetition, "seconds": seconds, "bytes": num_bytes,
                        "raw_bytes": shipment.raw_bytes,
                    }  # fmt: skip
