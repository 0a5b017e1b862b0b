"""Checksums over bytes that lie scattered in memory, at about the speed of reading them: one for CPU memory,
one for GPU memory.

`checksum`, for CPU memory. The bytes of all descriptors, in order, make one stream of 64-bit little-endian
words; the last word is padded with zeros. The words are dealt in turn to `STREAMS` streams, each with a state
of its own:

    state[i] = halves swapped((state[i] xor word) * M)          i = word's number mod STREAMS

The states, folded in order by the same step into a state that starts from the number of bytes, give the sum.
The step is one to one in the state and in the word. So a single changed word, hence a single flipped bit,
always changes the sum. Other changes (words or blocks exchanged, bytes moved from one descriptor to another
place in the stream) escape with a chance of about 2**-64. The sum does not depend on how the stream is cut
into descriptors. It protects against accidents, not against adversaries. Native code computes it; without a
compiler numpy does, with the same value. Any thread; the native call releases the interpreter's lock.

`tensor_checksum`, for any device of torch, suits many threads. Every word is mixed, one to one, with a weight
of its place in the block; the mixed words of a block are added; the sums of the blocks are mixed with their
places and added likewise. On a GPU `triton_checksum` computes it, or the operators of torch where Triton is
missing.

`BlockSums` chooses between the two by the device of a block memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.config.machine import has_triton
from cluster.kvcache.memory import BlockMemory
from kv_transfer.codecs import native as native_code
from kv_transfer.codecs.pending import Batch, Pending, done, download, upload, when_computed

STREAMS = 256
_MULTIPLIER = 0x9E3779B97F4A7C15
_STEP = 0xBF58476D1CE4E5B9
_WORD_MASK = 2**64 - 1


class Checksum(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["stream", "tensor"]  # made by `checksum` or by `tensor_checksum`
    value: int  # 64 bits


def checksum(descriptors: np.ndarray) -> int:
    """64 bits. descriptors [n, 2] uint64: address and bytes of memory of this process, which must not change
    meanwhile."""
    native = native_code.load()
    return numpy_checksum(descriptors) if native is None else native_checksum(descriptors, native)


def native_checksum(descriptors: np.ndarray, native: ctypes.CDLL) -> int:
    extents = np.ascontiguousarray(descriptors, dtype=np.uint64).reshape(-1, 2)
    return native.codec_checksum(extents.ctypes.data, len(extents))


def numpy_checksum(descriptors: np.ndarray) -> int:
    """Copies the bytes; about 20 times slower than the native function."""
    parts = [ctypes.string_at(int(address), int(size)) for address, size in descriptors]
    stream = b"".join(parts)
    padding = -len(stream) % 8
    words = np.frombuffer(stream + bytes(padding), dtype="<u8")
    states = np.arange(1, STREAMS + 1, dtype=np.uint64) * np.uint64(_STEP)
    multiplier, half = np.uint64(_MULTIPLIER), np.uint64(32)
    for start in range(0, len(words), STREAMS):
        row = words[start : start + STREAMS]
        products = (states[: len(row)] ^ row) * multiplier
        states[: len(row)] = (products << half) | (products >> half)
    return _folded(states.tolist(), len(stream))


def _folded(states: list[int], num_bytes: int) -> int:
    total = num_bytes * _STEP & _WORD_MASK
    for state in states:
        product = (total ^ state) * _MULTIPLIER & _WORD_MASK
        total = (product << 32 | product >> 32) & _WORD_MASK
    total = (total ^ total >> 32) * _STEP & _WORD_MASK
    return total ^ total >> 29


def tensor_checksum(segments: Iterable[Tensor]) -> int:
    """64 bits. Each segment is [n, bytes] uint8, the bytes of n blocks in it; all in CPU memory."""
    return int(_tensor_total(segments)) & _WORD_MASK


@torch.inference_mode()
def _tensor_total(segments: Iterable[Tensor]) -> Tensor:
    """[] int64, on the segments' device."""
    total: Tensor | int = 0
    for number, blocks in enumerate(segments):
        device = blocks.device
        words = F.pad(blocks, (0, -blocks.shape[1] % 8)).view(torch.int64)
        sums = _mixed(words, _weights(words.shape[1], device)).sum(1)
        places = torch.arange(1, len(blocks) + 1, device=device) * _signed(_STEP) + 2 * number
        total = total + _mixed(sums, places | 1).sum()
    assert isinstance(total, Tensor)
    return total


