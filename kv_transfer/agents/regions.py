"""The registered memories of one agent, and what lies where in them.

    descriptors [n, 2] (address, bytes)  --runs-->   views of registered buffers, neighbours merged
    runs                                 --pieces--> lists of runs of at most so many bytes in all

Writer and owner cut equal byte counts at equal places, so piece i of the writer fits piece i of the owner,
however their runs lie. Any thread may read while another one registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch

from cluster.kvcache.memory import BlockMemory
from kv_transfer.agents.agent import TransferError


class Region(msgspec.Struct, frozen=True, array_like=True):
    address: int
    num_bytes: int


class RegionTable:
    """Grows only. All memories lie on one device; `device` is the CPU while there is none."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.regions: tuple[Region, ...] = ()
        self._memories: tuple[BlockMemory, ...] = ()  # keeps the addresses valid

    def register(self, memory: BlockMemory) -> None:
        """Raises ValueError for a memory on another device than the first. Repeating it is harmless."""
        if any(known is memory for known in self._memories):
            return
        if self._memories and memory.buffer.device != self.device:
            raise ValueError(f"one agent cannot own memory on {self.device} and {memory.buffer.device}")
        self.device = memory.buffer.device
        self._memories += (memory,)
        self.regions += (Region(memory.base_address, memory.buffer.numel()),)

    def use_own_stream(self) -> None:
        """`BlockMemory.use_own_stream`, for a thread that moves bytes of these memories."""
        for memory in self._memories[:1]:
            memory.use_own_stream()

    def runs(self, rows: np.ndarray) -> list[torch.Tensor]:
        """Views [bytes] uint8 of the descriptors' memory, in order, adjacent rows as one.

        Raises TransferError if a row does not lie inside one memory.
        """
        owners = locate(rows, self.regions)
        addresses, sizes = rows[:, 0], rows[:, 1]
        is_new = np.ones(len(rows), dtype=bool)
        is_new[1:] = (addresses[1:] != addresses[:-1] + sizes[:-1]) | (owners[1:] != owners[:-1])
        firsts = np.flatnonzero(is_new)
        lengths = np.add.reduceat(sizes, firsts)
        views: list[torch.Tensor] = []
        for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True):
            owner = int(owners[first])
            start = int(addresses[first]) - self.regions[owner].address
            views.append(self._memories[owner].buffer[start : start + length])
        return views


def merged(local: np.ndarray, remote: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same copies, ascending by local address; rows that follow each other on both sides become one."""
    order = local[:, 0].argsort()
    sources, targets, sizes = local[order, 0], remote[order, 0], local[order, 1]
    is_new = np.ones(len(local), dtype=bool)
    is_new[1:] = (sources[1:] - sources[:-1] != sizes[:-1]) | (targets[1:] - targets[:-1] != sizes[:-1])
    (firsts,) = is_new.nonzero()
    found = np.empty((2, len(firsts), 2), dtype=np.uint64)
    found[0, :, 0], found[1, :, 0] = sources[firsts], targets[firsts]
    found[:, :, 1] = np.add.reduceat(sizes, firsts)
    return found[0], found[1]


def check_sizes(local: np.ndarray, remote: np.ndarray) -> None:
    """Raises TransferError unless row i of the one has as many bytes as row i of the other."""
    if local.shape != remote.shape or not (local[:, 1] == remote[:, 1]).all():
        raise TransferError("local and remote descriptors have different sizes")


def locate(rows: np.ndarray, regions: Sequence[Region]) -> np.ndarray:
    """The index of the region that holds each row. Raises TransferError for a row that no region holds."""
    owners = np.full(len(rows), -1)
    for index, region in enumerate(regions):
        size = np.uint64(region.num_bytes)
        offsets = rows[:, 0] - np.uint64(region.address)  # below the region it wraps to a huge number
        owners[(offsets <= size) & (rows[:, 1] <= size - offsets)] = index
    if (owners < 0).any():
        address, num_bytes = rows[np.argmax(owners < 0)].tolist()
        raise TransferError(f"no registered memory holds {num_bytes} bytes at {address:#x}")
    return owners


def pieces(runs: Sequence[torch.Tensor], max_bytes: int) -> Iterator[list[torch.Tensor]]:
    """The runs in order, in groups of exactly `max_bytes`; the last may be smaller. Long runs are cut."""
    piece: list[torch.Tensor] = []
    room = max_bytes
    for run in runs:
        num_left = len(run)
        while num_left >= room:
            yield [*piece, run[:room]]
            run, num_left = run[room:], num_left - room
            piece, room = [], max_bytes
        if num_left:
            piece.append(run)
            room -= num_left
    if piece:
        yield piece
