"""How the contract suite makes agents of each kind, and the peer that lives in a process of its own."""

from __future__ import annotations

import itertools
import os
import time
from multiprocessing.connection import Connection

import torch

from cluster.clock import SystemClock
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from kv_transfer.mover import Mover
from kv_transfer.nixl_agent import NixlAgent, load_nixl

LAYOUT = MemoryLayout((SegmentSpec(16, (4, 16), torch.float32),) * 2)
NUM_BLOCKS = 32
_serial = itertools.count()


def unique_name(stem: str) -> str:
    return f"{stem}-{os.getpid()}-{next(_serial)}"


def nixl_missing() -> str | None:
    """Why NIXL cannot be tested here, or None."""
    try:
        load_nixl()
    except ConfigError as error:
        return error.message
    return None


def serve_owner(pipe: Connection, name: str) -> None:
    """A process that owns a memory: grants on request, answers with its lease's event and the bytes' sum."""
    events: list[object] = []
    memory = BlockMemory(LAYOUT, NUM_BLOCKS)
    mover = Mover(NixlAgent(name), SystemClock(), events.append, incoming=memory, margin_s=1.0)
    mover.start()
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        lease_id, block_ids = request
        pipe.send(mover.grant(lease_id, block_ids, [0] * len(block_ids), 10.0))
        while not events:
            time.sleep(0.0005)
        blocks = [segment[block_ids].clone() for segment in memory.segments]
        pipe.send((type(events[0]).__name__, getattr(events[0], "payload", b""), blocks))
        events.clear()
    mover.close(1.0)
