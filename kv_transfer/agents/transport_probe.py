"""Whether NIXL moves memory of a device between processes of this host, and how fast.

A worker on a GPU asks at start. Without CUDA IPC NIXL may go through host memory: that works, but is so slow
that the cause would be hard to find later.

Before that it asks the driver whether other processes can open such memory at all. Of torch's allocator with
`expandable_segments:True` they cannot: NIXL then copies through host memory, hundreds of times slower.

`probe_transport` starts `python -m kv_transfer.agents.transport_probe` as the other process. It registers a
memory on the same device, drives its agent while the bytes come, and reports their checksum.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from cluster.config.environment import child_environment
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec, block_descriptors
from kv_transfer.agents.agent import TransferError, TransferState
from kv_transfer.agents.factory import make_agent
from kv_transfer.codecs.checksum import Checksum, checksum_blocks

LAYOUT = MemoryLayout((SegmentSpec(1, (1 << 20,), torch.uint8),))
NUM_BLOCKS = 32
NUM_WRITES = 3  # after the write that makes the connection
IS_LEGACY_CUDA_IPC_CAPABLE = 10  # cuPointerGetAttribute
TIMEOUT_S = 90.0  # a process that loads torch, NIXL and CUDA may take half a minute


def probe_transport(device: torch.device, timeout_s: float = TIMEOUT_S) -> float:
    """Bytes per second from one process to another. Blocks for some seconds. Raises ConfigError if the bytes
    do not arrive."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "kv_transfer.agents.transport_probe", str(theirs.fileno()), str(device)]
    environment = child_environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()
    pipe = Connection(ours.detach())
    try:
        return measure(device, pipe, time.monotonic() + timeout_s)
    except (TransferError, EOFError, OSError) as error:
        raise ConfigError(
            f"NIXL does not move memory of {device} between processes of this host: {error}",
            param="transport",
        ) from error
    finally:
        pipe.close()
        process.kill()
        process.wait()


def check_shareable(address: int, driver: ctypes.CDLL) -> None:
    """Raises ConfigError if other processes cannot open the device memory at this address."""
    is_shareable = ctypes.c_int(0)
    status = driver.cuPointerGetAttribute(
        ctypes.byref(is_shareable), IS_LEGACY_CUDA_IPC_CAPABLE, ctypes.c_uint64(address)
    )
    if status != 0:
        raise TransferError(f"the driver does not know memory at {address:#x} (error {status})")
    if not is_shareable.value:
        raise ConfigError(
            "other processes cannot open this GPU's memory; take expandable_segments out of "
            "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF",
            param="transport",
        )


def measure(device: torch.device, pipe: Connection, deadline: float) -> float:
    agent = make_agent("nixl", f"transport-probe-{secrets.token_hex(8)}")
    try:
        memory = BlockMemory(LAYOUT, NUM_BLOCKS, device)
        if device.type == "cuda":
            check_shareable(memory.base_address, ctypes.CDLL("libcuda.so.1"))
        memory.buffer.random_(0, 256)
        memory.synchronize()
        agent.register(memory)
        metadata, address = _receive(pipe, deadline)
        peer, blocks = agent.connect(metadata), range(NUM_BLOCKS)
        remote = block_descriptors(LAYOUT, address, NUM_BLOCKS, blocks)
        times = []
        for _ in range(1 + NUM_WRITES):
            start = time.perf_counter()
            handle = agent.post(peer, memory.descriptors(blocks), remote)
            while (state := agent.poll(handle)) is TransferState.PENDING:
                if time.monotonic() > deadline:
                    raise TransferError("a write does not end")
                agent.notifications()
            times.append(time.perf_counter() - start)
            agent.release(handle)
            if state is TransferState.FAILED:
                raise TransferError("a write failed")
        pipe.send(None)
        if _receive(pipe, deadline) != _checksum(memory):
            raise TransferError("the bytes that arrived are not those that were sent")
        return memory.buffer.numel() / min(times[1:])
    finally:
        agent.close()


def _receive(pipe: Connection, deadline: float) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise TransferError("the other process does not answer")
    return pipe.recv()


def _checksum(memory: BlockMemory) -> Checksum:
    found = checksum_blocks(memory, range(NUM_BLOCKS))
    memory.synchronize()
    return found.value()


def main(pipe_fd: int, device: str) -> None:
    pipe = Connection(pipe_fd)
    memory = BlockMemory(LAYOUT, NUM_BLOCKS, device)
    agent = make_agent("nixl", f"transport-probe-{secrets.token_hex(8)}")
    agent.register(memory)
    pipe.send((agent.metadata(), memory.base_address))
    while not pipe.poll(0.001):
        agent.notifications()  # drives the transport
    pipe.recv()
    pipe.send(_checksum(memory))
    pipe.poll(TIMEOUT_S)  # the agent must live until the other process has ended the pipe


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