def _weights(count: int, device: torch.device) -> Tensor:
    return (torch.arange(1, count + 1, device=device) * _signed(_MULTIPLIER)) | 1


def _mixed(words: Tensor, weights: Tensor) -> Tensor:
    """One to one in each int64 word if the weights are odd."""
    products = (words ^ weights) * weights
    return (products ^ (products >> 32 & 0xFFFFFFFF)) * _signed(_MULTIPLIER)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


class BlockSums:
    """Checksums of blocks of one memory: of their bytes in all segments, in this order. All that are asked
    for between two calls of `begin` are one launch on a GPU."""

    def __init__(self, memory: BlockMemory):
        """Waits, on a GPU, until the kernel is compiled; raises what it raises."""
        self._memory = memory
        self._batch = Batch(memory, self._run)
        self.begin = self._batch.begin
        self._tables: tuple[Tensor, Tensor] | None = None  # Triton's
        if memory.buffer.device.type == "cuda" and has_triton():
            self.use_triton()

    def use_triton(self) -> None:
        memory, spans = self._memory, self._memory.layout.spans.astype(np.int64)
        unit = 8 if (spans % 8 == 0).all() else 1
        elements = memory.buffer.view(torch.int64 if unit == 8 else torch.uint8)
        self._tables = elements, upload(spans * (memory.num_blocks, 1) // unit, memory.buffer.device)
        found = self.of([0])
        self.begin()
        memory.synchronize()
        found.value()  # raises what would end every lease

    def of(self, block_ids: Sequence[int]) -> Pending[Checksum]:
        """Reads the bytes once, on the CPU at once."""
        if self._memory.enqueues and not block_ids:
            return done(Checksum("tensor", 0))
        return self._batch.add(block_ids)

    def match(self, block_ids: Sequence[int], expected: Checksum | None) -> Pending[bool]:
        """Whether the blocks hold what the writer sent. True also if it cannot be checked: a GPU cannot
        compute a CPU's checksum."""
        enqueues = self._memory.enqueues
        if expected is None or (expected.kind == "stream" and enqueues):
            return done(True)
        if expected.kind == "tensor" and not enqueues:
            return done(tensor_checksum(self._bytes(block_ids)) == expected.value)
        found = self.of(block_ids)
        return Pending(found.is_done, lambda: found.value() == expected)

    def _run(self, jobs: Sequence[Sequence[int]]) -> Pending[Sequence[Checksum]]:
        memory = self._memory
        if not memory.enqueues:
            return done([Checksum("stream", checksum(memory.descriptors(ids))) for ids in jobs])
        if self._tables is not None:
            totals = self._enqueue(jobs, *self._tables)
        else:
            totals = torch.stack([_tensor_total(self._bytes(ids)) for ids in jobs])
        found = download(totals)
        return when_computed(
            memory, lambda: [Checksum("tensor", total & _WORD_MASK) for total in found.tolist()]
        )

    def _enqueue(self, jobs: Sequence[Sequence[int]], elements: Tensor, segments: Tensor) -> Tensor:
        """One copy to the device: the totals, which begin as zeros, and the blocks after them."""
        from kv_transfer.codecs.triton_checksum import add_sums

        first = len(jobs) + len(jobs) % 2  # the kernel is compiled for pointers to 16 bytes
        counts = [len(ids) for ids in jobs]
        table = np.zeros(first + 3 * sum(counts), dtype=np.int64)
        blocks = table[first:].reshape(-1, 3)
        blocks[:, 0] = np.repeat(np.arange(len(jobs)), counts)
        blocks[:, 1] = np.concatenate([np.arange(count) for count in counts])
        blocks[:, 2] = np.concatenate([np.asarray(ids) for ids in jobs])
        uploaded = upload(table, self._memory.buffer.device)
        add_sums(elements, segments, uploaded[:first], uploaded[first:].view(-1, 3))
        return uploaded[: len(jobs)]

    def _bytes(self, block_ids: Sequence[int]) -> Iterator[Tensor]:
        ids = upload(np.asarray(block_ids, dtype=np.int64), self._memory.buffer.device)
        for segment in self._memory.segments:
            yield segment.flatten(1).view(torch.uint8).index_select(0, ids)


def checksum_blocks(memory: BlockMemory, block_ids: Sequence[int]) -> Pending[Checksum]:
    """`BlockSums.of`, alone."""
    sums = BlockSums(memory)
    found = sums.of(block_ids)
    sums.begin()
    return found
